"""Writes KV behind the engine: copies are queued, a thread encodes them and stores them in packs.

A pack is written when enough is queued, when the oldest entry has lingered, or on `flush`; it holds chunks of one
scope. The queue is bounded in bytes, the upload in bytes per second (not while a flush or the end waits for it). A
store that fails stops writing behind, never the engine: what is queued then is dropped until a pause has passed and one
pack goes through again; either turn is told once. Limits: best effort: KV that is not there is computed again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from function_runtime.errors import KvError
from function_runtime.kv.bandwidth import Bandwidth
from function_runtime.kv.chunk import ChunkHead, EncodedChunk, encode_chunk
from function_runtime.kv.pack import MAX_CHUNKS, build_pack
from function_runtime.kv.sealing import CLEAR, ChunkSeal
from function_runtime.protocol import KvChunk
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore

LINGER_S: Final = 0.1
PACK_BYTES: Final = 16 * 1024 * 1024
MAX_PACK_BYTES: Final = 64 * 1024 * 1024
MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""A store that failed is tried again after a pause that doubles."""


@dataclass(frozen=True)
class Pending:
    """A copy of KV to be stored, and for whom."""

    owner: Hashable
    choice: int
    head: ChunkHead
    data: memoryview
    is_wanted: Callable[[], bool]
    """Asked before it is stored; what nobody wants any more is dropped, and its owner told without a reason."""
    seal: ChunkSeal = CLEAR
    """What the scope's chunks are sealed with at rest; the same for everything of a scope."""
    place: str = ""
    """Folder of the scope's packs."""
    queued_s: float = field(default_factory=time.monotonic)

    @property
    def kind(self) -> tuple[str, str]:
        return self.head.scope, self.head.form


@dataclass(slots=True)
class WriterCounts:
    packs: int = 0
    chunks: int = 0
    nbytes: int = 0
    dropped_chunks: int = 0
    dropped_bytes: int = 0
    failures: int = 0
    """Writes that the store refused."""
    cpu_us: int = 0
    """CPU time of the writer's thread: quantising, hashing, checksums, handing bytes to the store."""
    unfit_chunks: int = 0
    """Chunks whose values the form they were to be kept in cannot hold."""


Told: TypeAlias = Sequence[tuple[Hashable, tuple[KvChunk, ...]]]
"""(owner, chunks of it that are stored now) each; no chunks where they were dropped."""


