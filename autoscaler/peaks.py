"""When demand was last how high: for any window at once, so that each replica has a window of its own.

A stack of falling peaks (the monotone queue of a sliding maximum, Lemire 2006): a level is remembered until the demand
was as high again. Limits: `KEPT` levels; beyond, neighbours are merged upwards, which holds a little longer.
"""

from __future__ import annotations

from typing import Final

KEPT: Final = 48
FORGOTTEN_S: Final = 6 * 3600.0
"""No replica is kept for the sake of a peak that was longer ago."""


class Peaks:
    __slots__ = ("_level", "_steps")

    def __init__(self) -> None:
        self._level = 0
        self._steps: list[tuple[float, int]] = []

    def note(self, now_s: float, demand: int) -> None:
        """From now on `demand` requests are waiting or running."""
        level = self._level
        self._level = demand
        if demand >= level:
            return
        steps = self._steps
        while steps and steps[-1][1] <= level:
            steps.pop()
        steps.append((now_s, level))
        if len(steps) > KEPT:
            self._merge(now_s)

    def _merge(self, now_s: float) -> None:
        steps = [step for step in self._steps if now_s - step[0] < FORGOTTEN_S]
        if len(steps) > KEPT:
            closest = min(range(len(steps) - 1), key=lambda i: steps[i][1] - steps[i + 1][1])
            steps[closest : closest + 2] = [(steps[closest + 1][0], steps[closest][1])]
        self._steps = steps

    def since(self, from_s: float) -> int:
        """The highest demand since then."""
        return max(self._level, max((demand for at_s, demand in self._steps if at_s >= from_s), default=0))

    def steps(self) -> tuple[tuple[float, int], ...]:
        """As `Observed.peaks` wants them."""
        return tuple(self._steps)
