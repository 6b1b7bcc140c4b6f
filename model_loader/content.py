"""Reading a checkpoint's files for the first time: every digest in one pass, and whether the bytes can be weights.

Each file is read once, from its beginning to its end: its SHA-256 in one thread; the digests of its chunks and of the
tensors in it in another. A download that was cut after the file had been given its full length leaves zeros: a matrix
or a norm that is all zero is refused, and so is a file that ends in zeros, other than whole rows of an embedding.
Limits: a hole in the middle of a tensor is not noticed here; sources that state a digest are checked against it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES, DIGEST_BYTES, ChunkList, digest_chunk
from model_loader.errors import FormatError, SourceMissing
from model_loader.manifest import TensorEntry

_TORN_BYTES: Final = 512
"""Zeros at the end of a file that are no coincidence: the smallest block a disk or a transfer leaves unwritten."""
_MAY_END_IN_ZERO_ROWS: Final = ("model.embed_tokens.weight", "lm_head.weight")
_MOST_READERS: Final = 16
"""Files at once, each with a chunk in memory."""
_REMEDY: Final = "an interrupted download leaves this; fetch the file again"


@dataclass(frozen=True, slots=True)
class Content:
    """Of one tensor."""

    sha256: str
    zero_tail_bytes: int


@dataclass(frozen=True, slots=True)
class FileDigests:
    sha256: str
    chunks: ChunkList
    tensors: dict[str, Content]


def read_files(
    files: Sequence[Path], tensors: Iterable[TensorEntry], on_bytes: Callable[[int], None]
) -> list[FileDigests]:
    """Several files at once; raises `FormatError` where one is short or ends in zeros."""
    by_file: dict[int, list[TensorEntry]] = {}
    for entry in tensors:
        by_file.setdefault(entry.file, []).append(entry)
    last = last_tensors(entry for entries in by_file.values() for entry in entries)
    cores = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    readers = ThreadPoolExecutor(min(cores, len(files) or 1), thread_name_prefix="digest")
    helpers = ThreadPoolExecutor(cores, thread_name_prefix="sha256")
    try:
        work = [
            readers.submit(_read_file, path, by_file.get(number, []), last, on_bytes, helpers)
            for number, path in enumerate(files)
        ]
        return [each.result() for each in work]
    finally:
        readers.shutdown(wait=True, cancel_futures=True)
        helpers.shutdown(wait=True, cancel_futures=True)


def _read_file(
    path: Path,
    entries: list[TensorEntry],
    last: set[str],
    on_bytes: Callable[[int], None],
    helpers: ThreadPoolExecutor,
) -> FileDigests:
    waiting = _Waiting(path, sorted(entries, key=lambda entry: entry.offset))
    whole, chunks, nbytes = hashlib.sha256(), bytearray(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := _fill(file.fileno(), buffer, nbytes):
                view = buffer[:count]
                hashing = helpers.submit(whole.update, view)
                try:
                    chunks += digest_chunk(view)
                    waiting.feed(nbytes, view)
                finally:
                    hashing.result()
                nbytes += count
                on_bytes(count)
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    contents = waiting.finish(nbytes)
    for entry in entries:
        refuse_zeros(contents[entry.name], entry, path, is_last=entry.name in last)
    if len(chunks) != -(-nbytes // CHUNK_BYTES) * DIGEST_BYTES:
        raise FormatError(f"{path} changed its length while it was read")
    return FileDigests(whole.hexdigest(), ChunkList(nbytes, bytes(chunks)), contents)


def _fill(handle: int, view: memoryview, offset: int) -> int:
    """Bytes read; less than `view` holds only at the file's end."""
    at = 0
    while at < len(view):
        count = os.preadv(handle, [view[at:]], offset + at)
        if count == 0:
            break
        at += count
    return at


class _Waiting:
    """The tensors of one file, in its order, digested as its bytes come by."""

    def __init__(self, path: Path, entries: list[TensorEntry]) -> None:
        self._path = path
        self._entries = entries
        self._next = 0
        self._digest = hashlib.sha256()
        self._zeros = 0
        self._done: dict[str, Content] = {}

    def feed(self, offset: int, view: memoryview) -> None:
        """Bytes of the file from `offset` on; each call goes on where the last one ended."""
        end = offset + len(view)
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            entry_end = entry.offset + entry.nbytes
            piece = view[max(0, entry.offset - offset) : max(0, entry_end - offset)]
            if len(piece):
                self._digest.update(piece)
                self._zeros = self._zeros + len(piece) if (tail := _zero_tail(piece)) == len(piece) else tail
            if entry_end > end:
                return
            self._done[entry.name] = Content(self._digest.hexdigest(), self._zeros)
            self._digest, self._zeros, self._next = hashlib.sha256(), 0, self._next + 1

    def finish(self, nbytes: int) -> dict[str, Content]:
        self.feed(nbytes, memoryview(b""))
        if self._next < len(self._entries):
            entry = self._entries[self._next]
            raise FormatError(
                f"{self._path} is truncated: tensor {entry.name} needs {entry.offset + entry.nbytes} bytes, {nbytes} "
                "found"
            )
        return self._done


def _zero_tail(piece: memoryview) -> int:
    if piece[-1]:
        return 0
    return len(piece) - len(bytes(piece).rstrip(b"\0"))


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
