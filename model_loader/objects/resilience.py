"""Asking a store that may be slow, ill or away: retries under a budget, a deadline per operation, a circuit breaker.

    closed ── failures_to_open failures in a row ──> open ── cool-down over, one asks ──> half-open
    half-open ── that one succeeds ──> closed        half-open ── it fails ──> open, cool-down doubled

Pauses have full jitter, so that many clients do not come back at once; retries are paid from a budget that successes
fill, so that a store in trouble is not asked several times as often as a healthy one. Only StoreUnavailable is tried
again and counted against the store: "no such object" and "not allowed" are answers, and a store whose bytes still came
when a deadline passed is slow, not ill.
Limits: one process's view; what is retried must be safe to repeat.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, TypeVar

from model_loader.errors import LoaderError, StoreUnavailable
from model_loader.objects.stats import StoreStats

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Limits:
    attempts: int = 4
    """Requests for one operation, or one part of it, at most."""
    first_pause_s: float = 0.05
    """The first retry waits up to this long, each further one up to twice as long as the one before."""
    longest_pause_s: float = 2.0
    budget: float = 10.0
    """Retries that may be made at once, by all operations of the store together."""
    budget_per_success: float = 0.1
    """What a success gives back: in the long run one retry in ten requests."""
    operation_s: float = 30.0
    """Deadline of an operation whose caller gives none, for what it does beside moving bytes."""
    slowest_bytes_s: float = 1024 * 1024
    """Such an operation gets a second more for this many bytes."""
    failures_to_open: int = 5
    cool_down_s: float = 1.0
    longest_cool_down_s: float = 60.0
    judged_after_s: float = 1.0
    """A caller's deadline that passes sooner than this says nothing about the store; nor does one that passes within
    this time of the last bytes that moved."""


DEFAULT_LIMITS: Final = Limits()


class Deadline:
    """When an operation ends, whatever it is doing. `abandon` ends it at once, from any thread."""

    def __init__(self, within_s: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at_s = clock() + within_s
        self._moved_s = -math.inf
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._hooks: set[Callable[[], None]] = set()

    def remaining_s(self) -> float:
        return 0.0 if self._over.is_set() else max(self._at_s - self._clock(), 0.0)

    @property
    def passed(self) -> bool:
        return self.remaining_s() <= 0.0

    @property
    def abandoned(self) -> bool:
        return self._over.is_set()

    def moved(self) -> None:
        """Bytes of the operation came, or were taken."""
        self._moved_s = self._clock()

    @property
    def moved_s(self) -> float:
        """When they last did, by the clock."""
        return self._moved_s

    def wait(self, seconds: float) -> None:
        """Sleeps, but not beyond the end."""
        self._over.wait(min(seconds, self.remaining_s()))

    def abandon(self) -> None:
        self._over.set()
        with self._lock:
            hooks = list(self._hooks)
        for hook in hooks:
            hook()

    def attach(self, hook: Callable[[], None]) -> None:
        """From now on `abandon` calls `hook`, which has to wake whoever waits."""
        with self._lock:
            self._hooks.add(hook)
        if self._over.is_set():
            hook()

    def detach(self, hook: Callable[[], None]) -> None:
        with self._lock:
            self._hooks.discard(hook)


class RetryBudget:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.budget
        self._lock = threading.Lock()

    def earn(self) -> None:
        with self._lock:
            self._left = min(self._left + self._limits.budget_per_success, self._limits.budget)

    def spend(self) -> bool:
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Verdict(Enum):
    GOOD = "good"
    BAD = "bad"
    NONE = "none"
    """Says nothing about the store."""


class CircuitBreaker:
    """`admit` before a request, `settle` after it with the number `admit` gave."""

    def __init__(
        self,
        limits: Limits,
        stats: StoreStats,
        clock: Clock = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._era = 0
        """Grows with every change of state: what was admitted before the last one has no say any more."""
        self._failures = 0
        self._cool_down_s = limits.cool_down_s
        self._until_s = 0.0
        self._reason = ""

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._state

    def admit(self) -> int:
        """Raises StoreUnavailable while the store is left alone."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return self._era
            wait_s = self._until_s - self._clock()
            if self._state is BreakerState.OPEN and wait_s <= 0:
                self._become(BreakerState.HALF_OPEN)
                return self._era
            self._stats.refuse()
            until = f"for another {wait_s:.1f} s" if wait_s > 0 else "until one request has shown how it is"
            raise StoreUnavailable(f"the object store is left alone {until}, after failures: {self._reason}")

    def settle(self, era: int, verdict: Verdict, reason: str = "") -> None:
        with self._lock:
            if era != self._era:
                return
            if verdict is Verdict.GOOD:
                self._failures = 0
                if self._state is BreakerState.HALF_OPEN:
                    self._cool_down_s = self._limits.cool_down_s
                    self._become(BreakerState.CLOSED)
            elif verdict is Verdict.BAD:
                self._failures += 1
                self._reason = reason
                if self._state is BreakerState.HALF_OPEN:
                    self._cool_down_s = min(self._cool_down_s * 2, self._limits.longest_cool_down_s)
                    self._open()
                elif self._failures >= self._limits.failures_to_open:
                    self._open()
            elif self._state is BreakerState.HALF_OPEN:
                self._become(BreakerState.OPEN)  # the cool-down is over: the next one asks again

    def _open(self) -> None:
        # Up to a quarter longer, so that the processes of one store do not try again together.
        self._until_s = self._clock() + self._cool_down_s * (1.0 + self._chance() / 4)
        self._failures = 0
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._stats.breaker_is(state.value)


