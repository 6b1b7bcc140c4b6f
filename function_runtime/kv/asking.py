"""Asking the index, through the gateway, which stored chunks continue a prompt; an answer comes in time or not at all.

Limits: after `SILENCES` questions without an answer nobody is asked for `PAUSE_S`, so that an index that is away costs
few requests their moment.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from function_runtime.held import HeldRequest
from function_runtime.protocol import KvChunk, KvKnown

ASK_WITHIN_S: Final = 0.25
SILENCES: Final = 3
PAUSE_S: Final = 10.0


class _Question:
    __slots__ = ("answered", "chunks")

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.chunks: tuple[KvChunk, ...] = ()


class Asking:
    """`ask` and `hear` are the loop's thread's; `wait` is a helper's."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Question] = {}
        self._silent = 0
        self._again_s = 0.0
        self.asked = 0
        self.late = 0

    @property
    def is_worthwhile(self) -> bool:
        return time.monotonic() >= self._again_s

    def ask(self, held: HeldRequest) -> _Question:
        question = self._open[held.id, held.epoch] = _Question()
        self.asked += 1
        return question

    def hear(self, known: KvKnown) -> None:
        """Too late or not asked: dropped."""
        question = self._open.get((known.request_id, known.epoch))
        if question is not None:
            question.chunks = known.chunks
            question.answered.set()

    def wait(self, held: HeldRequest, question: _Question) -> tuple[KvChunk, ...]:
        answered = question.answered.wait(ASK_WITHIN_S)
        self._open.pop((held.id, held.epoch), None)
        if answered:
            self._silent = 0
            return question.chunks
        self.late += 1
        self._silent += 1
        if self._silent >= SILENCES:
            self._silent = 0
            self._again_s = time.monotonic() + PAUSE_S
        return ()
