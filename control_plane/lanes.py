"""Where requests of one function and checkpoint wait, and the ready replicas that can take them.

A `Lane` is a FIFO and its `Seat`s; two clocks run in it, one while no replica is ready (cold start) and one while all
are full (queue), so that each wait is counted against its own limit. A replica's places are shared by all
gateways: what the others have there is what the replica last said. Limits: two gateways that take the last place in the
same moment send it one request too many, which then waits in its engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from autoscaler.placement import Placement, ReplicaHome, place_request
from control_plane.errors import Saturated
from control_plane.live_request import RECORD_BYTES, TOKEN_BYTES, LiveRequest
from control_plane.prefixes import Prefixes, chain_of
from control_plane.replica_link import ReplicaLink
from control_plane.settings import QueueSettings

FunctionKey: TypeAlias = tuple[str, str]
"""(tenant, function name): names are unique within a tenant only."""

DEMAND_WINDOW_NS: Final = 15_000_000_000
GAPS_KEPT: Final = 64
UNMEASURED: Final = (0.05, 500.0)
"""Seconds of a step and tokens a second of prefill, until they were measured."""
DEFERRED_KEPT: Final = 4096
DEFERRED_S: Final = 120.0
"""Clients obey no longer `Retry-After`."""


class Seat:
    """A ready replica, what this gateway has running there, and how many places others take."""

    __slots__ = (
        "accepting",
        "identity",
        "in_flight",
        "key",
        "link",
        "max_requests",
        "moved",
        "others",
        "prefixes",
        "replica_id",
        "revision",
        "since_s",
        "slot_id",
    )

    def __init__(
        self,
        replica_id: str,
        slot_id: str,
        key: FunctionKey,
        revision: int,
        identity: str,
        max_requests: int,
        link: ReplicaLink,
    ) -> None:
        self.replica_id = replica_id
        self.slot_id = slot_id
        self.key = key
        self.revision = revision
        self.identity = identity
        self.max_requests = max(1, max_requests)
        self.link = link
        self.in_flight: dict[str, LiveRequest] = {}
        self.others = 0
        """Requests of other gateways that the replica runs."""
        self.prefixes = Prefixes()
        self.accepting = True
        self.since_s = time.monotonic()
        self.moved: Callable[[Seat, LiveRequest, bool], None] = lambda seat, request, taken: None
        """Told of a request that was given to it, or leaves it."""

    @property
    def has_room(self) -> bool:
        return self.room > 0

    @property
    def room(self) -> int:
        return max(self.max_requests - self.taken, 0) if self.accepting else 0

    @property
    def taken(self) -> int:
        return len(self.in_flight) + self.others

    def take(self, request: LiveRequest) -> None:
        self.in_flight[request.request_id] = request
        self.prefixes.note(chain_of(request.origin.prompt))
        request.seat = self
        self.moved(self, request, True)
        self.link.set_busy(True)

    def leave(self, request: LiveRequest) -> None:
        if self.in_flight.get(request.request_id) is request:
            del self.in_flight[request.request_id]
            self.moved(self, request, False)
        if request.seat is self:
            request.seat = None
        if not self.in_flight:
            self.link.set_busy(False)


class Lane:
    """Requests that only replicas with this checkpoint identity may serve."""

    def __init__(self, key: FunctionKey, identity: str) -> None:
        self.key = key
        self.function = key[1]
        self.identity = identity
        self.waiting: deque[LiveRequest] = deque()
        self.waiting_bytes = 0
        self.entering = 0
        """Requests that are being accepted: they hold a place already."""
        self.entering_bytes = 0
        self.seats: dict[str, Seat] = {}
        self.generation = 0
        self.refused = 0
        """Requests that were refused early, ever."""
        self._deferred_s: deque[float] = deque(maxlen=DEFERRED_KEPT)
        self.gaps_s: deque[float] = deque(maxlen=GAPS_KEPT)
        self.created_s = time.monotonic()
        self._active_since_s: float | None = None
        self._idle_since_s = self.created_s
        self._demand: deque[tuple[int, int]] = deque()
        self.noted: Callable[[Lane], None] = lambda lane: None
        """Told of every change of its demand."""
        self.paused = ""
        """Why nothing of this lane may run now (its function is drained); what waits keeps waiting, its limits stand
        still."""
        self._cold_ns = 0
        self._queue_ns = 0
        self._paused_ns = 0
        self._clock_ns = time.monotonic_ns()
        self._was_ready = False
        self.speeds: Callable[[], tuple[float, float]] = lambda: UNMEASURED
        """Seconds of an engine step, and tokens a second of prefill, of this lane's replicas."""
        self.left_tokens: Callable[[], Callable[[int, int], float]] = lambda: _all_it_may
        """What a request is expected to make still, by what it has made and may make."""

    # --- demand, as scaling sees it ---

    @property
    def in_flight(self) -> int:
        return sum(len(seat.in_flight) for seat in self.seats.values())

    @property
    def waiting_tokens(self) -> int:
        """Of prompts."""
        return (self.waiting_bytes - len(self.waiting) * RECORD_BYTES) // TOKEN_BYTES

    @property
    def waiting_since_s(self) -> float | None:
        """When the first in the queue was accepted; None: nobody waits. Who waits again stands before who is new."""
        return self.waiting[0].accept_ns / 1e9 if self.waiting else None

    @property
    def running_tokens(self) -> int:
        """Of prompts and answers so far."""
        running = (request for seat in self.seats.values() for request in seat.in_flight.values())
        return sum(len(request.origin.prompt) + request.received for request in running)

    @property
    def demand(self) -> int:
        return len(self.waiting) + self.in_flight

    def note_demand(self) -> None:
        """To be called whenever a request comes or goes."""
        now_ns = time.monotonic_ns()
        demand = self.demand
        while self._demand and self._demand[-1][1] <= demand:
            self._demand.pop()
        self._demand.append((now_ns, demand))
        now_s = now_ns / 1e9
        if demand > 0 and self._active_since_s is None:
            self._active_since_s = now_s
            if self.generation > 1:
                self.gaps_s.append(now_s - self._idle_since_s)
        elif demand == 0 and self._active_since_s is not None:
            self._active_since_s = None
            self._idle_since_s = now_s
        self.noted(self)

    def touch(self) -> None:
        """Interest without a request (one that did not want to wait): keeps what it woke for the keep-alive."""
        self._idle_since_s = time.monotonic()

    def last_activity_s(self, now_s: float) -> float:
        return now_s if self._active_since_s is not None else self._idle_since_s

    def peak_demand(self) -> int:
        """The largest demand within the window; the level at its start counts too."""
        horizon_ns = time.monotonic_ns() - DEMAND_WINDOW_NS
        while len(self._demand) > 1 and self._demand[1][0] <= horizon_ns:
            self._demand.popleft()
        return max((demand for _, demand in self._demand), default=0)

    def defer(self, retry_after_s: float) -> None:
        """A request was refused and told when to come back: until then it is demand that does not wait here."""
        self.refused += 1
        self._deferred_s.append(time.monotonic() + min(retry_after_s, DEFERRED_S))

    def deferred(self) -> int:
        """Refused requests that are yet to come back."""
        now_s = time.monotonic()
        while self._deferred_s and self._deferred_s[0] <= now_s:
            self._deferred_s.popleft()
        return len(self._deferred_s)

    # --- waiting ---

    def push(self, request: LiveRequest, *, front: bool = False) -> None:
        self._tick()
        request.cold_base_ns, request.queue_base_ns = self._cold_ns, self._queue_ns
        request.paused_base_ns = self._paused_ns
        if front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self.waiting_bytes += request.origin.nbytes
        self.note_demand()

    def pop(self) -> LiveRequest:
        request = self.waiting.popleft()
        self._left(request)
        return request

    def remove(self, request: LiveRequest) -> bool:
        try:
            self.waiting.remove(request)
        except ValueError:
            return False
        self._left(request)
        self.note_demand()
        return True

    def _left(self, request: LiveRequest) -> None:
        self.waiting_bytes -= request.origin.nbytes
        cold_ns, queue_ns = self.waited_ns(request)
        request.stages.cold_start_us += cold_ns // 1000
        request.stages.queue_us += queue_ns // 1000
        request.paused_ns += self._paused_ns - request.paused_base_ns

    # --- clocks ---

    @property
    def ready(self) -> bool:
        return any(seat.accepting for seat in self.seats.values())

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        if self.paused:
            self._paused_ns += now_ns - self._clock_ns
        elif self._was_ready:
            self._queue_ns += now_ns - self._clock_ns
        else:
            self._cold_ns += now_ns - self._clock_ns
        self._clock_ns = now_ns

    def seats_changed(self) -> bool:
        """To be called when a seat comes, goes or stops accepting; True if the lane became ready or stopped being."""
        self._tick()
        was, self._was_ready = self._was_ready, self.ready
        return was is not self._was_ready

    def pause(self, reason: str) -> None:
        """Empty: go on. The clocks change over at this moment."""
        self._tick()
        self.paused = reason

    def waited_ns(self, request: LiveRequest) -> tuple[int, int]:
        """(without any ready replica, with all replicas full), since the request was last queued."""
        self._tick()
        return self._cold_ns - request.cold_base_ns, self._queue_ns - request.queue_base_ns

    def paused_for_ns(self, request: LiveRequest) -> int:
        """Since it was last queued."""
        self._tick()
        return self._paused_ns - request.paused_base_ns

    # --- seats ---

    def choose(self, request: LiveRequest) -> tuple[Seat, Placement | None] | None:
        """The seat for a request, and the placement where there was a choice."""
        free = [seat for seat in self.seats.values() if seat.has_room]
        if not free or self.paused:
            return None
        if len(free) == 1:
            return free[0], None
        chain = chain_of(request.origin.prompt)
        step_s, tokens_per_s = self.speeds()
        homes = [
            ReplicaHome(
                seat.replica_id, seat.taken, seat.max_requests, step_s, tokens_per_s, seat.prefixes.held_tokens(chain)
            )
            for seat in free
        ]
        placement = place_request(len(request.origin.prompt), None, homes, self._work_left)
        if placement is None:
            return None
        return self.seats[placement.choice], placement

    def _work_left(self, replica_id: str) -> float:
        """Tokens. Requests of other gateways are taken to be like the ones that are known."""
        seat, left = self.seats[replica_id], self.left_tokens()
        tokens = sum(
            left(request.received // request.origin.sampling.n, request.origin.sampling.max_tokens)
            for request in seat.in_flight.values()
        )
        return tokens * (1.0 + seat.others / len(seat.in_flight)) if seat.in_flight else float(seat.others)


def _all_it_may(made: int, most: int) -> float:
    return float(most - made)


class Place:
    """In a queue, of a request that is being accepted."""

    __slots__ = ("_lane", "_nbytes", "_taken")

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self._lane = lane
        self._nbytes = nbytes
        self._taken = True
        lane.entering += 1
        lane.entering_bytes += nbytes

    def leave(self) -> None:
        """It waits now, has a seat, or is not accepted. Idempotent."""
        if self._taken:
            self._taken = False
            self._lane.entering -= 1
            self._lane.entering_bytes -= self._nbytes


@dataclass(frozen=True, slots=True)
class Room:
    """In a queue."""

    requests: int
    nbytes: int


class Lanes:
    """All lanes of a gateway, and the bounds on what may wait in those of one function."""

    def __init__(self, bounds: QueueSettings) -> None:
        self._bounds = bounds
        whole = Room(bounds.max_requests, bounds.max_bytes)
        self.granted: Callable[[FunctionKey], Room] = lambda key: whole
        """This gateway's part of a function's bounds, which hold for all gateways together."""
        self.speeds: Callable[[FunctionKey, str], tuple[float, float]] = lambda key, identity: UNMEASURED
        self.left_tokens: Callable[[FunctionKey, str], Callable[[int, int], float]] = lambda key, identity: _all_it_may
        self.noted: Callable[[Lane], None] = lambda lane: None
        self._lanes: dict[tuple[FunctionKey, str], Lane] = {}
        self._of: dict[FunctionKey, dict[str, Lane]] = {}
        self._paused: dict[FunctionKey, str] = {}

    def of(self, key: FunctionKey, identity: str) -> Lane:
        lane = self._lanes.get((key, identity))
        if lane is None:
            lane = self._lanes[key, identity] = Lane(key, identity)
            lane.speeds = lambda: self.speeds(key, identity)
            lane.left_tokens = lambda: self.left_tokens(key, identity)
            lane.noted = self.noted
            self._of.setdefault(key, {})[identity] = lane
            lane.pause(self._paused.get(key, ""))
        return lane

    def paused(self, key: FunctionKey) -> str:
        """Why the function takes no work; empty if it does."""
        return self._paused.get(key, "")

    def pause(self, key: FunctionKey, reason: str) -> list[Lane]:
        """Empty reason: go on. The function's lanes, now so."""
        if reason:
            self._paused[key] = reason
        else:
            self._paused.pop(key, None)
        lanes = self.of_function(key)
        for lane in lanes:
            lane.pause(reason)
        return lanes

    def find(self, key: FunctionKey, identity: str) -> Lane | None:
        return self._lanes.get((key, identity))

    def of_function(self, key: FunctionKey) -> list[Lane]:
        return list(self._of.get(key, {}).values())

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def has_ready(self, key: FunctionKey, identity: str) -> bool:
        lane = self._lanes.get((key, identity))
        return lane is not None and lane.ready

    def drop(self, lane: Lane) -> None:
        """Forget a lane that nobody waits in and nothing serves."""
        if not lane.waiting and not lane.seats and not lane.entering:
            self._lanes.pop((lane.key, lane.identity), None)
            known = self._of.get(lane.key, {})
            known.pop(lane.identity, None)
            if not known:
                self._of.pop(lane.key, None)

    def need(self, key: FunctionKey, nbytes: int, more: int = 1) -> Room:
        """What the queue of a function takes of its bounds with `more` requests of `nbytes` together. Those that find
        a free place at a replica do not wait, and take nothing."""
        lanes = self.of_function(key)
        places = sum(seat.room for lane in lanes for seat in lane.seats.values())
        waiting = sum(len(lane.waiting) + lane.entering for lane in lanes) + more - places
        if waiting <= 0:
            return Room(0, 0)
        return Room(waiting, sum(lane.waiting_bytes + lane.entering_bytes for lane in lanes) + nbytes)

    @contextmanager
    def room(self, key: FunctionKey, identity: str, nbytes: int) -> Iterator[Place]:
        """A place for a request that is being accepted; raises `Saturated` where it would wait behind too much."""
        lane = self.of(key, identity)
        need, granted = self.need(key, nbytes), self.granted(key)
        if need.requests > granted.requests:
            raise Saturated(
                f"{need.requests - 1} requests are waiting for {lane.function} here already; at most "
                f"{self._bounds.max_requests} may, over all gateways"
            )
        if need.nbytes > granted.nbytes:
            raise Saturated(
                f"the requests waiting for {lane.function} may hold {self._bounds.max_bytes} bytes, over all gateways, "
                "and do so already"
            )
        place = Place(lane, nbytes)
        try:
            yield place
        finally:
            place.leave()
