"""Reads a GGUF file's header: metadata and where each tensor lies. Versions 2 and 3, little-endian.

Everything is bounds-checked against the file's size before it is believed; the file is read with pread, never mapped,
so that one cut short while it is read is an error and no crash. Tensors come out under their Hugging Face names.
Limits: `MAX_HEADER_BYTES` of header, 100,000 tensors, four million items in all arrays, no arrays of arrays.
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
from model_loader.errors import FormatError, SourceMissing, SourceRefused, UnsupportedArchitecture, shown
from model_loader.manifest import TensorEntry
from model_loader.pickles import PICKLE_STARTS, conversion
from model_loader.safetensors_format import Ensure

MAGIC: Final = b"GGUF"
ROPE_FACTORS: Final = "rope_freqs.weight"
"""A tensor of head_dim / 2 divisors of the rotary frequencies; it belongs to the configuration."""
MAX_HEADER_BYTES: Final = 64 * 1024 * 1024
"""A vocabulary of 262,000 tokens with its merges takes some 15 MiB."""
_READ_BYTES: Final = 4 * 1024 * 1024
_MAX_DIMENSIONS: Final = 4
_MAX_TENSORS: Final = 100_000
_MAX_PAIRS: Final = 10_000
_MAX_ITEMS: Final = 4_000_000
_MAX_KEY_BYTES: Final = 1024
_MAX_NAME_BYTES: Final = 256

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


def read_gguf(path: Path, file_index: int = 0, ensure: Ensure | None = None) -> GgufHeader:
    """The header of one file. Raises `FormatError` naming the file, the field, what was needed and what was found.
    `ensure` is asked for more of the file's beginning as it is needed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    try:
        cursor = _Cursor(handle, path, ensure)
        return _read_header(cursor, path, file_index)
    finally:
        os.close(handle)


class _Cursor:
    """A growing prefix of the file, read in large pieces; `field` is what is being read, for messages."""

    def __init__(self, handle: int, path: Path, ensure: Ensure | None) -> None:
        self._handle = handle
        self._ensure = ensure
        self.path = path
        self.size = os.fstat(handle).st_size
        self.buffer = bytearray()
        self.at = 0
        self.field = "its first bytes"
        self.items_left = _MAX_ITEMS

    def refuse(self, why: str) -> FormatError:
        return FormatError(f"{self.path}: {self.field}: {why}")

    def take(self, nbytes: int) -> int:
        """Makes `nbytes` bytes available and moves past them; gives the place where they begin."""
        start, end = self.at, self.at + nbytes
        if end > self.size:
            raise FormatError(f"{self.path} is truncated: {self.field} needs {end} bytes, {self.size} found")
        if end > MAX_HEADER_BYTES:
            raise self.refuse(f"the header would have {end} bytes or more; at most {MAX_HEADER_BYTES} are read")
        while len(self.buffer) < end:
            wanted = min(max(_READ_BYTES, end - len(self.buffer)), self.size - len(self.buffer))
            if self._ensure is not None:
                self._ensure(self.path, len(self.buffer), len(self.buffer) + wanted)
            piece = os.pread(self._handle, wanted, len(self.buffer))
            if not piece:
                raise FormatError(f"{self.path} ended at {len(self.buffer)} bytes while {end} were needed")
            self.buffer += piece
        self.at = end
        return start

    def unpack(self, layout: struct.Struct) -> Any:
        return layout.unpack_from(self.buffer, self.take(layout.size))[0]

    def text(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        nbytes = self.unpack(_U64)
        if nbytes > max_bytes:
            raise self.refuse(f"a text of {nbytes} bytes; at most {max_bytes} are read here")
        start = self.take(nbytes)
        try:
            return self.buffer[start : start + nbytes].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"the text at byte {start} is not UTF-8") from error

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
                raise self.refuse(f"the text at byte {at} is not UTF-8") from error
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
        raise cursor.refuse(f"a value of unknown type {kind} at byte {cursor.at}")
    item_kind, count = cursor.unpack(_U32), cursor.unpack(_U64)
    if item_kind == _ARRAY:
        raise cursor.refuse("an array of arrays; no llama model needs one")
    item = _SCALARS.get(item_kind)
    if item is None and item_kind != _STRING:
        raise cursor.refuse(f"an array of unknown item type {item_kind}")
    if count * (item.size if item else 8) > cursor.size - cursor.at:
        raise FormatError(
            f"{cursor.path} is truncated or foreign: {cursor.field}: an array of {count} items does not fit the "
            f"file's {cursor.size} bytes"
        )
    if count > cursor.items_left:
        raise cursor.refuse(f"an array of {count} items; a header may have {_MAX_ITEMS} in all its arrays")
    cursor.items_left -= count
    if item is None:
        return cursor.texts(count)
    start = cursor.take(count * item.size)
    return list(struct.unpack_from(f"<{count}{item.format[-1]}", cursor.buffer, start))


