"""What scaling looks at, for one function: lanes and seats of this gateway, what the others told, and the replicas.

Pure but for the clock: `autoscaler.decide` gets it as a value. Limits: what was before `begin` is not known, so that
the window has to pass anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from autoscaler.decision import Observed, Phase, ReplicaView
from control_plane.demand import Demand
from control_plane.dispatch import Dispatcher
from control_plane.fleet import GONE, STARTING, Fleet
from control_plane.functions import Revision
from control_plane.lanes import DEMAND_WINDOW_NS, FunctionKey, Lane
from control_plane.seating import Seating
from control_plane.serving import Serving
from function_runtime.protocol import STALLED_AFTER_S, ReplicaState, ReplicaStatus

WINDOW_S: Final = DEMAND_WINDOW_NS / 1e9
SILENT_S: Final = STALLED_AFTER_S - 2.0
"""A replica that was not heard for so long counts for nothing: the gateway whose requests it holds gives it up about
now, and the one that decides may be another."""


class Observation:
    def __init__(
        self, serving: Serving, dispatcher: Dispatcher, fleet: Fleet, seating: Seating, demand: Demand
    ) -> None:
        self._serving = serving
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._seating = seating
        self._demand = demand
        self._since_s: dict[str, tuple[ReplicaState, float]] = {}
        self._woken_s: dict[FunctionKey, float] = {}
        self._started_s = time.monotonic()
        self.may_have: Callable[[FunctionKey], int | None] = lambda key: None
        """Devices that a function may take besides those it has; None: any number."""
        self.device_price: Callable[[str], float] = lambda tenant: 1.0

    def begin(self) -> None:
        self._started_s = time.monotonic()

    def note(self, status: ReplicaStatus) -> bool:
        """Whether the replica has entered another state."""
        known = self._since_s.get(status.replica_id)
        if known is not None and known[0] is status.state:
            return False
        if status.state in GONE:
            self._since_s.pop(status.replica_id, None)
        else:
            self._since_s[status.replica_id] = (status.state, time.monotonic())
        return True

    def woken(self, key: FunctionKey) -> None:
        """Somebody is interested and does not wait: as good as one waiting request, for one start."""
        self._woken_s[key] = time.monotonic()

    def is_woken(self, key: FunctionKey) -> bool:
        return key in self._woken_s

    def passed_on(self, key: FunctionKey) -> None:
        self._woken_s.pop(key, None)

    def of(
        self,
        key: FunctionKey,
        target: Revision,
        lanes: list[Lane],
        current: list[ReplicaStatus],
        old: list[ReplicaStatus],
        unusable: str,
    ) -> Observed:
        now_s = time.monotonic()
        elsewhere = self._demand.elsewhere(key)
        views: list[ReplicaView] = []
        for status in current:
            seat = self._seating.seat(status.replica_id)
            if status.state is ReplicaState.DRAINING or (seat is not None and not seat.accepting):
                phase = Phase.DRAINING
            elif status.replica_id in self._fleet.given_up or (seat is not None and seat.link.silent_s > SILENT_S):
                phase = Phase.DRAINING  # it may come back, but nobody is to wait for that
            elif status.state in STARTING or seat is None:
                phase = Phase.STARTING  # ready, but not connected to yet
            else:
                phase = Phase.READY
            in_flight = elsewhere.running.get(status.replica_id, 0)
            in_flight += len(seat.in_flight) if seat is not None else 0
            since_s = self._since_s.get(status.replica_id, (status.state, now_s))[1]
            views.append(ReplicaView(status.replica_id, phase, in_flight, since_s))
        with_old = 0
        for status in old:
            seat = self._seating.seat(status.replica_id)
            with_old += elsewhere.running.get(status.replica_id, 0)
            with_old += len(seat.in_flight) if seat is not None else 0
        woken_s = self._woken_s.get(key)
        if elsewhere.woken:
            woken_s = self._woken_s[key] = now_s
        woken = 0
        if woken_s is not None:
            if any(view.phase is not Phase.DRAINING for view in views):
                del self._woken_s[key]
            else:
                woken = 1
        lane = self._dispatcher.lanes.find(key, target.identity or "")
        waiting = sum(len(lane.waiting) for lane in lanes) + with_old + elsewhere.waiting
        # Who was refused early comes back: not to count it would hide that more replicas are needed.
        waiting += sum(lane.deferred() for lane in lanes) + elsewhere.deferred
        own_activity_s = max((lane.last_activity_s(now_s) for lane in lanes), default=0.0)
        return Observed(
            waiting=max(waiting, woken),
            replicas=tuple(views),
            peak_demand=sum(lane.peak_demand() for lane in lanes) + elsewhere.peak_demand,
            window_covered_s=min(now_s - self._started_s, WINDOW_S),
            last_activity_s=max(own_activity_s, elsewhere.last_activity_s, self._started_s),
            generation=sum(lane.generation for lane in lanes) + elsewhere.generation,
            cold_start_s=self._serving.cold_start_s(target.identity or ""),
            gaps_s=(tuple(lane.gaps_s) if lane is not None else ()) + elsewhere.gaps_s,
            complete=self._fleet.in_sight and self._demand.complete,
            unusable=unusable,
            may_have=self.may_have(key),
            device_price=self.device_price(key[0]),
        )
