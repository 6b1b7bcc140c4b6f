"""Reads a GGUF file's header: metadata and where each tensor lies. Versions 2 and 3, little-endian.

Everything is bounds-checked against the file's size before it is believed; the file is read with pread, never mapped,
so that one cut short while it is read is an error and no crash. Tensors come out under their Hugging Face names.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_loader.block_types import BLOCKS, GGUF_TYPES, count_bytes, count_values
from model_loader.errors import FormatError, SourceMissing, UnsupportedArchitecture
from model_loader.manifest import TensorEntry

MAGIC: Final = b"GGUF"
ROPE_FACTORS: Final = "rope_freqs.weight"
"""A tensor of head_dim / 2 divisors of the rotary frequencies; it belongs to the configuration."""
_READ_BYTES: Final = 4 * 1024 * 1024
_MAX_DIMENSIONS: Final = 4

_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d{1,5})\.([a-z0-9_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


def read_gguf(path: Path, file_index: int = 0) -> GgufHeader:
    """The header of one file. Raises `FormatError` naming the file, what was needed and what was found."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    try:
        cursor = _Cursor(handle, path)
        return _read_header(cursor, path, file_index)
    finally:
        os.close(handle)


class _Cursor:
    """A growing prefix of the file, read in large pieces."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path
        self.size = os.fstat(handle).st_size
        self.buffer = bytearray()
        self.at = 0

    def take(self, nbytes: int) -> int:
        """Makes `nbytes` bytes available and moves past them; gives the place where they begin."""
        start, end = self.at, self.at + nbytes
        if end > self.size:
            raise FormatError(f"{self.path} is truncated: its header needs {end} bytes, {self.size} found")
        while len(self.buffer) < end:
            piece = os.pread(self._handle, max(_READ_BYTES, end - len(self.buffer)), len(self.buffer))
            if not piece:
                raise FormatError(f"{self.path} ended at {len(self.buffer)} bytes while {end} were needed")
            self.buffer += piece
        self.at = end
        return start

    def unpack(self, layout: struct.Struct) -> Any:
        return layout.unpack_from(self.buffer, self.take(layout.size))[0]

    def text(self) -> str:
        nbytes = self.unpack(_U64)
        start = self.take(nbytes)
        try:
            return self.buffer[start : start + nbytes].decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.path}: a string at byte {start} is not UTF-8") from error

    def texts(self, count: int) -> list[str]:
        """Many strings; this loop is most of the time a header takes."""
        unpack, result = _U64.unpack_from, []
        at, buffer = self.at, self.buffer
        for _ in range(count):
            if at + 8 > len(buffer):
                self.at = at
                self.take(8)
            (nbytes,) = unpack(buffer, at)
            at += 8
            if at + nbytes > len(buffer):
                self.at = at
                self.take(nbytes)
            try:
                result.append(buffer[at : at + nbytes].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise FormatError(f"{self.path}: a string at byte {at} is not UTF-8") from error
            at += nbytes
        self.at = at
        return result


_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


def _read_value(cursor: _Cursor, kind: int) -> Any:
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return cursor.unpack(scalar)
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise FormatError(f"{cursor.path}: metadata of unknown type {kind} at byte {cursor.at}")
    item_kind, count = cursor.unpack(_U32), cursor.unpack(_U64)
    item = _SCALARS.get(item_kind)
    if item is not None:
        start = cursor.take(count * item.size)
        return list(struct.unpack_from(f"<{count}{item.format[-1]}", cursor.buffer, start))
    if count * 8 > cursor.size - cursor.at:
        raise FormatError(f"{cursor.path}: an array of {count} items does not fit the file's {cursor.size} bytes")
    if item_kind == _STRING:
        return cursor.texts(count)
    raise FormatError(f"{cursor.path}: an array of unknown item type {item_kind}")


def _read_header(cursor: _Cursor, path: Path, file_index: int) -> GgufHeader:
    start = cursor.take(4)
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != MAGIC:
        raise FormatError(f"{path} is no GGUF file (it begins with {magic!r})")
    version = cursor.unpack(_U32)
    if version not in (2, 3):
        hint = "big-endian files are not read" if version > 0xFFFF else "2 and 3 are read"
        raise FormatError(f"{path} has GGUF version {version}; {hint}")
    tensor_count, pair_count = cursor.unpack(_U64), cursor.unpack(_U64)
    if (tensor_count + pair_count) * 12 > cursor.size:
        raise FormatError(
            f"{path} is truncated or foreign: {tensor_count} tensors and {pair_count} keys are announced, more than "
            f"its {cursor.size} bytes can hold"
        )
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        if key in metadata:
            raise FormatError(f"{path} holds the key {key} twice")
        metadata[key] = _read_value(cursor, cursor.unpack(_U32))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise FormatError(f"{path}: alignment {alignment!r}")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedArchitecture(f"{path} is one of {metadata['split.count']} parts: join them to one file")
    found = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(path, cursor.size, data_start, alignment, file_index, *t) for t in found)
    _check_places(path, tensors)
    return GgufHeader(path, metadata, tensors)


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.text()
    dimensions = cursor.unpack(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise FormatError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.unpack(_U64) for _ in range(dimensions))[::-1]
    number, offset = cursor.unpack(_U32), cursor.unpack(_U64)
    kind = GGUF_TYPES.get(number, f"number {number}")
    if kind not in BLOCKS:
        raise UnsupportedArchitecture(
            f"{cursor.path}: tensor {name} is of GGUF type {kind}; read are {', '.join(BLOCKS)}"
        )
    if min(shape) < 1 or shape[-1] % BLOCKS[kind][0]:
        raise FormatError(f"{cursor.path}: tensor {name} of type {kind} has shape {shape}")
    return name, shape, kind, offset


def _place(
    path: Path, size: int, data_start: int, alignment: int, file_index: int,
    name: str, shape: tuple[int, ...], kind: str, offset: int,
) -> TensorEntry:  # fmt: skip
    nbytes = count_bytes(kind, count_values(shape))
    start = data_start + offset
    if offset % alignment:
        raise FormatError(f"{path}: tensor {name} lies at {offset}, no multiple of {alignment}")
    if start + nbytes > size:
        raise FormatError(f"{path} is truncated: tensor {name} needs {start + nbytes} bytes, {size} found")
    return TensorEntry(hugging_face_name(name, path), kind, shape, file_index, start, nbytes)


def _check_places(path: Path, tensors: tuple[TensorEntry, ...]) -> None:
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: tensors {before.name} and {after.name} overlap")
    if len({t.name for t in tensors}) != len(tensors):
        raise FormatError(f"{path} holds a tensor twice")


def hugging_face_name(name: str, path: Path) -> str:
    top = _TOP_NAMES.get(name)
    if top is not None:
        return top
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedArchitecture(f"{path}: tensor {name} belongs to no known llama model")
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
