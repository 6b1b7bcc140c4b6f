"""Knative around its autoscaler: scrapes, the activator's poke at zero, the two stages to zero.

Every 2 s the decider sees the average concurrency of the last 60 s and 6 s (`kpa`). A request at zero makes the
activator report it at once: no tick is waited for. Desired 0 marks a revision inactive only after it was active for a
stable window; pods go when the activator has been in the path for the grace period, which counts from when proxy mode
began (`excess burst capacity` below 0), so for few pods there is nothing to wait for.
Limits: concurrency is the exact area under it, where Knative samples; a scrape is never lost; the ticks of a function
with one replica and next to no load are evaluated together when nothing between them could have changed the decision;
the target is container concurrency times utilisation, container concurrency being what a replica takes at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.peers.by_load import NEVER, room_of
from autoscaler.simulator.peers.kpa import TICK_S, Kpa, KpaSpec
from autoscaler.simulator.policy import Asked, View, Wish
from autoscaler.simulator.result import Prices
from autoscaler.simulator.workload import Workload

POKE: Final = 1.0
"""AverageConcurrentRequests of the stat that the activator pushes for the first request at zero."""
_ASLEEP: Final = Wish(0, None, NEVER)


class Areas:
    """Averages of the concurrency over the last ticks, from the area under it: what `WindowAverage` gives for records
    of every second, whose sum over whole ticks is that area."""

    __slots__ = ("_areas", "_at", "_filled", "_size")

    def __init__(self, window_s: float) -> None:
        self._size = max(round(window_s / TICK_S), 1)
        self._areas = [0.0] * (self._size + 1)
        self.begin(0.0)

    def begin(self, area_s: float) -> None:
        self._at = 0
        self._filled = 0
        self._areas[0] = area_s

    def add(self, area_s: float, ticks: int) -> None:
        """`ticks` have passed; of those between, the area is taken to have grown evenly."""
        size = self._size + 1
        if ticks > self._size:
            self._at = 0
            self._areas = [area_s] * size
            self._filled = self._size
            return
        before_s = self._areas[self._at % size]
        for passed in range(1, ticks + 1):
            self._at += 1
            self._areas[self._at % size] = before_s + (area_s - before_s) * passed / ticks
        self._filled = min(self._filled + ticks, self._size)

    def last_s(self, ticks: int) -> float:
        """Request-seconds of the last `ticks`."""
        ticks = min(ticks, self._filled)
        size = self._size + 1
        return self._areas[self._at % size] - self._areas[(self._at - ticks) % size]

    def average(self, ticks: int) -> float:
        """Over at most so many ticks, fewer if fewer were watched; down to six digits, as Knative rounds."""
        ticks = min(ticks, self._filled)
        return int(self.last_s(ticks) / (ticks * TICK_S) * 1e6) / 1e6 if ticks else 0.0


@dataclass(slots=True)
class Revision:
    kpa: Kpa
    areas: Areas
    room: int
    awake: bool = False
    desired: int = 0
    tick_s: float = 0.0
    """When the last tick was."""
    next_s: float = 0.0
    active_since_s: float | None = None
    proxy_since_s: float | None = 0.0
    """Since when the activator is in the path; None: it is not."""
    zero_at_s: float | None = None


class Knative(Asked):
    stops_starting = True

    def __init__(self, *, utilisation: float = 0.7, spec: KpaSpec | None = None, name: str = "knative") -> None:
        """`utilisation`: container-concurrency-target-percentage. `spec`: everything but the target."""
        if not 0 < utilisation <= 1:
            raise ValueError(f"a utilisation of {utilisation} is not above 0 and at most 1")
        self.name = name
        self._utilisation = utilisation
        self._spec = spec or KpaSpec()
        self._stable_ticks = max(round(self._spec.stable_window_s / TICK_S), 1)
        self._panic_ticks = max(round(self._spec.panic_window_s / TICK_S), 1)
        self._revisions: list[Revision] = []

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        self._revisions = []
        for function in workload.functions:
            room = room_of(function)
            target = max(room * self._utilisation, 0.01)
            spec = replace(self._spec, target=target, total=float(room))
            self._revisions.append(Revision(Kpa(spec), Areas(self._spec.stable_window_s), room, proxy_since_s=now_s))

    def on_arrival(self, view: View, now_s: float) -> Wish:
        revision = self._revisions[view.index]
        if not revision.awake:
            # The revision slept: its windows are empty but for the activator's report.
            revision.awake = True
            revision.tick_s = now_s
            revision.next_s = now_s + TICK_S
            revision.areas.begin(view.area_s(now_s))
            revision.zero_at_s = None
            self._decide(revision, view, POKE, POKE, now_s)
        elif revision.next_s > revision.tick_s + TICK_S:
            # More has come than fits: the ticks that were to be evaluated together are not quiet after all.
            passed = int((now_s - revision.tick_s) / TICK_S)
            revision.next_s = min(revision.next_s, revision.tick_s + (passed + 1) * TICK_S)
        return self._wish(revision)

    def on_idle(self, view: View, now_s: float) -> Wish:
        return self._wish(self._revisions[view.index])

    def on_timer(self, view: View, now_s: float) -> Wish:
        revision = self._revisions[view.index]
        if not revision.awake:
            return _ASLEEP
        if view.ready and revision.active_since_s is None:
            revision.active_since_s = now_s
        if now_s < revision.next_s - 1e-3:
            return self._wish(revision)
        ticks = max(round((now_s - revision.tick_s) / TICK_S), 1)
        revision.areas.add(view.area_s(now_s), ticks)
        revision.tick_s = now_s
        stable = revision.areas.average(self._stable_ticks)
        self._decide(revision, view, stable, revision.areas.average(self._panic_ticks), now_s)
        revision.next_s = now_s + TICK_S * self._ticks_ahead(revision, view)
        return self._wish(revision)

    def _decide(self, revision: Revision, view: View, stable: float, panic: float, now_s: float) -> None:
        scale = revision.kpa.scale(stable, panic, view.ready, now_s)
        if scale.desired > 0 and scale.excess_burst_capacity >= 0:
            revision.proxy_since_s = None
        elif revision.proxy_since_s is None:
            revision.proxy_since_s = now_s
        revision.desired = scale.desired
        if scale.desired > 0:
            revision.zero_at_s = None
            return
        self._to_zero(revision, view, now_s)

    def _to_zero(self, revision: Revision, view: View, now_s: float) -> None:
        """Two stages: inactive, with the activator in the path; then, after the grace period, no pods."""
        spec = self._spec
        since_s = revision.active_since_s
        if view.waiting or view.running or since_s is None or now_s - since_s < spec.stable_window_s:
            revision.desired = 1
            return
        if revision.proxy_since_s is None:
            revision.proxy_since_s = now_s
        revision.zero_at_s = revision.proxy_since_s + max(spec.scale_to_zero_grace_s, spec.pod_retention_s)
        if now_s < revision.zero_at_s:
            revision.desired = 1
            return
        revision.awake = False
        revision.active_since_s = None

    def _ticks_ahead(self, revision: Revision, view: View) -> int:
        """Ticks until the next at which anything could have changed; 1 unless one idle replica has next to no load."""
        kpa, areas = revision.kpa, revision.areas
        if revision.desired != 1 or view.ready != 1 or view.starting or view.waiting or kpa.panic_s is not None:
            return 1
        if view.running or revision.zero_at_s is not None or areas.last_s(self._stable_ticks - self._panic_ticks) <= 0:
            return 1
        ahead = 1
        panic_s = self._panic_ticks * TICK_S * kpa.spec.target
        while ahead < self._panic_ticks:
            # If the replica were full from now on, the panic window would hold this much at that tick.
            most_s = areas.last_s(self._panic_ticks - ahead) + ahead * TICK_S * revision.room
            if most_s > panic_s or most_s + areas.last_s(self._stable_ticks - ahead) > (
                self._stable_ticks * TICK_S * kpa.spec.target
            ):
                break
            ahead += 1
        return ahead

    def _wish(self, revision: Revision) -> Wish:
        return Wish(revision.desired, revision.next_s, NEVER) if revision.awake else _ASLEEP
