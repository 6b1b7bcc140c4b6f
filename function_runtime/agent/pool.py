"""The slot's warm pool as the agent uses it: leases per replica, and preparations as processes bound to the agent.

The pool itself (one file per prepared form, one preparation per key) is `model_loader.pool`. What an earlier agent left
is verified while this one already listens. Limits: a replica holds one lease at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from function_runtime.agent.checkpoints import Checkpoint
from function_runtime.agent.children import Children
from function_runtime.agent.events import log
from function_runtime.agent.loaders import FIRST_WAITS_AFTER_S, Loaders
from function_runtime.errors import LoadError, PoolEntryInUse, PoolEntryUnknown
from function_runtime.protocol import LoadTotals, Peer, PoolEntry, ReplicaSpec
from model_loader.disk_tier import DiskTier
from model_loader.errors import LoaderError
from model_loader.file_memory import huge_share
from model_loader.forms.kept import checkpoints_on, forget_forms
from model_loader.forms.order import FormOrder
from model_loader.forms.sweeping import form_names
from model_loader.load_order import LoadOrder, LoadOutcome
from model_loader.manifest import Manifest
from model_loader.pool import SUFFIX, WarmPool
from model_loader.pool_room import default_budget, is_memory
from model_loader.pool_state import EntryState
from model_loader.ranges.peer import PeerAddress

MOST_TOKENS: Final = 1024
"""Of the object store, of the checkpoints that were asked for last."""
HUGE_AFTER_S: Final = 20.0
"""From a load until a form that got small pages, because huge ones would have taken long while somebody waited, is put
into huge ones: for whoever maps it next, and for what is loaded into its memory some day."""
LEAST_HUGE_BYTES: Final = 64 * 1024 * 1024
_HUGE_ENOUGH: Final = 0.9
_HALF_TYPES: Final = ("float16", "bfloat16")


def dtype_for(spec: ReplicaSpec) -> str:
    """What `auto` means: float32 on CPUs; on GPUs the checkpoint's own, bfloat16 where that is no half type."""
    options = spec.options
    if options.dtype != "auto":
        return options.dtype
    if options.device == "cpu":
        return "float32"
    own = Manifest.load(Path(spec.manifest_path)).config.dtype.lower()
    return own if own in _HALF_TYPES else "bfloat16"


@dataclass(frozen=True, slots=True)
class Tiers:
    """What is below the pool."""

    disk: Path | None = None
    """Directory of the disk tier."""
    disk_bytes: int = 0
    store: str = ""
    """URI of the object store where forms are kept; empty: none."""


