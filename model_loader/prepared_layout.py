"""How a prepared form lies in its file, version 2.

    page 0        preamble: magic, version, where table and list of chunks are, their digests, commit mark
    page 1...     board: what has landed while the form is made (`model_loader.board`)
    body          tensors in the order the model needs them (64-byte aligned, large ones page-aligned), then the table
    behind it     the list of the body's chunks, by which it is verified, here and wherever it is copied to

The table is JSON (identity, recipe, dtype, groups, tensors) and written first, so that a form can be mapped while it
arrives; the preamble's mark says `complete` only once everything is there. Limits: little-endian; bfloat16 and float16
are raw uint16; forms of version 1 (a CRC32C of each tensor) are made anew.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_loader.board import board_bytes
from model_loader.chunks import ChunkList
from model_loader.errors import FormatError, IntegrityError
from model_loader.llama_layout import ITEM_BYTES

MAGIC: Final = b"STOKRPF1"
FORMAT_VERSION: Final = 2
PAGE_BYTES: Final = 4096
COMPLETE: Final = b"complete"
ARRIVING: Final = b"arriving"
_PREAMBLE: Final = struct.Struct("<8sIIQQQ32s8sQQ32s")
"""magic, version, board bytes, table offset, table bytes, file bytes, SHA-256 of the table, mark, offset and bytes of
the list of chunks, its SHA-256"""
_LARGE_BYTES: Final = 64 * 1024
_MAX_TABLE_BYTES: Final = 64 * 1024 * 1024
_MAX_BOARD_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PreparedTensor:
    dtype: str
    shape: tuple[int, ...]
    """As the engine uses it."""
    offset: int
    nbytes: int
    group: int
    by_columns: bool
    """Its bytes are those of the transposed matrix: as a checkpoint has them."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to come, before its bytes are known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int = 0
    by_columns: bool = False

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Preamble:
    board_bytes: int
    table_offset: int
    table_bytes: int
    file_bytes: int
    table_sha256: bytes
    chunks_offset: int
    chunks_bytes: int
    chunks_sha256: bytes
    is_complete: bool

    @property
    def body_offset(self) -> int:
        return PAGE_BYTES + self.board_bytes

    @property
    def body_bytes(self) -> int:
        """What the list of chunks is of: from `body_offset` to the end of the table."""
        return self.table_offset + self.table_bytes - self.body_offset

    def pack(self) -> bytes:
        return _PREAMBLE.pack(
            MAGIC, FORMAT_VERSION, self.board_bytes, self.table_offset, self.table_bytes, self.file_bytes,
            self.table_sha256, COMPLETE if self.is_complete else ARRIVING, self.chunks_offset, self.chunks_bytes,
            self.chunks_sha256,
        )  # fmt: skip

    @staticmethod
    def read(path: Path, mapping: memoryview | bytes, size: int, *, may_arrive: bool = False) -> Preamble:
        """Checks everything that can be checked without the table."""
        magic, version, board, at, nbytes, file_bytes, digest, mark, chunks_at, chunks_bytes, chunks_digest = (
            _PREAMBLE.unpack_from(mapping, 0)
        )
        if magic != MAGIC:
            raise FormatError(f"{path} is no prepared checkpoint (it begins with {bytes(magic)!r})")
        if version != FORMAT_VERSION:
            raise FormatError(f"{path} has container version {version}, known is {FORMAT_VERSION}: it is made anew")
        if mark != COMPLETE and not (may_arrive and mark == ARRIVING):
            raise FormatError(f"{path} was never completed; remove it")
        if file_bytes != size:
            raise FormatError(f"{path} is truncated: {file_bytes} bytes needed, {size} found")
        begin = PAGE_BYTES + board
        if board > _MAX_BOARD_BYTES or nbytes > _MAX_TABLE_BYTES or not begin <= at <= at + nbytes <= size:
            raise FormatError(f"{path}: its table ({nbytes} bytes at {at}) lies outside the file's {size} bytes")
        if chunks_bytes != ChunkList.nbytes_for(at + nbytes - begin) or chunks_at + chunks_bytes > size:
            raise FormatError(f"{path}: its list of chunks ({chunks_bytes} bytes at {chunks_at}) is out of place")
        return Preamble(
            board, at, nbytes, file_bytes, digest, chunks_at, chunks_bytes, chunks_digest, mark == COMPLETE
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a form to come will lie."""

    preamble: Preamble
    places: Mapping[str, int]
    table: bytes


def plan_layout(identity: str, recipe: str, dtype: str, groups: Sequence[str], plans: Sequence[TensorPlan]) -> Layout:
    if len({plan.name for plan in plans}) != len(plans):
        raise FormatError("two tensors of a prepared form have the same name")
    board = board_bytes(len(groups))
    offset, places = PAGE_BYTES + board, dict[str, int]()
    for plan in plans:
        alignment = PAGE_BYTES if plan.nbytes >= _LARGE_BYTES else 64
        offset = -(-offset // alignment) * alignment
        places[plan.name] = offset
        offset += plan.nbytes
    table_offset = -(-offset // 64) * 64
    document: dict[str, Any] = {"identity": identity, "recipe": recipe, "dtype": dtype, "groups": list(groups)}
    document["tensors"] = {
        plan.name: {
            "dtype": plan.dtype,
            "shape": plan.shape,
            "offset": places[plan.name],
            "nbytes": plan.nbytes,
            "group": plan.group,
            "by_columns": plan.by_columns,
        }
        for plan in plans
    }
    table = json.dumps(document, separators=(",", ":")).encode()
    chunks_offset = -(-(table_offset + len(table)) // 64) * 64
    chunks_bytes = ChunkList.nbytes_for(table_offset + len(table) - PAGE_BYTES - board)
    preamble = Preamble(
        board, table_offset, len(table), chunks_offset + chunks_bytes, hashlib.sha256(table).digest(),
        chunks_offset, chunks_bytes, bytes(32), False,
    )  # fmt: skip
    return Layout(preamble, places, table)


def read_table(path: Path, preamble: Preamble, raw: bytes) -> dict[str, Any]:
    if hashlib.sha256(raw).digest() != preamble.table_sha256:
        raise IntegrityError(f"{path}: its table does not match its digest; remove the file")
    try:
        table = json.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: its table is no JSON; remove the file") from error
    if not isinstance(table, dict) or not isinstance(table.get("groups"), list):
        raise FormatError(f"{path}: its table is no object with groups")
    return table


def read_tensors(path: Path, table: Mapping[str, Any], preamble: Preamble) -> dict[str, PreparedTensor]:
    tensors: dict[str, PreparedTensor] = {}
    try:
        for name, entry in table["tensors"].items():
            tensor = PreparedTensor(
                entry["dtype"], tuple(entry["shape"]), entry["offset"], entry["nbytes"], entry["group"],
                entry["by_columns"],
            )  # fmt: skip
            if TensorPlan(name, tensor.dtype, tensor.shape).nbytes != tensor.nbytes or tensor.offset % 64:
                raise FormatError(f"{path}: tensor {name} contradicts itself")
            if not preamble.body_offset <= tensor.offset <= tensor.offset + tensor.nbytes <= preamble.table_offset:
                raise FormatError(f"{path}: tensor {name} lies outside the file's body")
            if not 0 <= tensor.group < len(table["groups"]):
                raise FormatError(f"{path}: tensor {name} belongs to no group")
            tensors[name] = tensor
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: its table is not of this version ({error})") from error
    return tensors
