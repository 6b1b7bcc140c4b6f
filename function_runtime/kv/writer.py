"""Writes KV behind the engine: copies are queued, a thread encodes them and stores them in packs.

A pack is written when enough is queued, when the oldest entry is `LINGER_S` old, or on `flush`; it holds chunks of
one scope. The queue is bounded in bytes; what does not fit, and what cannot be stored, is dropped and reported.
Limits: best effort and no retry: KV that is not there is computed again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from function_runtime.errors import KvError
from function_runtime.kv.chunk import ChunkHead, encode_chunk
from function_runtime.kv.pack import build_pack
from function_runtime.protocol import KvChunk
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore

LINGER_S: Final = 0.1
PACK_BYTES: Final = 16 * 1024 * 1024
MAX_PACK_BYTES: Final = 64 * 1024 * 1024
MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True)
class Pending:
    """A copy of KV to be stored, and for whom."""

    owner: Hashable
    choice: int
    head: ChunkHead
    data: memoryview
    is_wanted: Callable[[], bool]
    """Asked before it is stored; what nobody wants any more is dropped without a word."""
    queued_s: float = field(default_factory=time.monotonic)


class KvWriter:
    """`tell(owner, chunks, dropped)` is called from the writer's thread: with chunks that are stored now, or with why
    some were dropped. `durable`: whether a pack must survive a power cut. The store is opened at the first write."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        tell: Callable[[Hashable, tuple[KvChunk, ...], str], None],
        *,
        durable: bool = False,
    ) -> None:
        self._open_store = open_store
        self._tell = tell
        self._durable = durable
        self._condition = threading.Condition()
        self._queue: deque[Pending] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._hurry = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, pending: Pending) -> None:
        nbytes = len(pending.data)
        with self._condition:
            if self._queued_bytes + nbytes <= MAX_QUEUED_BYTES and not self._closed:
                self._queue.append(pending)
                self._queued_bytes += nbytes
                self._condition.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
                    self._thread.start()
                return
        self._tell(pending.owner, (), f"the queue of KV to be stored is full ({self._queued_bytes} bytes)")

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
            try:
                store = store or self._open_store()
                self._store(store, batch)
            except (KvError, LoaderError, OSError) as error:
                print(f"kv write failed: {error}", file=sys.stderr, flush=True)
                for owner in {pending.owner for pending in batch}:
                    self._tell(owner, (), str(error))
            finally:
                with self._condition:
                    self._writing = False
                    self._queued_bytes -= sum(len(pending.data) for pending in batch)
                    self._condition.notify_all()

    def _next_batch(self) -> list[Pending]:
        """Entries of one scope for one pack, once they are due. Empty when closed and nothing is left."""
        with self._condition:
            while True:
                if not self._queue:
                    if self._closed:
                        return []
                    self._condition.wait()
                    continue
                due_in_s = self._queue[0].queued_s + LINGER_S - time.monotonic()
                if due_in_s <= 0 or self._hurry or self._closed or self._queued_bytes >= PACK_BYTES:
                    break
                self._condition.wait(due_in_s)
            scope, size = self._queue[0].head.scope, 0
            batch: list[Pending] = []
            rest: deque[Pending] = deque()
            for pending in self._queue:
                fits = pending.head.scope == scope and (not batch or size + len(pending.data) <= MAX_PACK_BYTES)
                if fits:
                    batch.append(pending)
                    size += len(pending.data)
                else:
                    rest.append(pending)
            self._queue = rest
            self._writing = True
            return batch

    def _store(self, store: ObjectStore, batch: list[Pending]) -> None:
        wanted = [pending for pending in batch if pending.is_wanted()]
        if not wanted:
            return
        pack = build_pack([(pending.head.chain, encode_chunk(pending.head, pending.data)) for pending in wanted])
        store.put(pack.key, *pack.parts, durable=self._durable)
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
            )
            chunks.setdefault(pending.owner, []).append(chunk)
        for owner, stored in chunks.items():
            self._tell(owner, tuple(stored), "")
