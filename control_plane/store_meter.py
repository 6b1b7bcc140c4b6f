"""What the object store was asked for, by function: replicas' totals added up, the gateway's own beside them.

A replica's totals only grow, and are gone with it; what was seen of them last stays counted. Limits: what a replica did
after its last report, if it was killed, is in the provider's bill only; label `function` is empty for the gateway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from function_runtime.protocol import ReplicaStatus, StoreTotals

if TYPE_CHECKING:
    from control_plane.context import AppContext

COUNTED: Final = ("reads", "writes", "deletes", "read_bytes", "written_bytes", "retries", "failures")


class StoreMeter:
    def __init__(self) -> None:
        self.totals: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
        self._seen: dict[str, StoreTotals] = {}

    def see(self, statuses: dict[str, ReplicaStatus]) -> None:
        for status in statuses.values():
            before, now = self._seen.get(status.replica_id, StoreTotals()), status.store
            if now == before:
                continue
            totals = self.totals[status.function]
            for name in COUNTED:
                totals[name] += max(getattr(now, name) - getattr(before, name), 0)
            self._seen[status.replica_id] = now
        self._seen = {replica_id: totals for replica_id, totals in self._seen.items() if replica_id in statuses}

    def families(self, context: AppContext) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self.see(context.fleet.replicas)
        by_function: dict[str, dict[str, int]] = {"": dict.fromkeys(COUNTED, 0), **self.totals}
        use = context.store.use
        if use is not None:
            by_function[""] = {name: getattr(use, name) for name in COUNTED}
        requests = CounterMetricFamily(
            "stoker_object_store_requests", "Requests as a provider bills them", labels=["function", "kind"]
        )
        moved = CounterMetricFamily("stoker_object_store_bytes", "Payload moved", labels=["function", "kind"])
        retries = CounterMetricFamily(
            "stoker_object_store_retries", "Requests that repeated a failed one", labels=["function"]
        )
        failures = CounterMetricFamily(
            "stoker_object_store_failures", "Requests without a usable answer", labels=["function"]
        )
        for function, totals in by_function.items():
            for kind, name in (("read", "reads"), ("write", "writes"), ("delete", "deletes")):
                requests.add_metric([function, kind], totals[name])
            moved.add_metric([function, "read"], totals["read_bytes"])
            moved.add_metric([function, "write"], totals["written_bytes"])
            retries.add_metric([function], totals["retries"])
            failures.add_metric([function], totals["failures"])
        yield from (requests, moved, retries, failures)
        left_alone = sum(status.store.breaker_open for status in context.fleet.living())
        left_alone += use is not None and use.breaker != "closed"
        yield GaugeMetricFamily(
            "stoker_object_store_breakers_open", "Processes that leave the store alone at present", value=left_alone
        )
        yield GaugeMetricFamily(
            "stoker_object_store_usable", "1 unless the gateway's last check failed", value=float(context.store.usable)
        )
