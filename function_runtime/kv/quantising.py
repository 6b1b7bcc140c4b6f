"""Finished prefixes on their way into a lossy form: raw chunks of a request that is over, quantised behind its back.

    sources -> raw bytes (still queued, or read back and verified) -> the writer, which encodes them -> kept

What was kept, or seen in the index, within `KEPT_FOR_S` is not made again. Limits: one thread per request that ends;
what cannot be had, or that the writer has no room for within `ROOM_S`, ends the prefix there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from function_runtime.errors import KvError
from function_runtime.kv.chunk import ChunkHead, open_header
from function_runtime.kv.forms import chunk_nbytes
from function_runtime.kv.keeping import Prefix
from function_runtime.kv.known import KnownChunks
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.kv.written import Written
from function_runtime.protocol import KvChunk
from model_loader.errors import LoaderError
from model_loader.objects import ObjectStore

KEPT_FOR_S: Final = 600.0
ROOM_S: Final = 10.0


@dataclass(eq=False, frozen=True, slots=True)
class Quantised:
    """Owner of chunks in the writer's queue: whose they are, and why they are kept."""

    written: Written
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """A whole chunk as it is, and as what it is to be kept."""

    raw: ChunkHead
    lossy: ChunkHead
    data: memoryview | None
    """Its raw bytes where they are still in memory."""
    chunk: KvChunk | None
    """Where they are stored."""


class Quantising:
    """`sources`, `saw` and `forget_pack` are the loop's thread's; `run` is a helper's."""

    def __init__(self, chunk_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunk_tokens = chunk_tokens
        self._recent = KnownChunks(clock, KEPT_FOR_S)

    def saw(self, chunk: KvChunk) -> None:
        """It is in the index."""
        if chunk.form != "raw":
            self._recent.add(msgspec.structs.replace(chunk, lineage=""))

    def forget_pack(self, pack: str) -> None:
        self._recent.forget_pack(pack)

    def sources(self, written: Written) -> tuple[int, list[Source]]:
        """Where the request's whole chunks end, and those of them that are not kept in its form yet."""
        found: list[Source] = []
        position, size = 0, self._chunk_tokens
        while position + size <= len(written.tokens[0]):
            lossy = written.head(0, position, position + size, shared=True)
            chunk = written.chunks.get(position)
            is_here = chunk is not None and chunk.form == written.form and chunk.end == lossy.end
            if not is_here and self._recent.find((lossy.chain, position, ""), lambda _: False) is None:
                raw = written.head(0, position, position + size)
                copy = written.waiting.get(position)
                data = copy.data if copy is not None and copy.end == raw.end else None
                is_stored = chunk is not None and chunk.form == "raw" and chunk.end == raw.end
                if data is None and not is_stored:
                    break
                found.append(Source(raw, lossy, data, chunk if is_stored else None))
            position += size
        return position, found

    def prefix(self, written: Written, sources: Sequence[Source]) -> Prefix:
        """What the rule is asked about: the bytes are those of the form."""
        layout = written.shared.identity.layout
        tokens = sum(source.lossy.end - source.lossy.start for source in sources)
        nbytes = sum(chunk_nbytes(written.form, layout, s.lossy.end - s.lossy.start) for s in sources)
        return Prefix(tokens, nbytes, 1, sources[-1].lossy.chain)

    def run(
        self,
        owner: Quantised,
        sources: Sequence[Source],
        open_store: Callable[[], ObjectStore],
        writer: KvWriter,
        is_wanted: Callable[[], bool],
    ) -> None:
        for source in sources:
            try:
                data = source.data if source.data is not None else self._read(owner, source, open_store())
            except (KvError, LoaderError, OSError) as error:
                print(f"kv not kept from {source.raw.start} on: {error}", file=sys.stderr)
                return
            if not writer.wait_for_room(len(data), ROOM_S):
                return
            writer.put(Pending(owner, 0, source.lossy, data, is_wanted, owner.written.seal, owner.written.place))

    @staticmethod
    def _read(owner: Quantised, source: Source, store: ObjectStore) -> memoryview:
        chunk = source.chunk
        if chunk is None:
            raise KvError("it is not stored any more")
        raw = memoryview(bytearray(chunk.nbytes))
        store.get_into(chunk.pack, chunk.offset, raw, within_s=ROOM_S)
        owner.written.seal.open_in_place(chunk.pack, chunk.offset, raw)
        if hashlib.sha256(raw).hexdigest() != chunk.digest:
            raise KvError("its bytes do not have the digest that was recorded")
        return raw[open_header(raw, len(raw), source.raw).places[0].offset :]
