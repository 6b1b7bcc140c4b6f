"""How long what is idle is kept: the break-even of a start, shortened by known gaps, and windows that a forecast gives.

A start costs its seconds on the devices, and as many seconds of everybody who comes meanwhile. Keeping an idle replica
just as long as its start costs is never worse than twice the best choice made in hindsight (ski rental: Karlin et al.,
"Competitive randomized algorithms", 1990). Limits: starts cost the same each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from autoscaler.decision import Observed, ScalingSpec

KEEP_ALIVE_MIN_S: Final = 1.0
KEEP_ALIVE_MAX_S: Final = 6 * 3600.0
ASSUMED_COLD_START_S: Final = 10.0
GAPS_NEEDED: Final = 20
CANDIDATES: Final = 24
_COME_MAX: Final = 20.0
"""More than so many waiting for one start would have been seen as load, and not as idleness."""


def start_s(observed: Observed) -> float:
    return ASSUMED_COLD_START_S if observed.cold_start_s is None else observed.cold_start_s


def start_cost_s(
    spec: ScalingSpec, seconds: float, rate: float = 0.0, price: float = 1.0, waiters: float = 1.0
) -> float:
    """Device-seconds that a start in somebody's way costs: the devices while it lasts, and the waiting of the first
    request and of those that come before it is over (each half as long, on average): at `rate`, or as many as such a
    start was found to keep waiting."""
    come = max(min(rate * seconds, _COME_MAX), waiters - 1.0) / 2
    return seconds * (spec.devices * price + spec.waiting_weight * (1.0 + come))


def break_even_s(
    spec: ScalingSpec, seconds: float, rate: float = 0.0, price: float = 1.0, waiters: float = 1.0
) -> float:
    """Seconds of idleness that cost as much as a start."""
    kept_s = start_cost_s(spec, seconds, rate, price, waiters) / (spec.devices * price)
    return min(max(kept_s, KEEP_ALIVE_MIN_S), KEEP_ALIVE_MAX_S)


def keep_alive_s(
    spec: ScalingSpec,
    cold_start_s: float | None,
    gaps_s: tuple[float, ...],
    rate: float = 0.0,
    price: float = 1.0,
    waiters: float = 1.0,
) -> float:
    """Seconds an idle last replica is kept, by what was observed alone.

    The break-even of a start; known gaps may shorten it to what would have been cheapest for them, and never lengthen
    it. With 0.25 s and the default weight of 30: 0.25 * 31 = 7.75 s
    (`test_keep_alive_is_the_break_even_of_a_start`).
    """
    if spec.keep_alive_s is not None:
        return spec.keep_alive_s
    seconds = ASSUMED_COLD_START_S if cold_start_s is None else cold_start_s
    break_even = break_even_s(spec, seconds, rate, price, waiters)
    if len(gaps_s) < GAPS_NEEDED:
        return break_even
    start_cost = start_cost_s(spec, seconds, rate, price, waiters) / (spec.devices * price)
    return shortened_s(break_even, start_cost, gaps_s)


def shortened_s(break_even: float, start_cost: float, gaps_s: Sequence[float]) -> float:
    """The keep-alive up to the break-even that would have been cheapest for these gaps. Both costs in seconds of a
    replica's devices."""
    count = len(gaps_s)
    if count < GAPS_NEEDED:
        return break_even
    gaps = sorted(gaps_s)
    sums = [0.0, *accumulate(gaps)]
    # Kept for a candidate, gaps that end by it cost their length, the others the candidate and a start.
    best_s, best_cost = break_even, _INFINITY
    ended = count
    step = max(count // CANDIDATES, 1)
    candidates = [min(max(gap * 1.1, KEEP_ALIVE_MIN_S), break_even) for gap in gaps[::-step]]
    for kept_s in (break_even, *candidates, KEEP_ALIVE_MIN_S):
        while ended and gaps[ended - 1] > kept_s:
            ended -= 1
        cost = sums[ended] + (count - ended) * (kept_s + start_cost)
        if cost < best_cost:
            best_s, best_cost = kept_s, cost
    return best_s


_INFINITY: Final = float("inf")


def spare_kept_s(spec: ScalingSpec, seconds: float, waits_s: float, price: float = 1.0) -> float:
    """Seconds that a replica beyond the first is kept after it was last needed: the break-even of starting it again.
    `waits_s`: seconds of waiting, of all people together, that its start would cost."""
    return seconds + spec.waiting_weight * waits_s / (spec.devices * price)
