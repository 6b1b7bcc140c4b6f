"""Two costs told apart from what their sums took: y = p * first + q * second, both 0 or more.

    measurements, kept by the ratio of their two parts -> weights -> least squares of log(y / expected) -> p, q

Of each kind of measurement the last `KEPT` count, the newest most: many of one kind do not push out the few that tell
the parts apart. One that does not fit counts for less; several that are off in one direction are a change (a cumulative
sum of their distances: Page, Biometrika 1954), and what was measured before it hardly counts any more. The prior is a
few measurements that were never made; they decide what the real ones leave open. Limits: two parts only; what changes
both at once is noticed as one change.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT: Final = 6
FADE: Final = 0.75
"""Weight of each older measurement of the same kind."""
FADE_ALL: Final = 0.97
"""And of each that is older, of whatever kind."""
OFF: Final = 0.25
"""A measurement this far from what was expected (a difference of logarithms) is as good as expected."""
OFF_MOST: Final = 1.0
"""One counts for no more than this: a change takes two."""
CHANGE: Final = 1.2
"""What is above `OFF`, added up, makes a change."""
BEFORE_CHANGE: Final = 0.01
"""Weight that is left of what was measured before one."""
_PRIOR: Final = 0.02
_DOUBT: Final = 0.3
"""Beyond this (a difference of logarithms) a measurement counts in proportion to 1 / its distance."""
_ROUNDS: Final = 20
_NEAR: Final = 1e-3
_LEAST: Final = 1e-15

_Matrix = NDArray[np.float64]


@dataclass(slots=True)
class _Seen:
    first: float
    second: float
    y: float
    place: int
    """Counted over all measurements."""
    weight: float = 1.0


@dataclass(slots=True)
class _Run:
    """Measurements above (`sign` 1) or below what was expected."""

    sign: float
    total: float = 0.0
    seen: list[_Seen] = field(default_factory=list)

    def take(self, seen: _Seen, off: float) -> None:
        self.total = max(0.0, self.total + min(self.sign * off, OFF_MOST) - OFF)
        if self.total:
            self.seen.append(seen)
        else:
            self.seen.clear()


class Fit:
    """`typical`: (first, second) of what the prior is to stand for."""

    def __init__(self, p: float, q: float, typical: tuple[tuple[float, float], ...]) -> None:
        self._values = (max(p, 0.0), max(q, _LEAST))
        self._typical = [(first, second, p * first + q * second) for first, second in typical]
        self._kinds: dict[int, deque[_Seen]] = {}
        self._runs = (_Run(1.0), _Run(-1.0))
        self._reference = self._values
        """What the runs are measured by: what was expected before they began."""
        self._fitted = True
        self.count = 0

    def measure(self, first: float, second: float, y: float) -> None:
        if not (y > 0 and first >= 0 and second >= 0 and first + second > 0 and math.isfinite(y)):
            return
        if not any(run.total for run in self._runs):
            if not self._fitted and abs(_off(self._values, first, second, y)) >= OFF:
                # NOTE: only now, because a fit costs half a millisecond and this is called after every step.
                self._reference = self.values
            else:
                self._reference = self._values
        seen = _Seen(first, second, y, self.count)
        self.count += 1
        off = _off(self._reference, first, second, y)
        for run in self._runs:
            run.take(seen, off)
            if run.total >= CHANGE:
                for old in (s for kind in self._kinds.values() for s in kind if s not in run.seen):
                    old.weight *= BEFORE_CHANGE
                self._runs = (_Run(1.0), _Run(-1.0))
                break
        kind = round(2 * math.log2((second + 1e-12) / (first + 1e-12)))
        self._kinds.setdefault(kind, deque(maxlen=KEPT)).append(seen)
        self._fitted = False

    @property
    def values(self) -> tuple[float, float]:
        if not self._fitted:
            self._values = self._fit()
            self._fitted = True
        return self._values

    def _fit(self) -> tuple[float, float]:
        rows: list[tuple[float, float, float, float]] = []
        for kind in self._kinds.values():
            for age, seen in enumerate(reversed(kind)):
                weight = seen.weight * FADE**age * FADE_ALL ** (self.count - 1 - seen.place)
                rows.append((weight, seen.first, seen.second, seen.y))
        rows += [(_PRIOR, *row) for row in self._typical]
        weights, first, second, y = np.array(rows, np.float64).T
        p, q = self._values
        before = np.maximum(p * first + q * second, _LEAST)
        # From two sides, for doubt makes hollows to get stuck in: from the measurements, and from the last fit as much
        # slower or faster as most of them are.
        order = np.argsort(y / before)
        middle = int(np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2))
        shifted = before * float((y / before)[order][min(middle, len(y) - 1)])
        ends = [_improved(weights, first, second, y, expected) for expected in (y, shifted)]
        return min(ends, key=lambda end: end[2])[:2]


def _off(values: tuple[float, float], first: float, second: float, y: float) -> float:
    return math.log(y / max(values[0] * first + values[1] * second, _LEAST))


def _improved(
    weights: _Matrix, first: _Matrix, second: _Matrix, y: _Matrix, expected: _Matrix
) -> tuple[float, float, float]:
    """p and q, and the loss there."""
    p = q = 0.0
    for _ in range(_ROUNDS):
        # With the logarithmic mean as its scale, a difference is that of the logarithms.
        scale = _mean(y, expected)
        distance = np.abs((y - expected) / scale)
        factor = np.sqrt(weights * np.minimum(1.0, _DOUBT / np.maximum(distance, 1e-9))) / scale
        before = (p, q)
        p, q = _solve(factor * first, factor * second, factor * y)
        expected = np.maximum(p * first + q * second, _LEAST)
        if abs(p - before[0]) <= _NEAR * p and abs(q - before[1]) <= _NEAR * q:
            break
    distance = np.abs(np.log(y / expected))
    loss = np.where(distance < _DOUBT, distance**2, _DOUBT * (2 * distance - _DOUBT))
    return p, q, float(weights @ loss)


def _mean(a: _Matrix, b: _Matrix) -> _Matrix:
    """The logarithmic mean."""
    ratio = np.log(a / b)
    near = np.abs(ratio) < 1e-6
    mean: _Matrix = np.where(near, (a + b) / 2, (a - b) / np.where(near, 1.0, ratio))
    return mean


def _solve(x: _Matrix, z: _Matrix, y: _Matrix) -> tuple[float, float]:
    """Least squares with p and q of 0 or more."""
    a, b, c = float(x @ x), float(x @ z), float(z @ z)
    g, h = float(x @ y), float(z @ y)
    determinant = a * c - b * b
    if determinant > 1e-12 * a * c:
        p, q = (g * c - h * b) / determinant, (a * h - b * g) / determinant
        if p >= 0 and q >= 0:
            return p, q
    only_p, only_q = g / a if a else 0.0, h / c if c else 0.0
    # What is left with one of them at 0.
    return (only_p, 0.0) if a and (not c or g * only_p >= h * only_q) else (0.0, only_q)
