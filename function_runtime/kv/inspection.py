"""Packs and chunks as they lie in a store, read without expecting anything in particular: for people and for repair.

`scan_pack` reads headers only and tells what an index needs; `check_pack` reads every byte and believes none: the
pack's name, each chunk's digest, header checksum, chain from parent and tokens, and each layer's CRC32C. Limits: says
whether a chunk is sound in itself; whether it is of the right model and tenant is the reader's question.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from function_runtime.errors import KvError
from function_runtime.kv.chunk import MAGIC, LayerPlace, NeedMore, check_layer, layer_table, read_header
from function_runtime.kv.fields import decode_fields, encode_fields
from function_runtime.kv.forms import is_of_one_request
from function_runtime.kv.identity import link
from function_runtime.kv.pack import PackEntry, read_entries
from function_runtime.kv.sealing import CLEAR, ChunkSeal
from model_loader.objects import ObjectStore

HEAD_GUESS_BYTES: Final = 16 * 1024
_NUMBERS: Final = ("block_size", "layers", "kv_heads", "head_dim", "start", "end")
_IDENTITY: Final = (
    "checkpoint", "adapter", "dtype", "scales", "block_size", "layers", "kv_heads", "head_dim", "rope", "engine_format",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """What a chunk's own header says."""

    entry: PackEntry
    version: int
    fields: dict[str, bytes]
    layers: tuple[LayerPlace, ...]

    def text(self, name: str) -> str:
        return self.fields[name].decode(errors="replace")

    def number(self, name: str) -> int:
        return int.from_bytes(self.fields[name], "little")

    @property
    def identity(self) -> str:
        named = [("kind", b"stoker-kv-identity-1"), *((name, self.fields[name]) for name in _IDENTITY)]
        return hashlib.sha256(encode_fields(named)).hexdigest()

    @property
    def tokens(self) -> tuple[int, ...]:
        raw = self.fields["tokens"]
        return struct.unpack(f"<{len(raw) // 4}I", raw)

    @property
    def form(self) -> str:
        return self.text("scales").partition("-")[0].partition("/")[0] or "raw"

    def record(self) -> dict[str, Any]:
        """What the index keeps of it, and whether it can serve other requests: it is of whole blocks, and not in flight
        beside lossy prefixes."""
        size = max(self.number("block_size"), 1)
        return {
            "identity": self.identity,
            "scope": self.text("scope"),
            "chain": self.fields["chain"].hex(),
            "parent": self.fields["parent"].hex(),
            "start": self.number("start"),
            "end": self.number("end"),
            "offset": self.entry.offset,
            "nbytes": self.entry.nbytes,
            "digest": self.entry.digest,
            "form": self.form,
            "whole": self.number("start") % size == 0
            and self.number("end") % size == 0
            and not is_of_one_request(self.text("scales")),
        }

    def description(self) -> dict[str, Any]:
        """What people want to see; token ids and the scope are a tenant's own."""
        shown = {name: self.number(name) if name in _NUMBERS else self.text(name) for name in _IDENTITY}
        layers = {"layers_bytes": sum(layer.nbytes for layer in self.layers), "layer_count": len(self.layers)}
        return {**self.record(), "version": self.version, "tokens": len(self.tokens), **layers, "made_of": shown}


def parse_head(raw: memoryview, entry: PackEntry) -> FoundChunk:
    """From a chunk's first bytes; raises `KvError` where they are no sound header, `NeedMore` where they end early."""
    header = read_header(raw, entry.nbytes)
    fields = dict(decode_fields(header.fields))
    missing = {*_IDENTITY, "scope", "parent", "chain", "start", "end", "tokens", "layers_at"} - set(fields)
    if missing:
        raise KvError(f"its header lacks {', '.join(sorted(missing))}")
    if len(fields["tokens"]) % 4:
        raise KvError("the list of its tokens ends in the middle of one")
    found = FoundChunk(entry, header.version, fields, layer_table(fields["layers_at"]))
    if len(found.tokens) != found.number("end") - found.number("start"):
        raise KvError(
            f"it names {len(found.tokens)} tokens for positions {found.number('start')} to {found.number('end')}"
        )
    return found


def _clear(seals: Sequence[ChunkSeal], pack: str, offset: int, raw: bytes, is_right: Callable[[bytes], bool]) -> bytes:
    """A range as it was before it was sealed, if one of the keys opens it; else as it lies there."""
    for seal in (CLEAR, *seals):
        data = seal.apply(pack, offset, raw)
        if is_right(data):
            return data
    return raw


def scan_pack(store: ObjectStore, key: str, seals: Sequence[ChunkSeal] = ()) -> list[FoundChunk]:
    """What a pack holds, by its header and those of its chunks. `seals`: of the tenants that have keys."""
    found: list[FoundChunk] = []

    def begin(entry: PackEntry, nbytes: int) -> bytes:
        raw = store.get(key, entry.offset, nbytes)
        return _clear(seals, key, entry.offset, raw, lambda data: data.startswith(MAGIC))

    for entry in read_entries(store, key):
        head = begin(entry, min(HEAD_GUESS_BYTES, entry.nbytes))
        try:
            chunk = parse_head(memoryview(head), entry)
        except NeedMore as more:
            chunk = parse_head(memoryview(begin(entry, more.nbytes)), entry)
        if chunk.fields["chain"] != entry.chain:
            raise KvError(f"the chunk at {entry.offset} is not the one the pack's header names")
        found.append(chunk)
    return found


def check_pack(store: ObjectStore, key: str, seals: Sequence[ChunkSeal] = ()) -> list[FoundChunk]:
    """Reads and checks every byte that a chunk has; raises `KvError` with the first that is wrong."""
    found: list[FoundChunk] = []

    def is_of(digest: str) -> Callable[[bytes], bool]:
        return lambda data: hashlib.sha256(data).hexdigest() == digest

    for entry in read_entries(store, key):
        where = f"chunk at {entry.offset}"
        raw = store.get(key, entry.offset, entry.nbytes)
        raw = _clear(seals, key, entry.offset, raw, is_of(entry.digest))
        if hashlib.sha256(raw).hexdigest() != entry.digest:
            raise KvError(f"{where}: its bytes do not have the digest of the pack's header")
        try:
            chunk = parse_head(memoryview(raw), entry)
        except KvError as error:
            raise KvError(f"{where}: {error}") from None
        if chunk.fields["chain"] != entry.chain or _chain_after(chunk) != entry.chain:
            raise KvError(f"{where}: its chain does not follow from its parent and its tokens")
        for index in range(len(chunk.layers)):
            try:
                check_layer(memoryview(raw), chunk.layers, index)
            except KvError as error:
                raise KvError(f"{where}: {error}") from None
        found.append(chunk)
    return found


def _chain_after(chunk: FoundChunk) -> bytes:
    """The chain at its end, computed again. One that begins inside a block cannot be followed from its parent alone."""
    size, start, tokens = chunk.number("block_size"), chunk.number("start"), chunk.tokens
    if size <= 0 or start % size:
        return chunk.fields["chain"]
    chain = chunk.fields["parent"]
    for at in range(0, len(tokens) // size * size, size):
        chain = link("block", chain, tokens[at : at + size])
    rest = tokens[len(tokens) // size * size :]
    return link("part", chain, rest) if rest else chain
