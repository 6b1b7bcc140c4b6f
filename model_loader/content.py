"""Reading a tensor's content for the first time: its digest, and whether it can be weights at all.

A download that was cut after the file had been given its full length leaves zeros. A matrix or a norm that is all
zero, or a matrix that ends in zeros other than whole rows of an embedding, is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from model_loader.errors import FormatError
from model_loader.manifest import TensorEntry

_PIECE_BYTES: Final = 1024 * 1024
_TORN_BYTES: Final = 512
"""Zeros at the end of a tensor that are no coincidence: the smallest block a disk or a transfer leaves unwritten."""
_MAY_END_IN_ZERO_ROWS: Final = ("model.embed_tokens.weight", "lm_head.weight")


def digest_tensor(handle: int, entry: TensorEntry, path: Path, on_bytes: Callable[[int], None]) -> str:
    """SHA-256 of the tensor's bytes; raises `FormatError` where they are short or are no weights."""
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
    _refuse_zeros(entry, path, zero_tail_bytes)
    return digest.hexdigest()


def _refuse_zeros(entry: TensorEntry, path: Path, zero_tail_bytes: int) -> None:
    if zero_tail_bytes == 0 or entry.name.endswith(".bias"):
        return
    remedy = "an interrupted download leaves this; fetch the file again"
    if zero_tail_bytes == entry.nbytes:
        raise FormatError(f"{path}: tensor {entry.name} is all zero ({entry.nbytes} bytes): {remedy}")
    row_bytes = entry.nbytes // entry.shape[0]
    if zero_tail_bytes < min(_TORN_BYTES, row_bytes):
        return
    is_whole_rows = zero_tail_bytes % row_bytes < 16
    if entry.name in _MAY_END_IN_ZERO_ROWS and is_whole_rows:
        return
    raise FormatError(
        f"{path}: the last {zero_tail_bytes} of {entry.nbytes} bytes of tensor {entry.name} are zero: {remedy}"
    )
