"""What fixed and learned keep-alives have in common: replicas by concurrency, up at once, down by the peak of a window.

Desired = requests waiting or running / target, rounded up; fewer only when the peak of the last one to two windows
would have needed fewer. How long the last idle replica stays is `keep_alive_s` of whoever derives from it. Limits:
targets are the service model's room times a utilisation; no notion of tokens or of step times.
"""

from __future__ import annotations

import math
from typing import Final

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.policy import Asked, View, Wish
from autoscaler.simulator.result import Prices
from autoscaler.simulator.workload import SimFunction, Workload

NEVER: Final = float("inf")


def room_of(function: SimFunction) -> int:
    """Requests one replica takes at once."""
    return round(function.target_concurrency) or function.service.max_requests


class Peak:
    """The most requests at once in the last one to two windows."""

    __slots__ = ("before", "now", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.now = 0
        self.before = 0

    def seen(self, peak: int, now_s: float, window_s: float) -> int:
        passed_s = now_s - self.since_s
        if passed_s >= window_s:
            self.before = self.now if passed_s < 2 * window_s else 0
            self.now = 0
            self.since_s = now_s
        self.now = max(self.now, peak)
        return max(self.now, self.before)


class ByLoad(Asked):
    stops_starting = False

    def __init__(self, name: str, *, utilisation: float = 1.0, scale_in_s: float = 60.0) -> None:
        if not 0 < utilisation <= 1:
            raise ValueError(f"a utilisation of {utilisation} is not above 0 and at most 1")
        self.name = name
        self._utilisation = utilisation
        self._scale_in_s = scale_in_s
        self._targets: list[float] = []
        self._peaks: list[Peak] = []

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        self._targets = [max(room_of(function) * self._utilisation, 1.0) for function in workload.functions]
        self._peaks = [Peak(now_s) for _ in workload.functions]

    def keep_alive_s(self, view: View) -> float:
        raise NotImplementedError

    def on_arrival(self, view: View, now_s: float) -> Wish:
        return self.by_load(view, now_s)

    def on_timer(self, view: View, now_s: float) -> Wish:
        return self.by_load(view, now_s)

    def on_idle(self, view: View, now_s: float) -> Wish:
        return Wish(0, None, self.keep_alive_s(view))

    def by_load(self, view: View, now_s: float, idle_after_s: float | None = None) -> Wish:
        """At least the last replica stays: only idling ends it."""
        target = self._targets[view.index]
        demand = view.waiting + view.running
        have = view.ready + view.starting
        peak = self._peaks[view.index].seen(view.take_peak(), now_s, self._scale_in_s)
        needed = math.ceil(demand / target)
        desired = max(needed, min(have, math.ceil(peak / target)), 1 if have else 0)
        desired = min(desired, view.function.max_replicas)
        return Wish(
            desired,
            self._peaks[view.index].since_s + self._scale_in_s if desired > 1 else None,
            self.keep_alive_s(view) if idle_after_s is None else idle_after_s,
            busy_above=math.floor(target * desired) if self._utilisation < 1 else 1 << 60,
        )
