"""The reads of an arrival: chunks cut into ranges, read in the order in which they are needed, checked as they come.

    range read -> header: every field compared -> each layer's CRC32C -> when all is there, the digest of the whole

Neighbouring chunks of a pack are read together; or a chunk comes in several ranges, layer after layer. Limits: every
byte lands in memory of its own read, which nobody else has before the last view of it is gone.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeAlias

from function_runtime.errors import KvError
from function_runtime.kv.arrival import Arrival, ArrivingChunk, ChunkState
from function_runtime.kv.chunk import ChunkHead, LayerPlace, check_layer, header_nbytes, open_header
from function_runtime.kv.forms import decode
from function_runtime.kv.memory import MEMORY
from function_runtime.kv.sealing import CLEAR, ChunkSeal
from function_runtime.kv.steering import Steering
from function_runtime.kv.supply import Item, Job, Order, Supply
from function_runtime.passes import Passes
from function_runtime.protocol import KvChunk
from model_loader.errors import MissingObject
from model_loader.objects import ObjectStore
from model_loader.objects.resilience import DEFAULT_LIMITS

Place: TypeAlias = tuple[str, int, str]

READ_S: Final = 10.0
"""A range that takes longer, and than its bytes take at a store's slowest besides, is given up: many long ones share a
slow line."""
_NOTHING: Final = memoryview(b"")
Bad: TypeAlias = Callable[[KvChunk, str], None]
"""Told of a chunk that is not what its record says, or not there at all."""


@dataclass(frozen=True)
class Wanted:
    chunk: KvChunk
    head: ChunkHead
    """What it has to be for the request's tokens."""
    passes: Passes | None = None
    """Of a lossy chunk: how everything before its end is taken."""

    @property
    def place(self) -> Place:
        return self.chunk.pack, self.chunk.offset, self.chunk.digest

    def check_record(self) -> None:
        header_nbytes(self.chunk.nbytes, self.head)
        if self.chunk.offset < 0:
            raise KvError(f"its record says that it lies at {self.chunk.offset}")


