"""`simulate`: a workload through a cluster under a policy, event by event, on a clock that only the events move.

Events are arrivals (an ordered array) and, in a heap, replicas that become ready or are gone, moments that the policy
named, and functions that may be idle. Ends of requests are no events (`state`). The k-th start of a function draws the
same number under every policy, so that policies meet the same luck. Two million requests take about half a minute.
Limits: deciding takes no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

import numpy as np

from autoscaler.homes import POOL, Resident
from autoscaler.placement import Placement
from autoscaler.room import may_end_by_default
from autoscaler.simulator.cluster import Cluster, Slots
from autoscaler.simulator.policy import Policy, Wish
from autoscaler.simulator.replica import SimReplica
from autoscaler.simulator.result import FunctionResult, Prices, Result
from autoscaler.simulator.state import NEVER, FunctionState
from autoscaler.simulator.workload import Workload
from autoscaler.work import Work

READY: Final = 0
GONE: Final = 1
TIMER: Final = 2
IDLE: Final = 3
SAMPLE: Final = 4
SCORE: Final = 5
CHUNK: Final = 1 << 16
"""Requests that are turned into Python numbers at once."""
SOON_S: Final = 1e-6


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    seed: int = 0,
    prices: Prices | None = None,
    *,
    begin_s: float | None = None,
    since_s: float | None = None,
    until_s: float | None = None,
    sample_s: float = 600.0,
    sample_functions: bool = False,
    drain_s: float = 3600.0,
) -> Result:
    """Replays what arrives from `begin_s` on; scores arrivals and device-seconds between `since_s` and `until_s`.

    What arrived before `begin_s` is given to the policy to learn from. Requests that wait at `until_s` are waited for
    up to `drain_s` more, and count as refused after that.
    """
    return Simulation(
        workload, cluster, policy, seed, prices or Prices(), begin_s, since_s, until_s, sample_s, sample_functions
    ).run(drain_s)


class Simulation:
    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        seed: int,
        prices: Prices,
        begin_s: float | None,
        since_s: float | None,
        until_s: float | None,
        sample_s: float,
        sample_functions: bool,
    ) -> None:
        last_s = float(workload.arrival_s[-1]) if len(workload) else 0.0
        first_s = float(workload.arrival_s[0]) if len(workload) else 0.0
        self.begin_s = min(first_s, 0.0) if begin_s is None else begin_s
        self.since_s = self.begin_s if since_s is None else since_s
        self.until_s = max(last_s, self.since_s) + SOON_S if until_s is None else until_s
        self.policy = policy
        self.prices = prices
        self.slots = Slots(cluster)
        self._past = workload.between(-NEVER, self.begin_s)
        self._replayed = workload.between(self.begin_s, self.until_s)
        self._scored = self._replayed.between(self.since_s, self.until_s)
        self._first_scored = len(self._replayed) - len(self._scored)
        self._waits: array[float] = array("f", [float("nan")]) * len(self._scored)
        self.functions = [
            FunctionState(index, function, self.begin_s, self._waits, self._first_scored)
            for index, function in enumerate(workload.functions)
        ]
        self._results = [
            FunctionResult(
                function.name,
                objective_s=function.objective_s,
                devices=function.held_devices,
                expected_start_s=function.starts.expected_s(POOL) or function.starts.expected_s() or 0.0,
            )
            for function in workload.functions
        ]
        self._chance = [np.random.default_rng((seed, index)) for index in range(len(workload.functions))]
        self._events: list[tuple[float, int, int, FunctionState | None, object]] = []
        self._sequence = 0
        self._number = 0
        self._handled = 0
        self._no_room = 0
        self._hungry: dict[int, FunctionState] = {}
        self._series: list[tuple[float, ...]] = []
        self._function_series: list[list[tuple[int, int, int, int]]] = []
        self._sample_s = sample_s
        self._sample_functions = sample_functions
        self._handlers: tuple[Callable[[float, FunctionState | None, object], None], ...] = (
            self._ready, self._gone, self._timer, self._idle, self._sample, self._score,
        )  # fmt: skip

    def run(self, drain_s: float) -> Result:
        self.policy.begin(self._past, self.slots.cluster, self.prices, self.begin_s)
        self._push(NEVER, SAMPLE, None, None)  # so that there always is a next event
        self._push(self.since_s, SCORE, None, None)
        self._push(self.since_s, SAMPLE, None, None)
        for function in self.functions:
            self._apply(function, self.policy.on_timer(function, self.begin_s), self.begin_s)
            self._arm_idle(function, self.begin_s)
        self._replay()
        self._handle_until(self.until_s)
        self._end(self.until_s)
        self._handle_until(self.until_s + drain_s, only_waiting=True)
        for function in self.functions:
            function.advance(self.until_s + drain_s)
        return self._result()

    # --- the clock ---

    def _push(self, at_s: float, kind: int, function: FunctionState | None, what: object) -> None:
        self._sequence += 1
        heappush(self._events, (at_s, self._sequence, kind, function, what))

    def _replay(self) -> None:
        replayed, functions, events = self._replayed, self.functions, self._events
        policy, handle, number = self.policy, self._handle_until, 0
        for begin in range(0, len(replayed), CHUNK):
            part = slice(begin, begin + CHUNK)
            for now_s, index, prompt_tokens, output_tokens in zip(
                replayed.arrival_s[part].tolist(),
                replayed.function[part].tolist(),
                replayed.prompt_tokens[part].tolist(),
                replayed.output_tokens[part].tolist(),
                strict=True,
            ):
                if events[0][0] <= now_s:
                    handle(now_s)
                function = functions[index]
                settled = function.arrive(now_s, prompt_tokens, output_tokens, number)
                number += 1
                if not settled:
                    if (
                        function.queue
                        and function.open
                        and not policy.admits(function, prompt_tokens, output_tokens, now_s)
                    ):
                        function.refuse_last()
                    self._apply(function, policy.on_arrival(function, now_s), now_s)
                if not function.idle_armed:
                    self._arm_idle(function, now_s)

    def _handle_until(self, until_s: float, only_waiting: bool = False) -> None:
        events, handlers = self._events, self._handlers
        while events and events[0][0] <= until_s:
            if only_waiting and not any(function.queue for function in self.functions):
                return
            at_s, _, kind, function, what = heappop(events)
            self._handled += 1
            handlers[kind](at_s, function, what)

    # --- what happens ---

    def _ready(self, now_s: float, function: FunctionState | None, what: object) -> None:
        replica = what
        assert function is not None and isinstance(replica, SimReplica)
        if replica.ended:
            return
        function.advance(now_s)
        self.slots.started(replica, ready=True)
        function.opened(replica, now_s)
        self._apply(function, self.policy.on_timer(function, now_s), now_s)
        self._arm_idle(function, now_s)

    def _gone(self, now_s: float, function: FunctionState | None, what: object) -> None:
        replica = what
        assert function is not None and isinstance(replica, SimReplica)
        function.advance(now_s)
        function.closed.remove(replica)
        function.settle()
        self._release(function, replica, now_s)

    def _timer(self, now_s: float, function: FunctionState | None, what: object) -> None:
        assert function is not None
        if what != function.timer_version:
            return
        function.timer_s = None
        function.advance(now_s)
        self._apply(function, self.policy.on_timer(function, now_s), now_s)

    def _idle(self, now_s: float, function: FunctionState | None, what: object) -> None:
        assert function is not None
        if what != function.idle_version:
            return
        function.idle_armed = False
        function.advance(now_s)
        if function.queue:
            self._push_idle(function, now_s + max(function.idle_after_s, 0.5))
        elif function.running:
            self._push_idle(function, max(function.busy_until_at_least_s(), now_s) + function.idle_after_s)
        elif function.last_end_s + function.idle_after_s <= now_s:
            self._apply(function, self.policy.on_idle(function, now_s), now_s)
        else:
            self._push_idle(function, function.last_end_s + function.idle_after_s)

    def _arm_idle(self, function: FunctionState, now_s: float) -> None:
        if function.idle_after_s < NEVER:
            self._push_idle(function, now_s + function.idle_after_s)

    def _push_idle(self, function: FunctionState, at_s: float) -> None:
        function.idle_version += 1
        function.idle_armed = True
        self._push(at_s + SOON_S, IDLE, function, function.idle_version)

    # --- what is done ---

    def _apply(self, function: FunctionState, wish: Wish, now_s: float) -> None:
        function.busy_above = wish.busy_above
        if wish.idle_after_s != function.idle_after_s:
            shorter = wish.idle_after_s < function.idle_after_s
            function.idle_after_s = wish.idle_after_s
            if shorter and function.idle_armed:
                self._arm_idle(function, now_s)
        if wish.ask_again_s != function.timer_s:
            function.timer_version += 1
            function.timer_s = wish.ask_again_s
            if wish.ask_again_s is not None:
                self._push(max(wish.ask_again_s, now_s + SOON_S), TIMER, function, function.timer_version)
        spec = function.function
        desired = min(max(wish.desired, spec.min_replicas), spec.max_replicas)
        have = len(function.open) + len(function.starting_replicas)
        if desired > have:
            for _ in range(desired - have):
                if not self._start(function, now_s):
                    break
        elif desired < have:
            self._stop(function, have - desired, now_s)
        if desired <= have and function.short_of_room:
            function.short_of_room = False
            self._hungry.pop(function.index, None)

    def _start(self, function: FunctionState, now_s: float) -> bool:
        spec = function.function
        placed = self.slots.place(spec, now_s) or self._cleared(function, now_s)
        if placed is None:
            self._no_room += not function.short_of_room
            function.short_of_room = True
            self._hungry[function.index] = function
            return False
        self._number += 1
        u = float(self._chance[function.index].random())
        replica = self.slots.start(self._number, spec, placed, u, now_s)
        taken_s, tier = replica.ready_s - now_s, replica.tier
        function.starting_replicas.append(replica)
        self._push(replica.ready_s, READY, function, replica)
        result = self._results[function.index]
        if self.since_s <= now_s < self.until_s:
            result.starts += 1
            result.start_s_sum += taken_s
            result.starts_by_tier[tier] = result.starts_by_tier.get(tier, 0) + 1
            if function.stopped_s is not None:
                result.away_s.append(now_s - function.stopped_s)
        function.stopped_s = None
        return True

    def _cleared(self, function: FunctionState, now_s: float) -> Placement | None:
        """Where there is room once idle replicas have gone that lose less than is won; they are stopped."""
        losses: dict[int, float] = {}
        replicas: dict[str, tuple[FunctionState, SimReplica]] = {}
        for other in self.functions:
            if other is function or not other.open:
                continue
            other.advance(now_s)
            idle = [replica for replica in other.open if not replica.heap]
            lost_s = self.policy.loss_s(other, now_s) if idle else None
            if lost_s is not None:
                for replica in idle:
                    losses[replica.number] = lost_s
                    replicas[str(replica.number)] = (other, replica)
        if not losses:
            return None

        def may_end(resident: Resident, work: Work) -> bool:
            return resident.replica_id in replicas and may_end_by_default(resident, work)

        placed = self.slots.place(function.function, now_s, may_end, lambda each: losses.get(each.number, 0.0))
        if placed is None:
            return None
        for victim in placed.victims:
            self._end_replica(*replicas[victim], now_s)
        return placed

    def _stop(self, function: FunctionState, count: int, now_s: float) -> None:
        if self.policy.stops_starting:
            while count and function.starting_replicas:
                replica = function.starting_replicas.pop()
                self.slots.started(replica, ready=False)
                self._results[function.index].stopped_before_ready += self.since_s <= now_s < self.until_s
                function.stopped_s = now_s
                self._release(function, replica, now_s)
                count -= 1
        # As `room.choose_victims` has it: the fewest in flight, then the youngest.
        for replica in sorted(function.open, key=lambda each: (len(each.heap), -each.ready_s))[:count]:
            self._end_replica(function, replica, now_s)

    def _end_replica(self, function: FunctionState, replica: SimReplica, now_s: float) -> None:
        """A ready one takes nothing more, and is gone when it has ended what it has."""
        function.open.remove(replica)
        function.stopped_s = now_s
        self._results[function.index].stops += self.since_s <= now_s < self.until_s
        ends_s = function.function.ends_s
        if replica.heap or ends_s:
            function.closed.append(replica)
            drained_s = function.drained_s(replica) + SOON_S if replica.heap else now_s
            self._push(drained_s + ends_s, GONE, function, replica)
        else:
            self._release(function, replica, now_s)
        function.settle()

    def _release(self, function: FunctionState, replica: SimReplica, now_s: float) -> None:
        """The replica is gone; its devices are free."""
        replica.ended = True
        self._account(function, replica, now_s)
        self.slots.free(replica)
        if self._hungry:
            # Whoever found no room asks again, in the order they came.
            for hungry in list(self._hungry.values()):
                if self.slots.place(hungry.function, now_s) is None:
                    continue
                self._hungry.pop(hungry.index, None)
                hungry.short_of_room = False
                self._push(now_s, TIMER, hungry, self._retimed(hungry))

    @staticmethod
    def _retimed(function: FunctionState) -> int:
        function.timer_version += 1
        function.timer_s = None
        return function.timer_version

    # --- what it comes to ---

    def _account(self, function: FunctionState, replica: SimReplica, end_s: float) -> None:
        result, devices = self._results[function.index], function.function.held_devices
        begin_s = max(replica.begun_s, self.since_s)
        end_s = min(end_s, self.until_s)
        if end_s <= begin_s:
            return
        result.held_device_s += (end_s - begin_s) * devices
        result.starting_device_s += max(min(replica.ready_s, end_s) - begin_s, 0.0) * devices

    def _score(self, now_s: float, function: FunctionState | None, what: object) -> None:
        for each in self.functions:
            each.advance(now_s)
            each.waited_s = each.busy_s = 0.0
            each.scored_requests = each.scored_refused = each.cold_requests = 0
            each.scored_from = self._first_scored
            each.busy_from_s, each.busy_until_s = now_s, self.until_s

    def _sample(self, now_s: float, function: FunctionState | None, what: object) -> None:
        rows = []
        for each in self.functions:
            each.advance(now_s)
            rows.append((len(each.open), len(each.starting_replicas), len(each.queue), each.running))
        ready, starting, waiting, running = (sum(column) for column in zip(*rows, strict=True)) if rows else (0,) * 4
        self._series.append((now_s, self.slots.held, ready, starting, waiting, running))
        if self._sample_functions:
            self._function_series.append(rows)
        if now_s + self._sample_s <= self.until_s:
            self._push(now_s + self._sample_s, SAMPLE, None, None)

    def _end(self, now_s: float) -> None:
        """The scored time is over: what is held is counted up to now."""
        for function in self.functions:
            function.advance(now_s)
            for replica in (*function.open, *function.closed, *function.starting_replicas):
                self._account(function, replica, now_s)
                if replica.heap:
                    function.busy_s += now_s - max(replica.busy_since_s, self.since_s)
            function.busy_from_s = NEVER
        self.since_s = NEVER  # nothing counts from here on but the waits of requests that are here

    def _result(self) -> Result:
        constants = self._scored.full_batch_device_s()
        for function, result in zip(self.functions, self._results, strict=True):
            left = sum(each[3] >= self._first_scored for each in function.queue)
            result.requests = function.scored_requests
            result.refused = function.scored_refused + left
            result.waited_s = function.waited_s + function.function.way_s * (result.requests - result.refused)
            result.cold_requests = function.cold_requests
            result.busy_device_s = function.busy_s * function.function.held_devices
            result.full_batch_device_s = float(constants[function.index])
        waits = np.frombuffer(self._waits, dtype=np.float32) if len(self._waits) else np.zeros(0, dtype=np.float32)
        ways_s = np.asarray([function.function.way_s for function in self.functions], dtype=np.float32)
        if ways_s.any():
            waits = waits + ways_s[self._scored.function]
        return Result(
            policy=self.policy.name,
            since_s=float(self._series[0][0]) if self._series else 0.0,
            until_s=self.until_s,
            functions=tuple(self._results),
            first_token_s=waits,
            series=np.array(self._series, dtype=np.float64).reshape(-1, 6),
            function_series=np.array(self._function_series, dtype=np.int32)
            if self._function_series
            else np.zeros((0, 0, 4), dtype=np.int32),
            events=self._handled + len(self._replayed),
            no_room=self._no_room,
        )
