"""What comes to this gateway and what becomes of it, per function and per slot, in windows of ten seconds.

The dispatcher tells it of arrivals, first tokens, ends and every change of demand, and what is given to a slot's
replicas and leaves them; `close` gives the windows that are
over, which stay until the leader of the control loop has them. Windows begin at multiples of their length on the wall
clock, so that those of several gateways are the same; within one, time is the monotonic clock's.
Limits: a window in which the wall clock jumped is not told of; nor are windows older than `KEPT` that nobody heard.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from control_plane.load_windows import SLOTS, STORED, ClosedWindow, FunctionWindow

if TYPE_CHECKING:
    from control_plane.lanes import Lane, Seat
    from control_plane.live_request import LiveRequest

logger = logging.getLogger(__name__)

FunctionKey: TypeAlias = tuple[str, str]

WINDOW_S: Final = 10
KEPT: Final = 12
JUMP_S: Final = 1.0
"""A wall clock that moved by more against the monotonic one was set."""
PAUSE_S: Final = 0.5
"""Idleness that is shorter is none: nothing is ever decided about it."""


class _Open:
    """A window of one function that is not over."""

    __slots__ = (*STORED, "active_since_s", "busy", "demand", "levels", "since_s")

    def __init__(self) -> None:
        for name in STORED:
            setattr(self, name, 0)
        self.levels: dict[str, tuple[int, int]] = {}
        """(waiting, waiting and running) of each checkpoint."""
        self.demand = 0
        self.since_s = 0.0
        """When the demand last changed, by the monotonic clock."""
        self.active_since_s = 0.0
        self.busy: list[tuple[float, float]] = []
        """Times with demand, by the wall clock."""

    if TYPE_CHECKING:
        arrivals: float
        refused: float
        peak_concurrency: float
        mean_concurrency: float
        prompt_tokens: float
        output_tokens: float
        peak_queue: float
        kv_used_share: float
        first_token_s_sum: float
        first_token_count: float
        first_token_s_max: float
        token_s_sum: float
        token_count: float
        late: float
        ended: float
        ended_output_tokens: float
        service_s_sum: float
        ended_output_tokens_sq: float


class Recent:
    """Of one function: arrivals by the second, and the last times to first tokens and between tokens."""

    __slots__ = ("_counts", "_second", "first_tokens", "tokens")

    def __init__(self) -> None:
        self._counts = [0] * 60
        self._second = 0
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=64)
        """(when, seconds) of requests that found a ready replica."""
        self.tokens: deque[tuple[float, float]] = deque(maxlen=64)

    def arrived(self, now_s: float) -> None:
        self._turn(int(now_s))
        self._counts[int(now_s) % 60] += 1

    def _turn(self, second: int) -> None:
        for passed in range(max(self._second + 1, second - 59), second + 1):
            self._counts[passed % 60] = 0
        self._second = max(self._second, second)

    def arrivals(self, now_s: float) -> tuple[int, int, int]:
        """Within the last 10 s, 30 s and 60 s."""
        self._turn(int(now_s))
        lately = [self._counts[(self._second - ago) % 60] for ago in range(30)]
        return sum(lately[:10]), sum(lately), sum(self._counts)

    @staticmethod
    def mean_s(measured: deque[tuple[float, float]], now_s: float) -> float | None:
        """Of the last minute's."""
        lately = [seconds for at_s, seconds in measured if now_s - at_s < 60.0]
        return sum(lately) / len(lately) if lately else None


