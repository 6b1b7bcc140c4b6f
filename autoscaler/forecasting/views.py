"""A history seen otherwise: as it was at an earlier time, or read once for several forecasters.

Limits: of an earlier time, only what is still remembered now.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from autoscaler.forecasting.outlook import Numbers, Past


class Remembered(Past, Protocol):
    def gaps_after(self, start_s: float) -> list[tuple[float, float]]: ...


class Once:
    """A history for forecasters that read the same of it one after the other, and change nothing of what they read."""

    __slots__ = ("_gap_starts", "_gaps", "_history", "_read")

    def __init__(self, history: Remembered) -> None:
        self._history = history
        self._read: dict[tuple[int, float, float], tuple[Numbers, Numbers]] = {}
        self._gaps: Numbers | None = None
        self._gap_starts: Numbers | None = None

    @property
    def gaps_s(self) -> Numbers:
        if self._gaps is None:
            self._gaps = self._history.gaps_s
        return self._gaps

    @property
    def gap_starts_s(self) -> Numbers:
        if self._gap_starts is None:
            self._gap_starts = self._history.gap_starts_s
        return self._gap_starts

    def gaps_after(self, start_s: float) -> list[tuple[float, float]]:
        return self._history.gaps_after(start_s)

    def arrivals(self, resolution_s: int, since_s: float, until_s: float) -> tuple[Numbers, Numbers]:
        asked = (resolution_s, since_s, until_s)
        if asked not in self._read:
            self._read[asked] = self._history.arrivals(resolution_s, since_s, until_s)
        return self._read[asked]

    def total(self, name: str, resolution_s: int, since_s: float, until_s: float) -> float:
        return self._history.total(name, resolution_s, since_s, until_s)


class Until:
    """A history as it was at `until_s`."""

    __slots__ = ("_gap_lengths", "_gap_starts", "_history", "until_s")

    def __init__(self, history: Remembered, until_s: float) -> None:
        self._history, self.until_s = history, until_s
        starts, lengths = history.gap_starts_s, history.gaps_s
        ended = starts + lengths <= until_s
        self._gap_starts, self._gap_lengths = starts[ended], lengths[ended]

    @property
    def gaps_s(self) -> Numbers:
        return self._gap_lengths

    @property
    def gap_starts_s(self) -> Numbers:
        return self._gap_starts

    def gaps_after(self, start_s: float) -> list[tuple[float, float]]:
        first = bisect_right(self._gap_starts.tolist(), start_s)
        return list(zip(self._gap_starts[first:].tolist(), self._gap_lengths[first:].tolist(), strict=True))

    def arrivals(self, resolution_s: int, since_s: float, until_s: float) -> tuple[Numbers, Numbers]:
        return self._history.arrivals(resolution_s, since_s, min(until_s, self.until_s))

    def total(self, name: str, resolution_s: int, since_s: float, until_s: float) -> float:
        return self._history.total(name, resolution_s, since_s, min(until_s, self.until_s))
