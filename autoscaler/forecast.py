"""What a forecast says to a decision: expected arrivals ahead, when being warm pays, how long a request will take.

`Forecast` is made once a window by `choosing` from a function's history and looked up in constant time by `decide`; a
function without one (None) is scaled by observed load and its break-even keep-alive. A forecast only raises the floor.
Limits: rates are means over steps of `step_s`; what happens inside a step is the reactive part's to answer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

REACTIVE = "reactive"
"""The source that always exists: the last value, and an idle replica kept for as long as a start costs."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a start and a wait of one function cost, in device-seconds; the measure of every choice made here."""

    start_s: float
    """Expected seconds from asking for a replica to its being ready: the horizon that matters."""
    devices: float = 1
    """Devices one replica holds, at what they are worth."""
    waiting_weight: float = 30.0
    """Device-seconds that one second of a person's waiting is worth."""

    def of_start(self, waiters: float = 1.0) -> float:
        """A start that `waiters` wait for: the devices held while it starts, and what the waiting is worth.

        10 s of one device, one waiter, weight 30: 10 * (1 + 30) = 310.
        """
        return self.start_s * (self.devices + self.waiting_weight * waiters)

    def break_even_s(self, waiters: float = 1.0) -> float:
        """Idle seconds that cost as much as one start."""
        return self.of_start(waiters) / max(self.devices, 1e-9)


@dataclass(frozen=True, slots=True)
class Quantiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one function. Times (`made_s`, `valid_until_s`) are on the clock of whoever made it: see `moved`."""

    source: str
    """Who said it, `warm` before `rate` where they differ: `idle_histogram`, `idle_histogram+holt_winters`."""
    made_s: float
    step_s: float = 60.0
    rate: tuple[float, ...] = ()
    """Expected arrivals a second in each step from `made_s` on. Empty: nobody beat the last value; use what is seen."""
    rate_high: tuple[float, ...] = ()
    """The 0.9 quantile of the same."""
    warm: tuple[tuple[float, float], ...] | None = None
    """Intervals, in seconds since the last activity, in which being warm pays; ordered, apart from each other; the last
    may end at infinity. A replica has to be *ready* at the beginning of one, so it is started `start_s` earlier.
    (): never while idle. None: nobody beat the break-even keep-alive; use that."""
    clock: tuple[tuple[float, float, float], ...] | None = None
    """The same by the clock, where what comes goes by it, instead of `warm`: an idle replica is held from the first of
    each three moments to the last; where there is none, one should be ready at the second (infinity: none is started).
    None: nothing is said by the clock."""
    floor: tuple[int, ...] = ()
    """Replicas a schedule of the user's asks for in each step; empty: no schedule says anything."""
    service_s: float = 0.0
    """Expected seconds a request occupies a place; 0: unknown."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    """Expected of the next request; 0: unknown."""
    output_spread: float = 0.0
    """Standard deviation of the logarithm of a request's output tokens; 0: all alike, or unknown."""
    arrivals: Quantiles | None = None
    """Within this function's own start time from `made_s` on."""
    valid_until_s: float = float("inf")

    def valid(self, now_s: float) -> bool:
        return now_s <= self.valid_until_s

    def moved(self, by_s: float) -> Forecast:
        """The same on a clock that shows `by_s` more. Histories follow the calendar, decisions a monotonic clock."""
        clock = self.clock
        if clock is not None:
            clock = tuple((from_s + by_s, ready_s + by_s, until_s + by_s) for from_s, ready_s, until_s in clock)
        return dataclasses.replace(
            self, made_s=self.made_s + by_s, valid_until_s=self.valid_until_s + by_s, clock=clock
        )

    @property
    def knows_gaps(self) -> bool:
        """Whether it says when an idle function should be ready."""
        return self.warm is not None or self.clock is not None

    def rate_at(self, at_s: float) -> float | None:
        """Expected arrivals a second at `at_s`; None: it says nothing about then."""
        return _at(self.rate, at_s - self.made_s, self.step_s)

    def rate_high_at(self, at_s: float) -> float | None:
        return _at(self.rate_high, at_s - self.made_s, self.step_s)

    def floor_until(self, now_s: float, until_s: float) -> int:
        """The most replicas a schedule asks for between `now_s` and `until_s` (a start from now)."""
        if not self.floor or now_s < self.made_s:
            return 0
        first = int((now_s - self.made_s) / self.step_s)
        last = int((until_s - self.made_s) / self.step_s)
        return max(self.floor[first : last + 1], default=0)

    def remaining_tokens(self, done_tokens: float) -> float:
        """Expected still to come of a request that has made so many and not ended."""
        return remaining_tokens(self.output_tokens, self.output_spread, done_tokens)

    def pays_warm(self, idle_s: float) -> bool | None:
        """Whether being warm pays after `idle_s` without activity; None: use the break-even keep-alive."""
        if self.warm is None:
            return None
        return any(opens_s <= idle_s < closes_s for opens_s, closes_s in self.warm)

    def warm_window(self, idle_s: float) -> tuple[float, float] | None:
        """The interval `idle_s` is in, or the next one (in seconds since the last activity); None: there is none."""
        for opens_s, closes_s in self.warm or ():
            if idle_s < closes_s:
                return opens_s, closes_s
        return None


def remaining_tokens(mean: float, spread: float, done: float) -> float:
    """What is left of a request after `done` tokens, if lengths are lognormal: the mean of those that are longer, less
    `done`. Requests that have run for long are mostly the long ones, so it falls and then grows; with no spread it is
    the mean for ever, as if lengths had no memory.

    Mean 100, spread 1: 100 at first, 93 after 20, 124 after 100, 266 after 500.
    """
    if mean <= 0.0 or spread <= 0.0 or done <= 0.0:
        return max(mean, 0.0)
    away = (math.log(done / mean) + spread * spread / 2) / spread
    longer = math.erfc(away / _ROOT_2)
    if longer < 1e-9:
        return max(done * spread / away, 1.0)
    return max(mean * math.erfc((away - spread) / _ROOT_2) / longer - done, 1.0)


_ROOT_2 = math.sqrt(2.0)


def _at(steps: tuple[float, ...], after_s: float, step_s: float) -> float | None:
    if after_s < 0:
        return None
    step = int(after_s / step_s)
    return steps[step] if step < len(steps) else None
