"""Durable KV of one replica: what the loop hands over is stored behind it, and read back before a request resumes.

    write -> queue -> pack -> KvSealed            while a request is under way
    finished -> the rule of `keeping` -> KvKept   when it is over: its whole chunks stay for whoever comes next, as they
                                                  are or `quantising`
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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from function_runtime.engine_like import SealedRangeLike
from function_runtime.held import HeldRequest
from function_runtime.inbox import Inbox
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.asking import Asking
from function_runtime.kv.forms import identity_of, known_form
from function_runtime.kv.identity import KvIdentity
from function_runtime.kv.keeping import Keep, Prefix, Speeds, decide
from function_runtime.kv.known import Key, KnownChunks
from function_runtime.kv.plan import MAX_DEADLINE_S
from function_runtime.kv.quantising import Quantised, Quantising
from function_runtime.kv.reader import Capabilities, Reading, Restoration
from function_runtime.kv.settings import KvReplicaSettings
from function_runtime.kv.speeds import DIRECTORY_PRIOR, READERS, REMOTE_PRIOR, Measured
from function_runtime.kv.writer import KvWriter, Pending, Told
from function_runtime.kv.written import Copy, Written
from function_runtime.kv_service import KvRead
from function_runtime.protocol import KvAsk, KvBad, KvChunk, KvKept, KvKnown, KvSealed, StoreTotals
from function_runtime.serving import Serving
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore, open_store

_REQUESTS_AT_ONCE: Final = 4
_ASKERS: Final = 32
_KEPT_PACKS: Final = 65_536


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
        self._quantising = Quantising(chunk_tokens)
        self._copies: dict[Key, Copy] = {}
        """What waits in the writer's queue."""
        self._written: dict[HeldRequest, Written] = {}
        self._users: dict[str, set[HeldRequest | Quantised]] = {}
        self._own: dict[str, int] = {}
        """Packs this replica wrote, with the bytes of their chunks."""
        self._kept: dict[str, None] = {}
        """Packs that were told to be kept: the index has them, they are not ours to delete."""
        self._given_away: dict[str, None] = {}
        """Packs of requests that go on elsewhere: who deletes them is decided where those end."""
        self._named: dict[Written, list[KvChunk]] = {}
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

    def _of(self, held: HeldRequest) -> Written:
        written = self._written.get(held)
        if written is None:
            written = self._written[held] = Written(held, self._identity)
        written.catch_up()
        return written

    # --- asking ---------------------------------------------------------------------------------------------------

    def may_continue(self, held: HeldRequest, cached_tokens: int) -> bool:
        """Whether the index is asked before this request's first prefill: `cached_tokens` of it are here already."""
        work = held.work
        fresh = work.share_prefix and not work.kv and not work.produced and not work.prefill_ends
        usable = len(work.prompt) - (work.prefix_form != "raw")
        missing = usable // self._chunk_tokens * self._chunk_tokens - cached_tokens
        return fresh and missing >= self._chunk_tokens and held.link is not None and self._asking.is_worthwhile

    def begin_ask(self, held: HeldRequest) -> None:
        written = self._of(held)
        tokens, chain, size = written.tokens[0], written.shared, self._chunk_tokens
        usable = len(held.work.prompt) - (written.form != "raw")
        ends = range(size, usable + 1, size)
        question = self._asking.ask(held)
        held.tell(
            KvAsk(
                request_id=held.id,
                epoch=held.epoch,
                identity=chain.identity.digest.hex(),
                chains=tuple(chain.at(tokens, end).hex() for end in ends),
            )
        )

        def wait() -> None:
            chunks = self._asking.wait(held, question)
            self._inbox.post(lambda: self._answered(held, chunks))

        self._askers.submit(wait)

    def distrust(self, chunk: KvChunk) -> None:
        self._known.forget_pack(chunk.pack)
        self._quantising.forget_pack(chunk.pack)

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
                    arrival = reading.begin_all(MAX_DEADLINE_S, self._store(), self._readers, self._engine.coming)
            else:
                chosen = reading.plan(self.measured.speeds, self._engine)
                detail = "; ".join(filter(None, (outcome.detail, chosen.reason)))
                arrival = reading.begin_steered(chosen, self.measured, self._engine, self._store(), self._readers)
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
        given = False
        while True:
            at_once = arrival.steering is not None or arrival.begins_at > 0
            if not given and (at_once or arrival.first_layer_is_here or arrival.resolved):
                given = True
                self._inbox.post(lambda: self._serving().kv_read(held, KvRead(arrival, 0)))
            if arrival.resolved or arrival.abandoned:
                break
            if not held.live:
                arrival.abandon()
                break
            arrival.wait_and_ask()
        reading.conclude(arrival)

    def found(self, held: HeldRequest, sound: list[KvChunk], bad: list[tuple[KvChunk, str]]) -> None:
        """What a read came to. Sound chunks are counted on from here on, and named again if the index spoke of them:
        then the journal knows what the request was begun with. Bad ones are reported and not named any more."""
        for chunk, reason in bad:
            self.distrust(chunk)
            held.tell(KvBad(request_id=held.id, epoch=held.epoch, chunk=chunk, reason=reason))
        if not held.live:
            return
        written = self._of(held)
        begun_here = not held.work.produced and not held.work.prefill_ends
        for chunk in sound:
            self._known.add(chunk)
            self._quantising.saw(chunk)
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
                written.waiting[start] = copy
            self.deduplicated_chunks += 1
            return True
        chunk = self._find_stored(key)
        if chunk is None and choice == 0 and written.form != "raw":
            # A lossy prefix that is in the memory of this replica is stored as what it was loaded from.
            chunk = self._find_stored((written.shared.at(written.tokens[0], end), start, lineage))
        if chunk is None:
            return False
        self.deduplicated_chunks += 1
        chunk = msgspec.structs.replace(chunk, choice=choice)
        self._count_on(written, chunk)
        if not self._named:
            self._inbox.post(self._tell_named)
        self._named.setdefault(written, []).append(chunk)
        return True

    def _find_stored(self, key: Key) -> KvChunk | None:
        return self._known.find(key, lambda pack: bool(self._users.get(pack)))

    def _tell_named(self) -> None:
        named, self._named = self._named, {}
        for written, chunks in named.items():
            if not written.settled:
                self._seal(written, tuple(chunks), "")

    def write(self, held: HeldRequest, sealed: SealedRangeLike, data: memoryview) -> None:
        choice, start, end = sealed.choice, sealed.start, sealed.end
        written = self._of(held)
        head = written.head(choice, start, end, passes=sealed.passes)
        copy = Copy((head.chain, start, sealed.passes.digest), end, data, [(written, choice)])
        self._copies[copy.key] = copy
        if choice == 0:
            written.waiting[start] = copy
        self._writer.put(Pending(copy, choice, head, data, lambda: self._may_write(copy), written.seal, written.place))

    def _told(self, told: Told, dropped: str) -> None:
        """From the writer's thread, all of a pack at once."""
        news = [(owner, chunks) for owner, chunks in told if isinstance(owner, Copy)]
        if news:
            self._inbox.post(lambda: self._hear_writer(news, dropped))
        lossy = [(owner, chunks) for owner, chunks in told if isinstance(owner, Quantised)]
        if lossy:
            self._inbox.post(lambda: self._hear_quantised(lossy))

    def _hear_quantised(self, news: list[tuple[Quantised, tuple[KvChunk, ...]]]) -> None:
        """Chunks in a lossy form are stored, of requests that may be over."""
        kept: dict[Quantised, list[KvChunk]] = {}
        for owner, chunks in news:
            for chunk in chunks:
                self._own[chunk.pack] = self._own.get(chunk.pack, 0) + chunk.nbytes
                self._quantising.saw(chunk)
                kept.setdefault(owner, []).append(chunk)
        for owner, found in kept.items():
            self._keep(owner.written, found, owner.reason)
        self._delete_unused({chunk.pack for found in kept.values() for chunk in found})

    def _hear_writer(self, news: list[tuple[Copy, tuple[KvChunk, ...]]], dropped: str) -> None:
        sealed: dict[Written, list[KvChunk]] = {}
        kept: dict[Written, list[KvChunk]] = {}
        unused: set[str] = set()
        for copy, chunks in news:
            if self._copies.get(copy.key) is copy:
                del self._copies[copy.key]
            for written, choice in copy.wanted_by:
                if choice == 0 and written.waiting.get(copy.key[1]) is copy:
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

    def _count_on(self, written: Written, chunk: KvChunk) -> None:
        if written.settled:
            return
        written.packs.add(chunk.pack)
        self._users.setdefault(chunk.pack, set()).add(written.held)
        if chunk.choice == 0 and (chunk.start not in written.chunks or chunk.end >= written.chunks[chunk.start].end):
            written.chunks[chunk.start] = chunk

    def _seal(self, written: Written, chunks: tuple[KvChunk, ...], dropped: str) -> None:
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
        if written.form != "raw":
            self._finish_lossy(held, written)
            return
        position, stored = written.whole_run(self._chunk_tokens)
        if not position:
            return
        standing = [c for c in stored if c.pack not in self._own or c.pack in self._kept]
        new = position - len(standing) * self._chunk_tokens
        prefix = Prefix(
            tokens=new,
            nbytes=self._identity.layout.nbytes_per_token * new,
            packs=len({c.pack for c in stored}) + (1 if len(stored) * self._chunk_tokens < position else 0),
            name=written.chains[0].at(written.tokens[0], position),
        )
        choice = self._decide(held, prefix, position)
        if choice.keep:
            written.keeps_until = position
            self._keep(written, stored, choice.reason)
        elif new:
            self._tell_kept(held, (), {}, choice.reason)

    def _decide(self, held: HeldRequest, prefix: Prefix, position: int) -> Keep:
        reuse, speeds = held.work.reuse, self.measured.speeds
        measured = Speeds(self._token_us(position), speeds.bytes_per_s, speeds.latency_s)
        return decide(prefix, reuse.probability, reuse.device_microusd_per_hour, measured, self._settings.prices)

    def _finish_lossy(self, held: HeldRequest, written: Written) -> None:
        """Its whole chunks are quantised behind its back; until then the packs they lie in stay."""
        position, sources = self._quantising.sources(written)
        if not sources:
            return
        choice = self._decide(held, self._quantising.prefix(written, sources), position)
        if not choice.keep:
            self._tell_kept(held, (), {}, choice.reason)
            return
        packs = {source.chunk.pack for source in sources if source.chunk is not None}
        job = Quantised(written, f"{choice.reason}; kept as {written.form}")
        for pack in packs:
            self._users.setdefault(pack, set()).add(job)

        def run() -> None:
            try:
                self._quantising.run(job, sources, self._store, self._writer, lambda: self._serving().is_awake)
            finally:
                self._inbox.post(lambda: self._let_go(job, packs))

        self._requests.submit(run)

    def _token_us(self, tokens: int) -> float:
        """Measured microseconds of prefill per token of a prompt this long."""
        speeds = self.measured.speeds
        return (speeds.prefill_s + speeds.prefill_position_s * tokens / 2) * 1e6

    def _keep(self, written: Written, chunks: list[KvChunk], reason: str) -> None:
        if not chunks:
            return
        packs = {c.pack: self._own[c.pack] for c in chunks if c.pack in self._own and c.pack not in self._kept}
        _remember(self._kept, {chunk.pack for chunk in chunks})
        self._tell_kept(written.held, tuple(chunks), packs, reason)

    def _tell_kept(self, held: HeldRequest, chunks: tuple[KvChunk, ...], packs: dict[str, int], reason: str) -> None:
        held.tell(
            KvKept(
                request_id=held.id,
                epoch=held.epoch,
                identity=identity_of(known_form(held.work.prefix_form), self._identity).digest.hex(),
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
        self._let_go(held, written.packs)
        written.packs = set()

    def hand_over(self, held: HeldRequest) -> None:
        """It goes on elsewhere: its packs are not this replica's to delete any more. Nor does it count on them here any
        longer, for nobody here hears when they go."""
        written = self._written.pop(held, None)
        if written is not None:
            written.settled = True
            _remember(self._given_away, written.packs)
            self._let_go(held, written.packs)
            written.packs = set()

    def _may_write(self, copy: Copy) -> bool:
        """Asked by the writer right before it stores: a process that was stopped writes nothing for requests that
        others may own by now."""
        return copy.is_wanted and self._serving().is_awake

    def _let_go(self, user: HeldRequest | Quantised, packs: set[str]) -> None:
        for pack in packs:
            users = self._users.get(pack)
            if users is not None:
                users.discard(user)
                if not users:
                    del self._users[pack]
        self._delete_unused(packs)

    def _delete_unused(self, packs: set[str]) -> None:
        """Those of these that this replica wrote, that no request of it counts on, and that were neither kept nor given
        away."""
        unused = [p for p in packs if p in self._own and p not in self._users]
        for pack in unused:
            del self._own[pack]
        gone = [pack for pack in unused if pack not in self._kept and pack not in self._given_away]
        for pack in gone:
            self._known.forget_pack(pack)
            self._quantising.forget_pack(pack)
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


def _remember(packs: dict[str, None], more: Iterable[str]) -> None:
    """The last `_KEPT_PACKS` of them."""
    packs.update(dict.fromkeys(more))
    while len(packs) > _KEPT_PACKS:
        del packs[next(iter(packs))]
