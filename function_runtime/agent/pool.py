"""The slot's warm pool as the agent uses it: leases per replica, and preparations as processes bound to the agent.

The pool itself (one file per prepared form, one preparation per key) is `model_loader.pool`. What an earlier agent left
is verified while this one already listens. Limits: a replica holds one lease at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from function_runtime import process
from function_runtime.agent.checkpoints import Checkpoint
from function_runtime.agent.children import Children
from function_runtime.errors import LoadError, PoolEntryInUse, PoolEntryUnknown
from function_runtime.protocol import Peer, PoolEntry, ReplicaSpec
from model_loader.errors import LoaderError, error_from_code
from model_loader.manifest import Manifest
from model_loader.pool import SUFFIX, LoadOrder, PeerAddress, ProgressCallback, WarmPool
from model_loader.pool_room import default_budget
from model_loader.pool_state import EntryState
from model_loader.progress import Progress

_HALF_TYPES: Final = ("float16", "bfloat16")
_MAX_LINE_BYTES: Final = 1 << 20


def dtype_for(spec: ReplicaSpec) -> str:
    """What `auto` means: float32 on CPUs; on GPUs the checkpoint's own, bfloat16 where that is no half type."""
    options = spec.options
    if options.dtype != "auto":
        return options.dtype
    if options.device == "cpu":
        return "float32"
    own = Manifest.load(Path(spec.manifest_path)).config.dtype.lower()
    return own if own in _HALF_TYPES else "bfloat16"


class Pool:
    def __init__(self, directory: Path, budget_bytes: int, children: Children, on_change: Callable[[], None]) -> None:
        self._children = children
        self._on_change = on_change
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.budget_bytes = budget_bytes or default_budget(directory)
        self._pool = WarmPool(directory, self.budget_bytes, self._run_load)
        self._scan: asyncio.Task[object] | None = None

    async def open(self) -> None:
        self._scan = asyncio.create_task(self._pool.scan())
        self._scan.add_done_callback(lambda _: self._on_change())

    async def acquire(self, spec: ReplicaSpec) -> Checkpoint:
        return await self._acquire(spec.manifest_path, dtype_for(spec), spec.replica_id, spec.peers)

    async def warm(self, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> Checkpoint:
        """Prepares ahead; held by nobody afterwards."""
        holder = f"warm-{secrets.token_hex(6)}"
        try:
            return await self._acquire(manifest_path, "float32" if dtype == "auto" else dtype, holder, peers)
        finally:
            self.release(holder)

    @contextlib.contextmanager
    def lend(self, key: str) -> Iterator[Path]:
        holder = f"peer-{secrets.token_hex(6)}"
        if not self._pool.hold(key, holder):
            raise PoolEntryUnknown(f"the pool holds nothing ready under {key!r}")
        try:
            yield self._pool.directory / f"{key}{SUFFIX}"
        finally:
            self._pool.release(holder)

    async def _acquire(self, manifest_path: str, dtype: str, holder: str, peers: Sequence[Peer]) -> Checkpoint:
        if self._scan is not None and not self._scan.done():
            await asyncio.wait([self._scan])
        addresses = tuple(PeerAddress(peer.url, peer.token) for peer in peers)
        lease = await self._pool.acquire(Path(manifest_path), dtype, holder, peers=addresses)
        if lease.tier != "pool":
            self._on_change()
        return Checkpoint(str(lease.path), lease.tier, lease.nbytes)

    def release(self, holder: str) -> None:
        self._pool.release(holder)
        self._on_change()

    def entries(self) -> tuple[PoolEntry, ...]:
        return tuple(
            PoolEntry(
                key=entry.key,
                identity=entry.identity,
                state=entry.state.value,
                nbytes=entry.nbytes,
                holders=entry.holders,
                last_used_us=entry.last_used_us,
                error=entry.error,
                dtype=entry.dtype,
                reload_s=entry.reload_s,
                chance=entry.chance,
            )
            for entry in self._pool.entries()
        )

    async def evict(self, key: str) -> int:
        """Lets a form go; gives its bytes. Raises `PoolEntryUnknown` and `PoolEntryInUse`."""
        entry = self._pool.find(key)
        if entry is None or entry.state is EntryState.ABSENT:
            raise PoolEntryUnknown(f"the pool holds nothing under {key!r}")
        if not await self._pool.evict(key):
            users = f"used by {', '.join(entry.holders)}" if entry.holders else f"{entry.state}"
            raise PoolEntryInUse(f"{key} of {entry.identity[:12]} is {users}: end them or try again")
        self._on_change()
        return entry.nbytes

    def expect(self, chances: Mapping[str, float], holds_s: float) -> None:
        self._pool.expect(chances, holds_s)

    def ready_paths(self) -> list[Path]:
        ready = [entry for entry in self._pool.entries() if entry.state is EntryState.READY]
        ready.sort(key=lambda entry: -entry.last_used_us)
        return [self._pool.directory / f"{entry.key}{SUFFIX}" for entry in ready]

    async def close(self) -> None:
        if self._scan is not None:
            self._scan.cancel()
            await asyncio.gather(self._scan, return_exceptions=True)
        await self._pool.close()

    async def _run_load(self, order: LoadOrder) -> None:
        """One preparation as a process of its own, so that its memory goes with it and its threads are nobody's."""
        recipe = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "model_loader.recipe", str(order.manifest_path), "--dtype", order.dtype),
            *("--out", str(order.out)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            preexec_fn=partial(process.die_with_parent, os.getpid()),
        )
        self._children.foreign.add(recipe.pid)
        try:
            error = await _follow(recipe, order.progress)
            status = await recipe.wait()
        except BaseException:
            if recipe.returncode is None:
                recipe.kill()
                await recipe.wait()
            raise
        finally:
            self._children.foreign.discard(recipe.pid)
        if error is not None:
            raise error
        if status != 0:
            message = f"the preparation of {order.manifest_path} ended with status {status}; see the agent's log"
            raise LoadError("prepare_failed", message, retry=True)


async def _follow(recipe: asyncio.subprocess.Process, progress: ProgressCallback) -> LoaderError | None:
    """Passes progress on until the output ends; gives the error it reported."""
    if recipe.stdout is None:
        return None
    error: LoaderError | None = None
    async for line in recipe.stdout:
        event = json.loads(line)
        if event["event"] == "progress":
            progress(Progress(event["stage"], event["done_bytes"], event["total_bytes"]))
        elif event["event"] == "error":
            error = error_from_code(event["code"], event["message"])
    return error