class _Chunk:
    """One chunk being read: what of it is here, and what of that is checked."""

    def __init__(self, wanted: Wanted, index: int, pieces: int, deadline_s: float) -> None:
        self.wanted = wanted
        layout = wanted.head.identity.layout
        self._layout, self._form = layout, wanted.head.form
        self._header = header_nbytes(wanted.chunk.nbytes, wanted.head)
        layer_nbytes = wanted.head.data_bytes // layout.num_layers
        self.layers = [layout.num_layers * i // pieces for i in range(pieces + 1)]
        self.edges = [0, *(self._header + layer_nbytes * layer for layer in self.layers[1:])]
        self.arriving = ArrivingChunk(wanted.chunk, layout.num_layers, _NOTHING, deadline_s)
        self.buffer = self._raw = _NOTHING
        if pieces > 1:
            # A pass that follows the layers looks at the bytes before they are there.
            self.land_in(MEMORY.lease(wanted.chunk.nbytes))
        chunk = wanted.chunk
        self.item = Item(index, chunk.choice, chunk.start, chunk.end, chunk.pack, chunk.offset, tuple(self.edges))
        self._lock = threading.Lock()
        self._here = [False] * pieces
        self._checked = [False] * pieces
        self._hashed = 0
        self._hash = hashlib.sha256()
        self._places: tuple[LayerPlace, ...] | None = None

    def land_in(self, buffer: memoryview) -> None:
        """The engine takes layers where they are read to, or where they are decoded to."""
        self.buffer = buffer
        self._raw = buffer[self._header :] if self._form == "raw" else MEMORY.lease(self.wanted.head.raw_bytes)
        self.arriving.data = self._raw

    def has(self, piece: int, arrival: Arrival) -> None:
        """The bytes of a piece are in the buffer. Raises `KvError` for what is wrong with them."""
        with self._lock:
            self._here[piece] = True
            if self._places is None:
                if not self._here[0]:
                    return
                opened = open_header(self.buffer[: self.edges[1]], len(self.buffer), self.wanted.head)
                # Quantised KV is not what its passes give, but what it was taken from.
                self._places = opened.places
                self.arriving.passes = opened.passes if self._form == "raw" else self.wanted.passes
            if len(self._here) == 1:
                # All of it is here: the digest covers what the layers' checksums would say, at a third of the cost.
                self._hash.update(self.buffer)
                self._check_digest()
                self._decode(0)
                arrival.has_layers(self.arriving, 0, self.layers[1])
                arrival.is_sound(self.arriving)
                return
            for index, is_here in enumerate(self._here):
                if is_here and not self._checked[index]:
                    for layer in range(self.layers[index], self.layers[index + 1]):
                        check_layer(self.buffer, self._places, layer)
                    self._decode(index)
                    self._checked[index] = True
                    arrival.has_layers(self.arriving, self.layers[index], self.layers[index + 1])
            while self._hashed < len(self._here) and self._checked[self._hashed]:
                self._hash.update(self.buffer[self.edges[self._hashed] : self.edges[self._hashed + 1]])
                self._hashed += 1
            if self._hashed == len(self._here):
                self._check_digest()
                arrival.is_sound(self.arriving)

    def _decode(self, piece: int) -> None:
        """The layers of a piece that were checked, for the engine."""
        if self._form == "raw":
            return
        layers, (first, last) = self._layout.num_layers, self.layers[piece : piece + 2]
        stored, raw = self.wanted.head.data_bytes // layers, self.wanted.head.raw_bytes // layers
        data = self.buffer[self._header + first * stored : self._header + last * stored]
        tokens = self.wanted.chunk.end - self.wanted.chunk.start
        self._raw[first * raw : last * raw] = decode(self._form, self._layout, tokens, data)

    def _check_digest(self) -> None:
        if self._hash.hexdigest() != self.wanted.chunk.digest:
            raise KvError("its bytes do not have the digest that was recorded")


class Fetch:
    """Begins the reads of an arrival. `took` is told of each range: the bytes that came in its time, and the time."""

    def __init__(
        self,
        store: ObjectStore,
        executor: Executor,
        bad: Bad,
        seal: ChunkSeal = CLEAR,
        took: Callable[[float, float], None] | None = None,
    ) -> None:
        self._store = store
        self._seal = seal
        self._executor = executor
        self._bad = bad
        self._took = took

    def begin(
        self,
        wanted: Sequence[Wanted],
        deadlines_s: Sequence[float],
        *,
        order: Order = Order.FRONT,
        pieces: int = 1,
        reason: str = "",
        other: Callable[[KvChunk], Wanted | None] | None = None,
        steer: Callable[[Sequence[Item]], Steering] | None = None,
    ) -> Arrival:
        """`deadlines_s` are seconds from now, one for each chunk wanted. `other`: asked for another chunk that begins
        where a failed one did."""
        now_s = time.monotonic()
        arrival = Arrival((), layered=order is Order.LAYERS, reason=reason)
        chunks = [_Chunk(w, i, pieces, now_s + d) for i, (w, d) in enumerate(zip(wanted, deadlines_s, strict=True))]
        arrival.chunks += [chunk.arriving for chunk in chunks]
        items = [chunk.item for chunk in chunks]
        steering = steer(items) if steer is not None else Steering(Supply(items, order))
        if steer is not None:
            arrival.steering = steering

        def instead(failed: ArrivingChunk) -> ArrivingChunk | None:
            found = other(failed.record) if other is not None else None
            if found is None or arrival.abandoned:
                return None
            chunk = _Chunk(found, len(chunks), 1, failed.deadline_s)
            self._executor.submit(self._read_alone, arrival, chunk)
            return chunk.arriving

        arrival.on_failure = instead
        reads = _Reads(self, arrival, steering, chunks)
        arrival.pump = reads.pump
        reads.pump()
        return arrival

    def submit(self, work: Callable[[], None]) -> None:
        self._executor.submit(work)

    def read(self, arrival: Arrival, job: Job, chunks: Sequence[_Chunk]) -> bool:
        """True: all of the range is here and sound as far as it goes."""
        if len(chunks) == 1:
            return self._read_pieces(arrival, chunks[0], job.first, job.last)
        offset = chunks[0].item.offset
        buffer = MEMORY.lease(job.nbytes)
        deadline_s = max(chunk.arriving.deadline_s for chunk in chunks)
        try:
            self._get(arrival, chunks[0].item.pack, offset, buffer, deadline_s)
        except Exception:
            # Each by itself: a pack that ends too early is no reason to doubt what comes before.
            for chunk in chunks:
                self._read_pieces(arrival, chunk, 0, 1)
            return False
        sound = True
        for chunk in chunks:
            at = chunk.item.offset - offset
            chunk.land_in(buffer[at : at + chunk.item.nbytes])
            sound &= self._check(arrival, chunk, 0, 1)
        return sound

    def tell(self, nbytes: float, seconds: float) -> None:
        if self._took is not None:
            self._took(nbytes, seconds)

    def _read_alone(self, arrival: Arrival, chunk: _Chunk) -> None:
        self._read_pieces(arrival, chunk, 0, 1)

    def _read_pieces(self, arrival: Arrival, chunk: _Chunk, first: int, last: int) -> bool:
        begin, end = chunk.edges[first], chunk.edges[last]
        if chunk.arriving.state is not ChunkState.ARRIVING:
            return False
        try:
            record = chunk.wanted.chunk
            if not chunk.buffer:
                chunk.land_in(MEMORY.lease(record.nbytes))
            view = chunk.buffer[begin:end]
            self._get(arrival, record.pack, record.offset + begin, view, chunk.arriving.deadline_s)
        except Exception as error:
            # Whatever it was: a chunk that is not here is computed.
            self._failed(arrival, chunk, error)
            return False
        return self._check(arrival, chunk, first, last)

    def _get(self, arrival: Arrival, pack: str, offset: int, view: memoryview, deadline_s: float) -> None:
        within_s = min(deadline_s - time.monotonic(), READ_S + len(view) / DEFAULT_LIMITS.slowest_bytes_s)
        if arrival.abandoned or within_s <= 0:
            raise TimeoutError("not read in time")
        self._store.get_into(pack, offset, view, within_s=within_s)
        self._seal.open_in_place(pack, offset, view)

    def _check(self, arrival: Arrival, chunk: _Chunk, first: int, last: int) -> bool:
        try:
            for piece in range(first, last):
                chunk.has(piece, arrival)
            return True
        except Exception as error:
            self._failed(arrival, chunk, error)
            return False

    def _failed(self, arrival: Arrival, chunk: _Chunk, error: Exception) -> None:
        if isinstance(error, KvError | MissingObject) and chunk.arriving.state is ChunkState.ARRIVING:
            self._bad(chunk.wanted.chunk, str(error))
        arrival.has_failed(chunk.arriving, str(error) or type(error).__name__)


class _Reads:
    """Readers of one arrival: each takes what is to be read next, until nothing is."""

    def __init__(self, fetch: Fetch, arrival: Arrival, steering: Steering, chunks: Sequence[_Chunk]) -> None:
        self._fetch = fetch
        self._arrival = arrival
        self._steering = steering
        self._chunks = chunks
        self._lock = threading.Lock()
        self._coming = 0
        """Readers that were asked for and have not begun."""

    def pump(self) -> None:
        """Readers are asked for, as many as there is room and work for."""
        while not self._arrival.abandoned:
            with self._lock:
                if not self._steering.wants_more(self._coming):
                    return
                self._coming += 1
            self._fetch.submit(self._work)

    def _work(self) -> None:
        with self._lock:
            self._coming -= 1
        while not self._arrival.abandoned and (job := self._steering.take()) is not None:
            chunks = [self._chunks[item.index] for item in job.items]
            sound = self._fetch.read(self._arrival, job, chunks)
            nbytes, seconds = self._steering.done(job, sound)
            self._arrival.read_bytes += job.nbytes
            self._arrival.reads += 1
            if sound:
                self._fetch.tell(nbytes, seconds)
            for chunk in chunks:
                if chunk.arriving.state is ChunkState.FAILED:
                    self._steering.drop(chunk.item.index)
            # What came may have shown that more at once is better.
            self.pump()
