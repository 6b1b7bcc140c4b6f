"""A histogram of seconds as plain integers. Limits: one set of bounds for all, from 5 ms to 10 minutes."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            running += count
            found.append((bound, float(running)))
        return found
