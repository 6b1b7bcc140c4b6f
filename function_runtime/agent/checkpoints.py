"""What a slot asks of its warm pool: a lease on a prepared checkpoint for as long as a replica lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from function_runtime.errors import SpecError
from function_runtime.protocol import PoolEntry, ReplicaSpec


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: str
    tier: str
    nbytes: int


class Checkpoints(Protocol):
    budget_bytes: int

    async def open(self) -> None: ...
    async def acquire(self, spec: ReplicaSpec) -> Checkpoint: ...
    async def warm(self, manifest_path: str, dtype: str) -> Checkpoint: ...
    def release(self, holder: str) -> None: ...
    def entries(self) -> tuple[PoolEntry, ...]: ...


class NoCheckpoints:
    """A slot without a pool: replicas whose engine has no weights only."""

    budget_bytes = 0

    async def open(self) -> None:
        pass

    async def acquire(self, spec: ReplicaSpec) -> Checkpoint:
        raise SpecError("this slot has no pool of prepared checkpoints")

    async def warm(self, manifest_path: str, dtype: str) -> Checkpoint:
        raise SpecError("this slot has no pool of prepared checkpoints")

    def release(self, holder: str) -> None:
        pass

    def entries(self) -> tuple[PoolEntry, ...]:
        return ()
