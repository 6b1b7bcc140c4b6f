"""A file that arrives chunk by chunk, in any order, and goes on where it was left, whatever ended the last try.

A chunk's bytes are written first, then a record of its index and digest is appended to a journal beside the file. Who
opens it again reads what the journal names and keeps what still has its digest: records that a power cut left without
their bytes are worth nothing. Limits: one writer at a time (the importer's lock); several threads of it.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

from model_loader.chunks import CHUNK_BYTES, DIGEST_BYTES, ChunkList, count_chunks, digest_chunk
from model_loader.errors import LoaderError
from model_loader.manifest import write_atomically

_RECORD: Final = struct.Struct(f"<Q{DIGEST_BYTES}s")
_JOURNAL_SUFFIX: Final = ".landed"
_CHUNKS_SUFFIX: Final = ".chunks"


class PartialFile:
    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._journal = os.open(journal_path(path), flags, 0o600)
        except BaseException:
            os.close(self._handle)
            raise
        if os.fstat(self._handle).st_size != nbytes:
            os.ftruncate(self._handle, nbytes)
        self._landed = self._recover()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
        os.close(self._journal)

    @property
    def landed_bytes(self) -> int:
        with self._lock:
            return sum(self._size(index) for index in self._landed)

    def missing(self, start: int = 0, end: int | None = None) -> list[int]:
        """Chunks between two places of the file that have not landed."""
        indexes = range(start // CHUNK_BYTES, count_chunks(self.nbytes if end is None else min(end, self.nbytes)))
        with self._lock:
            return [index for index in indexes if index not in self._landed]

    def land(self, index: int, view: memoryview) -> None:
        """All bytes of one chunk."""
        if len(view) != self._size(index):
            raise ValueError(f"chunk {index} of {self.path} has {self._size(index)} bytes, not {len(view)}")
        offset, at = index * CHUNK_BYTES, 0
        while at < len(view):
            at += os.pwrite(self._handle, view[at:], offset + at)
        digest = digest_chunk(view)
        record = _RECORD.pack(index, digest)
        with self._lock:
            # A record that a full disk cut would shift all that follow: it is taken back.
            if os.write(self._journal, record) != len(record):
                whole = os.fstat(self._journal).st_size // _RECORD.size * _RECORD.size
                os.ftruncate(self._journal, whole)
                raise OSError(28, "No space left on device", str(self.path))
            self._landed[index] = digest

    def complete(self) -> None:
        """Everything is here: synced, and a list of its chunks beside it instead of the journal."""
        if gone := self.missing():
            raise ValueError(f"{self.path} lacks {len(gone)} chunks")
        os.fsync(self._handle)
        digests = b"".join(self._landed[index] for index in range(count_chunks(self.nbytes)))
        write_atomically(landed_chunks_path(self.path), ChunkList(self.nbytes, digests).to_bytes())
        journal_path(self.path).unlink(missing_ok=True)

    def _size(self, index: int) -> int:
        return min(CHUNK_BYTES, self.nbytes - index * CHUNK_BYTES)

    def _recover(self) -> dict[int, bytes]:
        """Digest by index, of what really landed."""
        raw = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        whole = len(raw) // _RECORD.size * _RECORD.size
        if whole != len(raw):
            os.ftruncate(self._journal, whole)
        digests = dict(_RECORD.iter_unpack(raw[:whole]))
        buffer = memoryview(bytearray(CHUNK_BYTES))
        landed = {}
        for index, digest in digests.items():
            if index < count_chunks(self.nbytes):
                view = buffer[: self._size(index)]
                if os.preadv(self._handle, [view], index * CHUNK_BYTES) == len(view) and digest_chunk(view) == digest:
                    landed[index] = digest
        return landed


def reopen(path: Path) -> None:
    """Makes a complete file partial again: opened, it lacks the chunks that are no longer what they were."""
    chunks_path = landed_chunks_path(path)
    try:
        chunks = ChunkList.from_bytes(chunks_path.read_bytes(), str(chunks_path))
    except (OSError, LoaderError):
        return
    records = b"".join(_RECORD.pack(index, chunks.expected(index)) for index in range(len(chunks)))
    write_atomically(journal_path(path), records)
    chunks_path.unlink()


def landed_names(folder: Path) -> list[str]:
    """Complete files of a folder."""
    marks = (path.name for path in folder.glob(f".*{_CHUNKS_SUFFIX}"))
    return sorted(mark.removeprefix(".").removesuffix(_CHUNKS_SUFFIX) for mark in marks)


def landed_chunks_path(path: Path) -> Path:
    """The chunks of a file as they were when they landed."""
    return path.with_name(f".{path.name}{_CHUNKS_SUFFIX}")


def journal_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_JOURNAL_SUFFIX}")
