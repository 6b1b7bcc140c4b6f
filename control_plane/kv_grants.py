"""KV memory of replicas that share a device: what each needs, by its model's shape, and what it is granted: when it
starts, and again when others come to the device or leave it (`kv_sharing`).

The rule is `autoscaler.device_sharing`. Who is starting, has its KV from its spec or runs under an agent that cannot
change it keeps what it has. Limits: shapes are read beside the event loop, and until they are, an engine chooses for
itself; GPUs of a function that wants several are divided as if alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from autoscaler.device_sharing import Sharer, divide, divide_anew
from function_runtime.protocol import EngineOptions, ReplicaSpec

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 16
TYPICAL_TOKENS: Final = 1024
"""Of a request's context, until a function's own are known: as the engine assumes."""
CUDA_CONTEXT_BYTES: Final = 1 << 30
"""Context, kernels and activations of a process on a GPU, beside weights and KV."""
CPU_PROCESS_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class KvShape:
    values_per_token: int
    """Keys and values of all layers."""
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica on the device: what it was started as."""

    spec: ReplicaSpec
    weights_bytes: int
    weight: float = 1.0
    tokens: float = 0.0
    """Of a request's context as predicted; 0: typical."""
    has_bytes: int = 0
    """KV memory it has now; 0: as its spec says."""
    yields: bool = False
    """Its KV can be made less or more while it runs."""

    @property
    def kv_bytes(self) -> int:
        return self.has_bytes or self.spec.options.kv_bytes


class KvGrants:
    def __init__(self) -> None:
        self._shapes: dict[str, KvShape] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self.locate: Callable[[str], Path] = Path
        """Where a manifest lies on this machine; called in a thread."""

    async def close(self) -> None:
        for task in list(self._reading.values()):
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    def learn(self, identity: str, manifest_path: str) -> None:
        """Reads a checkpoint's shape, once, in a thread."""
        if identity and manifest_path and identity not in self._shapes and identity not in self._reading:
            task = asyncio.get_running_loop().create_task(self._read(identity, manifest_path))
            self._reading[identity] = task
            task.add_done_callback(lambda _: self._reading.pop(identity, None))

    async def _read(self, identity: str, manifest_path: str) -> None:
        try:
            self._shapes[identity] = await asyncio.to_thread(lambda: _shape_of(self.locate(manifest_path)))
        except Exception as error:
            logger.warning("event=kv_shape_unknown identity=%s error=%r", identity[:12], error)

    def needs(self, spec: ReplicaSpec, tokens: float = 0.0) -> tuple[int, int] | None:
        """(least, wanted) bytes of KV; None: not known. The least is two requests of the longest context, as the engine
        has it: with one alone a second would wait for the whole answer. On CPUs, where memory is taken as tokens come,
        two typical ones."""
        shape = self._shapes.get(spec.identity)
        if shape is None or spec.options.engine != "native":
            return None
        options = spec.options
        context = min(options.max_context_tokens or shape.max_context_tokens, shape.max_context_tokens)
        block_bytes = shape.values_per_token * _value_bytes(options) * BLOCK_TOKENS
        usual = min(context, int(tokens) or TYPICAL_TOKENS)
        longest = usual if options.device == "cpu" else context
        least = 2 * (-(-longest // BLOCK_TOKENS) + 1) * block_bytes
        return least, max(options.max_requests * (usual // BLOCK_TOKENS + 1) * block_bytes, least)

    def grant(self, new: Holder, others: Sequence[Holder], total_bytes: int) -> int:
        """KV bytes for a replica that starts where these are; 0: the engine chooses."""
        needs = self.needs(new.spec, new.tokens)
        on_gpu = new.spec.options.device != "cpu"
        if new.spec.options.kv_bytes or needs is None or not total_bytes or not (others or on_gpu):
            return new.spec.options.kv_bytes
        grants = divide(total_bytes, [_sharer(new, *needs), *map(self._sharing, others)])
        return needs[0] if grants is None else grants[0].kv_bytes

    def shares(self, holders: Sequence[Holder], total_bytes: int) -> dict[str, int]:
        """KV bytes for each of those on a device whose KV can be changed, by replica. Nothing where nobody can tell."""
        sharers = [self._sharing(holder) for holder in holders]
        has = [
            holder.kv_bytes if holder.yields else sharer.least_bytes
            for holder, sharer in zip(holders, sharers, strict=True)
        ]
        grants = divide_anew(total_bytes, sharers, has) or ()
        return {
            grant.name: grant.kv_bytes
            for holder, grant in zip(holders, grants, strict=False)
            if holder.yields and self.least_bytes(holder) is not None
        }

    def _sharing(self, holder: Holder) -> Sharer:
        """Of one that is there: between its least and its need, or exactly what it has."""
        needs = self.needs(holder.spec, holder.tokens)
        if needs is not None and holder.yields:
            return _sharer(holder, *needs)
        has = holder.kv_bytes or (needs[1] if needs is not None else 0)
        return _sharer(holder, has, has)

    def least_bytes(self, holder: Holder) -> int | None:
        """To what its KV can be cut down; None: it cannot, or that is not known."""
        needs = self.needs(holder.spec, holder.tokens) if holder.yields else None
        return None if needs is None else min(needs[0], holder.kv_bytes)

    def device_bytes(self, new: Holder) -> int:
        """What it needs on its device at least; 0 where that is not known."""
        needs = self.needs(new.spec, new.tokens)
        if needs is None:
            return new.kv_bytes
        return fixed_bytes(new) + (new.kv_bytes or needs[0])


def fixed_bytes(holder: Holder) -> int:
    """Beside KV. On CPUs the weights are the pool's."""
    if holder.spec.options.device == "cpu":
        return CPU_PROCESS_BYTES
    return holder.weights_bytes + CUDA_CONTEXT_BYTES


def _sharer(holder: Holder, least: int, wanted: int) -> Sharer:
    return Sharer(holder.spec.replica_id, fixed_bytes(holder), least, wanted, holder.weight)


def _value_bytes(options: EngineOptions) -> int:
    return 4 if options.dtype == "float32" or (options.dtype == "auto" and options.device == "cpu") else 2


def _shape_of(path: Path) -> KvShape:
    from model_loader.manifest import Manifest

    config = Manifest.load(path).config
    return KvShape(2 * config.num_layers * config.num_kv_heads * config.head_dim, config.max_position)
