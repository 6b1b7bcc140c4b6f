"""Durable KV of one replica: what the loop hands over is stored behind it, and read back before a request resumes.

Runs on the loop's thread except for reading, encoding and storing, which helpers do; their results come back through
the inbox. A request that is settled needs its KV no more: packs that hold nothing else are deleted.
Limits: packs shared with requests of a replica that died stay for a sweep from outside.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from function_runtime.errors import KvError
from function_runtime.held import HeldRequest
from function_runtime.inbox import Inbox
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.pack import read_entries
from function_runtime.kv.reader import Restoration, read_kv, sequences
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.protocol import KvChunk, KvSealed
from function_runtime.serving import KvRead, Serving
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore, open_store

READ_WITHIN_S: Final = 10.0
_READERS: Final = 4
_REQUESTS_AT_ONCE: Final = 4


class _Written:
    """What has been written for one request: its tokens and chains per choice, and the packs they lie in."""

    def __init__(self, held: HeldRequest, identity: KvIdentity) -> None:
        self.held = held
        self.tokens = [list(tokens) for tokens in sequences(held.work)]
        self.chains = [Chain(identity, held.work.kv_scope) for _ in self.tokens]
        self.packs: set[str] = set()
        self.settled = False
        self._seen = 0

    def catch_up(self) -> None:
        messages = self.held.messages
        for message in messages[self._seen :]:
            for event in message.events:
                self.tokens[event.choice].append(event.token_id)
        self._seen = len(messages)


class DurableKv:
    def __init__(self, store_uri: str, identity: KvIdentity, inbox: Inbox, serving: Callable[[], Serving]) -> None:
        self._uri = store_uri
        self._identity = identity
        self._inbox = inbox
        self._serving = serving
        self._opened: ObjectStore | None = None
        self._open_lock = threading.Lock()
        self._writer = KvWriter(self._store, self._told)
        self._requests = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="kv-request")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-read")
        self._written: dict[HeldRequest, _Written] = {}
        self._users: dict[str, set[HeldRequest]] = {}

    def _store(self) -> ObjectStore:
        with self._open_lock:
            if self._opened is None:
                self._opened = open_store(self._uri)
            return self._opened

    # --- reading --------------------------------------------------------------------------------------------------

    def begin_read(self, held: HeldRequest) -> None:
        self._requests.submit(self._read, held)

    def _read(self, held: HeldRequest) -> None:
        begin_ns = time.monotonic_ns()
        try:
            outcome = read_kv(held.work, self._identity, self._store(), self._readers, READ_WITHIN_S)
        except Exception as error:
            # Whatever goes wrong with stored KV, the request is computed again.
            outcome = Restoration(None, [f"{type(error).__name__}: {error}"])
        for miss in outcome.misses:
            print(f"kv miss request={held.id} {miss}", file=sys.stderr)
        result = KvRead(outcome.restored, (time.monotonic_ns() - begin_ns) // 1000, outcome.detail)
        self._inbox.post(lambda: self._serving().kv_read(held, result))

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, held: HeldRequest, choice: int, start: int, end: int, data: memoryview) -> None:
        written = self._written.get(held)
        if written is None:
            written = self._written[held] = _Written(held, self._identity)
        written.catch_up()
        tokens, chain = written.tokens[choice], written.chains[choice]
        head = ChunkHead(
            identity=self._identity,
            scope=held.work.kv_scope,
            parent=chain.at(tokens, start),
            chain=chain.at(tokens, end),
            start=start,
            end=end,
            tokens=tuple(tokens[start:end]),
        )
        self._writer.put(Pending(written, choice, head, data, is_wanted=lambda: not written.settled))

    def _told(self, owner: Hashable, chunks: tuple[KvChunk, ...], dropped: str) -> None:
        if isinstance(owner, _Written):
            self._inbox.post(lambda: self._sealed(owner, chunks, dropped))

    def _sealed(self, written: _Written, chunks: tuple[KvChunk, ...], dropped: str) -> None:
        held = written.held
        for chunk in chunks:
            written.packs.add(chunk.pack)
            self._users.setdefault(chunk.pack, set()).add(held)
        if written.settled:
            self._abandon(written)
        else:
            message = KvSealed(request_id=held.id, epoch=held.epoch, chunks=chunks, dropped=dropped)
            self._serving().kv_sealed(held, message)

    def flush(self, within_s: float) -> None:
        if not self._writer.flush(within_s):
            print(f"kv not all stored within {within_s:g} s", file=sys.stderr)

    # --- the end --------------------------------------------------------------------------------------------------

    def release(self, held: HeldRequest) -> None:
        written = self._written.pop(held, None)
        if written is not None:
            written.settled = True
            self._abandon(written)
        if held.work.kv:
            self._requests.submit(self._delete_inherited, held.work.kv)

    def _abandon(self, written: _Written) -> None:
        unused: list[str] = []
        for pack in written.packs:
            users = self._users.get(pack, set())
            users.discard(written.held)
            if not users:
                self._users.pop(pack, None)
                unused.append(pack)
        written.packs = set()
        if unused:
            self._requests.submit(self._delete, unused)

    def _delete(self, packs: list[str]) -> None:
        for pack in packs:
            try:
                self._store().delete(pack)
            except (LoaderError, OSError) as error:
                print(f"kv pack {pack} not deleted: {error}", file=sys.stderr)

    def _delete_inherited(self, chunks: tuple[KvChunk, ...]) -> None:
        """Packs of an earlier replica, where they hold this request's chunks and nothing else."""
        known = {chunk.digest for chunk in chunks}
        for pack in {chunk.pack for chunk in chunks}:
            try:
                if known >= {entry.digest for entry in read_entries(self._store(), pack)}:
                    self._store().delete(pack)
            except (KvError, LoaderError, OSError):
                continue

    def close(self) -> None:
        self._writer.close()
        self._requests.shutdown(wait=True, cancel_futures=False)
        self._readers.shutdown(wait=False, cancel_futures=True)
