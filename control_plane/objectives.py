"""Early refusal: a request that would come too late for its function's objective is told so before it costs anything.

`judge` puts together what a gateway knows of a function (its ready replicas and what runs there, who waits here and at
the other gateways, replicas that are starting, measured service times) and lets `autoscaler.admission` decide. The
places that may be waited in are a bound over all gateways, claimed like that of the queue (`queue_shares`). Who is
refused counts as demand until it comes back, so that refusing never hides that more replicas are needed.
Limits: at zero, or before `ServiceTimes` knows anything, nobody is refused; work in the background never is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from autoscaler import admission
from autoscaler.admission import Line, Load, Server, Verdict
from autoscaler.service import ServiceModel
from control_plane.decisions import Decisions
from control_plane.dispatch import Dispatcher
from control_plane.errors import FirstTokenLate
from control_plane.fleet import STARTING, Fleet
from control_plane.lanes import FunctionKey, Lane, Seat
from control_plane.serving import Serving
from control_plane.standings import Standings
from function_runtime.protocol import ReplicaState

logger = logging.getLogger(__name__)

LINE_S: Final = 0.05
"""How old the line of places may be while nobody takes or leaves one: so that refusing costs next to nothing."""
RECORD_S: Final = 1.0
"""Refusals of one function are recorded as a decision this often, with how many there were."""
LOOK_S: Final = 1.0
"""Demand that was refused falls as its time to come back passes, which is no event: it is looked at this often."""
OVERDUE_SHARE: Final = 0.1
"""A start that takes longer than expected is expected to take this share of it more."""


@dataclass(frozen=True, slots=True)
class _Lined:
    at_s: float
    state: tuple[object, ...]
    line: Line
    service: ServiceModel
    free: int


class Objectives:
    def __init__(
        self,
        dispatcher: Dispatcher,
        serving: Serving,
        fleet: Fleet,
        standings: Standings,
        decisions: Decisions,
        start_estimate_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._serving = serving
        self._fleet = fleet
        self._standings = standings
        self._decisions = decisions
        self._start_estimate_s = start_estimate_s
        self._clock = clock
        self._lined: dict[tuple[FunctionKey, str], _Lined] = {}
        self._recorded: dict[FunctionKey, tuple[float, int]] = {}
        """When refusals of a function were last recorded, and how many there were since."""
        self._looks: set[FunctionKey] = set()
        self.leads: Callable[[], bool] = lambda: True
        self.waiting_elsewhere: Callable[[FunctionKey], int] = lambda key: 0
        """Places that other gateways have claimed in a function's queue."""
        self.refused: defaultdict[str, int] = defaultdict(int)
        """By function."""
        dispatcher.judge = self.judge
        dispatcher.queue_moves_s = self.queue_moves_s

    # --- what is known ---

    def objective_s(self, key: FunctionKey, identity: str) -> float | None:
        revision = self._serving.with_identity(key, identity)
        return None if revision is None else revision.spec.scaling.objectives.first_token_s

    def _line(self, lane: Lane) -> _Lined | None:
        """None: nothing can be said yet."""
        key, identity = lane.key, lane.identity
        seats = [seat for seat in lane.seats.values() if seat.accepting]
        service = self._dispatcher.service_times.model(key, identity)
        means = self._dispatcher.service_times.means(key, identity)
        if service is None or means is None or not seats:
            return None
        now_s = self._clock()
        state = (len(seats), sum(seat.taken for seat in seats), id(service))
        known = self._lined.get((key, identity))
        if known is not None and known.state == state and now_s - known.at_s < LINE_S:
            return known
        servers = tuple(self._server(seat, means[1]) for seat in seats)
        load = Load(service, servers, self._coming_s(lane), means[0], means[1])
        free = sum(seat.room for seat in seats)
        lined = self._lined[key, identity] = _Lined(now_s, state, admission.line_up(load), service, free)
        return lined

    def _server(self, seat: Seat, output_tokens: float) -> Server:
        times = self._dispatcher.service_times
        expected = times.left_tokens(seat.key, seat.identity)
        unread = 0
        left: list[float] = []
        for request in seat.in_flight.values():
            sampling = request.origin.sampling
            left.append(expected(request.received // sampling.n, sampling.max_tokens))
            if request.last_token_ns == 0:
                unread += len(request.origin.prompt)
        left += [output_tokens / 2] * seat.others
        computed = round(unread * times.computed_share(seat.key, seat.identity))
        return Server(tuple(left), seat.max_requests, computed)

    def _coming_s(self, lane: Lane) -> tuple[float, ...]:
        """Of the replicas that start, and of one more that may be started for who waits."""
        key = lane.key
        expected_s = self._serving.cold_start_s(lane.identity) or self._start_estimate_s
        living = self._fleet.living(key)
        now_us = time.time_ns() // 1000
        starting = [
            max(expected_s - (now_us - status.created_us) / 1e6, expected_s * OVERDUE_SHARE)
            for status in living
            if status.state in STARTING and status.spec.identity == lane.identity
        ]
        revision = self._serving.with_identity(key, lane.identity)
        there = sum(status.state is not ReplicaState.DRAINING for status in living)
        if revision is not None and not starting and there < revision.spec.scaling.max_replicas:
            more = self._standings.may_have(key[0])
            if more is None or more >= revision.spec.resources.devices:
                starting.append(expected_s)
        return tuple(starting)

    def _ahead(self, key: FunctionKey) -> int:
        lanes = self._dispatcher.lanes.of_function(key)
        return sum(len(lane.waiting) + lane.entering for lane in lanes) + self.waiting_elsewhere(key)

    # --- judging ---

    def most_waiting(self, key: FunctionKey, bound: int) -> int:
        """How many may wait for a function, at all gateways together, so that the last still meets the objective."""
        for lane in self._dispatcher.lanes.of_function(key):
            objective_s = self.objective_s(key, lane.identity) if lane.ready else None
            lined = self._line(lane) if objective_s is not None else None
            if objective_s is None or lined is None:
                continue
            means = self._dispatcher.service_times.means(key, lane.identity)
            prompt_tokens = round(means[0]) if means is not None else 1
            strictness = self._standings.strictness(key[0], self.leads())
            most = admission.depth(lined.line, lined.service, prompt_tokens, objective_s, strictness) - lined.free
            bound = min(bound, max(most, 0))
        return bound

    def verdict(self, key: FunctionKey, identity: str, prompt_tokens: int) -> Verdict | None:
        """On a request that would come now; None: there is no objective, or nothing to judge by."""
        lane = self._dispatcher.lanes.find(key, identity)
        if lane is None or not lane.ready:
            return None
        objective_s = self.objective_s(key, identity)
        lined = self._line(lane) if objective_s is not None else None
        if objective_s is None or lined is None:
            return None
        computed = max(round(prompt_tokens * self._dispatcher.service_times.computed_share(key, identity)), 1)
        strictness = self._standings.strictness(key[0], self.leads())
        ahead, lanes = self._ahead(key), self._dispatcher.lanes
        if lanes.need(key, 0).requests > lanes.granted(key).requests:
            # The other gateways have claimed what may be waited in.
            ahead = max(ahead, admission.depth(lined.line, lined.service, computed, objective_s, strictness))
        return admission.judge(
            lined.line,
            lined.service,
            computed,
            ahead,
            objective_s,
            strictness=strictness,
            deferred=lane.deferred(),
        )

    def judge(self, key: FunctionKey, identity: str, prompt_tokens: int) -> None:
        """Raises `FirstTokenLate`."""
        verdict = self.verdict(key, identity, prompt_tokens)
        if verdict is None or verdict.retry_after_s is None:
            return
        lane = self._dispatcher.lanes.of(key, identity)
        self._defer(lane, verdict.retry_after_s)
        self.refused[key[1]] += 1
        objective_s = self.objective_s(key, identity) or 0.0
        tight = ""
        if verdict.bound_s < objective_s:
            tight = f" ({verdict.bound_s:.2f} s while tenant {key[0]} holds more than its share of the devices)"
        text = (
            f"the first token of {key[1]} is predicted in {verdict.first_token_s:.2f} s with {verdict.ahead} requests "
            f"before this one, and its objective is {objective_s:g} s{tight}"
        )
        self._record(key, text, verdict, lane)
        raise FirstTokenLate(
            f"{text}: come back in {verdict.retry_after_s:.2f} s",
            retry_after_s=verdict.retry_after_s,
            predicted_s=verdict.first_token_s,
        )

    def queue_moves_s(self, key: FunctionKey, identity: str) -> float | None:
        """Who finds the queue full is told to come back when as many have their turns as were told so before."""
        lane = self._dispatcher.lanes.find(key, identity)
        lined = self._line(lane) if lane is not None and lane.ready else None
        if lane is None or lined is None:
            return None
        moves_s = max(lined.line.wait_s(lane.deferred()), admission.RETRY_MIN_S)
        self._defer(lane, moves_s)
        return moves_s

    def _defer(self, lane: Lane, retry_after_s: float) -> None:
        """It counts as demand until then."""
        key = lane.key
        lane.defer(retry_after_s)
        self._dispatcher.on_demand(key, False)
        if key not in self._looks:
            self._looks.add(key)
            asyncio.get_running_loop().call_later(LOOK_S, self._look, key)

    def _look(self, key: FunctionKey) -> None:
        self._looks.discard(key)
        self._dispatcher.on_demand(key, False)
        if any(lane.deferred() for lane in self._dispatcher.lanes.of_function(key)) and not self._dispatcher.closing:
            self._looks.add(key)
            asyncio.get_running_loop().call_later(LOOK_S, self._look, key)

    def _record(self, key: FunctionKey, text: str, verdict: Verdict, lane: Lane) -> None:
        now_s = self._clock()
        at_s, since = self._recorded.get(key, (float("-inf"), 0))
        if now_s - at_s < RECORD_S:
            self._recorded[key] = at_s, since + 1
            return
        self._recorded[key] = now_s, 0
        logger.info("event=refused function=%s count=%d predicted_s=%.3f", key[1], since + 1, verdict.first_token_s)
        inputs = {
            "refused": since + 1,
            "first_token_s": round(verdict.first_token_s, 4),
            "bound_s": round(verdict.bound_s, 4),
            "retry_after_s": round(verdict.retry_after_s or 0.0, 4),
            "ahead": verdict.ahead,
            "to_come_back": lane.deferred(),
            "ready": sum(seat.accepting for seat in lane.seats.values()),
            "running": sum(seat.taken for seat in lane.seats.values()),
        }
        self._decisions.record("refuse", key[1], None, None, text, inputs, tenant=key[0])
