"""Trying again what the storage refused: one ladder of pauses for appends, ends and whatever else must come to pass.

Only the journal's own word says that a request is another's; a fault, whichever, passes. Who waits for the request is
told when that takes longer than readers are asked to be patient. Limits: there is no last try; who wants one counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from control_plane.errors import StokerError

logger = logging.getLogger(__name__)

PAUSES_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Before what was refused is tried again; the last one repeats."""


def _untold(away_s: float) -> None:
    """Nobody waits."""


class Retry:
    """The refusals of one write, since it was first tried."""

    __slots__ = ("_away", "_event", "_patience_s", "_request_id", "_since_s", "tries")

    def __init__(
        self,
        event: str,
        request_id: str,
        patience_s: float,
        away: Callable[[float], None] = _untold,
        since_s: float | None = None,
    ) -> None:
        self._event = event
        self._request_id = request_id
        self._patience_s = patience_s
        self._away = away
        self._since_s = time.monotonic() if since_s is None else since_s
        self.tries = 0

    def refused(self, error: BaseException) -> float:
        """How long to wait before the next try."""
        pause_s = PAUSES_S[min(self.tries, len(PAUSES_S) - 1)]
        self.tries += 1
        logger.warning(
            "event=%s request=%s retry_s=%s error=%s", self._event, self._request_id, pause_s, error,
            exc_info=None if isinstance(error, StokerError) else error,
        )  # fmt: skip
        away_s = time.monotonic() - self._since_s
        if away_s >= self._patience_s:
            self._away(away_s)
        return pause_s
