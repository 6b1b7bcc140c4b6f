"""Numbers of slots as pods, for Prometheus: where slots are, what was asked of the API server, what is being held back.

Limits: counters are of this process; classes are labels, of which there are as many as there are kinds of slots.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from control_plane.backends.kubernetes.phases import Phase

if TYPE_CHECKING:
    from control_plane.backends.kubernetes.cluster import Cluster


def cluster_families(cluster: Cluster) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    backend, now_s = cluster.backend, time.monotonic()
    slots = GaugeMetricFamily("stoker_slots", "Slots by class and phase", labels=["class", "phase"])
    counts = Counter((backend.class_of(name), each.seen.phase) for name, each in backend.progress.items())
    counts.update((asked.class_name, Phase.REQUESTED) for asked in backend.asked.values())
    for (class_name, phase), count in sorted(counts.items()):
        slots.add_metric([class_name, phase.value], count)
    yield slots
    paused = GaugeMetricFamily(
        "stoker_slot_class_paused_seconds", "Until a class that failed is tried again", labels=["class"]
    )
    failures = GaugeMetricFamily("stoker_slot_class_failures", "Failures in a row of a class's slots", labels=["class"])
    for class_name, backoff in backend.backoffs.items():
        paused.add_metric([class_name], backoff.pausing_s(now_s))
        failures.add_metric([class_name], backoff.failures)
    yield from (paused, failures)
    writes = CounterMetricFamily("stoker_cluster_writes", "Writes to the API server", labels=["what"])
    for what, count in (
        ("pod_create", backend.creates),
        ("pod_delete", backend.deletes),
        ("pod_annotations", cluster.tending.marks_written),
        ("pool_status", cluster.pool_status.writes),
        ("function", cluster.function_objects.writes),
    ):
        writes.add_metric([what], count)
    yield writes
    lists = CounterMetricFamily("stoker_cluster_lists", "Whole lists read", labels=["resource"])
    watches = CounterMetricFamily("stoker_cluster_watches", "Watches begun", labels=["resource"])
    for watch in backend.watches:
        lists.add_metric([watch.resource.plural], watch.lists)
        watches.add_metric([watch.resource.plural], watch.watches)
    yield from (lists, watches)
    yield GaugeMetricFamily(
        "stoker_cluster_in_sight", "1 while the cluster's objects are up to date", value=float(not backend.problem)
    )