class LoadMeter:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._offset_s = wall() - monotonic()
        self._open: dict[FunctionKey, _Open] = {}
        self._start_s = self._window_of(wall())
        self._whole = False
        self._good = True
        """False: the open window began with a jump, and part of it is missing."""
        self._unsent: deque[ClosedWindow] = deque(maxlen=KEPT)
        self._recent: dict[FunctionKey, Recent] = {}
        self._counted: dict[str, int] = {}
        """Tokens of live requests that earlier windows have counted."""
        self._counted_there: dict[str, tuple[int, int]] = {}
        """Of those that run on a slot: tokens there were when they came to it, and that its windows have counted."""
        self.objective_s: dict[FunctionKey, float] = {}
        """Of the first token, where a function has one."""
        self.clock_jumps = 0

    @staticmethod
    def _window_of(at_s: float) -> float:
        return math.floor(at_s / WINDOW_S) * WINDOW_S

    def _of(self, key: FunctionKey) -> _Open:
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = _Open()
            found.since_s = self._monotonic()
        return found

    def recent(self, key: FunctionKey) -> Recent:
        found = self._recent.get(key)
        if found is None:
            found = self._recent[key] = Recent()
        return found

    # --- what the dispatcher tells ---

    def demand(self, lane: Lane) -> None:
        """Of one lane, after it changed."""
        window = self._of(lane.key)
        waiting, demand = len(lane.waiting), lane.demand
        known = window.levels.get(lane.identity, (0, 0))
        if known == (waiting, demand):
            return
        if demand:
            window.levels[lane.identity] = (waiting, demand)
        else:
            window.levels.pop(lane.identity, None)
        self._moved(window, demand - known[1])

    def _moved(self, window: _Open, change: int) -> None:
        now_s, before = self._monotonic(), window.demand
        self._count_up(window, now_s)
        window.demand += change
        self._note_peaks(window)
        if before == 0 and window.demand > 0:
            window.active_since_s = now_s
        elif before > 0 and window.demand == 0:
            self._note_busy(window, now_s)

    @staticmethod
    def _count_up(window: _Open, now_s: float) -> None:
        """Concurrency as request-seconds, until the window is closed."""
        window.mean_concurrency += window.demand * (now_s - window.since_s)
        window.since_s = now_s

    @staticmethod
    def _note_peaks(window: _Open) -> None:
        window.peak_concurrency = max(window.peak_concurrency, window.demand)
        window.peak_queue = max(window.peak_queue, sum(waiting for waiting, _ in window.levels.values()))

    def _note_busy(self, window: _Open, now_s: float) -> None:
        since_s, until_s = window.active_since_s + self._offset_s, now_s + self._offset_s
        if window.busy and since_s - window.busy[-1][1] < PAUSE_S:
            since_s = window.busy.pop()[0]
        window.busy.append((since_s, until_s))

    def arrived(self, request: LiveRequest) -> None:
        window = self._of(request.origin.key)
        window.arrivals += 1
        self.recent(request.origin.key).arrived(self._monotonic())
        window.prompt_tokens += len(request.origin.prompt)

    def refused(self, key: FunctionKey) -> None:
        """Turned away for load: it came all the same."""
        window = self._of(key)
        window.arrivals += 1
        window.refused += 1
        self.recent(key).arrived(self._monotonic())

    def first_token(self, request: LiveRequest) -> None:
        seconds = (time.monotonic_ns() - request.accept_ns) / 1e9
        window = self._of(request.origin.key)
        for each in (window, *self._there(request.seat)):
            each.first_token_s_sum += seconds
            each.first_token_count += 1
            each.first_token_s_max = max(each.first_token_s_max, seconds)
        if not request.stages.cold_start_us:
            self.recent(request.origin.key).first_tokens.append((self._monotonic(), seconds))
        objective_s = self.objective_s.get(request.origin.key)
        if objective_s is not None and seconds > objective_s:
            window.late += 1

    def ended(self, request: LiveRequest) -> None:
        window, stages, tokens = self._of(request.origin.key), request.stages, request.log.last_seq
        window.output_tokens += max(tokens - self._counted.pop(request.request_id, 0), 0)
        if not tokens:
            return
        window.ended += 1
        window.ended_output_tokens += tokens
        window.ended_output_tokens_sq += tokens * tokens
        window.service_s_sum += (stages.load_kv_us + stages.prefill_us + stages.decode_us) / 1e6
        if tokens > 1:
            token_s = stages.decode_us / 1e6 / (tokens - 1)
            window.token_s_sum += token_s
            window.token_count += 1
            self.recent(request.origin.key).tokens.append((self._monotonic(), token_s))

    def memory(self, seat: Seat, used: int, total: int, waiting: int = 0) -> None:
        """Blocks of KV that a replica has in use, and how many of its requests wait for some."""
        for window in (self._of(seat.key), *self._there(seat)):
            if total > 0:
                window.kv_used_share = max(window.kv_used_share, used / total)
        for window in self._there(seat):
            window.peak_queue = max(window.peak_queue, waiting)

    # --- slots ---

    def _there(self, seat: Seat | None) -> tuple[_Open, ...]:
        """The window of a seat's slot, if it is known."""
        return (self._of((SLOTS, seat.slot_id)),) if seat is not None and seat.slot_id else ()

    def seated(self, seat: Seat, request: LiveRequest, taken: bool) -> None:
        """A request was given to a replica, or has left it."""
        for window in self._there(seat):
            if taken:
                window.arrivals += 1
                window.prompt_tokens += len(request.origin.prompt)
                self._counted_there[request.request_id] = request.received, request.received
            else:
                self._count_tokens_there(window, request)
                made = request.received - self._counted_there.pop(request.request_id)[0]
                if made:
                    window.ended += 1
                    window.service_s_sum += (time.monotonic_ns() - request.submit_ns) / 1e9
                if made > 1 and request.attempt_first:
                    window.token_s_sum += (request.last_token_ns - request.attempt_first) / 1e9 / (made - 1)
                    window.token_count += 1
            self._moved(window, 1 if taken else -1)

    def _count_tokens_there(self, window: _Open, request: LiveRequest) -> None:
        began, counted = self._counted_there.get(request.request_id, (request.received, request.received))
        window.output_tokens += max(request.received - counted, 0)
        self._counted_there[request.request_id] = began, request.received

    # --- windows ---

    @property
    def ends_s(self) -> float:
        """When the open window is over, on the wall clock."""
        return self._start_s + WINDOW_S

    def close(self, live: Iterable[LiveRequest]) -> bool:
        """To be called when a window is over; True if there is one more to tell of. `live`: all requests that run."""
        wall_s, now_s = self._wall(), self._monotonic()
        jump_s = wall_s - now_s - self._offset_s
        self._offset_s = wall_s - now_s
        if abs(jump_s) > JUMP_S:
            self.clock_jumps += 1
            logger.warning("event=clock_jumped seconds=%.1f hint=the load of this window counts for nothing", jump_s)
        elif wall_s < self.ends_s:
            return False
        closed: list[FunctionWindow] = []
        for request in live:
            self._count_tokens(request)
        for key, window in list(self._open.items()):
            # What began before the window's end and is counted a moment after it is not worth telling apart.
            self._count_up(window, now_s)
            if window.demand:
                self._note_busy(window, now_s)
            values = self._values(window)
            if any(values):
                closed.append(FunctionWindow(*key, values=values, busy=tuple(window.busy)))
            self._renew(key, window, now_s)
        told, good = ClosedWindow(self._start_s, self._whole, tuple(closed)), self._good
        late = wall_s >= self.ends_s + WINDOW_S  # the process stood still
        jumped = abs(jump_s) > JUMP_S
        self._start_s = self._window_of(wall_s)
        self._whole, self._good = True, not (late or jumped)
        if late or jumped or not good:
            return False
        self._unsent.append(told)
        return True

    def _count_tokens(self, request: LiveRequest) -> None:
        """Of a request that runs: what it has made within this window."""
        for there in self._there(request.seat):
            self._count_tokens_there(there, request)
        counted = self._counted.get(request.request_id, 0)
        if request.received > counted:
            self._of(request.origin.key).output_tokens += request.received - counted
            self._counted[request.request_id] = request.received

    @staticmethod
    def _values(window: _Open) -> tuple[float, ...]:
        window.mean_concurrency = window.mean_concurrency / WINDOW_S
        return tuple(round(getattr(window, name), 6) for name in STORED)

    def _renew(self, key: FunctionKey, window: _Open, now_s: float) -> None:
        if not window.demand:
            del self._open[key]
            return
        fresh = self._open[key] = _Open()
        fresh.levels, fresh.demand, fresh.since_s, fresh.active_since_s = window.levels, window.demand, now_s, now_s
        self._note_peaks(fresh)

    # --- telling ---

    def unsent(self) -> tuple[ClosedWindow, ...]:
        """What the leader has not said it has, oldest first."""
        return tuple(self._unsent)

    def sent(self, until_s: float) -> None:
        """The leader has everything up to the window that begins then."""
        while self._unsent and self._unsent[0].start_s <= until_s:
            self._unsent.popleft()
