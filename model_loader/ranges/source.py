"""Where the bytes of files can be had: one protocol for this machine's disk, another slot, an object store, a hub.

A source gives bytes, it does not vouch for them: whoever reads verifies. Everything is synchronous; callers use
threads. Limits: a file's size must not change while it is read; if it does, its chunks are no longer what they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Digest = Callable[[memoryview], object]
"""Is given bytes in their order, each piece while it is in the processor's cache."""


class Tier(StrEnum):
    """How far away the bytes are, nearest first."""

    DISK = "disk"
    PEER = "peer"
    STORE = "store"
    HUB = "hub"


class RangeSource(Protocol):
    """Raises SourceMissing (no such file), SourceUnavailable (try again), IntegrityError (it is shorter)."""

    @property
    def name(self) -> str:
        """For people: which disk, which slot, which bucket."""
        ...

    @property
    def tier(self) -> Tier: ...

    @property
    def range_bytes(self) -> int:
        """What one request should ask for at most."""
        ...

    @property
    def threads(self) -> int:
        """How many requests at once are worth while."""
        ...

    def size(self, file: str) -> int: ...

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        """Fills `view` from its start with bytes of `file` from `offset` on; at least one byte, and as many as come in
        one go: less than `view` holds only where that is faster. Gives their number. Once it has returned or raised,
        nothing writes to `view` any more."""
        ...


@dataclass(slots=True)
class TierTotals:
    nbytes: int = 0
    seconds: float = 0.0
    """Summed over threads: of asking and waiting, without checking."""


@dataclass(slots=True)
class ReadStats:
    """What was read, by tier. `seconds` over `nbytes` is what one thread of that tier reaches."""

    tiers: dict[Tier, TierTotals] = field(default_factory=dict)
    chunks: int = 0
    """Verified."""
    bad_chunks: int = 0
    """Came with another digest; fetched again or refused."""
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def moved(self, tier: Tier, nbytes: int, seconds: float) -> None:
        with self._lock:
            totals = self.tiers.setdefault(tier, TierTotals())
            totals.nbytes += nbytes
            totals.seconds += seconds

    def verified(self, chunks: int) -> None:
        with self._lock:
            self.chunks += chunks

    def found_bad(self) -> None:
        with self._lock:
            self.bad_chunks += 1

    def retried(self) -> None:
        with self._lock:
            self.retries += 1

    def afar(self) -> tuple[int, float]:
        """Bytes that came over a network, and seconds that threads waited for them."""
        with self._lock:
            far = [totals for tier, totals in self.tiers.items() if tier is not Tier.DISK]
            return sum(t.nbytes for t in far), sum(t.seconds for t in far)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(totals.nbytes for totals in self.tiers.values())

    def by_tier(self) -> Mapping[str, int]:
        with self._lock:
            return {tier.value: totals.nbytes for tier, totals in self.tiers.items()}
