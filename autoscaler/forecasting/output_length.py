"""How many tokens a request will make, and how many it still has to make after so many.

Lengths are counted in cells of a quarter octave, old ones fading; what is left after `done` tokens is the mean of those
that were longer, less `done`: requests that have run for long are mostly the long ones. Without counts, means of the
history's windows stand in, and what is left is always the mean (no memory).
Limits: lengths are taken as alike whatever the prompt says; what was cut off by its limit counts as that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaler.forecasting.outlook import Past

CELLS_AN_OCTAVE = 4
CELLS = 20 * CELLS_AN_OCTAVE
"""Up to a million tokens."""
KEPT = 2_048.0
"""Counts fade so that about as many requests are remembered."""
REQUESTS_NEEDED = 8
HOUR_S, DAYS_S, ALL_S = 3_600.0, 86_400.0, 15 * 86_400.0


class OutputLengths:
    """Of one function: `note` each request that has ended."""

    __slots__ = ("_counts", "_sums", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * CELLS
        self._sums = [0.0] * CELLS
        self.total = 0.0

    def note(self, output_tokens: int) -> None:
        if output_tokens < 0:
            return
        cell = min(int(CELLS_AN_OCTAVE * math.log2(1 + output_tokens)), CELLS - 1)
        self._counts[cell] += 1.0
        self._sums[cell] += output_tokens
        self.total += 1.0
        if self.total >= 2 * KEPT:
            self._counts = [count / 2 for count in self._counts]
            self._sums = [tokens / 2 for tokens in self._sums]
            self.total /= 2

    def remaining_tokens(self, done_tokens: float = 0.0) -> float | None:
        """Expected tokens still to come of a request that has made `done_tokens` and not ended; None: unknown."""
        if self.total < REQUESTS_NEEDED:
            return None
        first = min(int(CELLS_AN_OCTAVE * math.log2(1 + max(done_tokens, 0.0))), CELLS - 1)
        count = tokens = 0.0
        for cell in range(first, CELLS):
            if self._counts[cell] and self._sums[cell] > done_tokens * self._counts[cell]:
                count += self._counts[cell]
                tokens += self._sums[cell]
        # Longer than any before: as much again as a quarter of what it has made.
        return tokens / count - done_tokens if count else max(done_tokens / 4, 1.0)

    def table(self) -> tuple[tuple[float, float], ...]:
        """(tokens made, expected tokens left) at powers of four; () while unknown."""
        points: list[tuple[float, float]] = []
        for done in (0.0, *(float(4**power) for power in range(2, 10))):
            left = self.remaining_tokens(done)
            if left is None:
                return ()
            points.append((done, left))
        return tuple(points)

    def to_json(self) -> dict[str, list[float]]:
        return {"counts": self._counts, "sums": self._sums}

    @classmethod
    def from_json(cls, kept: dict[str, list[float]]) -> OutputLengths:
        """What does not fit is nothing."""
        lengths = cls()
        counts, sums = kept.get("counts", []), kept.get("sums", [])
        if len(counts) == len(sums) == CELLS and all(math.isfinite(x) and x >= 0 for x in (*counts, *sums)):
            lengths._counts, lengths._sums = [float(x) for x in counts], [float(x) for x in sums]
            lengths.total = sum(lengths._counts)
        return lengths


@dataclass(frozen=True, slots=True)
class Work:
    """Of the next request; 0: unknown."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    service_s: float = 0.0


def output_length(history: Past, now_s: float) -> Work:
    """Means over the last hour if enough ended in it, else over the last day, else over all there is."""
    for resolution_s, span_s in ((10, HOUR_S), (60, DAYS_S), (600, ALL_S)):
        since_s = now_s - span_s
        ended = history.total("ended", resolution_s, since_s, now_s)
        if ended < REQUESTS_NEEDED and resolution_s < 600:
            continue
        arrived = history.total("arrivals", resolution_s, since_s, now_s)

        def mean(name: str, of: float, resolution_s: int = resolution_s, since_s: float = since_s) -> float:
            return history.total(name, resolution_s, since_s, now_s) / of if of > 0 else 0.0

        return Work(mean("prompt_tokens", arrived), mean("ended_output_tokens", ended), mean("service_s_sum", ended))
    return Work()
