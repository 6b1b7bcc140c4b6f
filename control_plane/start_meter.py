"""How starts and loads went, for Prometheus: seconds of each stage by tier, bytes read and verified, what pools hold.

A replica's stages are counted once, when it has become ready; loads are each agent's own totals, which begin anew with
it. Limits: looked at when somebody asks, so that a replica that came and went between two looks counts only as long as
the fleet remembers it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from control_plane.histogram import Histogram
from function_runtime.protocol import ReplicaStatus, SlotState

if TYPE_CHECKING:
    from control_plane.context import AppContext


class StartMeter:
    def __init__(self) -> None:
        self.stages: defaultdict[tuple[str, str, str], Histogram] = defaultdict(Histogram)
        """By function, stage and tier."""
        self._seen: set[str] = set()

    def see(self, statuses: Mapping[str, ReplicaStatus]) -> None:
        for status in statuses.values():
            if not status.ready_us or status.replica_id in self._seen:
                continue
            self._seen.add(status.replica_id)
            for stage in status.stages:
                if stage.start_us <= status.ready_us:
                    self.stages[status.function, stage.name, stage.tier].observe(stage.duration_us / 1e6)
        self._seen &= set(statuses)

    def families(self, context: AppContext) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        self.see(context.fleet.replicas)
        stages = HistogramMetricFamily(
            "stoker_start_stage_seconds", "Stages of starts that became ready", labels=["function", "stage", "tier"]
        )
        for labels, observed in self.stages.items():
            stages.add_metric(list(labels), observed.buckets(), observed.total)
        yield stages
        yield from pool_families(context.fleet.slots)


def pool_families(slots: Mapping[str, SlotState]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    budget = GaugeMetricFamily("stoker_pool_budget_bytes", "What a slot's warm pool may hold", labels=["slot"])
    used = GaugeMetricFamily("stoker_pool_used_bytes", "What it holds or has reserved", labels=["slot"])
    entries = GaugeMetricFamily("stoker_pool_entries", "Prepared forms, by state", labels=["slot", "state"])
    loads = CounterMetricFamily("stoker_loads", "Forms that came into a pool, by origin", labels=["slot", "origin"])
    nbytes = CounterMetricFamily("stoker_load_bytes", "Read for loads, by tier", labels=["slot", "tier"])
    seconds = CounterMetricFamily("stoker_load_seconds", "Spent on loads", labels=["slot"])
    chunks = CounterMetricFamily("stoker_load_chunks", "Chunks read, by verdict", labels=["slot", "verdict"])
    retries = CounterMetricFamily("stoker_load_retries", "Ranges that were asked for again", labels=["slot"])
    failed = CounterMetricFamily("stoker_load_failures", "Loads that came to nothing", labels=["slot"])
    for slot_id, slot in slots.items():
        budget.add_metric([slot_id], slot.pool_budget_bytes)
        used.add_metric([slot_id], slot.pool_used_bytes)
        states: defaultdict[str, int] = defaultdict(int)
        for entry in slot.pool:
            states[entry.state] += 1
        for state, count in states.items():
            entries.add_metric([slot_id, state], count)
        for origin, count in slot.loads.by_origin.items():
            loads.add_metric([slot_id, origin], count)
        for tier, moved in slot.loads.read_bytes.items():
            nbytes.add_metric([slot_id, tier], moved)
        seconds.add_metric([slot_id], slot.loads.seconds)
        chunks.add_metric([slot_id, "verified"], slot.loads.chunks)
        chunks.add_metric([slot_id, "bad"], slot.loads.bad_chunks)
        retries.add_metric([slot_id], slot.loads.retries)
        failed.add_metric([slot_id], slot.loads.failures)
    yield from (budget, used, entries, loads, nbytes, seconds, chunks, retries, failed)
