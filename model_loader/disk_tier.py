"""The disk tier: chunks of checkpoints and prepared forms that were fetched once, kept under a budget of bytes.

A chunk is a file of its own, named by the content name of the file it is from (a SHA-256) and its index, so that any
function that uses the same file finds it, and a list of chunks chosen by somebody else cannot make it serve theirs. It
appears by rename and is verified by whoever reads it: a torn or rotten one is a miss and goes. Least recently read goes
first. Several processes may use one directory. Limits: the budget is kept to within what other processes write between
two looks; chunks are not synced, since a chunk that a crash tears fails its digest.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES, Buffer, ChunkList
from model_loader.errors import FormatError, IntegrityError, SourceMissing, SourceUnavailable, from_os_error

FREE_BYTES: Final = 1 << 30
"""Left free on the file system: the tier is the first to do without."""
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_CHUNK: Final = re.compile(r"([0-9]+)\.chunk")
_HALF_WRITTEN: Final = re.compile(r"\.[0-9]+\.chunk\.[0-9a-f]+\.tmp")
_ABANDONED_S: Final = 3600.0
"""A half-written chunk of this age belongs to nobody alive."""
_LOW_SHARE: Final = 0.95
"""Evicting goes on to this share of the budget, so that not every write evicts."""


class DiskTier:
    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, str(directory)) from error
        self._used_bytes = sum(size for _, size, _ in self._files())

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def has(self, name: str, index: int) -> bool:
        return self._path(name, index).exists()

    def count(self, name: str) -> int:
        """Chunks of a file that are here."""
        try:
            return sum(bool(_CHUNK.fullmatch(found)) for found in os.listdir(self._folder(name)))
        except OSError:
            return 0

    def read_into(self, name: str, chunks: ChunkList, index: int, view: memoryview) -> bool:
        """A whole chunk into `view`, verified. False: it is not here (any more), or was no good and has been removed;
        what is in `view` then is nothing."""
        path = self._path(name, index)
        _, nbytes = chunks.bounds(index)
        if len(view) != nbytes:
            raise FormatError(f"chunk {index} of {name[:12]} has {nbytes} bytes, room for {len(view)} was given")
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            got = 0
            while got < nbytes:
                piece = os.preadv(handle, [view[got:]], got)
                if not piece:
                    break
                got += piece
            whole = got == nbytes and not os.pread(handle, 1, nbytes)
            with suppress(OSError):
                os.utime(handle)
        except OSError:
            whole = False
        finally:
            os.close(handle)
        if whole:
            try:
                chunks.check(index, view)
            except IntegrityError:
                whole = False
        if not whole:
            self._remove(path)
        return whole

    def pread_into(self, name: str, index: int, at: int, view: memoryview) -> int:
        """Bytes of a chunk from its byte `at` on, unverified; how many came. Raises `SourceMissing` and
        `SourceUnavailable`."""
        path = self._path(name, index)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"chunk {index} of {name[:12]} is not in the disk tier") from error
        try:
            count = os.preadv(handle, [view], at)
            with suppress(OSError):
                os.utime(handle)
        except OSError as error:
            raise SourceUnavailable(f"cannot read {path}: {error.strerror}") from error
        finally:
            os.close(handle)
        if not count:
            raise IntegrityError(f"{path} is shorter than the chunk it holds")
        return count

    def put(self, name: str, index: int, data: Buffer) -> bool:
        """Keeps a chunk that has been verified. False: there was no room, and nothing is kept; nothing else is lost."""
        path = self._path(name, index)
        nbytes = len(data)
        if nbytes > CHUNK_BYTES:
            raise FormatError(f"a chunk has at most {CHUNK_BYTES} bytes, not {nbytes}")
        if path.exists():
            return True
        if not self._make_room(nbytes):
            return False
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(temporary, "xb", buffering=0) as file:
                view = memoryview(data).cast("B")
                while len(view):
                    view = view[file.write(view) :]
            os.replace(temporary, path)
        except OSError:
            # A full or failing disk costs the tier, never the load.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        with self._lock:
            self._used_bytes += nbytes
        return True

    def forget(self, name: str) -> None:
        """Removes what there is of one file."""
        folder = self._folder(name)
        for path, _, _ in list(self._files(folder)):
            self._remove(path)
        with suppress(OSError):
            folder.rmdir()

    def sweep(self) -> int:
        """Counts anew what is there, removes what crashed writers left, and keeps the budget. Gives the bytes freed."""
        now_s = time.time()
        for half in self.directory.glob("*/.*.tmp"):
            with suppress(OSError):
                if _HALF_WRITTEN.fullmatch(half.name) and now_s - half.stat().st_mtime > _ABANDONED_S:
                    half.unlink()
        files = list(self._files())
        with self._lock:
            self._used_bytes = sum(size for _, size, _ in files)
        return self._evict(self.budget_bytes, files) if self._used_bytes > self.budget_bytes else 0

    # --- files --------------------------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise FormatError(f"{name!r} is no content name: 64 hexadecimal digits are")
        return self.directory / name

    def _path(self, name: str, index: int) -> Path:
        return self._folder(name) / f"{index}.chunk"

    def _files(self, folder: Path | None = None) -> Iterator[tuple[Path, int, float]]:
        """(path, bytes, last read) of every chunk."""
        for path in (folder or self.directory).glob("*.chunk" if folder else "*/*.chunk"):
            if _CHUNK.fullmatch(path.name) and _NAME.fullmatch(path.parent.name):
                with suppress(OSError):
                    found = path.stat()
                    yield path, found.st_size, found.st_mtime

    def _make_room(self, nbytes: int) -> bool:
        if nbytes > self.budget_bytes:
            return False
        if self._used_bytes + nbytes > self.budget_bytes:
            files = list(self._files())
            with self._lock:
                self._used_bytes = sum(size for _, size, _ in files)
            if self._used_bytes + nbytes > self.budget_bytes:
                self._evict(int(self.budget_bytes * _LOW_SHARE) - nbytes, files)
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize - nbytes >= FREE_BYTES

    def _evict(self, down_to_bytes: int, files: list[tuple[Path, int, float]]) -> int:
        freed = 0
        for path, size, _ in sorted(files, key=lambda each: each[2]):
            if self._used_bytes <= max(0, down_to_bytes):
                break
            freed += size if self._remove(path) else 0
        return freed

    def _remove(self, path: Path) -> bool:
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError:
            return False
        with self._lock:
            self._used_bytes = max(0, self._used_bytes - size)
        return True
