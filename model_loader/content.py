"""Reading a tensor's content for the first time: its digest, and whether it can be weights at all.

A download that was cut after the file had been given its full length leaves zeros. A matrix or a norm that is all zero
is refused, and so is a file that ends in zeros, other than whole rows of an embedding. Limits: a hole in the middle of
a tensor is not noticed here; sources that state a digest are checked against it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_loader.errors import FormatError
from model_loader.manifest import TensorEntry

_PIECE_BYTES: Final = 1024 * 1024
_TORN_BYTES: Final = 512
"""Zeros at the end of a file that are no coincidence: the smallest block a disk or a transfer leaves unwritten."""
_MAY_END_IN_ZERO_ROWS: Final = ("model.embed_tokens.weight", "lm_head.weight")
_REMEDY: Final = "an interrupted download leaves this; fetch the file again"


@dataclass(frozen=True, slots=True)
class Content:
    sha256: str
    zero_tail_bytes: int


def read_content(handle: int, entry: TensorEntry, path: Path, on_bytes: Callable[[int], None]) -> Content:
    """Reads the tensor once; raises `FormatError` where the file is short."""
    digest, at, end = hashlib.sha256(), entry.offset, entry.offset + entry.nbytes
    zero_tail_bytes = 0
    while at < end:
        piece = os.pread(handle, min(_PIECE_BYTES, end - at), at)
        if not piece:
            raise FormatError(f"{path} is truncated: tensor {entry.name} needs {end} bytes, {at} found")
        digest.update(piece)
        kept = len(piece.rstrip(b"\0")) if piece[-1] == 0 else len(piece)
        zero_tail_bytes = zero_tail_bytes + len(piece) if kept == 0 else len(piece) - kept
        at += len(piece)
        on_bytes(len(piece))
    return Content(digest.hexdigest(), zero_tail_bytes)


def last_tensors(tensors: Iterable[TensorEntry]) -> set[str]:
    """Names of the tensors that lie last in their files. Biases are left aside: they may well be zero."""
    last: dict[int, TensorEntry] = {}
    for entry in tensors:
        if not _is_bias(entry) and (entry.file not in last or entry.offset > last[entry.file].offset):
            last[entry.file] = entry
    return {entry.name for entry in last.values()}


def refuse_zeros(content: Content, entry: TensorEntry, path: Path, *, is_last: bool) -> None:
    zeros = content.zero_tail_bytes
    if zeros == 0 or _is_bias(entry):
        return
    if zeros == entry.nbytes:
        raise FormatError(f"{path}: tensor {entry.name} is all zero ({zeros} bytes): {_REMEDY}")
    if not is_last or zeros < _TORN_BYTES:
        return
    row_bytes = entry.nbytes // entry.shape[0]
    if entry.name in _MAY_END_IN_ZERO_ROWS and zeros % row_bytes < 16:
        return
    raise FormatError(
        f"{path}: the last {zeros} of {entry.nbytes} bytes of its last tensor {entry.name} are zero: {_REMEDY}"
    )


def _is_bias(entry: TensorEntry) -> bool:
    return entry.name.endswith(".bias")
