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
    return encode_fields([*head.fields(), ("passes", head.passes.to_bytes()), ("layers_at", table)])


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer lies in its chunk, and what its bytes must sum to."""

    offset: int
    nbytes: int
    crc: int


def open_chunk(raw: memoryview, digest: str, expected: ChunkHead) -> memoryview:
    """The layers of a chunk that is, byte for byte, what its digest says and of what the reader expects."""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise KvError("its bytes do not have the digest that was recorded")
    places = open_header(raw, len(raw), expected).places
    for index in range(len(places)):
        check_layer(raw, places, index)
    return raw[places[0].offset :]


def check_layer(raw: memoryview, places: Sequence[LayerPlace], index: int) -> None:
    place = places[index]
    if crc32c(raw[place.offset : place.offset + place.nbytes]) != place.crc:
        raise KvError(f"layer {index} does not have its checksum")


def header_nbytes(nbytes: int, expected: ChunkHead) -> int:
    """Where the layers of such a chunk of `nbytes` begin: they are what it ends with. Raises `KvError`."""
    layers = expected.identity.layout.num_layers
    fields = encode_fields([*expected.fields(), ("layers_at", bytes(layers * _LAYER.size))])
    least = _PREAMBLE.size + len(fields) + _CRC.size
    found = nbytes - expected.data_bytes
    if not least <= found <= least + _MAX_PASSES_BYTES or found % _ALIGNMENT:
        raise KvError(f"its record says {nbytes} bytes, of which {expected.data_bytes} are KV: no header fits the rest")
    return found


@dataclass(frozen=True, slots=True)
class Opened:
    places: tuple[LayerPlace, ...]
    passes: Passes | None
    """None: a version that does not say."""


def open_header(raw: memoryview, nbytes: int, expected: ChunkHead) -> Opened:
    """Where the layers lie in a chunk of `nbytes`, of which `raw` is the header at least; every field that can be
    expected is compared."""
    if len(raw) < _PREAMBLE.size:
        raise KvError(f"{len(raw)} bytes are no chunk")
    magic, version, size = _PREAMBLE.unpack_from(raw)
    if magic != MAGIC:
        raise KvError("it does not begin as a chunk does")
    if not 1 <= version <= VERSION:
        raise KvError(f"it has format version {version}, known are 1 to {VERSION}")
    end = _PREAMBLE.size + size
    if end + _CRC.size > len(raw):
        raise KvError("its header reaches beyond its end")
    if _CRC.unpack_from(raw, end)[0] != crc32c(raw[:end]):
        raise KvError("its header does not have its checksum")
    fields = decode_fields(raw[_PREAMBLE.size : end])
    wanted = expected.fields()
    for (tag, value), (wanted_tag, wanted_value) in zip(fields, wanted, strict=False):
        if tag != wanted_tag:
            raise KvError(f"field {tag!r} stands where {wanted_tag!r} belongs")
        if value != wanted_value:
            raise KvError(f"its {tag} is another one")
    if [tag for tag, _ in fields[len(wanted) :]] != (["layers_at"] if version == 1 else ["passes", "layers_at"]):
        raise KvError("it has other fields than its version")
    passes = _passes(fields[-2][1], expected) if version > 1 else None
    return Opened(_layers(nbytes, fields[-1][1], end + _CRC.size, expected), passes)


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
    if len(table) != layers * _LAYER.size or nbytes != first + layers * layer_bytes:
        raise KvError(f"it has {nbytes} bytes, {first + layers * layer_bytes} were expected")
    places = tuple(LayerPlace(*entry) for entry in _LAYER.iter_unpack(table))
    for index, place in enumerate(places):
        if (place.offset, place.nbytes) != (first + index * layer_bytes, layer_bytes):
            raise KvError(f"layer {index} lies elsewhere than this version puts it")
    return places
