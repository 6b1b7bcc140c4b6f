"""A cap on bytes per second: a bucket that fills steadily and may be overdrawn by one pack; the next one waits for it.

Limits: no clock of its own; whoever asks says what time it is (monotonic seconds).
"""

from __future__ import annotations


class Bandwidth:
    """`bytes_per_s` 0: no cap."""

    def __init__(self, bytes_per_s: float, now_s: float, burst_s: float = 0.5) -> None:
        self.bytes_per_s = bytes_per_s
        self._room = bytes_per_s * burst_s
        self._burst = bytes_per_s * burst_s
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """How long until the next write may begin."""
        if self.bytes_per_s <= 0:
            return 0.0
        self._fill(now_s)
        return max(0.0, -self._room / self.bytes_per_s)

    def spend(self, nbytes: int, now_s: float) -> None:
        """Takes what a write takes; a pack larger than the bucket leaves a debt."""
        if self.bytes_per_s > 0:
            self._fill(now_s)
            self._room -= nbytes

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._room = min(self._burst, self._room + passed_s * self.bytes_per_s)
