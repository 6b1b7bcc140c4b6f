"""What a forecaster reads and what it answers: `outlook(history, now_s, horizon_s, steps) -> Outlook`.

An outlook has either or both of two halves: arrivals a second in the steps ahead (for how many replicas), and a law of
the gap between the last activity and the next request (for whether there should be one at all).
Limits: forecasters hold no state; what is costly to fit is fitted less often, which is `choosing`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]

DAY_S = 86_400.0


class Past(Protocol):
    """What forecasters read of a `History`. Times are seconds since the epoch; NaN is what nobody watched."""

    @property
    def gaps_s(self) -> Numbers: ...
    @property
    def gap_starts_s(self) -> Numbers: ...
    def arrivals(self, resolution_s: int, since_s: float, until_s: float) -> tuple[Numbers, Numbers]: ...
    def total(self, name: str, resolution_s: int, since_s: float, until_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class GapLaw:
    """How long the gap after the last activity will be: the chance that it ends in each cell between two edges.

    Edges are seconds since the last activity (or since `outlook` was asked, which is the same for one that goes by the
    clock and is asked while nothing happens). What is missing to 1 lies beyond the last edge."""

    edges_s: Numbers
    chances: Numbers


@dataclass(frozen=True, slots=True)
class Outlook:
    rate: Numbers | None = None
    """Expected arrivals a second in each step."""
    rate_high: Numbers | None = None
    """The 0.9 quantile of the same."""
    law: GapLaw | None = None


NOTHING = Outlook()
"""Too little is known to say anything."""

Forecaster: TypeAlias = Callable[[Past, float, float, int], Outlook]
"""`(history, now_s, horizon_s, steps)`: the horizon is divided into that many steps."""


def high(rate: Numbers, step_s: float, dispersion: float = 1.0) -> Numbers:
    """The 0.9 quantile of a step's rate, if counts vary `dispersion` times as much as a Poisson process's."""
    return np.asarray(rate + 1.2816 * np.sqrt(np.maximum(rate, 0.0) * dispersion / step_s), dtype=np.float64)


def dispersion(counts: Numbers) -> float:
    """Variance over mean of the counts of like windows: 1 for a Poisson process, more where calls come in heaps."""
    seen = counts[~np.isnan(counts)]
    if len(seen) < 2:
        return 1.0
    mean = float(seen.mean())
    return max(float(seen.var()) / mean, 1.0) if mean > 0 else 1.0


def law_of_rates(active: Numbers, step_s: float) -> GapLaw:
    """The law of a gap that begins now, from the chance that each step ahead holds a request."""
    surviving = np.concatenate([[1.0], np.cumprod(1.0 - np.clip(active, 0.0, 1.0))])
    edges = step_s * np.arange(len(active) + 1, dtype=np.float64)
    return GapLaw(edges, np.asarray(-np.diff(surviving), dtype=np.float64))


def seconds_of_day(at_s: float) -> float:
    """Of the UTC day. Seasons need a day's length, not its midnight."""
    return math.fmod(at_s, DAY_S)
