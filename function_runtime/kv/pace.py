"""How fast this replica computes a prompt and reads from its store: what the rule of keeping weighs against each other.

Each is a mean that fades, so that what was measured last counts most. Limits: a prompt is taken to cost the same per
token wherever the token stands; before anything was measured, cautious guesses stand in.
"""

from __future__ import annotations

import threading
from typing import Final

FADE: Final = 0.8
GUESSED_TOKEN_US: Final = 200.0
GUESSED_READ: Final = (200e6, 0.02)
"""Bytes per second, seconds before the first."""


class Pace:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token_us = GUESSED_TOKEN_US
        self._bytes_per_s, self._latency_s = GUESSED_READ
        self._computed = False

    def computed(self, tokens: int, prefill_us: int) -> None:
        if tokens < 16 or prefill_us <= 0:
            return
        with self._lock:
            measured = prefill_us / tokens
            self._token_us = self._token_us * FADE + measured * (1 - FADE) if self._computed else measured
            self._computed = True

    def read(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            if nbytes >= 1 << 20 and seconds > 0:
                self._bytes_per_s = self._bytes_per_s * FADE + nbytes / seconds * (1 - FADE)

    @property
    def token_us(self) -> float:
        return self._token_us

    @property
    def reading(self) -> tuple[float, float]:
        return self._bytes_per_s, self._latency_s
