"""Durable KV of one replica: what the loop hands over is stored behind it, and read back before a request resumes.

    write -> queue -> pack -> KvSealed            while a request is under way
    finished -> the rule of `keeping` -> KvKept   when it is over: its whole chunks stay for whoever comes next
    begin_ask -> KvKnown -> begin_read            before a prompt's first prefill: what others left is loaded

Runs on the loop's thread except for waiting, reading, encoding and storing, which helpers do; their results come back
through the inbox. A chunk that is in the store already is named, not written again. What this replica wrote and nobody
counts on any more it deletes; everything else is left to the control plane's collection. Limits: a chunk is known to be
stored for as long as `known` says.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from function_runtime.engine_like import SealedRangeLike
from function_runtime.held import HeldRequest
from function_runtime.inbox import Inbox
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.asking import Asking
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.keeping import Prefix, Speeds, decide
from function_runtime.kv.known import Key, KnownChunks
from function_runtime.kv.plan import MAX_DEADLINE_S
from function_runtime.kv.reader import Capabilities, Reading, Restoration, sequences
from function_runtime.kv.sealing import ChunkSeal
from function_runtime.kv.settings import KvReplicaSettings
from function_runtime.kv.speeds import DIRECTORY_PRIOR, READERS, REMOTE_PRIOR, Measured
from function_runtime.kv.writer import KvWriter, Pending, Told
from function_runtime.kv_service import KvRead
from function_runtime.protocol import KvAsk, KvBad, KvChunk, KvKept, KvKnown, KvSealed, StoreTotals
from function_runtime.serving import Serving
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore, open_store

_REQUESTS_AT_ONCE: Final = 4
_ASKERS: Final = 32
_KEPT_PACKS: Final = 65_536


class _Written:
    """What has been stored for one request: its tokens and chains per choice, its whole chunks, the packs they lie
    in."""

    def __init__(self, held: HeldRequest, identity: KvIdentity) -> None:
        self.held = held
        self.tokens = [list(tokens) for tokens in sequences(held.work)]
        self.chains = [Chain(identity, held.work.kv_scope) for _ in self.tokens]
        self.seal = ChunkSeal(held.work.kv_key)
        self.packs: set[str] = set()
        self.chunks: dict[int, KvChunk] = {}
        """Of choice 0, by start: the longest that is stored."""
        self.waiting: dict[int, int] = {}
        """Of choice 0, start -> end: handed to the writer, not stored yet."""
        self.told_dropped = False
        self.settled = False
        self.keeps_until = 0
        """Chunks of choice 0 that end at or before this are kept though the request is over."""
        self._seen = 0

    def catch_up(self) -> None:
        messages = self.held.messages
        for message in messages[self._seen :]:
            for event in message.events:
                self.tokens[event.choice].append(event.token_id)
        self._seen = len(messages)

    def wants(self, choice: int, end: int) -> bool:
        return not self.settled or (choice == 0 and end <= self.keeps_until)


@dataclass(eq=False, slots=True)
class _Copy:
    """One copy in the writer's queue, and every request that will name it: (request, choice)."""

    key: Key
    end: int
    wanted_by: list[tuple[_Written, int]]

    @property
    def is_wanted(self) -> bool:
        return any(written.wants(choice, self.end) for written, choice in self.wanted_by)


