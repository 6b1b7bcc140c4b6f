"""Durable KV as a replica's loop sees it: reads begun and answered later, copies handed over, and what becomes of them.

Answers come through the loop's inbox. Limits: the face only; `function_runtime.kv.service` is what stands behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from function_runtime.engine_like import RestoredKv, SealedRangeLike
from function_runtime.held import HeldRequest
from function_runtime.protocol import KvChunk, KvKnown, StoreTotals

if TYPE_CHECKING:
    from function_runtime.kv.arrival import Arrival  # with numpy, which a worker that has no KV does without


@dataclass(frozen=True, slots=True)
class KvRead:
    """What came back from the store for a request: a gapless, verified beginning of each choice, or nothing."""

    restored: RestoredKv | Arrival | None
    duration_us: int
    detail: str = ""


class KvService(Protocol):
    """Durable KV as the loop sees it; answers come through the inbox."""

    def store_totals(self) -> StoreTotals: ...
    def begin_read(self, held: HeldRequest) -> None: ...
    def may_continue(self, held: HeldRequest, cached_tokens: int) -> bool:
        """Whether stored prefixes may spare a part of its prefill beyond what is cached here."""
        ...

    def begin_ask(self, held: HeldRequest) -> None:
        """Ask for them; a read or nothing comes of it, in time."""
        ...

    def hear(self, known: KvKnown) -> None: ...
    def distrust(self, chunk: KvChunk) -> None:
        """Its pack is not named any more."""
        ...

    def has_already(self, held: HeldRequest, sealed: SealedRangeLike) -> bool:
        """Whether these positions need no copy: they are stored, and named for this request, or about to be."""
        ...

    def write(self, held: HeldRequest, sealed: SealedRangeLike, data: memoryview) -> None: ...
    def flush(self, within_s: float) -> None:
        """Blocks until everything queued is stored (and its `KvSealed` posted), or the time is over."""
        ...

    def finished(self, held: HeldRequest) -> None:
        """The request is about to end: decide what of its KV is kept."""
        ...

    def release(self, held: HeldRequest) -> None:
        """The request is settled: its chunks may go."""
        ...

    def hand_over(self, held: HeldRequest) -> None:
        """The request goes on elsewhere: its stored chunks stay, what is still queued for it is dropped."""
        ...

    def close(self) -> None: ...
