"""What comes by the clock: a rate for each minute of a season of minutes, and the spans in which being ready pays.

Timers call every 5, 10 or 15 minutes, on the minute, and other calls come between: a law of gaps tells that blurred.
Here each minute of the season has an exponentially weighted mean of its own; the season is the one that would have
foretold the day's minutes best (Poisson deviance, each minute told before it came). From the rates, dynamic programming
backwards in time (Bellman, 1957) finds when an idle replica is worth holding and when one is worth starting.
Limits: within a minute requests come by chance; a season begins with the hour; days shorter than `NEEDED` say nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from autoscaler.forecast import Costs
from autoscaler.forecasting.outlook import DAY_S, Numbers, Past
from autoscaler.forecasting.warmth import Windows, spliced

MINUTE_S: Final = 60.0
SEASONS: Final = (5, 10, 15, 20, 30, 60)
"""Minutes. What divides the hour; whatever else timers do is left to the laws of gaps."""
NEWEST: Final = 0.3
"""Weight of a minute's last count in its mean."""
BACK: Final = 24
"""Seasons that a mean reaches back."""
UNSEEN: Final = 1e-3
"""Weight of what is usual, where nothing was seen."""
NEEDED: Final = 180
"""Minutes watched, before anything is said."""
LEAST: Final = 0.02
"""Calls a minute that are expected at least: never is too much to say of a rate."""
BETTER: Final = 0.9
"""Of the deviance without a season, what a season may come to at most."""
CELL_S: Final = 5.0
AHEAD_S: Final = 1_800.0
SAID_S: Final = 1_200.0
"""Of what is planned, how much is said: the rest is there so that the end of it is no reason to let go."""


@dataclass(frozen=True, slots=True)
class Span:
    """On the wall clock: an idle replica that is there is held from `from_s` to `until_s`; where there is none, one
    should be ready at `ready_s` (infinity: for this alone none is started)."""

    from_s: float
    ready_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class ByClock:
    """A plan by the wall clock, for whatever gap."""

    made_s: float
    spans: tuple[Span, ...]
    before: Windows = ()
    """In the gap that ran when this was made: what held until then."""

    def windows(self, gap_start_s: float) -> Windows:
        """Of a gap that begins then, in seconds since its beginning."""
        found: list[tuple[float, float]] = []
        for span in self.spans:
            if span.until_s <= gap_start_s:
                continue
            opens_s, closes_s = span.from_s - gap_start_s, span.until_s - gap_start_s
            if found and found[-1][1] >= opens_s:
                found[-1] = (found[-1][0], closes_s)
            elif opens_s <= 0.0:
                found.append((0.0, closes_s))
            elif span.ready_s < math.inf:
                found.append((span.ready_s - gap_start_s, closes_s))
        if gap_start_s < self.made_s:
            return spliced(self.before, tuple(found), self.made_s - gap_start_s)
        return tuple(found)

    def following(self, before: Windows) -> ByClock:
        """The same where, in the gap that runs, something else held before it was made."""
        return ByClock(self.made_s, self.spans, before)

    def within(self, costs: Costs, room: float, waiters: float) -> ByClock | None:
        """As many of its spans, from the first on, as can be lost and a start beside them without losing more than
        `room`; None: not even a start."""
        left_s = (room - costs.of_start(waiters)) / max(costs.devices, 1e-9)
        if left_s < 0.0:
            return None
        kept: list[Span] = []
        for span in self.spans:
            starts_s = costs.start_s if span.ready_s < math.inf else 0.0
            begins_s = max(min(span.from_s, span.ready_s), self.made_s)
            until_s = min(span.until_s, begins_s + left_s - starts_s)
            if until_s <= begins_s:
                break
            ready_s = span.ready_s if span.ready_s < until_s else math.inf
            kept.append(Span(span.from_s, ready_s, until_s))
            if until_s < span.until_s:
                break
            left_s -= until_s - begins_s + starts_s
        return ByClock(self.made_s, tuple(kept), self.before)


def minute_rates(history: Past, now_s: float, minutes: int) -> Numbers | None:
    """Arrivals a second expected in each of so many minutes, the present one first; None: no season tells them
    better than the last minutes do."""
    end_s = now_s // MINUTE_S * MINUTE_S
    starts, counts = history.arrivals(60, end_s - DAY_S, end_s)
    seen = ~np.isnan(counts)
    if seen.sum() < NEEDED or not np.nansum(counts[-NEEDED:]):
        return None
    first = int(np.argmax(seen))
    counts, begun_s = counts[first:], float(starts[first])
    judged = len(counts) // 2
    came, early = _Came.of(counts[judged:]), counts[:NEEDED]
    usual = float(np.nanmean(early)) if np.isfinite(early).any() else LEAST
    best, rates = BETTER * came.deviance(_smoothed(counts, 1, judged, usual)[0]), None
    for season in SEASONS:
        if len(counts) < 4 * season:
            break
        told, following = _smoothed(counts, season, judged, usual)
        found = came.deviance(told)
        if found < best:
            best = found
            # `following` is by place in the season, counted from where the counts begin.
            place = (round((end_s - begun_s) / MINUTE_S) + np.arange(minutes)) % season
            rates = np.maximum(following[place], LEAST) / MINUTE_S
    return rates


