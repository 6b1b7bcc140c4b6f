"""Two costs told apart from what their sums took: y = p * first + q * second, both 0 or more.

    measurements, kept by the ratio of their two parts -> weights -> least squares of log(y / expected) -> p, q

Of each kind of measurement the last `KEPT` count, the newest most: many of one kind do not push out the few that tell
the parts apart. One that does not fit counts for less; several in a row that are off in one direction, together by
`CHANGE`, are a change (a cumulative sum: Page, Biometrika 1954), and what was measured before hardly counts any more. The prior is a few measurements that were never made; they decide
what the real ones leave open. Limits: two parts only; what changes both at once is noticed as one change.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT: Final = 6
FADE: Final = 0.75
"""Weight of each older measurement of the same kind."""
FADE_ALL: Final = 0.97
"""And of each that is older, of whatever kind."""
OFF: Final = math.log(1.5)
"""A measurement this far from what was expected may be the first of a change."""
ALIKE: Final = 2
"""That many must be, and their distances add up to this:"""
CHANGE: Final = math.log(1.5) * 3
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


class Fit:
    """`typical`: (first, second) of what the prior is to stand for."""

    def __init__(self, p: float, q: float, typical: tuple[tuple[float, float], ...]) -> None:
        self._values = (max(p, 0.0), max(q, _LEAST))
        self._typical = [(first, second, p * first + q * second) for first, second in typical]
        self._kinds: dict[int, deque[_Seen]] = {}
        self._unlike: list[_Seen] = []
        """The last measurements, as far as none of them was as expected, and all are off in one direction."""
        self._off = 0.0
        """By how much, together."""
        self._fitted = True
        self.count = 0

    def measure(self, first: float, second: float, y: float) -> None:
        if not (y > 0 and first >= 0 and second >= 0 and first + second > 0 and math.isfinite(y)):
            return
        off = _off(self._values, first, second, y)
        if abs(off) >= OFF and not self._fitted:
            # NOTE: only now, because a fit costs half a millisecond and this is called after every step.
            off = _off(self.values, first, second, y)
        seen = _Seen(first, second, y, self.count)
        self.count += 1
        if abs(off) < OFF or off * self._off < 0:
            self._unlike, self._off = [], 0.0
        if abs(off) >= OFF:
            self._unlike.append(seen)
            self._off += off
            if len(self._unlike) >= ALIKE and abs(self._off) >= CHANGE:
                for old in (s for kind in self._kinds.values() for s in kind if s not in self._unlike):
                    old.weight *= BEFORE_CHANGE
                self._unlike, self._off = [], 0.0
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
