"""How starts of a revision went, and when the next may be tried: pauses that grow, so that nothing is tried in a storm.

A failure that would repeat (bad checkpoint) makes the revision unusable until its pause is over; one that may pass
(a slot out of reach) only delays the next start, and makes it unusable after `PATIENCE` in a row. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from function_runtime.protocol import ReplicaError

PATIENCE: Final = 5
TRANSIENT_FIRST_S: Final = 0.5
TRANSIENT_MAX_S: Final = 30.0
LASTING_FIRST_S: Final = 30.0
LASTING_MAX_S: Final = 900.0


@dataclass(slots=True)
class StartRecord:
    failures: int = 0
    lasting: int = 0
    not_before_s: float = 0.0
    error: ReplicaError | None = None

    def failed(self, error: ReplicaError, now_s: float) -> None:
        self.error = error
        self.failures += 1
        if error.retry and self.failures < PATIENCE:
            pause_s = min(TRANSIENT_FIRST_S * 2 ** (self.failures - 1), TRANSIENT_MAX_S)
        else:
            self.lasting += 1
            pause_s = min(LASTING_FIRST_S * 2 ** (self.lasting - 1), LASTING_MAX_S)
        self.not_before_s = now_s + pause_s

    def succeeded(self) -> None:
        self.failures = self.lasting = 0
        self.not_before_s = 0.0
        self.error = None

    def pausing(self, now_s: float) -> bool:
        return now_s < self.not_before_s

    def unusable(self, now_s: float) -> str:
        """Why nothing should wait for a start; empty while one may still succeed."""
        if self.error is None or not self.lasting or not self.pausing(now_s):
            return ""
        return f"{self.error.code}: {self.error.message}"
