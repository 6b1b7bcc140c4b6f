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
from function_runtime.passes import Passes
from function_runtime.protocol import KvChunk
from model_loader.errors import MissingObject
from model_loader.objects import ObjectStore

Place: TypeAlias = tuple[str, int, str]

SPAN_BYTES: Final = 17 * 1024 * 1024
"""Neighbouring chunks are read together up to this size: a pack of 16 MiB with its headers is one request. A store that
is far or slow gets it in parts, side by side."""
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


@dataclass(frozen=True)
class Span:
    """Chunks that lie side by side in a pack, read as one range."""

    wanted: tuple[Wanted, ...]

    @property
    def offset(self) -> int:
        return self.wanted[0].chunk.offset

    @property
    def nbytes(self) -> int:
        last = self.wanted[-1].chunk
        return last.offset + last.nbytes - self.offset


def spans(wanted: Sequence[Wanted]) -> list[Span]:
    """In the order given; only neighbours in it are joined."""
    found: list[list[Wanted]] = []
    for item in wanted:
        before = found[-1][-1].chunk if found else None
        begin = found[-1][0].chunk.offset if found else 0
        gap = item.chunk.offset - (before.offset + before.nbytes) if before else -1
        fits = item.chunk.offset + item.chunk.nbytes - begin <= SPAN_BYTES
        if before and before.pack == item.chunk.pack and 0 <= gap < 64 and fits:
            found[-1].append(item)
        else:
            found.append([item])
    return [Span(tuple(items)) for items in found]


class _Chunk:
    """One chunk being read: what of it is here, and what of that is checked."""

    def __init__(self, wanted: Wanted, buffer: memoryview, pieces: int, deadline_s: float) -> None:
        self.wanted = wanted
        self.buffer = buffer
        layout = wanted.head.identity.layout
        self._layout, self._form = layout, wanted.head.form
        self._header = header_nbytes(wanted.chunk.nbytes, wanted.head)
        layer_nbytes = wanted.head.data_bytes // layout.num_layers
        self.layers = [layout.num_layers * i // pieces for i in range(pieces + 1)]
        self.edges = [0, *(self._header + layer_nbytes * layer for layer in self.layers[1:])]
        self._raw = buffer[self._header :]
        """Layers as the engine takes them: where they were read to, or where they are decoded to."""
        if self._form != "raw":
            self._raw = MEMORY.lease(wanted.head.raw_bytes)
        self.arriving = ArrivingChunk(wanted.chunk, layout.num_layers, self._raw, deadline_s)
        self._lock = threading.Lock()
        self._here = [False] * pieces
        self._checked = [False] * pieces
        self._hashed = 0
        self._hash = hashlib.sha256()
        self._places: tuple[LayerPlace, ...] | None = None

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
    """Begins the reads of an arrival. `deadlines_s` are seconds from now, one for each chunk wanted."""

    def __init__(self, store: ObjectStore, executor: Executor, bad: Bad, seal: ChunkSeal = CLEAR) -> None:
        self._store = store
        self._seal = seal
        self._executor = executor
        self._bad = bad

    def begin(
        self,
        wanted: Sequence[Wanted],
        deadlines_s: Sequence[float],
        *,
        pieces: int = 1,
        from_back: bool = False,
        reason: str = "",
        other: Callable[[KvChunk], Wanted | None] | None = None,
    ) -> Arrival:
        """`other`: asked for another chunk that begins where a failed one did."""
        now_s = time.monotonic()
        deadline_of = {w.place: now_s + d for w, d in zip(wanted, deadlines_s, strict=True)}
        arrival = Arrival((), layered=not from_back, reason=reason)
        jobs: list[Callable[[], None]] = []
        order = spans(wanted) if pieces == 1 else [Span((w,)) for w in wanted]
        rounds: list[list[Callable[[], None]]] = [[] for _ in range(pieces)]
        for span in reversed(order) if from_back else order:
            buffer = MEMORY.lease(span.nbytes)
            chunks: list[_Chunk] = []
            for w in span.wanted:
                at = w.chunk.offset - span.offset
                chunks.append(_Chunk(w, buffer[at : at + w.chunk.nbytes], pieces, deadline_of[w.place]))
                arrival.chunks.append(chunks[-1].arriving)
            if pieces == 1:
                jobs.append(_job(self._read_span, arrival, span, buffer, chunks))
            else:
                for piece in range(pieces):
                    rounds[piece].append(_job(self._read_piece, arrival, chunks[0], piece))
        jobs += [job for round_ in rounds for job in round_]

        def instead(failed: ArrivingChunk) -> ArrivingChunk | None:
            found = other(failed.record) if other is not None else None
            if found is None or arrival.abandoned:
                return None
            chunk = _Chunk(found, MEMORY.lease(found.chunk.nbytes), 1, failed.deadline_s)
            self._executor.submit(self._read_piece, arrival, chunk, 0)
            return chunk.arriving

        arrival.on_failure = instead
        for job in jobs:
            self._executor.submit(job)
        return arrival

    def _read_span(self, arrival: Arrival, span: Span, buffer: memoryview, chunks: Sequence[_Chunk]) -> None:
        within_s = max(c.arriving.deadline_s for c in chunks) - time.monotonic()
        if len(chunks) == 1 or not self._read(arrival, span.wanted[0].chunk.pack, span.offset, buffer, within_s, None):
            for chunk in chunks:
                # By itself: a pack that ends too early is no reason to doubt what comes before.
                self._read_piece(arrival, chunk, 0)
            return
        for chunk in chunks:
            self._check(arrival, chunk, 0)

    def _read_piece(self, arrival: Arrival, chunk: _Chunk, piece: int) -> None:
        begin, end = chunk.edges[piece], chunk.edges[piece + 1]
        record = chunk.wanted.chunk
        within_s = chunk.arriving.deadline_s - time.monotonic()
        if self._read(arrival, record.pack, record.offset + begin, chunk.buffer[begin:end], within_s, chunk):
            self._check(arrival, chunk, piece)

    def _read(
        self, arrival: Arrival, pack: str, offset: int, view: memoryview, within_s: float, chunk: _Chunk | None
    ) -> bool:
        if arrival.abandoned or (chunk is not None and chunk.arriving.state is not ChunkState.ARRIVING):
            return False
        try:
            if within_s <= 0:
                raise TimeoutError("not read in time")
            self._store.get_into(pack, offset, view, within_s=min(within_s, 3600.0))
            self._seal.open_in_place(pack, offset, view)
            return True
        except Exception as error:
            # Whatever it was: a chunk that is not here is computed.
            if chunk is not None:
                self._failed(arrival, chunk, error)
            return False

    def _check(self, arrival: Arrival, chunk: _Chunk, piece: int) -> None:
        try:
            chunk.has(piece, arrival)
        except Exception as error:
            self._failed(arrival, chunk, error)

    def _failed(self, arrival: Arrival, chunk: _Chunk, error: Exception) -> None:
        if isinstance(error, KvError | MissingObject) and chunk.arriving.state is ChunkState.ARRIVING:
            self._bad(chunk.wanted.chunk, str(error))
        arrival.has_failed(chunk.arriving, str(error) or type(error).__name__)


def _job(work: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: work(*arguments)
