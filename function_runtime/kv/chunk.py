"""A chunk: the KV of a run of tokens with everything needed to doubt it (docs/kv-format.md has it byte by byte).

    magic | version | header bytes | fields | CRC32C of all before | zeros to 64 | layers, contiguous

Reading checks the digest over every byte, then every field against what the reader expects, then each layer's CRC32C;
any difference is a `KvError`. In which form the layers are (`forms`), the identity says; how they were computed is not
expected but learnt. Limits: the digest travels beside the chunk, not in it; version 1 did not say how they were
computed, and is still read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from function_runtime.errors import KvError
from function_runtime.kv.checksum import crc32c
from function_runtime.kv.fields import decode_fields, encode_fields
from function_runtime.kv.forms import Form, chunk_nbytes, encode, form_of
from function_runtime.kv.identity import KvIdentity, pack_tokens
from function_runtime.passes import NONE, Passes

MAGIC: Final = b"STKKVCH1"
VERSION: Final = 2
_PREAMBLE: Final = struct.Struct("<8sII")
_CRC: Final = struct.Struct("<I")
_LAYER: Final = struct.Struct("<QQI")
_ALIGNMENT: Final = 64
_MAX_PASSES_BYTES: Final = 4 * 1024 * 1024
_MAX_HEADER_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class ChunkHead:
    """What a chunk is: of which identity and scope, and which tokens, after which."""

    identity: KvIdentity
    scope: str
    parent: bytes
    """Chain at `start`."""
    chain: bytes
    """Chain at `end`."""
    start: int
    end: int
    tokens: tuple[int, ...]
    """The ids at positions [start, end)."""
    passes: Passes = NONE
    """How all positions before `end` were computed; not known where a reader expects a chunk."""

    @cached_property
    def form(self) -> Form:
        return form_of(self.identity)

    @property
    def data_bytes(self) -> int:
        """Of the layers as they are stored."""
        return chunk_nbytes(self.form, self.identity.layout, self.end - self.start)

    @property
    def raw_bytes(self) -> int:
        """Of the layers as the engine has them."""
        return chunk_nbytes("raw", self.identity.layout, self.end - self.start)

    def fields(self) -> list[tuple[str, bytes]]:
        return [
            *self.identity.fields(),
            ("scope", self.scope.encode()),
            ("parent", self.parent),
            ("chain", self.chain),
            ("start", struct.pack("<Q", self.start)),
            ("end", struct.pack("<Q", self.end)),
            ("tokens", pack_tokens(self.tokens)),
        ]

    @cached_property
    def encoded(self) -> bytes:
        """What every such chunk's fields begin with."""
        return encode_fields(self.fields())


@dataclass(frozen=True)
class EncodedChunk:
    head: bytes
    data: memoryview
    digest: str

    @property
    def nbytes(self) -> int:
        return len(self.head) + len(self.data)


def encode_chunk(head: ChunkHead, data: memoryview) -> EncodedChunk:
    """`data` is raw [layers, 2, tokens, kv_heads, head_dim], contiguous bytes; stored in the form the head names."""
    data = data.cast("B")
    if len(data) != head.raw_bytes or len(head.tokens) != head.end - head.start:
        raise KvError(f"{len(data)} bytes of KV for {len(head.tokens)} tokens where {head.raw_bytes} were expected")
    data = encode(head.form, head.identity.layout, data)
    layers = head.identity.layout.num_layers
    layer_bytes = len(data) // layers
    crcs = [crc32c(data[i * layer_bytes : (i + 1) * layer_bytes]) for i in range(layers)]
    prefix = _header(head, crcs, layer_bytes)
    digest = hashlib.sha256(prefix)
    digest.update(data)
    return EncodedChunk(prefix, data, digest.hexdigest())