class Pool:
    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        children: Children,
        on_change: Callable[[], None],
        tiers: Tiers = Tiers(),
    ) -> None:
        self._loaders = Loaders(children, directory)
        self._tiers = tiers
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._store_tokens: dict[str, str] = {}
        """By manifest: each opens what is of its checkpoint."""
        self.loads = LoadTotals()
        self.on_disk: tuple[str, ...] = ()
        """Checkpoints of which a form lies in the disk tier."""
        self._disk_changed = False
        self._looking: asyncio.Task[None] | None = None
        self._on_change = on_change
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.budget_bytes = budget_bytes or default_budget(directory)
        self._pool = WarmPool(directory, self.budget_bytes, self._run_load)
        self._scan: asyncio.Task[object] | None = None

    @property
    def loader_pid(self) -> int:
        return self._loaders.waiting_pid

    def use_store(self, token: str, manifest_path: str) -> None:
        self._store_tokens.pop(manifest_path, None)
        self._store_tokens[manifest_path] = token
        while len(self._store_tokens) > MOST_TOKENS:
            del self._store_tokens[next(iter(self._store_tokens))]

    async def open(self) -> None:
        self._scan = asyncio.create_task(self._pool.scan())
        self._scan.add_done_callback(lambda _: self._on_change())
        self._look_at_disk()
        self._loaders.wait_soon(FIRST_WAITS_AFTER_S)

    async def acquire(self, spec: ReplicaSpec) -> Checkpoint:
        return await self._acquire(spec.manifest_path, dtype_for(spec), spec.replica_id, spec.peers, may_arrive=True)

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

    async def _acquire(
        self, manifest_path: str, dtype: str, holder: str, peers: Sequence[Peer], *, may_arrive: bool = False
    ) -> Checkpoint:
        if self._scan is not None and not self._scan.done():
            await asyncio.wait([self._scan])
        addresses = tuple(PeerAddress(peer.url, peer.token) for peer in peers)
        lease = await self._pool.acquire(Path(manifest_path), dtype, holder, peers=addresses, may_arrive=may_arrive)
        if lease.tier != "pool":
            self._on_change()
        detail = ""
        if lease.landing is None:
            detail = self._how(lease.key) if lease.outcome is not None else f"was here: {self._how(lease.key)}"
        landing = None
        if lease.landing is not None:
            landing = asyncio.create_task(self._landed(lease.key, lease.landing), name=f"landing {lease.key}")
            landing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Checkpoint(str(lease.path), lease.tier, lease.nbytes, detail, str(lease.arriving or ""), landing)

    def _how(self, key: str) -> str:
        outcome = self._pool.outcome(key)
        return outcome.describe() if outcome is not None else "left by an earlier agent, every chunk verified"

    async def _landed(self, key: str, work: asyncio.Task[None]) -> LoadOutcome:
        await asyncio.shield(work)
        self._on_change()
        return self._pool.outcome(key) or LoadOutcome("make")

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
                load=self._how(entry.key) if entry.state is EntryState.READY else "",
                load_s=outcome.seconds if (outcome := self._pool.outcome(entry.key)) is not None else 0.0,
            )
            for entry in self._pool.entries()
        )

    async def evict(self, key: str) -> int:
        """Lets a form go; gives its bytes. Raises `PoolEntryUnknown` and `PoolEntryInUse`.

        What is only being kept in a lower tier is used by nobody: that ends with it.
        """
        keeping = self._keeping.get(key)
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})
        entry = self._pool.find(key)
        if entry is None or entry.state is EntryState.ABSENT:
            raise PoolEntryUnknown(f"the pool holds nothing under {key!r}")
        if not await self._pool.evict(key):
            users = f"used by {', '.join(entry.holders)}" if entry.holders else f"{entry.state}"
            raise PoolEntryInUse(f"{key} of {entry.identity[:12]} is {users}: end them or try again")
        self._on_change()
        return entry.nbytes

    async def forget(self, identity: str) -> int:
        freed = 0
        for entry in self._pool.entries():
            if entry.identity == identity and await self._pool.evict(entry.key):
                freed += entry.nbytes
        if self._tiers.disk is not None and self._tiers.disk.is_dir():
            tier = DiskTier(self._tiers.disk, self._tiers.disk_bytes)
            await asyncio.to_thread(forget_forms, tier, form_names(identity))
            self._look_at_disk()
        self._on_change()
        return freed

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
        keeping = (*self._keeping.values(), *([self._looking] if self._looking is not None else []))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await self._pool.close()
        await self._loaders.close()

    async def _run_load(self, order: LoadOrder) -> LoadOutcome:
        """One load as a process of its own, so that its memory goes with it and its threads are nobody's."""
        form = self._form_order(order)
        try:
            told = await self._loaders.run(form.to_bytes(), order.progress)
        except (LoaderError, LoadError):
            self.loads = msgspec.structs.replace(self.loads, failures=self.loads.failures + 1)
            raise
        outcome = LoadOutcome(
            origin=str(told["origin"]),
            seconds=float(told["seconds"]),
            read_bytes={str(tier): int(nbytes) for tier, nbytes in told["read_bytes"].items()},
            chunks=int(told["chunks"]),
            bad_chunks=int(told["bad_chunks"]),
            retries=int(told["retries"]),
            tried=tuple(told["tried"]),
        )
        log(f"form={order.out.stem} {outcome.describe()}")
        self.loads = _added(self.loads, outcome)
        self._look_at_disk()  # what a load puts there may cost others their place
        is_kept = outcome.origin == "make" and bool(form.disk or form.store)
        if is_kept or int(told["nbytes"]) >= LEAST_HUGE_BYTES:
            self._begin_keeping(form, outcome.seconds if is_kept else 0.0)
        return outcome

    def _begin_keeping(self, form: FormOrder, make_s: float) -> None:
        key = form.pool_key
        if (earlier := self._keeping.get(key)) is not None:
            earlier.cancel()
        keeping = asyncio.create_task(self._keep(form, make_s), name=f"keep {key}")
        self._keeping[key] = keeping

        def over(_: asyncio.Task[None]) -> None:
            if self._keeping.get(key) is keeping:
                del self._keeping[key]

        keeping.add_done_callback(over)

    async def _keep(self, form: FormOrder, make_s: float) -> None:
        """Beside everything else, since nobody waits for it. `make_s`: 0 where keeping it below is not worth while."""
        holder = f"keep-{secrets.token_hex(6)}"
        try:
            # The load that made it is not over before the pool has taken the form: this waits for that.
            await self._pool.acquire(Path(form.manifest_path), form.dtype, holder)
            if make_s:
                told = await self._loaders.run_beside(["--keep", str(make_s)], form.to_bytes())
                log(f"form={form.pool_key} kept={told['kept']}")
                self._look_at_disk()
            self.release(holder)
            await asyncio.sleep(HUGE_AFTER_S)
            if self._pool.hold(form.pool_key, holder) and await asyncio.to_thread(_is_in_pieces, Path(form.out)):
                told = await self._loaders.run_beside(["--huge"], form.to_bytes())
                log(f"form={form.pool_key} huge={told['huge_bytes']} of={told['whole_bytes']}")
        except (LoaderError, LoadError, OSError) as error:
            log(f"form={form.pool_key} not kept: {error}")
        finally:
            self.release(holder)

    def _look_at_disk(self) -> None:
        """What lies in the disk tier, by a thread of its own and once for however many asked: told when it changed."""
        self._disk_changed = True
        if self._tiers.disk is not None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(self._tiers.disk), name="look at the disk tier")

    async def _look(self, directory: Path) -> None:
        while self._disk_changed:
            self._disk_changed = False
            try:
                found = await asyncio.to_thread(checkpoints_on, directory)
            except (LoaderError, OSError) as error:
                log(f"cannot look at the disk tier: {error}")
                continue
            if found != self.on_disk:
                self.on_disk = found
                self._on_change()

    def _form_order(self, order: LoadOrder) -> FormOrder:
        return FormOrder(
            manifest_path=str(order.manifest_path),
            dtype=order.dtype,
            out=str(order.out),
            peers=order.peers,
            pool_key=order.out.stem,
            recycle=str(order.recycle or ""),
            disk=str(self._tiers.disk or ""),
            disk_bytes=self._tiers.disk_bytes,
            store=self._tiers.store,
            store_token=self._store_tokens.get(str(order.manifest_path), ""),
        )


def _is_in_pieces(form: Path) -> bool:
    return is_memory(form.parent) and huge_share(form) < _HUGE_ENOUGH


def _added(totals: LoadTotals, outcome: LoadOutcome) -> LoadTotals:
    read_bytes = dict(totals.read_bytes)
    for tier, nbytes in outcome.read_bytes.items():
        read_bytes[tier] = read_bytes.get(tier, 0) + nbytes
    return LoadTotals(
        by_origin={**totals.by_origin, outcome.origin: totals.by_origin.get(outcome.origin, 0) + 1},
        read_bytes=read_bytes,
        seconds=totals.seconds + outcome.seconds,
        chunks=totals.chunks + outcome.chunks,
        bad_chunks=totals.bad_chunks + outcome.bad_chunks,
        retries=totals.retries + outcome.retries,
        failures=totals.failures,
    )