class Guard:
    """One store's deadlines, retries and breaker. `pause` sleeps; tests give one that moves their clock."""

    def __init__(
        self,
        stats: StoreStats,
        limits: Limits = DEFAULT_LIMITS,
        *,
        clock: Clock = time.monotonic,
        pause: Callable[[Deadline, float], None] = Deadline.wait,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits
        self.breaker = CircuitBreaker(limits, stats, clock, chance)
        self._budget = RetryBudget(limits)
        self._stats = stats
        self._clock = clock
        self._pause = pause
        self._chance = chance
        self._lock = threading.Lock()
        self._operations: weakref.WeakSet[Deadline] = weakref.WeakSet()
        self._closed = False

    def deadline(self, within_s: float | None, nbytes: int = 0) -> Deadline:
        """Of an operation that begins: `close` ends it, and so did one that came before."""
        if within_s is None:
            within_s = self.limits.operation_s + nbytes / self.limits.slowest_bytes_s
        deadline = Deadline(within_s, self._clock)
        with self._lock:
            self._operations.add(deadline)
            closed = self._closed
        if closed:
            deadline.abandon()
        return deadline

    def close(self) -> None:
        """What is under way is given up, and whatever begins from now on."""
        with self._lock:
            self._closed = True
            operations = list(self._operations)
        for operation in operations:
            operation.abandon()

    def run(self, kind: str, deadline: Deadline, request: Callable[[], T], nbytes: int = 0) -> T:
        """What `request` gives. It is called again after StoreUnavailable, and raises that once `deadline` passed."""
        attempt = 0
        last: StoreUnavailable | None = None
        while True:
            if deadline.passed:
                raise last or StoreUnavailable("the deadline had passed before the object store was asked")
            try:
                era = self.breaker.admit()
            except StoreUnavailable as refusal:
                raise last or refusal from last
            begin_s, verdict, reason, moved = self._clock(), Verdict.NONE, "", 0
            try:
                result = request()
                verdict, moved = Verdict.GOOD, nbytes
                self._budget.earn()
                return result
            except StoreUnavailable as error:
                since_s = max(begin_s, deadline.moved_s)
                cut_short = deadline.passed and self._clock() - since_s < self.limits.judged_after_s
                verdict = Verdict.NONE if cut_short or deadline.abandoned else Verdict.BAD
                reason, last = str(error), error
            except LoaderError:
                verdict = Verdict.GOOD
                raise
            finally:
                self.breaker.settle(era, verdict, reason)
                self._stats.count(
                    kind,
                    nbytes=moved,
                    seconds=self._clock() - begin_s,
                    retry=attempt > 0,
                    failed=verdict is not Verdict.GOOD,
                )
            attempt += 1
            longest_s = min(self.limits.first_pause_s * 2 ** (attempt - 1), self.limits.longest_pause_s)
            pause_s = longest_s * self._chance()
            if attempt >= self.limits.attempts or pause_s >= deadline.remaining_s() or not self._budget.spend():
                raise last
            self._pause(deadline, pause_s)
