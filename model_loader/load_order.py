"""What a pool asks of whoever loads for it, and what came of it. Limits: values only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from model_loader.progress import Progress
from model_loader.ranges.peer import PeerAddress

ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What the pool wants made: the prepared form of a checkpoint at `out`, which appears whole or not at all."""

    manifest_path: Path
    dtype: str
    out: Path
    progress: ProgressCallback
    peers: tuple[PeerAddress, ...] = ()
    """Pools that may have it already."""
    recycle: Path | None = None
    """A file nobody uses any more, whose memory may be written over instead of taking new memory; gone afterwards."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a form came to be in the pool, for people and for choosing better."""

    origin: str
    """make: by the recipe from the checkpoint; disk | peer | store: copied from where it was."""
    seconds: float = 0.0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    """By tier."""
    chunks: int = 0
    """Verified."""
    bad_chunks: int = 0
    retries: int = 0
    tried: tuple[str, ...] = ()
    """Ways that failed before, each with its reason."""

    @property
    def tier(self) -> str:
        """Where most of the bytes came from."""
        return max(self.read_bytes, key=lambda tier: self.read_bytes[tier], default="disk")

    def describe(self) -> str:
        """One line."""
        nbytes = sum(self.read_bytes.values())
        rate = f", {nbytes / self.seconds / 1e6:.0f} MB/s" if self.seconds and nbytes else ""
        words = [f"{'made' if self.origin == 'make' else f'copied from {self.origin}'}: {nbytes} bytes read{rate}"]
        words += [
            f"{self.chunks} chunks verified" + (f", {self.bad_chunks} bad and fetched again" if self.bad_chunks else "")
        ]
        words += [f"{self.retries} ranges asked again"] if self.retries else []
        words += [f"{way} (left)" for way in self.tried]
        return "; ".join(words)


RunLoad = Callable[[LoadOrder], Awaitable[LoadOutcome]]