def _read_header(cursor: _Cursor, path: Path, file_index: int) -> GgufHeader:
    start = cursor.take(4)
    magic = bytes(cursor.buffer[start : start + 4])
    if magic.startswith(tuple(sign[:4] for sign in PICKLE_STARTS)):
        raise SourceRefused(
            f"{path} is no GGUF file but begins like a pickle ({magic!r}), which can run code when it is read: convert "
            f"it where you trust it: {conversion(str(path))}"
        )
    if magic != MAGIC:
        raise FormatError(f"{path} is no GGUF file (it begins with {magic!r})")
    cursor.field = "its version and counts"
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
    if tensor_count > _MAX_TENSORS or pair_count > _MAX_PAIRS:
        raise cursor.refuse(
            f"{tensor_count} tensors and {pair_count} keys are announced; at most {_MAX_TENSORS} and {_MAX_PAIRS} are "
            "read"
        )
    metadata = _read_metadata(cursor, pair_count)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise FormatError(f"{path}: general.alignment is {shown(alignment)}; 1 to {1 << 20} is read")
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UnsupportedArchitecture(f"{path}: split.count is {shown(parts)}: join the parts to one file")
    cursor.field = "the list of tensors"
    found = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(path, cursor.size, data_start, alignment, file_index, *t) for t in found)
    _check_places(path, tensors)
    return GgufHeader(path, metadata, tensors)


def _read_metadata(cursor: _Cursor, pair_count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(pair_count):
        cursor.field = f"metadata key {number + 1} of {pair_count}"
        key = cursor.text(_MAX_KEY_BYTES)
        cursor.field = f"metadata {shown(key)}"
        if key in metadata:
            raise cursor.refuse("this key is there twice")
        metadata[key] = _read_value(cursor, cursor.unpack(_U32))
    return metadata


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.text(_MAX_NAME_BYTES)
    dimensions = cursor.unpack(_U32)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise FormatError(f"{cursor.path}: tensor {shown(name)} has {dimensions} dimensions")
    shape = tuple(cursor.unpack(_U64) for _ in range(dimensions))[::-1]
    number, offset = cursor.unpack(_U32), cursor.unpack(_U64)
    kind = GGUF_TYPES.get(number, f"number {number}")
    if kind not in BLOCKS:
        raise UnsupportedArchitecture(
            f"{cursor.path}: tensor {shown(name)} is of GGUF type {kind}; read are {', '.join(BLOCKS)}"
        )
    if min(shape) < 1 or shape[-1] % BLOCKS[kind][0]:
        raise FormatError(f"{cursor.path}: tensor {shown(name)} of type {kind} has shape {shape}")
    return name, shape, kind, offset


def _place(
    path: Path, size: int, data_start: int, alignment: int, file_index: int,
    name: str, shape: tuple[int, ...], kind: str, offset: int,
) -> TensorEntry:  # fmt: skip
    nbytes = count_bytes(kind, count_values(shape))
    start = data_start + offset
    if offset % alignment:
        raise FormatError(f"{path}: tensor {shown(name)} lies at offset {offset}, no multiple of {alignment}")
    if start + nbytes > size:
        raise FormatError(
            f"{path} is truncated: tensor {shown(name)} of shape {shape} at offset {offset} needs {start + nbytes} "
            f"bytes, {size} found"
        )
    return TensorEntry(hugging_face_name(name, path), kind, shape, file_index, start, nbytes)


def _check_places(path: Path, tensors: tuple[TensorEntry, ...]) -> None:
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: tensors {before.name} and {after.name} overlap: the offset of one is wrong")
    seen: set[str] = set()
    for entry in tensors:
        if entry.name in seen:
            raise FormatError(f"{path} holds tensor {entry.name} twice")
        seen.add(entry.name)


def hugging_face_name(name: str, path: Path) -> str:
    top = _TOP_NAMES.get(name)
    if top is not None:
        return top
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedArchitecture(f"{path}: tensor {shown(name)} belongs to no known llama model")
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