class DurableKv:
    def __init__(
        self,
        store_uri: str,
        identity: KvIdentity,
        inbox: Inbox,
        serving: Callable[[], Serving],
        *,
        chunk_tokens: int = 32,
        settings: KvReplicaSettings | None = None,
        measured: Measured | None = None,
        engine: Capabilities | None = None,
    ) -> None:
        self._uri = store_uri
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._inbox = inbox
        self._serving = serving
        self._opened: ObjectStore | None = None
        self._open_lock = threading.Lock()
        self._settings = settings or KvReplicaSettings.of(store_uri, os.environ)
        self._writer = KvWriter(
            self._store, self._told, linger_s=self._settings.linger_s, bytes_per_s=self._settings.bytes_per_s
        )
        self.measured = measured or Measured()
        self.measured.expect_store(*(DIRECTORY_PRIOR if store_uri.startswith("file:") else REMOTE_PRIOR))
        self._engine = engine or Capabilities(identity.layout.num_layers)
        self._chance = random.Random()
        self._requests = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="kv-request")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._askers = ThreadPoolExecutor(_ASKERS, thread_name_prefix="kv-ask")
        self._asking = Asking()
        self._known = KnownChunks(time.monotonic)
        self._copies: dict[Key, _Copy] = {}
        """What waits in the writer's queue."""
        self._written: dict[HeldRequest, _Written] = {}
        self._users: dict[str, set[HeldRequest]] = {}
        self._own: dict[str, int] = {}
        """Packs this replica wrote, with the bytes of their chunks."""
        self._kept: dict[str, None] = {}
        """Packs that were told to be kept: the index has them, they are not ours to delete."""
        self._named: dict[_Written, list[KvChunk]] = {}
        self.deduplicated_chunks = 0

    @property
    def writer(self) -> KvWriter:
        return self._writer

    def store_totals(self) -> StoreTotals:
        if self._opened is None:
            return StoreTotals()
        use = self._opened.stats.snapshot()
        return StoreTotals(
            use.reads, use.writes, use.deletes, use.read_bytes, use.written_bytes, use.retries, use.failures,
            breaker_open=use.breaker != "closed",
        )  # fmt: skip

    def _store(self) -> ObjectStore:
        with self._open_lock:
            if self._opened is None:
                self._opened = open_store(self._uri)
            return self._opened

    def _of(self, held: HeldRequest) -> _Written:
        written = self._written.get(held)
        if written is None:
            written = self._written[held] = _Written(held, self._identity)
        written.catch_up()
        return written

    # --- asking ---------------------------------------------------------------------------------------------------

    def may_continue(self, held: HeldRequest, cached_tokens: int) -> bool:
        """Whether the index is asked before this request's first prefill: `cached_tokens` of it are here already."""
        work = held.work
        fresh = work.share_prefix and not work.kv and not work.produced and not work.prefill_ends
        missing = len(work.prompt) // self._chunk_tokens * self._chunk_tokens - cached_tokens
        return fresh and missing >= self._chunk_tokens and held.link is not None and self._asking.is_worthwhile

    def begin_ask(self, held: HeldRequest) -> None:
        written = self._of(held)
        tokens, chain, size = written.tokens[0], written.chains[0], self._chunk_tokens
        ends = range(size, len(held.work.prompt) + 1, size)
        question = self._asking.ask(held)
        held.tell(
            KvAsk(
                request_id=held.id,
                epoch=held.epoch,
                identity=self._identity.digest.hex(),
                chains=tuple(chain.at(tokens, end).hex() for end in ends),
            )
        )

        def wait() -> None:
            chunks = self._asking.wait(held, question)
            self._inbox.post(lambda: self._answered(held, chunks))

        self._askers.submit(wait)

    def distrust(self, chunk: KvChunk) -> None:
        self._known.forget_pack(chunk.pack)

    def hear(self, known: KvKnown) -> None:
        self._asking.hear(known)

    def _answered(self, held: HeldRequest, chunks: tuple[KvChunk, ...]) -> None:
        if chunks and held.live:
            held.work = msgspec.structs.replace(held.work, kv=chunks)
            self.begin_read(held)
        else:
            self._serving().kv_read(held, KvRead(None, 0))

    # --- reading --------------------------------------------------------------------------------------------------

    def begin_read(self, held: HeldRequest) -> None:
        self._requests.submit(self._read, held)

    def _read(self, held: HeldRequest) -> None:
        arrival: Arrival | None = None
        detail = ""
        try:
            reading = Reading(held.work, self._identity)
            outcome = reading.outcome
            if self._settings.loads_always:
                detail = outcome.detail
                if reading.wanted:
                    arrival = reading.begin_all(MAX_DEADLINE_S, self._store(), self._readers)
            else:
                chosen = reading.plan(self.measured.speeds, self._engine)
                detail = "; ".join(filter(None, (outcome.detail, chosen.reason)))
                if chosen.loads:
                    arrival = reading.begin(chosen, self._store(), self._readers)
            if arrival is not None:
                arrival.reason = detail
                arrival.is_sampled = self._chance.random() < self._settings.shadow_share
        except Exception as error:
            # Whatever goes wrong with stored KV, the request is computed again.
            arrival, outcome = None, Restoration(None, [f"{type(error).__name__}: {error}"])
            detail = outcome.detail
        if arrival is None:
            self._inbox.post(lambda: self._serving().kv_read(held, KvRead(None, 0, detail)))
        else:
            self._follow(held, reading, arrival)
        for miss in outcome.misses:
            print(f"kv miss request={held.id} {miss}", file=sys.stderr)
        self._inbox.post(lambda: self.found(held, outcome.sound, outcome.bad))

    def _follow(self, held: HeldRequest, reading: Reading, arrival: Arrival) -> None:
        """The engine has the arrival as soon as it can do anything with it; returns when nothing more will come."""
        begin_s = time.monotonic()
        given = False
        while True:
            if not given and (arrival.begins_at > 0 or arrival.first_layer_is_here or arrival.resolved):
                given = True
                self._inbox.post(lambda: self._serving().kv_read(held, KvRead(arrival, 0)))
            if arrival.resolved or arrival.abandoned:
                break
            if not held.live:
                arrival.abandon()
                break
            arrival.wait(1.0)
        reading.conclude(arrival)
        if arrival.is_sound_throughout and reading.nbytes:
            self.measured.read(reading.nbytes, reading.reads, time.monotonic() - begin_s)

    def found(self, held: HeldRequest, sound: list[KvChunk], bad: list[tuple[KvChunk, str]]) -> None:
        """What a read came to. Sound chunks are counted on from here on, and named again if the index spoke of them:
        then the journal knows what the request was begun with. Bad ones are reported and not named any more."""
        for chunk, reason in bad:
            self._known.forget_pack(chunk.pack)
            held.tell(KvBad(request_id=held.id, epoch=held.epoch, chunk=chunk, reason=reason))
        if not held.live:
            return
        written = self._of(held)
        begun_here = not held.work.produced and not held.work.prefill_ends
        for chunk in sound:
            self._known.add(chunk)
            self._count_on(written, chunk)
            if begun_here:
                self._named.setdefault(written, []).append(chunk)
        self._tell_named()

    # --- writing --------------------------------------------------------------------------------------------------

    def has_already(self, held: HeldRequest, sealed: SealedRangeLike) -> bool:
        """Whether this range, of these very passes, is stored (and named here), or a copy of it waits to be."""
        choice, start, end = sealed.choice, sealed.start, sealed.end
        if end - start != self._chunk_tokens or start % self._chunk_tokens or not (lineage := sealed.passes.digest):
            return False
        written = self._of(held)
        key = (written.chains[choice].at(written.tokens[choice], end), start, lineage)
        copy = self._copies.get(key)
        if copy is not None:
            copy.wanted_by.append((written, choice))
            if choice == 0:
                written.waiting[start] = end
            self.deduplicated_chunks += 1
            return True
        chunk = self._known.find(key, lambda pack: bool(self._users.get(pack)))
        if chunk is None:
            return False
        self.deduplicated_chunks += 1
        chunk = msgspec.structs.replace(chunk, choice=choice)
        self._count_on(written, chunk)
        if not self._named:
            self._inbox.post(self._tell_named)
        self._named.setdefault(written, []).append(chunk)
        return True

    def _tell_named(self) -> None:
        named, self._named = self._named, {}
        for written, chunks in named.items():
            if not written.settled:
                self._seal(written, tuple(chunks), "")

    def write(self, held: HeldRequest, sealed: SealedRangeLike, data: memoryview) -> None:
        choice, start, end = sealed.choice, sealed.start, sealed.end
        written = self._of(held)
        tokens, chain = written.tokens[choice], written.chains[choice]
        head = ChunkHead(
            identity=self._identity,
            scope=held.work.kv_scope,
            parent=chain.at(tokens, start),
            chain=chain.at(tokens, end),
            start=start,
            end=end,
            tokens=tuple(tokens[start:end]),
            passes=sealed.passes,
        )
        copy = _Copy((head.chain, start, sealed.passes.digest), end, [(written, choice)])
        self._copies[copy.key] = copy
        if choice == 0:
            written.waiting[start] = max(end, written.waiting.get(start, 0))
        self._writer.put(Pending(copy, choice, head, data, lambda: self._may_write(copy), written.seal))

    def _told(self, told: Told, dropped: str) -> None:
        """From the writer's thread, all of a pack at once."""
        news = [(owner, chunks) for owner, chunks in told if isinstance(owner, _Copy)]
        self._inbox.post(lambda: self._hear_writer(news, dropped))

    def _hear_writer(self, news: list[tuple[_Copy, tuple[KvChunk, ...]]], dropped: str) -> None:
        sealed: dict[_Written, list[KvChunk]] = {}
        kept: dict[_Written, list[KvChunk]] = {}
        unused: set[str] = set()
        for copy, chunks in news:
            if self._copies.get(copy.key) is copy:
                del self._copies[copy.key]
            for written, choice in copy.wanted_by:
                if choice == 0 and written.waiting.get(copy.key[1]) == copy.end:
                    del written.waiting[copy.key[1]]
                if dropped and not written.told_dropped and not written.settled:
                    written.told_dropped = True
                    self._seal(written, (), dropped)
            for chunk in chunks:
                self._own[chunk.pack] = self._own.get(chunk.pack, 0) + chunk.nbytes
                self._known.add(chunk)
                unused.add(chunk.pack)
                for written, choice in copy.wanted_by:
                    named = msgspec.structs.replace(chunk, choice=choice)
                    if not written.settled:
                        self._count_on(written, named)
                        sealed.setdefault(written, []).append(named)
                    if choice == 0 and chunk.end <= written.keeps_until:
                        kept.setdefault(written, []).append(named)
        for written, found in sealed.items():
            self._seal(written, tuple(found), "")
        for written, found in kept.items():
            self._keep(written, found, "stored after the request was over")
        self._delete_unused(unused)

    def _count_on(self, written: _Written, chunk: KvChunk) -> None:
        if written.settled:
            return
        written.packs.add(chunk.pack)
        self._users.setdefault(chunk.pack, set()).add(written.held)
        if chunk.choice == 0 and (chunk.start not in written.chunks or chunk.end >= written.chunks[chunk.start].end):
            written.chunks[chunk.start] = chunk

    def _seal(self, written: _Written, chunks: tuple[KvChunk, ...], dropped: str) -> None:
        held = written.held
        self._serving().kv_sealed(held, KvSealed(request_id=held.id, epoch=held.epoch, chunks=chunks, dropped=dropped))

    def flush(self, within_s: float) -> None:
        if not self._writer.flush(within_s):
            print(f"kv not all stored within {within_s:g} s", file=sys.stderr)

    # --- the end --------------------------------------------------------------------------------------------------

    def finished(self, held: HeldRequest) -> None:
        """Called before the end is told: what is to be kept is known to the gateway before it writes the outcome."""
        written = self._written.get(held)
        if written is None or not held.work.share_prefix or held.work.reuse.probability <= 0:
            return
        written.catch_up()
        stored: list[KvChunk] = []
        new: list[tuple[int, int]] = []
        position = 0
        while True:
            chunk = written.chunks.get(position)
            end = chunk.end if chunk is not None else written.waiting.get(position, 0)
            if end - position != self._chunk_tokens:
                break
            if chunk is not None:
                stored.append(chunk)
            if chunk is None or (chunk.pack in self._own and chunk.pack not in self._kept):
                new.append((position, end))
            position = end
        if not position:
            return
        nbytes = self._identity.layout.nbytes_per_token * sum(end - start for start, end in new)
        prefix = Prefix(
            tokens=sum(end - start for start, end in new),
            nbytes=nbytes,
            packs=len({c.pack for c in stored}) + (1 if len(stored) * self._chunk_tokens < position else 0),
            name=written.chains[0].at(written.tokens[0], position),
        )
        reuse = held.work.reuse
        speeds = Speeds(self._token_us(position), self.measured.speeds.bytes_per_s, self.measured.speeds.latency_s)
        choice = decide(prefix, reuse.probability, reuse.device_microusd_per_hour, speeds, self._settings.prices)
        if choice.keep:
            written.keeps_until = position
            self._keep(written, stored, choice.reason)
        elif new:
            self._tell_kept(held, (), {}, choice.reason)

    def _token_us(self, tokens: int) -> float:
        """Measured microseconds of prefill per token of a prompt this long."""
        speeds = self.measured.speeds
        return (speeds.prefill_s + speeds.prefill_position_s * tokens / 2) * 1e6

    def _keep(self, written: _Written, chunks: list[KvChunk], reason: str) -> None:
        if not chunks:
            return
        packs = {c.pack: self._own[c.pack] for c in chunks if c.pack in self._own and c.pack not in self._kept}
        for chunk in chunks:
            self._kept[chunk.pack] = None
        while len(self._kept) > _KEPT_PACKS:
            del self._kept[next(iter(self._kept))]
        self._tell_kept(written.held, tuple(chunks), packs, reason)

    def _tell_kept(self, held: HeldRequest, chunks: tuple[KvChunk, ...], packs: dict[str, int], reason: str) -> None:
        held.tell(
            KvKept(
                request_id=held.id,
                epoch=held.epoch,
                identity=self._identity.digest.hex(),
                chunks=chunks,
                packs=packs,
                token_us=round(self._token_us(chunks[-1].end if chunks else 0), 3),
                reason=reason,
            )
        )

    def release(self, held: HeldRequest) -> None:
        written = self._written.pop(held, None)
        if written is None:
            return
        written.settled = True
        self._let_go(held, written)

    def hand_over(self, held: HeldRequest) -> None:
        """It goes on elsewhere: it stays among its packs' users here, so that this replica never deletes them."""
        written = self._written.pop(held, None)
        if written is not None:
            written.settled = True

    def _may_write(self, copy: _Copy) -> bool:
        """Asked by the writer right before it stores: a process that was stopped writes nothing for requests that
        others may own by now."""
        return copy.is_wanted and self._serving().is_awake

    def _let_go(self, held: HeldRequest, written: _Written) -> None:
        for pack in written.packs:
            users = self._users.get(pack)
            if users is not None:
                users.discard(held)
                if not users:
                    del self._users[pack]
        self._delete_unused(written.packs)
        written.packs = set()

    def _delete_unused(self, packs: set[str]) -> None:
        """Those of these that this replica wrote, that no request of it counts on, and that were not kept."""
        unused = [p for p in packs if p in self._own and p not in self._users]
        for pack in unused:
            del self._own[pack]
        gone = [pack for pack in unused if pack not in self._kept]
        for pack in gone:
            self._known.forget_pack(pack)
        if gone:
            self._requests.submit(self._delete, gone)

    def _delete(self, packs: list[str]) -> None:
        for pack in packs:
            try:
                self._store().delete(pack)
            except (LoaderError, OSError) as error:
                print(f"kv pack {pack} not deleted: {error}", file=sys.stderr)

    def close(self) -> None:
        self._writer.close()
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._requests.shutdown(wait=True, cancel_futures=False)
        self._readers.shutdown(wait=False, cancel_futures=True)
