"""The warm pool: prepared checkpoints of one slot, as files in shared memory, kept while the budget allows.

An entry is keyed by checkpoint identity, dtype and recipe; it is prepared once however many ask, held by whoever uses
it, and evicted where its loss costs least (`eviction`), never while held. What an earlier agent left is found by `scan`
and used only after its checksums agree. The budget is in bytes; beyond it the memory that the machine or the control
group still has is respected, since a file on tmpfs is memory. Limits: one event loop, one pool per directory; a failed
preparation is not retried until somebody asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from model_loader.errors import FormatError, LoaderError, OutOfSpace, from_os_error
from model_loader.eviction import Candidate, first_to_go
from model_loader.llama_layout import ITEM_BYTES, prepared_bytes, recipe_name
from model_loader.load_order import LoadOrder, LoadOutcome, ProgressCallback, RunLoad
from model_loader.manifest import Manifest, SourceFile
from model_loader.pool_room import Room
from model_loader.pool_state import EntryState, transition
from model_loader.prepared import PreparedFile
from model_loader.progress import LEFT, Progress
from model_loader.ranges.peer import PeerAddress

SUFFIX: Final = ".prepared"
PRIOR_BYTES_PER_S: Final = 1e9
"""What a load is taken to reach until this pool has seen one of the entry."""
_COMPLETE: Final = re.compile(r"[0-9a-f]{16}\.prepared")
_HALF_WRITTEN: Final = re.compile(r"\.[0-9a-f]{16}\.prepared\..+\.tmp")


@dataclass(frozen=True, slots=True)
class PoolLease:
    path: Path
    key: str
    tier: str
    """pool: it was there; else where most of the bytes came from: disk | peer | store | hub."""
    seconds: float
    """What the caller waited."""
    nbytes: int
    outcome: LoadOutcome | None = None
    """Of the load that this lease waited for."""
    arriving: Path | None = None
    """The name under which it can be mapped until it is complete: it is still on its way, its tier not yet known."""
    landing: asyncio.Task[None] | None = None
    """Ends when it is complete, with what kept it otherwise."""


@dataclass(frozen=True, slots=True)
class PoolEntryInfo:
    key: str
    identity: str
    dtype: str
    state: EntryState
    nbytes: int
    holders: tuple[str, ...]
    last_used_us: int
    error: str
    reload_s: float = 0.0
    """What its last load took, or would take by the prior."""
    chance: float | None = None
    """Of being wanted, by the forecast that holds now."""


@dataclass(slots=True)
class _Entry:
    key: str
    identity: str
    dtype: str
    path: Path
    state: EntryState = EntryState.ABSENT
    nbytes: int = 0
    """Of the file; while it is loading, what is reserved for it."""
    inode: int = 0
    holders: set[str] = field(default_factory=set)
    last_used_us: int = 0
    error: str = ""
    load_s: float = 0.0
    """What its last load took; 0: none was seen."""
    outcome: LoadOutcome | None = None
    work: asyncio.Task[None] | None = None
    mappable: asyncio.Future[None] | None = None
    """Of the load under way: done when there is something to map."""
    arriving: Path | None = None
    listeners: list[ProgressCallback] = field(default_factory=list)

    def become(self, state: EntryState) -> None:
        self.state = transition(self.state, state)

    @property
    def reload_s(self) -> float:
        return self.load_s or self.nbytes / PRIOR_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Forecast:
    """How likely each checkpoint identity is to be wanted, as long as it holds."""

    chances: Mapping[str, float]
    until_s: float
    """On the monotonic clock."""


def pool_key(identity: str, dtype: str) -> str:
    digest = hashlib.sha256()
    for part in (identity, dtype, recipe_name(dtype)):
        digest.update(len(part).to_bytes(4, "big") + part.encode())
    return digest.hexdigest()[:16]


class WarmPool:
    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        run_load: RunLoad,
        room: Room | None = None,
    ) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._run_load = run_load
        self._forecast = Forecast({}, 0.0)
        self._entries: dict[str, _Entry] = {}
        self._manifests: dict[Path, tuple[SourceFile, Manifest]] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, str(directory)) from error
        self._room = room or Room(directory, budget_bytes)

    @property
    def used_bytes(self) -> int:
        """What the entries take, what is reserved for those that load included."""
        return sum(entry.nbytes for entry in self._entries.values())

    def entries(self) -> list[PoolEntryInfo]:
        return [
            PoolEntryInfo(
                e.key,
                e.identity,
                e.dtype,
                e.state,
                e.nbytes,
                tuple(sorted(e.holders)),
                e.last_used_us,
                e.error,
                e.reload_s,
                self._chance(e),
            )
            for e in self._entries.values()
        ]

    def expect(self, chances: Mapping[str, float], holds_s: float) -> None:
        """Takes a forecast: the chance per checkpoint identity of being wanted. A checkpoint it does not name has
        none. It replaces the one before, and counts for `holds_s`."""
        if not all(0.0 <= chance <= 1.0 for chance in chances.values()):
            raise FormatError("a chance in a forecast is a number from 0 to 1")
        self._forecast = Forecast(dict(chances), time.monotonic() + holds_s)

    async def acquire(
        self,
        manifest_path: Path,
        dtype: str,
        holder: str,
        on_progress: ProgressCallback | None = None,
        peers: tuple[PeerAddress, ...] = (),
        *,
        may_arrive: bool = False,
    ) -> PoolLease:
        """The prepared form, held for `holder` until `release`. Raises what the preparation raised; then nothing is
        held. `peers` are asked where it is not here. `may_arrive`: the lease is given as soon as the form can be
        mapped; it is held then even if the rest never comes."""
        started_ns = time.monotonic_ns()
        if dtype not in ITEM_BYTES:
            raise FormatError(f"dtype {dtype!r} is not known; choose {', '.join(ITEM_BYTES)}")
        manifest = await self._manifest(manifest_path)
        entry = self._entry(manifest.identity, dtype)
        entry.holders.add(holder)
        if on_progress is not None:
            entry.listeners.append(on_progress)
        try:
            outcome = None
            if not await self._is_ready(entry):
                work = await self._begin_load(entry, manifest, manifest_path, dtype, peers)
                while may_arrive and entry.mappable is not None and not work.done():
                    await asyncio.wait([work, entry.mappable], return_when=asyncio.FIRST_COMPLETED)
                    if not work.done() and entry.arriving is not None:
                        return self._lease(entry, started_ns, "arriving", arriving=entry.arriving, landing=work)
                await asyncio.shield(work)
                outcome = entry.outcome
        except BaseException:
            self._drop_holder(entry, holder)
            raise
        finally:
            if on_progress is not None:
                entry.listeners.remove(on_progress)
        return self._lease(entry, started_ns, "pool" if outcome is None else outcome.tier, outcome=outcome)

    def _lease(
        self,
        entry: _Entry,
        started_ns: int,
        tier: str,
        outcome: LoadOutcome | None = None,
        arriving: Path | None = None,
        landing: asyncio.Task[None] | None = None,
    ) -> PoolLease:
        entry.last_used_us = time.time_ns() // 1000
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        return PoolLease(entry.path, entry.key, tier, seconds, entry.nbytes, outcome, arriving, landing)

    def outcome(self, key: str) -> LoadOutcome | None:
        """Of the entry's last load."""
        entry = self._entries.get(key)
        return entry.outcome if entry is not None else None

    def release(self, holder: str) -> None:
        """`holder` uses nothing any more."""
        now_us = time.time_ns() // 1000
        for entry in list(self._entries.values()):
            if holder in entry.holders:
                entry.last_used_us = now_us
                self._drop_holder(entry, holder)

    def hold(self, key: str, holder: str) -> bool:
        """Marks an entry as used by a replica that outlived an earlier agent; False if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.state is not EntryState.READY:
            return False
        entry.holders.add(holder)
        return True

    async def scan(self) -> list[PoolEntryInfo]:
        """Takes over what an earlier agent left: complete files whose checksums agree. Those that do not, and
        half-written ones, are removed; files of other names are not the pool's and stay. A budget that has become
        smaller is kept by evicting what costs least to lose."""
        found = await asyncio.to_thread(lambda: sorted(self.directory.iterdir()))
        for path in found:
            if _HALF_WRITTEN.fullmatch(path.name) and not self._is_being_written(path):
                _remove(path)
            if not _COMPLETE.fullmatch(path.name) or path.stem in self._entries:
                continue
            entry = _Entry(path.stem, "", "", path)
            self._entries[entry.key] = entry
            entry.become(EntryState.LOADING)
            entry.work = asyncio.create_task(self._adopt(entry))
            try:
                await entry.work
            except LoaderError:
                continue
            finally:
                entry.work = None
        while self.used_bytes > self.budget_bytes and (victim := self._victim()) is not None:
            await self._remove(victim, EntryState.EVICTING)
        return self.entries()

    def find(self, key: str) -> PoolEntryInfo | None:
        return next((entry for entry in self.entries() if entry.key == key), None)

    async def evict(self, key: str) -> bool:
        """Removes an entry nobody holds; False if there is none such."""
        entry = self._entries.get(key)
        if entry is None or entry.holders or entry.state is not EntryState.READY:
            return False
        await self._remove(entry, EntryState.EVICTING)
        return True

    async def close(self) -> None:
        """Stops preparations. The files stay for the next agent."""
        tasks = [entry.work for entry in self._entries.values() if entry.work is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one entry ----------------------------------------------------------------------------------------------

    async def _manifest(self, path: Path) -> Manifest:
        """Parsed once per version of the file: a start from the pool has no milliseconds to spare."""
        found = SourceFile.of(path)
        known = self._manifests.get(path)
        if known is None or known[0] != found:
            known = (found, await asyncio.to_thread(Manifest.load, path))
            self._manifests[path] = known
        return known[1]

    def _entry(self, identity: str, dtype: str) -> _Entry:
        key = pool_key(identity, dtype)
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(key, identity, dtype, self.directory / f"{key}{SUFFIX}")
            self._entries[key] = entry
        return entry

    async def _is_ready(self, entry: _Entry) -> bool:
        """Whether it can be used now. A file that vanished or was replaced under the pool is not trusted."""
        if entry.state is EntryState.LOADING and not entry.identity and entry.work is not None:
            await asyncio.wait([entry.work])
        if entry.state is not EntryState.READY:
            return False
        try:
            found = entry.path.stat()
        except OSError:
            found = None
        if found is not None and (found.st_size, found.st_ino) == (entry.nbytes, entry.inode):
            return True
        entry.error = "its file was removed or replaced by somebody else"
        await self._remove(entry, EntryState.QUARANTINED)
        return False

    async def _begin_load(
        self, entry: _Entry, manifest: Manifest, manifest_path: Path, dtype: str, peers: tuple[PeerAddress, ...]
    ) -> asyncio.Task[None]:
        """Joins the preparation under way, or begins one. It goes on even if whoever asked is cancelled."""
        while entry.state in (EntryState.EVICTING, EntryState.QUARANTINED) and entry.work is not None:
            await asyncio.wait([entry.work])
        if entry.work is None:
            entry.identity, entry.dtype, entry.error = manifest.identity, dtype, ""
            entry.become(EntryState.LOADING)
            entry.arriving, entry.mappable = None, asyncio.get_running_loop().create_future()
            order = LoadOrder(manifest_path, dtype, entry.path, partial(self._tell, entry), peers)
            entry.work = asyncio.create_task(self._prepare(entry, prepared_bytes(manifest.config, dtype), order))
            entry.work.add_done_callback(_note_outcome)
        return entry.work

    async def _prepare(self, entry: _Entry, needed_bytes: int, order: LoadOrder) -> None:
        try:
            recycle = await self._make_room(entry, needed_bytes)
            begin_s = time.monotonic()
            entry.outcome = await self._run_load(replace(order, recycle=recycle))
            if recycle is not None:
                _remove(recycle)
            await self._accept(entry, verify=False)
            entry.load_s = time.monotonic() - begin_s
        except BaseException as error:
            await self._give_up(entry, error)
            raise
        finally:
            entry.work = None

    async def _adopt(self, entry: _Entry) -> None:
        try:
            entry.nbytes = (await asyncio.to_thread(entry.path.stat)).st_size
            await self._accept(entry, verify=True)
        except (LoaderError, OSError) as error:
            await self._give_up(entry, error)

    async def _accept(self, entry: _Entry, *, verify: bool) -> None:
        """The file under the final name becomes the entry, if it is what the key promises."""
        prepared = await asyncio.to_thread(PreparedFile.open, entry.path, verify)
        expected = pool_key(prepared.identity, prepared.dtype)
        if expected != entry.key or prepared.recipe != recipe_name(prepared.dtype):
            raise FormatError(
                f"{entry.path} holds {prepared.identity[:12]} as {prepared.recipe}, not what its name says"
            )
        found = entry.path.stat()
        entry.identity, entry.dtype = prepared.identity, prepared.dtype
        entry.nbytes, entry.inode = found.st_size, found.st_ino
        entry.last_used_us = time.time_ns() // 1000
        entry.become(EntryState.READY)

    async def _give_up(self, entry: _Entry, error: BaseException) -> None:
        entry.error = str(error) or type(error).__name__
        entry.become(EntryState.QUARANTINED)
        entry.nbytes = 0
        for path in [entry.path, *self.directory.glob(f".{entry.path.name}.*.tmp")]:
            _remove(path)
        entry.become(EntryState.ABSENT)
        self._forget_if_unused(entry)

    async def _remove(self, entry: _Entry, by_way_of: EntryState, keep_as: Path | None = None) -> None:
        entry.become(by_way_of)
        move = partial(os.replace, entry.path, keep_as) if keep_as is not None else partial(_remove, entry.path)
        entry.work = asyncio.create_task(asyncio.to_thread(move))
        try:
            await asyncio.shield(entry.work)
        finally:
            entry.work = None
            entry.nbytes = 0
            entry.become(EntryState.ABSENT)
            self._forget_if_unused(entry)

    async def _make_room(self, entry: _Entry, needed_bytes: int) -> Path | None:
        """Reserves the bytes for an entry, evicting what nobody holds, what costs least to lose first. The last file
        that had to go is kept for its memory, under a name of this entry's: taking new pages costs as much as filling
        them."""
        if needed_bytes > self.budget_bytes:
            raise OutOfSpace(
                f"the prepared checkpoint needs {needed_bytes} bytes, the pool may hold {self.budget_bytes}: raise its "
                "budget"
            )
        entry.nbytes = needed_bytes
        recycle, recycled_bytes = entry.path.with_name(f".{entry.path.name}.recycled.tmp"), 0
        while True:
            loads = [e for e in self._entries.values() if e is not entry and e.state is EntryState.LOADING and e.dtype]
            short = self._room.shortage(
                needed_bytes,
                self.used_bytes - needed_bytes,
                [(e.path, e.nbytes) for e in loads],
                min(needed_bytes, recycled_bytes),
            )
            if not short:
                return recycle if recycled_bytes else None
            victim = self._victim()
            if victim is None:
                raise OutOfSpace(f"the pool cannot take {needed_bytes} bytes: {short}, and nothing in it is unused")
            recycled_bytes = victim.nbytes
            await self._remove(victim, EntryState.EVICTING, recycle)

    def _victim(self) -> _Entry | None:
        now_us = time.time_ns() // 1000
        unheld = [e for e in self._entries.values() if e.state is EntryState.READY and not e.holders]
        chosen = first_to_go(
            [
                Candidate(e.key, e.nbytes, e.reload_s, max(0.0, (now_us - e.last_used_us) / 1e6), self._chance(e))
                for e in unheld
            ]
        )
        return self._entries[chosen.key] if chosen is not None else None

    def _chance(self, entry: _Entry) -> float | None:
        if time.monotonic() >= self._forecast.until_s:
            return None
        return self._forecast.chances.get(entry.identity)

    def _is_being_written(self, path: Path) -> bool:
        key = path.name[1:17]
        return key in self._entries and self._entries[key].state is EntryState.LOADING

    def _tell(self, entry: _Entry, progress: Progress) -> None:
        if progress.path:
            # Again where one way failed and the next begins: the newest name counts.
            entry.arriving = Path(progress.path)
            if entry.mappable is not None and not entry.mappable.done():
                entry.mappable.set_result(None)
        elif progress.stage == LEFT and entry.mappable is not None and entry.mappable.done():
            # Whoever comes now would be given the name of what is gone.
            entry.arriving, entry.mappable = None, asyncio.get_running_loop().create_future()
        for listener in list(entry.listeners):
            listener(progress)

    def _drop_holder(self, entry: _Entry, holder: str) -> None:
        entry.holders.discard(holder)
        self._forget_if_unused(entry)

    def _forget_if_unused(self, entry: _Entry) -> None:
        """An absent entry is kept while somebody waits for it, and for its error's sake until the next scan."""
        if entry.state is EntryState.ABSENT and not entry.holders and not entry.error:
            self._entries.pop(entry.key, None)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _note_outcome(task: asyncio.Task[None]) -> None:
    """Whoever waits is told; if nobody is left, the outcome is not an unhandled exception."""
    if not task.cancelled():
        task.exception()
