"""How many requests a start from zero is found to keep waiting: what the next one will cost in people's time.

An exponential mean over starts, of whoever had come by the time the first replica was ready. Limits: a start that ends
in nothing counts with the one that follows it.
"""

from __future__ import annotations

from typing import Final

NEWEST: Final = 0.2
"""Weight of the last start."""


class ColdWaiters:
    """Of one function. `note` is called with every look at it."""

    __slots__ = ("_from", "mean")

    def __init__(self) -> None:
        self.mean = 1.0
        self._from: int | None = None
        """Arrivals before the first of those that wait for such a start now."""

    def note(self, ready: int, waiting: int, arrivals: int) -> None:
        """`arrivals`: so far, those that wait included. Where they fall, somebody's count has gone: who waits is then
        counted from now on."""
        if self._from is not None and arrivals < self._from:
            self._from = None
        if ready:
            if self._from is not None:
                self.mean += NEWEST * (max(arrivals - self._from, 1) - self.mean)
                self._from = None
        elif waiting and self._from is None:
            self._from = arrivals - waiting
