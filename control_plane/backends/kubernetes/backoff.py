"""How long a class of slots is left alone after it failed: so that nothing is tried in a hot loop.

Each failure in a row doubles the pause; a slot whose agent answered ends the row, and so does time in which nobody
wanted one: what failed an hour ago says nothing of now. Limits: the cluster is not asked what would help; what changes
there (a quota, an image) is found by the next try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from control_plane.backends.kubernetes.api import ApiRefused

FIRST_S: Final = 1.0
MOST_S: Final = 120.0


@dataclass(slots=True)
class Backoff:
    failures: int = 0
    until_s: float = float("-inf")
    since_s: float = 0.0
    """Of the first failure of the row."""
    last_s: float = 0.0
    words: str = ""
    """What the last one was."""

    def failed(self, now_s: float, words: str, retry_after_s: float | None = None) -> None:
        if not self.is_recent(now_s):
            self.failures, self.since_s = 0, now_s
        self.failures += 1
        self.last_s = now_s
        pause_s = min(FIRST_S * 2 ** min(self.failures - 1, 16), MOST_S)
        self.until_s = now_s + max(pause_s, retry_after_s or 0.0)
        self.words = words

    def pausing_s(self, now_s: float) -> float:
        """Seconds left; 0: it may be tried."""
        return max(self.until_s - now_s, 0.0) if self.failures else 0.0

    def is_recent(self, now_s: float) -> bool:
        """There is a row, and the next failure would belong to it."""
        return self.failures > 0 and now_s <= self.until_s + MOST_S

    @property
    def lasted_s(self) -> float:
        """Over how long a time nothing but failures was seen; one alone has not lasted."""
        return self.last_s - self.since_s if self.failures else 0.0


def refusal_words(error: ApiRefused) -> str:
    """Why no pod could be made, for whoever waits for one."""
    if error.status == 403 and "quota" in error.message:
        return f"the cluster refuses another slot for its quota: {error.message}"
    if error.status == 403:
        return f"the cluster refuses a slot's pod: {error.message}"
    return f"a slot's pod cannot be made: {error}"
