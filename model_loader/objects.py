"""An object store: named byte strings that appear whole or not at all. One protocol; a directory behind it here.

Keys are relative paths of plain segments. Everything is synchronous; callers use threads. Limits of the directory: one
machine; a key cannot also be the folder of another key.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from model_loader.errors import MissingObject, SourceRefused, StoreError, from_os_error

Buffer = bytes | bytearray | memoryview

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+@%,~-][A-Za-z0-9_=+@%,~.-]*")
_MAX_KEY_CHARS: Final = 900
_TEMPORARY: Final = ".tmp"
_ABANDONED_AFTER_S: Final = 3600.0
"""A temporary file this old belongs to a writer that was killed."""
_VECTORS: Final = 512


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    nbytes: int


class ObjectStore(Protocol):
    def put(self, key: str, *parts: Buffer, durable: bool = True) -> int:
        """Stores the parts, joined, under `key`, replacing what was there; gives the number of bytes. Afterwards a
        reader sees all of it; before, nothing or the old object. `durable=False` may lose it in a power cut."""
        ...

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly `length` bytes from `offset`, or everything from `offset`."""
        ...

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        """Fills `view` from `offset`."""
        ...

    def exists(self, key: str) -> int | None:
        """The object's size, or None."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Removes it; it need not be there."""
        ...


def check_key(key: str) -> str:
    if len(key) > _MAX_KEY_CHARS or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"object key {key[:100]!r} is not allowed: plain segments joined by '/' are")
    return key


class DirectoryStore:
    """Objects as files under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root / _TEMPORARY
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise from_os_error(error, str(root)) from error
        self._remove_abandoned()

    def put(self, key: str, *parts: Buffer, durable: bool = True) -> int:
        target = self._path(key)
        temporary = self._temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            try:
                made = _make_folders(target.parent)
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    nbytes = _write_parts(handle, parts)
                    if durable:
                        os.fsync(handle)
                finally:
                    os.close(handle)
                os.replace(temporary, target)
                if durable:
                    for folder in (target.parent, *made):
                        _sync_folder(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise from_os_error(error, f"object {key}") from error
        return nbytes

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._opened(key) as handle:
            size = os.fstat(handle).st_size
            if offset < 0 or offset > size:
                raise StoreError(f"object {key} has {size} bytes; byte {offset} was asked for")
            result = bytearray(size - offset if length is None else length)
            self._fill(handle, key, offset, memoryview(result))
            return bytes(result)

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        with self._opened(key) as handle:
            self._fill(handle, key, offset, view.cast("B"))

    def exists(self, key: str) -> int | None:
        try:
            found = os.stat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot look at object {key}: {error.strerror}") from error
        return found.st_size if os.path.isfile(self._path(key)) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(folder)
        yield from self._walk(folder, prefix)

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise StoreError(f"cannot delete object {key}: {error.strerror}") from error

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

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

    def _fill(self, handle: int, key: str, offset: int, view: memoryview) -> None:
        at = 0
        try:
            while at < len(view):
                count = os.preadv(handle, [view[at:]], offset + at)
                if count == 0:
                    raise StoreError(f"object {key} is short: {offset + len(view)} bytes needed, {offset + at} found")
                at += count
        except OSError as error:
            raise StoreError(f"cannot read object {key}: {error.strerror}") from error

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self.root / folder) as scan:
                found = [(e.name, e.is_dir(follow_symlinks=False), e) for e in scan if not e.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return
        # A folder sorts as its keys do: with the slash that follows its name.
        for name, is_folder, entry in sorted(found, key=lambda f: f[0] + "/" * f[1]):
            key = f"{folder}/{name}" if folder else name
            if is_folder:
                if f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    yield ObjectInfo(key, entry.stat().st_size)

    def _remove_abandoned(self) -> None:
        before_s = time.time() - _ABANDONED_AFTER_S
        for path in self._temporary.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()


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


def _write_parts(handle: int, parts: tuple[Buffer, ...]) -> int:
    """Gathers all parts with few system calls and without joining them."""
    views = [view for part in parts if len(view := memoryview(part).cast("B"))]
    total = sum(len(view) for view in views)
    while views:
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


def open_store(uri: str) -> ObjectStore:
    """The store a URI names: `file:///folder`."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(Path(unquote(parts.path)))
    raise SourceRefused(f"object store {uri!r} is not supported: give file:///FOLDER")
