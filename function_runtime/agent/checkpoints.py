"""What a slot asks of its warm pool: a lease on a prepared checkpoint for as long as a replica lives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from function_runtime.protocol import LoadTotals, Peer, PoolEntry, ReplicaSpec
from model_loader.load_order import LoadOutcome


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: str
    tier: str
    nbytes: int
    detail: str = ""
    """How it came, in words."""
    arriving: str = ""
    """The name under which it can be mapped until it is complete; empty: it is."""
    landing: asyncio.Task[LoadOutcome] | None = None
    """Ends with the load under way."""


class Checkpoints(Protocol):
    budget_bytes: int

    @property
    def loads(self) -> LoadTotals: ...
    @property
    def on_disk(self) -> tuple[str, ...]:
        """Checkpoints of which a form lies in the disk tier."""
        ...

    @property
    def loader_pid(self) -> int:
        """Of the process that waits for the next load; 0: none does."""
        ...

    def use_store(self, token: str, manifest_path: str) -> None:
        """What a control plane's object store is read with from now on."""
        ...

    async def open(self) -> None: ...
    async def acquire(self, spec: ReplicaSpec) -> Checkpoint:
        """Held for the replica from then on; it may still be arriving."""
        ...

    async def warm(self, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> Checkpoint: ...
    def lend(self, key: str) -> AbstractContextManager[Path]:
        """The file of a ready form, held in the context. Raises `PoolEntryUnknown`."""
        ...

    async def evict(self, key: str) -> int:
        """Lets a prepared form go that nobody uses; gives its bytes."""
        ...

    async def forget(self, identity: str) -> int:
        """Drops what is kept of a checkpoint that nobody uses, here and below; gives the pool's bytes."""
        ...

    def expect(self, chances: Mapping[str, float], holds_s: float) -> None:
        """Takes a forecast: the chance per checkpoint identity of being wanted."""
        ...

    def release(self, holder: str) -> None: ...
    def ready_paths(self) -> list[Path]:
        """Prepared forms that are there now, last used first."""
        ...

    def entries(self) -> tuple[PoolEntry, ...]: ...
    async def close(self) -> None: ...