def _header(head: ChunkHead, crcs: Sequence[int], layer_bytes: int) -> bytes:
    """Offsets of layers count from the chunk's first byte, which depends on the header's own length, which does not
    depend on them."""
    size = len(_fields(head, crcs, layer_bytes, 0))
    first = -(-(_PREAMBLE.size + size + _CRC.size) // _ALIGNMENT) * _ALIGNMENT
    body = _PREAMBLE.pack(MAGIC, VERSION, size) + _fields(head, crcs, layer_bytes, first)
    body += _CRC.pack(crc32c(body))
    return body.ljust(first, b"\0")


def _fields(head: ChunkHead, crcs: Sequence[int], layer_bytes: int, first: int) -> bytes:
    table = b"".join(_LAYER.pack(first + i * layer_bytes, layer_bytes, crc) for i, crc in enumerate(crcs))
    return head.encoded + encode_fields([("passes", head.passes.to_bytes()), ("layers_at", table)])


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer lies in its chunk, and what its bytes must sum to."""

    offset: int
    nbytes: int
    crc: int


def check_layer(raw: memoryview, places: Sequence[LayerPlace], index: int) -> None:
    place = places[index]
    layer = raw[place.offset : place.offset + place.nbytes]
    if len(layer) != place.nbytes or not len(layer) or crc32c(layer) != place.crc:
        raise KvError(f"layer {index} does not have its checksum")


def header_nbytes(nbytes: int, expected: ChunkHead) -> int:
    """Where the layers of such a chunk of `nbytes` begin: they are what it ends with. Raises `KvError`."""
    layers = expected.identity.layout.num_layers
    fields = len(expected.encoded) + len(encode_fields([("layers_at", b"")])) + layers * _LAYER.size
    least = _PREAMBLE.size + fields + _CRC.size
    found = nbytes - expected.data_bytes
    if not least <= found <= least + _MAX_PASSES_BYTES or found % _ALIGNMENT:
        raise KvError(f"its record says {nbytes} bytes, of which {expected.data_bytes} are KV: no header fits the rest")
    return found


class NeedMore(KvError):
    """The header is longer than what is there of the chunk."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"its header reaches beyond its end, or is not all here: {nbytes} bytes")
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the beginning of a chunk says of itself, under its checksum."""

    version: int
    fields: memoryview
    """As they are encoded."""
    end: int
    """Of header and checksum; zeros follow up to the layers."""


def read_header(raw: memoryview, nbytes: int) -> Header:
    """Of a chunk of `nbytes`, of which `raw` is the beginning; raises `NeedMore` where that is too little of it."""
    if len(raw) < _PREAMBLE.size:
        raise NeedMore(_PREAMBLE.size)
    magic, version, size = _PREAMBLE.unpack_from(raw)
    if magic != MAGIC:
        raise KvError("it does not begin as a chunk does")
    if not 1 <= version <= VERSION:
        raise KvError(f"it has format version {version}, known are 1 to {VERSION}")
    end = _PREAMBLE.size + size
    if end + _CRC.size > min(nbytes, _MAX_HEADER_BYTES):
        raise KvError("its header reaches beyond its end")
    if end + _CRC.size > len(raw):
        raise NeedMore(end + _CRC.size)
    if _CRC.unpack_from(raw, end)[0] != crc32c(raw[:end]):
        raise KvError("its header does not have its checksum")
    return Header(version, raw[_PREAMBLE.size : end], end + _CRC.size)


def layer_table(table: bytes) -> tuple[LayerPlace, ...]:
    """The field `layers_at`."""
    if len(table) % _LAYER.size:
        raise KvError("the table of its layers ends in the middle of an entry")
    return tuple(LayerPlace(*entry) for entry in _LAYER.iter_unpack(table))


@dataclass(frozen=True, slots=True)
class Opened:
    places: tuple[LayerPlace, ...]
    passes: Passes | None
    """None: a version that does not say."""


def open_header(raw: memoryview, nbytes: int, expected: ChunkHead) -> Opened:
    """Where the layers lie in a chunk of `nbytes`, of which `raw` is the header at least; every field that can be
    expected is compared."""
    header = read_header(raw, nbytes)
    wanted = expected.encoded
    if header.fields[: len(wanted)] != wanted:
        raise KvError(_difference(decode_fields(header.fields), expected.fields()))
    rest = decode_fields(header.fields[len(wanted) :])
    if [tag for tag, _ in rest] != (["layers_at"] if header.version == 1 else ["passes", "layers_at"]):
        raise KvError("it has other fields than its version")
    passes = _passes(rest[0][1], expected) if header.version > 1 else None
    return Opened(_layers(nbytes, rest[-1][1], header.end, expected), passes)


def _difference(found: Sequence[tuple[str, bytes]], wanted: Sequence[tuple[str, bytes]]) -> str:
    for (tag, value), (wanted_tag, wanted_value) in zip(found, wanted, strict=False):
        if tag != wanted_tag:
            return f"field {tag!r} stands where {wanted_tag!r} belongs"
        if value != wanted_value:
            return f"its {tag} is another one"
    return "it has other fields than its version"


def _passes(data: bytes, expected: ChunkHead) -> Passes | None:
    try:
        passes = Passes.from_bytes(data)
    except ValueError as error:
        raise KvError(f"its passes are none: {error}") from None
    if passes.parts and passes.end != expected.end:
        raise KvError(f"its passes end at {passes.end}")
    return passes if passes.parts else None


def _layers(nbytes: int, table: bytes, header_end: int, expected: ChunkHead) -> tuple[LayerPlace, ...]:
    layers = expected.identity.layout.num_layers
    layer_bytes = expected.data_bytes // layers
    first = -(-header_end // _ALIGNMENT) * _ALIGNMENT
    places = layer_table(table)
    if len(places) != layers or nbytes != first + layers * layer_bytes:
        raise KvError(f"it has {nbytes} bytes, {first + layers * layer_bytes} were expected")
    for index, place in enumerate(places):
        if (place.offset, place.nbytes) != (first + index * layer_bytes, layer_bytes):
            raise KvError(f"layer {index} lies elsewhere than this version puts it")
    return places