def _smoothed(counts: Numbers, season: int, judged: int, usual: float) -> tuple[Numbers, Numbers]:
    """What was expected of each minute from the `judged` one on before it came, and what is expected of each place of
    the season now. `usual`: of a minute, before any was seen."""
    rows = -(-len(counts) // season)
    padded = np.full((rows + 1) * season, np.nan)
    padded[: len(counts)] = counts
    table = padded.reshape(rows + 1, season)
    seen = ~np.isnan(table)
    table[~seen] = 0.0
    first = judged // season
    total = np.full((rows + 1 - first, season), usual * UNSEEN)
    # Where everything was seen, places of a season weigh alike: one weight a season.
    whole = bool(seen[:rows].all())
    weights = np.full((len(total), 1) if whole else total.shape, UNSEEN)
    for back in range(1, min(BACK, rows) + 1):
        weight, low = NEWEST * (1.0 - NEWEST) ** (back - 1), max(back, first)
        before = slice(low - back, rows + 1 - back)
        total[low - first :] += weight * table[before]
        weights[low - first :] += weight if whole else weight * seen[before]
    told = total / weights
    return told.ravel()[judged - first * season : len(counts) - first * season], told[-1]


@dataclass(frozen=True, slots=True)
class _Came:
    """Counts that forecasts of them are held against."""

    seen: npt.NDArray[np.bool_]
    some: npt.NDArray[np.bool_]
    """Where any came."""
    counts: Numbers
    """0 where nobody watched."""
    positive: Numbers

    @classmethod
    def of(cls, counts: Numbers) -> _Came:
        seen = ~np.isnan(counts)
        some = seen & (counts > 0)
        return cls(seen, some, np.where(seen, counts, 0.0), counts[some])

    def deviance(self, told: Numbers) -> float:
        """From what was told of them, as if they were Poisson: less is better."""
        expected = np.maximum(told, LEAST)
        each = np.where(self.seen, expected - self.counts, 0.0)
        each[self.some] += self.positive * np.log(self.positive / expected[self.some])
        return float(each.sum())


def plan_by_clock(rates: Numbers, now_s: float, costs: Costs, waiters: float, service_s: float) -> ByClock:
    """When being ready pays, if requests come at these rates (by the minute, from the present one on)."""
    devices, start_s, weight = float(costs.devices), costs.start_s, costs.waiting_weight
    cells = int(AHEAD_S / CELL_S)
    at_s = now_s + CELL_S * (np.arange(cells) + 0.5)
    minute = ((at_s - now_s // MINUTE_S * MINUTE_S) // MINUTE_S).astype(np.int64)
    rate = rates[np.minimum(minute, len(rates) - 1)]
    come = (1.0 - np.exp(-rate * CELL_S)).tolist()
    # A start in somebody's way: those who wait for it, and half as long each those who come meanwhile.
    waiting = np.maximum(waiters, 1.0 + rate * start_s / 2.0)
    woken = (start_s * (devices + weight * waiting)).tolist()
    ahead = (start_s * (devices + weight * rate * start_s / 2.0)).tolist()
    busy, starting = max(round(service_s / CELL_S), 0), max(round(start_s / CELL_S), 1)
    cell_cost = devices * CELL_S
    # From each cell on, the least cost if idle with a replica, and without.
    margin = busy + starting + 2
    warm, cold = [0.0] * (cells + margin), [0.0] * (cells + margin)
    held, started = [False] * cells, [False] * cells
    for cell in range(cells - 1, -1, -1):
        chance = come[cell]
        served = devices * service_s
        stay = chance * (woken[cell] + served + warm[cell + starting + busy]) + (1.0 - chance) * cold[cell + 1]
        begin = ahead[cell] + warm[cell + starting]
        started[cell] = begin < stay
        cold[cell] = min(stay, begin)
        hold = cell_cost + chance * (served + warm[cell + 1 + busy]) + (1.0 - chance) * warm[cell + 1]
        held[cell] = hold < cold[cell]
        warm[cell] = min(hold, cold[cell])
    return ByClock(now_s, _spans(held, started, now_s, start_s))


def _spans(held: list[bool], started: list[bool], now_s: float, start_s: float) -> tuple[Span, ...]:
    found: list[Span] = []
    said, cell = int(SAID_S / CELL_S), 0
    while cell < said:
        if not held[cell]:
            cell += 1
            continue
        end = cell
        while end < len(held) and held[end]:
            end += 1
        from_s, until_s = now_s + CELL_S * cell, now_s + CELL_S * end
        first = max(cell - int(start_s / CELL_S) - 1, 0)
        begins_s = next((now_s + CELL_S * place for place in range(first, end) if started[place]), math.inf)
        ready_s = begins_s + start_s
        if ready_s >= until_s:
            ready_s = math.inf
        found.append(Span(min(from_s, begins_s), ready_s, until_s))
        cell = end
    return tuple(found)
