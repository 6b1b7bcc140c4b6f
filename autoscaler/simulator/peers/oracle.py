"""A policy that knows every arrival: the plan of `oracle_plan`, carried out in the same simulator.

It is given the whole workload when it is made, and the weight when it begins. What depends on the moment is decided
then: a function that is idle is let go if its next request is farther away than a start costs. `strongest` simulates
several plans and keeps the best one for each function. Limits: each function is planned alone, as if the devices always
sufficed; so it is a strong policy, and a lower bound only where they do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.peers.oracle_plan import Plan, plan_for
from autoscaler.simulator.policy import Asked, Fixed, View, Wish
from autoscaler.simulator.result import Prices, Result
from autoscaler.simulator.workload import Workload

NEVER: Final = float("inf")
DRAIN_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of planning. Waits cost more or less in the plan than they do, to make up for what it leaves out."""

    weight_factor: float = 1.0
    most: int | None = None


VARIANTS: Final = (Variant(), Variant(most=1), Variant(weight_factor=0.5), Variant(weight_factor=2.0))


class Replays:
    """What each function's requests wait for with n replicas throughout; simulated once, for every plan and weight."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._waits: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._alone: dict[int, Workload] = {}

    def of(self, index: int) -> Workload:
        if index not in self._alone:
            self._alone[index] = self.workload.of(index)
        return self._alone[index]

    def waits(self, index: int, replicas: int) -> NDArray[np.float64]:
        key = (index, replicas)
        if key not in self._waits:
            alone = self.of(index)
            function = alone.functions[0]
            roomy = replace(
                function, max_replicas=max(function.max_replicas, replicas), min_replicas=0, device_share=1.0
            )
            before_s = float(alone.arrival_s[0]) - 2.0 * max(function.starts.draw(0.999), 1.0) - 60.0
            result = simulate(
                replace(alone, functions=(roomy,)),
                Cluster(slots=replicas, devices_per_slot=max(function.devices, 1)),
                Fixed(replicas),
                begin_s=before_s,
                since_s=before_s,
                sample_s=NEVER,
                drain_s=DRAIN_S,
            )
            waits = result.first_token_s.astype(np.float64)
            # What had not begun when the replay was given up has waited at least until then.
            never = float(alone.arrival_s[-1]) + DRAIN_S - alone.arrival_s
            self._waits[key] = np.where(np.isnan(waits), never, waits)
        return self._waits[key]


@dataclass(slots=True)
class _Future:
    arrival_s: list[float]
    plan: Plan
    passed: int = 0
    """Requests before the beginning."""
    away_until_s: float = -NEVER


class Oracle(Asked):
    stops_starting = False

    def __init__(self, workload: Workload, variants: Sequence[Variant] | Variant = VARIANTS[0]) -> None:
        """`variants`: for all functions, or one for each."""
        self.name = "oracle"
        self.replays = Replays(workload)
        self.variants = variants
        self._futures: list[_Future] = []

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        self._futures = []
        for index in range(len(self.replays.workload.functions)):
            variant = self.variants if isinstance(self.variants, Variant) else self.variants[index]
            alone = self.replays.of(index)
            plan = plan_for(
                alone,
                lambda replicas, index=index: self.replays.waits(index, replicas),  # type: ignore[misc]
                prices.waiting_weight * variant.weight_factor,
                variant.most,
            )
            arrival_s: list[float] = alone.arrival_s.tolist()
            self._futures.append(_Future(arrival_s, plan, int(np.searchsorted(alone.arrival_s, now_s))))

    def on_arrival(self, view: View, now_s: float) -> Wish:
        future = self._futures[view.index]
        future.away_until_s = -NEVER
        return self._wish(view, future, now_s)

    def on_timer(self, view: View, now_s: float) -> Wish:
        return self._wish(view, self._futures[view.index], now_s)

    def on_idle(self, view: View, now_s: float) -> Wish:
        future = self._futures[view.index]
        coming = future.passed + view.arrivals
        next_s = future.arrival_s[coming] if coming < len(future.arrival_s) else NEVER
        start = future.plan.start
        if (next_s - now_s) * view.function.held_devices > start.device_s and next_s - start.lead_s > now_s:
            future.away_until_s = next_s - start.lead_s
        return self._wish(view, future, now_s)

    def _wish(self, view: View, future: _Future, now_s: float) -> Wish:
        plan = future.plan
        if now_s < future.away_until_s:
            return Wish(0, future.away_until_s if future.away_until_s < NEVER else None)
        place = bisect_right(plan.at_s, now_s + 1e-5)
        level = plan.level[place - 1] if place else 0
        next_s = plan.at_s[place] if place < len(plan.at_s) else None
        busy = view.waiting or view.running
        return Wish(max(level, 1 if busy or view.starting else 0), next_s)


def strongest(
    workload: Workload,
    cluster: Cluster,
    prices: Prices,
    seed: int = 0,
    *,
    begin_s: float | None = None,
    since_s: float | None = None,
    until_s: float | None = None,
    replays: Replays | None = None,
) -> tuple[Oracle, Result]:
    """The oracle whose plan for each function is the one of `VARIANTS` that came out cheapest, and its result."""
    oracle = Oracle(workload)
    if replays is not None:
        oracle.replays = replays
    results = []
    for variant in VARIANTS:
        oracle.variants = variant
        results.append(
            simulate(workload, cluster, oracle, seed, prices, begin_s=begin_s, since_s=since_s, until_s=until_s)
        )
    costs = np.asarray([[each.objective(prices.waiting_weight) for each in result.functions] for result in results])
    oracle.variants = [VARIANTS[int(place)] for place in np.argmin(costs, axis=0)]
    final = simulate(workload, cluster, oracle, seed, prices, begin_s=begin_s, since_s=since_s, until_s=until_s)
    best = min((*results, final), key=lambda result: result.objective(prices.waiting_weight))
    if best is not final:
        oracle.variants = VARIANTS[results.index(best)]
    return oracle, best
