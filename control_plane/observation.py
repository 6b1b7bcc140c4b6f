"""What scaling looks at, for one function: lanes and seats of this gateway, what the others told, and the replicas.

Pure but for the clock: `autoscaler.decide` gets it as a value. Limits: what was before `begin` is not known, so that
the window has to pass anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from autoscaler.cold_waiters import ColdWaiters
from autoscaler.decision import Observed, Phase, ReplicaView
from autoscaler.forecast import Forecast
from autoscaler.peaks import Peaks
from autoscaler.service import ServiceModel
from control_plane.demand import Demand, Elsewhere, earliest, longest
from control_plane.dispatch import Dispatcher
from control_plane.fleet import GONE, STARTING, Fleet
from control_plane.functions import Revision
from control_plane.lanes import DEMAND_WINDOW_NS, FunctionKey, Lane
from control_plane.seating import Seating
from control_plane.serving import Serving
from function_runtime.protocol import STALLED_AFTER_S, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from control_plane.observations import FunctionLoad

WINDOW_S: Final = DEMAND_WINDOW_NS / 1e9
SILENT_S: Final = STALLED_AFTER_S - 2.0
"""A replica that was not heard for so long counts for nothing: the gateway whose requests it holds gives it up about
now, and the one that decides may be another."""


GAPS_READ: Final = 64
"""What the automatic keep-alive looks at where no forecast acts."""


class Observation:
    def __init__(
        self, serving: Serving, dispatcher: Dispatcher, fleet: Fleet, seating: Seating, demand: Demand
    ) -> None:
        self._serving = serving
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._seating = seating
        self._demand = demand
        self.loads: Callable[[FunctionKey], FunctionLoad | None] = lambda key: None
        """What is remembered of a function over all gateways."""
        self.restarts: Callable[[FunctionKey, float], tuple[int, float | None]] = lambda key, now_s: (0, None)
        self.may_have: Callable[[FunctionKey], int | None] = lambda key: None
        """Devices that a function may take besides those it has; None: any number."""
        self.device_price: Callable[[str], float] = lambda tenant: 1.0
        """What a device is worth to other tenants."""
        self.service: Callable[[FunctionKey, str], ServiceModel | None] = lambda key, identity: None
        """Measured speeds of a checkpoint's replicas."""
        self.in_sight = False
        """Whether every slot is, as of the round of decisions that is under way."""
        self._peaks: dict[FunctionKey, Peaks] = {}
        self._cold: dict[FunctionKey, ColdWaiters] = {}
        self._since_s: dict[str, tuple[ReplicaState, float]] = {}
        self._woken_s: dict[FunctionKey, float] = {}
        self._started_s = time.monotonic()

    def begin(self) -> None:
        self._started_s = time.monotonic()
        self._peaks.clear()

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

    def cold_waiters(self, key: FunctionKey) -> float:
        """Requests that were found to wait for a start from zero, on average lately."""
        return self._cold[key].mean if key in self._cold else 1.0

    def forget(self, key: FunctionKey) -> None:
        """The function was deleted."""
        self._peaks.pop(key, None)
        self._cold.pop(key, None)
        self._woken_s.pop(key, None)

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
        *,
        forecast: Forecast | None = None,
    ) -> Observed:
        """`forecast`: what requests ask of a replica, on average, is known with it."""
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
        peaks = self._peaks.setdefault(key, Peaks())
        peaks.note(now_s, waiting + sum(view.in_flight for view in views))
        generation = sum(lane.generation for lane in lanes) + elsewhere.generation
        cold = self._cold.setdefault(key, ColdWaiters())
        if not any(each.paused for each in lanes):
            cold.note(sum(view.phase is Phase.READY for view in views), waiting, generation)
        waiting_since_s = elsewhere.waiting_since_s
        for each in lanes:
            waiting_since_s = earliest(waiting_since_s, each.waiting_since_s)
        load, recent = self.loads(key), self._dispatcher.load.recent(key)
        in_10_s, in_30_s, in_60_s = recent.arrivals(now_s)
        restarts, restart_leaves_s = self.restarts(key, now_s)
        cold_start_s = self._serving.cold_start_s(target.identity or "")
        gaps_s = (tuple(lane.gaps_s) if lane is not None else ()) + elsewhere.gaps_s
        if load is not None:
            gaps_s = load.history.last_gaps(GAPS_READ) or gaps_s
            cold_start_s = load.starts.quantile_s(0.5) if cold_start_s is None else cold_start_s
        return Observed(
            waiting=max(waiting, woken),
            replicas=tuple(views),
            peak_demand=sum(lane.peak_demand() for lane in lanes) + elsewhere.peak_demand,
            window_covered_s=min(now_s - self._started_s, WINDOW_S),
            last_activity_s=self._activity_s(lanes, elsewhere, load, bool(views), now_s),
            generation=generation,
            cold_start_s=cold_start_s,
            gaps_s=gaps_s,
            complete=self.in_sight and self._demand.complete,
            unusable=unusable,
            cold_start_high_s=None if load is None else load.starts.quantile_s(0.9),
            service=self.service(key, target.identity or ""),
            prompt_tokens=forecast.prompt_tokens if forecast is not None else 0.0,
            output_tokens=forecast.output_tokens if forecast is not None else 0.0,
            waiting_tokens=sum(lane.waiting_tokens for lane in lanes) + elsewhere.waiting_tokens,
            running_tokens=sum(lane.running_tokens for lane in lanes) + elsewhere.running_tokens,
            kv_used_share=self._kv_used_share(current),
            first_token_s=longest(recent.mean_s(recent.first_tokens, now_s), elsewhere.first_token_s),
            token_s=longest(recent.mean_s(recent.tokens, now_s), elsewhere.token_s),
            waiting_since_s=waiting_since_s,
            cold_waiters=cold.mean,
            arrivals_in_10_s=in_10_s + elsewhere.arrivals_in_10_s,
            arrivals_in_30_s=in_30_s + elsewhere.arrivals_in_30_s,
            arrivals_in_60_s=in_60_s + elsewhere.arrivals_in_60_s,
            peaks=peaks.steps(),
            restarts_in_hour=restarts,
            restart_leaves_s=restart_leaves_s,
            may_have=self.may_have(key),
            device_price=self.device_price(key[0]),
        )

    def _activity_s(
        self, lanes: list[Lane], elsewhere: Elsewhere, load: FunctionLoad | None, held: bool, now_s: float
    ) -> float:
        """What a replica was held for before this gateway came to lead is not known: it is kept as if just used. Of a
        function at zero the last activity is when it was last seen to have any, so that a forecast goes on from there.
        """
        seen_s = max(max((lane.last_activity_s(now_s) for lane in lanes), default=0.0), elsewhere.last_activity_s)
        if held or load is None or load.active_until_s == -math.inf:
            return max(seen_s, self._started_s)
        return max(seen_s, load.active_until_s - time.time() + now_s)

    def idle_since_s(self, key: FunctionKey, now_s: float) -> float | None:
        """When a function's last activity ended, by the monotonic clock; None: there is some."""
        lanes, elsewhere = self._dispatcher.lanes.of_function(key), self._demand.elsewhere(key)
        if any(lane.demand for lane in lanes) or elsewhere.waiting or elsewhere.running:
            return None
        return self._activity_s(lanes, elsewhere, self.loads(key), False, now_s)

    def _kv_used_share(self, current: list[ReplicaStatus]) -> float | None:
        used = total = 0
        for status in current:
            seat = self._seating.seat(status.replica_id)
            if seat is not None and seat.link.progress is not None:
                used += seat.link.progress.kv_used_blocks
                total += seat.link.progress.kv_total_blocks
        return used / total if total else None