class KvWriter:
    """`tell(told, dropped)` is called from the writer's thread (`put` may call it from its caller's), once for all of a
    pack, or with why something was dropped: nobody hears of a part of a pack and takes it for the whole. `durable`:
    whether a pack must survive a power cut. The store is opened at the first write."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        tell: Callable[[Told, str], None],
        *,
        durable: bool = False,
        linger_s: float = LINGER_S,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._tell = tell
        self._durable = durable
        self._linger_s = linger_s
        self._clock = clock
        self._bandwidth = Bandwidth(bytes_per_s, clock())
        self._condition = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._hurry = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stopped = ""
        """Why nothing is written now; empty while the store works."""
        self._pause_s = FIRST_PAUSE_S
        self._again_s = 0.0
        self.counts = WriterCounts()

    @property
    def stopped(self) -> str:
        return self._stopped

    def put(self, pending: Pending) -> None:
        nbytes = len(pending.data)
        with self._condition:
            refused = self._refusal(nbytes)
            if not refused:
                self._queue.append(pending)
                self._queued_bytes += nbytes
                self._condition.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
                    self._thread.start()
                return
            self._drop(1, nbytes)
        self._tell([(pending.owner, ())], refused)

    def wait_for_room(self, nbytes: int, within_s: float) -> bool:
        """Whether the queue takes so much by then; what is written behind requests in flight goes before."""
        with self._condition:
            return self._condition.wait_for(
                lambda: self._closed or bool(self._stopped) or self._queued_bytes + nbytes <= MAX_QUEUED_BYTES // 2,
                within_s,
            )

    def _refusal(self, nbytes: int) -> str:
        if self._closed:
            return "this replica is ending"
        if self._stopped and self._clock() < self._again_s:
            return f"write-behind is stopped: {self._stopped}"
        if self._queued_bytes + nbytes > MAX_QUEUED_BYTES:
            return f"the queue of KV to be stored is full ({self._queued_bytes} bytes)"
        return ""

    def _drop(self, chunks: int, nbytes: int) -> None:
        self.counts.dropped_chunks += chunks
        self.counts.dropped_bytes += nbytes

    def flush(self, within_s: float) -> bool:
        """Waits until everything queued is stored or dropped; False if the time was over first."""
        with self._condition:
            self._hurry = True
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: not self._queue and not self._writing, within_s)
            self._hurry = False
            return done

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        store: ObjectStore | None = None
        while batch := self._next_batch():
            nbytes = sum(len(pending.data) for pending in batch)
            began_ns = time.thread_time_ns()
            try:
                store = store or self._open_store()
                written = self._store(store, batch)
                self._went_well(written)
            except Exception as error:
                # NOTE: whatever it was, this thread must live: nobody else would ever write, or tell who waits.
                self._failed(batch, nbytes, error)
            finally:
                self.counts.cpu_us += (time.thread_time_ns() - began_ns) // 1000
                with self._condition:
                    self._writing = False
                    self._queued_bytes -= nbytes
                    self._condition.notify_all()

    def _went_well(self, nbytes: int) -> None:
        if nbytes:
            self._bandwidth.spend(nbytes, self._clock())
            if self._stopped:
                print("kv write-behind goes on: the store takes packs again", file=sys.stderr, flush=True)
            self._stopped, self._pause_s = "", FIRST_PAUSE_S

    def _failed(self, batch: list[Pending], nbytes: int, error: Exception) -> None:
        self.counts.failures += 1
        known = isinstance(error, KvError | LoaderError | OSError)
        why = (str(error) if known else f"{type(error).__name__}: {error}") or type(error).__name__
        with self._condition:
            if not self._stopped:
                print(f"kv write-behind stops, serving goes on: {why}", file=sys.stderr, flush=True)
            self._stopped = why
            self._again_s = self._clock() + self._pause_s
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            waiting, self._queue = list(self._queue), deque()
            self._queued_bytes -= sum(len(pending.data) for pending in waiting)
            self._drop(len(batch) + len(waiting), nbytes + sum(len(pending.data) for pending in waiting))
        owners = dict.fromkeys(pending.owner for pending in (*batch, *waiting))
        self._tell([(owner, ()) for owner in owners], why)

    def _next_batch(self) -> list[Pending]:
        """Entries of one scope and form for one pack, once they are due: what is kept does not share a pack with what
        will be deleted. Empty when closed and nothing is left."""
        with self._condition:
            while True:
                if not self._queue:
                    if self._closed:
                        return []
                    self._condition.wait()
                    continue
                if self._hurry or self._closed:
                    break
                now_s = self._clock()
                due_s = 0.0 if self._queued_bytes >= PACK_BYTES else self._queue[0].queued_s + self._linger_s - now_s
                wait_s = max(due_s, self._bandwidth.wait_s(now_s))
                if wait_s <= 0:
                    break
                self._condition.wait(wait_s)
            kind, size = self._queue[0].kind, 0
            batch: list[Pending] = []
            rest: deque[Pending] = deque()
            for pending in self._queue:
                fits = not batch or size + len(pending.data) <= MAX_PACK_BYTES
                if pending.kind == kind and fits and len(batch) < MAX_CHUNKS:
                    batch.append(pending)
                    size += len(pending.data)
                else:
                    rest.append(pending)
            self._queue = rest
            self._writing = True
            return batch

    def _store(self, store: ObjectStore, batch: list[Pending]) -> int:
        """Bytes written."""
        asked = [(pending, pending.is_wanted()) for pending in batch]
        unwanted = [(pending.owner, ()) for pending, is_wanted in asked if not is_wanted]
        if unwanted:
            self._tell(unwanted, "")
        wanted, encoded = self._encode([pending for pending, is_wanted in asked if is_wanted])
        if not wanted:
            return 0
        pack = build_pack([(p.head.chain, chunk) for p, chunk in zip(wanted, encoded, strict=True)], wanted[0].place)
        header, *chunk_parts = pack.parts
        sealed = wanted[0].seal.apply_parts(pack.key, len(header), chunk_parts)
        nbytes = store.put(pack.key, header, *sealed, durable=self._durable)
        self.counts.packs += 1
        self.counts.chunks += len(wanted)
        self.counts.nbytes += nbytes
        chunks: dict[Hashable, list[KvChunk]] = {}
        for pending, entry in zip(wanted, pack.entries, strict=True):
            chunk = KvChunk(
                choice=pending.choice,
                start=pending.head.start,
                end=pending.head.end,
                pack=pack.key,
                offset=entry.offset,
                nbytes=entry.nbytes,
                digest=entry.digest,
                chain=pending.head.chain.hex(),
                parent=pending.head.parent.hex(),
                form=pending.head.form,
                lineage=pending.head.passes.digest if pending.head.form == "raw" else "",
            )
            chunks.setdefault(pending.owner, []).append(chunk)
        self._tell([(owner, tuple(stored)) for owner, stored in chunks.items()], "")
        return nbytes

    def _encode(self, batch: list[Pending]) -> tuple[list[Pending], list[EncodedChunk]]:
        """A chunk whose values its form cannot hold is dropped alone; nothing is wrong with the store."""
        wanted: list[Pending] = []
        encoded: list[EncodedChunk] = []
        for pending in batch:
            try:
                chunk = encode_chunk(pending.head, pending.data)
            except KvError as error:
                self.counts.unfit_chunks += 1
                self._tell([(pending.owner, ())], str(error))
                continue
            wanted.append(pending)
            encoded.append(chunk)
        return wanted, encoded
