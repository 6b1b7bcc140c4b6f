"""Objects as files under a folder: temporary file, fsync, rename, fsync of the folder.

Limits: one machine; a key cannot also be the folder of another key; a system call that hangs (a dead network mount)
cannot be interrupted, deadlines are looked at between the pieces of a read or a write.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from model_loader.errors import (
    LoaderError,
    MissingObject,
    OutOfSpace,
    ShortObject,
    StoreError,
    StoreProblem,
    StoreRefused,
    StoreUnavailable,
    from_os_error,
)
from model_loader.objects.protocol import CHECK_PREFIX, Buffer, ObjectInfo, check_key
from model_loader.objects.resilience import Deadline
from model_loader.objects.stats import StoreStats

_TEMPORARY: Final = ".tmp"
_ABANDONED_AFTER_S: Final = 3600.0
"""A temporary file this old belongs to a writer that was killed."""
_VECTORS: Final = 512
_PIECE_BYTES: Final = 32 * 1024 * 1024
_CHECK_BYTES: Final = 64 * 1024


class _Operation:
    """One operation: how far it may go in time, and what it moved."""

    __slots__ = ("_deadline", "nbytes")

    def __init__(self, deadline: Deadline | None) -> None:
        self._deadline = deadline
        self.nbytes = 0

    def go_on(self) -> None:
        if self._deadline is not None and self._deadline.passed:
            raise StoreUnavailable("the directory did not keep the deadline")


class DirectoryStore:
    """Objects as files under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stats = StoreStats()
        self._temporary = root / _TEMPORARY
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
        except OSError as error:
            raise _unwritable(error, str(root)) from error

    @property
    def uri(self) -> str:
        return self.root.absolute().as_uri()

    def put(self, key: str, *parts: Buffer, durable: bool = True, within_s: float | None = None) -> int:
        check_key(key)
        with self._counted("put", within_s) as operation:
            operation.nbytes = self._write(key, parts, durable, operation)
            return operation.nbytes

    def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
        with self._counted("get", within_s) as operation, self._opened(key) as handle:
            size = os.fstat(handle).st_size
            if offset < 0 or offset > size or (length is not None and length < 0):
                raise ShortObject(f"object {key} has {size} bytes; byte {offset} was asked for")
            wanted = size - offset if length is None else length
            if offset + wanted > size:
                raise _short(key, offset + wanted, size)
            found = _read(handle, key, min(wanted, _PIECE_BYTES), offset)
            if len(found) < wanted:
                result = bytearray(wanted)
                result[: len(found)] = found
                self._fill(handle, key, offset, memoryview(result), len(found), operation)
                found = bytes(result)
            operation.nbytes = wanted
            return found

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        if offset < 0:
            raise ShortObject(f"object {key} has no byte {offset}")
        with self._counted("get", within_s) as operation, self._opened(key) as handle:
            view = view.cast("B")
            self._fill(handle, key, offset, view, 0, operation)
            operation.nbytes = len(view)

    def exists(self, key: str, *, within_s: float | None = None) -> int | None:
        path = self._path(key)
        with self._counted("head", within_s):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise StoreError(f"cannot look at object {key}: {error.strerror}") from error
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str, *, within_s: float | None = None, after: str = "") -> Iterator[ObjectInfo]:
        """`after`: only keys behind this one; folders that lie before it are not looked into."""
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        with self._counted("list", None):
            pass
        yield from self._walk(folder, prefix, after)

    def begin(self, key: str, *, durable: bool = True) -> ObjectWriter:
        """An object that comes piece by piece."""
        return ObjectWriter(self._path(key), self._temporary, key, durable)

    def path_of(self, key: str) -> Path:
        """Where the object lies, if it is there."""
        return self._path(key)

    def delete(self, key: str, *, within_s: float | None = None) -> None:
        path = self._path(key)
        with self._counted("delete", within_s):
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                return
            except OSError as error:
                raise StoreError(f"cannot delete object {key}: {error.strerror}") from error

    def check(self, *, within_s: float | None = None) -> None:
        key = f"{CHECK_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        content = os.urandom(_CHECK_BYTES)
        try:
            self.put(key, content, within_s=within_s)
            if self.get(key, within_s=within_s) != content:
                raise StoreRefused(
                    f"the directory {self.root} gives back other bytes than were written: use another disk",
                    StoreProblem.UNWRITABLE,
                )
            list(self.list(CHECK_PREFIX, within_s=within_s))
        finally:
            with contextlib.suppress(LoaderError):
                self.delete(key, within_s=within_s)

    def close(self) -> None:
        pass

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextlib.contextmanager
    def _counted(self, kind: str, within_s: float | None) -> Iterator[_Operation]:
        operation = _Operation(None if within_s is None else Deadline(within_s))
        begin_s, failed = time.monotonic(), True
        try:
            operation.go_on()
            yield operation
            failed = False
        except (MissingObject, ShortObject):
            failed = False
            raise
        finally:
            self.stats.count(kind, nbytes=operation.nbytes, seconds=time.monotonic() - begin_s, failed=failed)

    def _write(self, key: str, parts: tuple[Buffer, ...], durable: bool, operation: _Operation) -> int:
        with self.begin(key, durable=durable) as writer:
            writer.write(*parts, go_on=operation.go_on)
            return writer.commit()

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        try:
            handle = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingObject(f"there is no object {key}") from error
        except OSError as error:
            raise StoreError(f"cannot read object {key}: {error.strerror}") from error
        try:
            yield handle
        finally:
            os.close(handle)

    def _fill(self, handle: int, key: str, offset: int, view: memoryview, at: int, operation: _Operation) -> None:
        try:
            while at < len(view):
                count = os.preadv(handle, [view[at : at + _PIECE_BYTES]], offset + at)
                if count == 0:
                    raise _short(key, offset + len(view), offset + at)
                at += count
                operation.go_on()
        except OSError as error:
            raise StoreError(f"cannot read object {key}: {error.strerror}") from error

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self.root / folder) as scan:
                found = [(e.name, e.is_dir(follow_symlinks=False), e) for e in scan if not e.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return
        # A folder sorts as its keys do: with the slash that follows its name.
        for name, is_folder, entry in sorted(found, key=lambda f: f[0] + "/" * f[1]):
            key = f"{folder}/{name}" if folder else name
            if is_folder:
                behind = f"{key}/" > after or after.startswith(f"{key}/")
                if behind and (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")):
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                with contextlib.suppress(FileNotFoundError):
                    found_now = entry.stat()
                    version = f"{found_now.st_ino}-{found_now.st_mtime_ns}"
                    yield ObjectInfo(key, found_now.st_size, found_now.st_mtime, version)

    def _remove_abandoned(self) -> None:
        before_s = time.time() - _ABANDONED_AFTER_S
        for path in self._temporary.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()


class ObjectWriter:
    """An object on its way: a temporary file that gets its name with `commit`. Leaving the context without it, or
    `abandon`, leaves nothing behind. Raises StoreRefused and OutOfSpace."""

    def __init__(self, target: Path, temporary_dir: Path, key: str, durable: bool) -> None:
        self._target = target
        self._key = key
        self._durable = durable
        self._temporary = temporary_dir / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._nbytes = 0
        with self._told():
            self._made = _make_folders(target.parent)
            self._handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open = True

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def write(self, *parts: Buffer, go_on: Callable[[], None] = lambda: None) -> None:
        with self._told():
            self._nbytes += _write_parts(self._handle, parts, go_on)

    def commit(self) -> int:
        """From now on it is there, all of it; gives its bytes."""
        with self._told():
            if self._durable:
                os.fsync(self._handle)
            self._close()
            os.replace(self._temporary, self._target)
            if self._durable:
                for folder in (self._target.parent, *self._made):
                    _sync_folder(folder)
        return self._nbytes

    def abandon(self) -> None:
        if self._open:
            self._close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        self._open = False
        os.close(self._handle)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise _unwritable(error, f"object {self._key}") from error


def _make_folders(folder: Path) -> list[Path]:
    """Makes the folder and gives the parents in which something new appeared."""
    if folder.is_dir():
        return []
    made: list[Path] = []
    missing = folder
    while not missing.exists():
        made.append(missing.parent)
        missing = missing.parent
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _write_parts(handle: int, parts: tuple[Buffer, ...], go_on: Callable[[], None]) -> int:
    """Gathers all parts with few system calls and without joining them."""
    views = [view for part in parts if len(view := memoryview(part).cast("B"))]
    total = sum(len(view) for view in views)
    while views:
        go_on()
        written = os.writev(handle, views[:_VECTORS])
        while written:
            if written >= len(views[0]):
                written -= len(views.pop(0))
            else:
                views[0] = views[0][written:]
                written = 0
    return total


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(handle: int, key: str, nbytes: int, offset: int) -> bytes:
    try:
        return os.pread(handle, nbytes, offset)
    except OSError as error:
        raise StoreError(f"cannot read object {key}: {error.strerror}") from error


def _short(key: str, needed: int, found: int) -> ShortObject:
    return ShortObject(f"object {key} is short: {needed} bytes needed, {found} found")


def _unwritable(error: OSError, what: str) -> LoaderError:
    """Full, or not allowed; both are for a person to mend."""
    mapped = from_os_error(error, what)
    if isinstance(mapped, OutOfSpace):
        return mapped
    return StoreRefused(f"{mapped}: give this user write permission, or another directory", StoreProblem.UNWRITABLE)
