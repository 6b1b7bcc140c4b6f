"""Files on this machine: from the page cache where they are in it, else by the way that was measured to be faster.

What is cached is copied in small blocks that stay in the processor's cache: out of a mapping where nobody can change
the file meanwhile (a read lease: whoever opens it to write waits for us), else by reading. What is not comes through
the page cache (which keeps it for the next one) or past it (O_DIRECT, which saves a copy); on a filesystem's first cold
reads the two take turns, then the faster one is used, and remembered where a file to remember it in is given.
Limits: a system call that hangs (a dead network mount) cannot be interrupted; Linux.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, SourceMissing, SourceUnavailable
from model_loader.file_memory import copy, is_cached, map_file
from model_loader.manifest import write_atomically
from model_loader.ranges.source import Digest, Tier

HOT_BYTES: Final = 1024 * 1024
"""A cached block at a time. By CPU time of a whole load, 1 MiB took 0.59 s/GB and 512 KiB 0.68 (each block costs the
interpreter some 20 us); 4 MiB, which do not stay in the cache until they are digested and written, were far slower."""
COLD_BYTES: Final = CHUNK_BYTES
RANGE_BYTES: Final = 4 * CHUNK_BYTES
"""What a thread takes at a time: each costs the interpreter some 100 us, whatever is in it."""
MAPPED_BYTES: Final = 512 * 1024
"""Copied past the processor's caches at a time, then digested out of them: what one core's second level holds. 4 MiB
took a sixth more processor time where others use the processor: a part had left the caches before it was digested."""
_LEAST_MAPPED_BYTES: Final = 64 * 1024
MOST_THREADS: Final = 16
"""More would hold more memory (4 MiB each) and bring nothing sooner: two or three fill a disk, eight a memory bus."""
TRIALS: Final = 6
"""Cold reads of each way before one is chosen."""
_ALIGNMENT: Final = 4096


class Way(StrEnum):
    CACHED = "page cache"
    DIRECT = "direct"


class ColdWays:
    """Which way cold bytes come faster, by filesystem. `remember` is a small file that outlives the process."""

    def __init__(self, remember: Path | None = None) -> None:
        self._remember = remember
        self._lock = threading.Lock()
        self._chosen: dict[str, Way] = {}
        self._seconds: dict[tuple[str, Way], list[float]] = {}
        self._turn = 0
        if remember is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                kept = json.loads(remember.read_bytes())
                self._chosen = {str(device): Way(way) for device, way in kept.items()}

    def choose(self, device: int) -> Way:
        with self._lock:
            known = self._chosen.get(str(device))
            if known is not None:
                return known
            self._turn += 1
            return Way.DIRECT if self._turn % 2 else Way.CACHED

    def learn(self, device: int, way: Way, nbytes: int, seconds: float) -> None:
        """One cold read's time. Short ones say more of the request than of the way."""
        if nbytes < COLD_BYTES // 2:
            return
        with self._lock:
            if str(device) in self._chosen:
                return
            self._seconds.setdefault((str(device), way), []).append(seconds / nbytes)
            tried = {each: sorted(self._seconds.get((str(device), each), [])) for each in Way}
            if all(len(found) >= TRIALS for found in tried.values()):
                self._settle(device, min(Way, key=lambda each: tried[each][len(tried[each]) // 2]))

    def give_up(self, device: int, way: Way) -> None:
        """The filesystem does not have that way."""
        with self._lock:
            self._settle(device, Way.CACHED if way is Way.DIRECT else Way.DIRECT)

    def _settle(self, device: int, way: Way) -> None:
        self._chosen[str(device)] = way
        if self._remember is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._remember, json.dumps(self._chosen).encode())


class _Opened:
    __slots__ = ("_direct", "_leased", "_lock", "_mapped", "device", "handle", "nbytes", "path")

    def __init__(self, path: Path) -> None:
        try:
            self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
        found = os.fstat(self.handle)
        self.path, self.nbytes, self.device = path, found.st_size, found.st_dev
        self._direct: int | None = None
        self._mapped: memoryview | None = None
        self._leased = False
        self._lock = threading.Lock()

    @property
    def direct(self) -> int:
        with self._lock:
            if self._direct is None:
                self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            return self._direct

    def mapped(self) -> memoryview | None:
        """The whole file, which cannot change while `is_held` says so; None: that cannot be had here."""
        with self._lock:
            if self._mapped is None:
                self._mapped = memoryview(b"")
                if self.nbytes and _take_lease(self.handle):
                    self._leased = True
                    with contextlib.suppress(OSError):
                        # NOTE: looking at what was cut off before the lease would end the process.
                        if os.fstat(self.handle).st_size >= self.nbytes:
                            self._mapped = map_file(self.handle, self.nbytes)
            return self._mapped if self._leased and len(self._mapped) else None

    def is_held(self) -> bool:
        """Whether nobody could open it to write, or cut it, since it was mapped. Once it does not, it is let go, and
        whoever waits to write may."""
        with self._lock:
            if self._leased and fcntl.fcntl(self.handle, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                self._leased = False
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self.handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return self._leased

    def close(self) -> None:
        # NOTE: a mapping keeps the lease beyond the descriptor's end.
        if self._leased:
            fcntl.fcntl(self.handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(self.handle)
        if self._direct is not None:
            os.close(self._direct)


def _take_lease(handle: int) -> bool:
    """Refused where somebody has it open to write, or it is another user's, or the filesystem has no leases."""
    try:
        # The kernel says by a signal that somebody waits: by one that is ignored, SIGIO would end the process.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


class LocalSource:
    """Files by name. A context manager, because it keeps them open."""

    tier: Final = Tier.DISK
    range_bytes: Final = RANGE_BYTES

    def __init__(self, paths: Mapping[str, Path], ways: ColdWays | None = None, name: str = "disk") -> None:
        self.name = name
        self.threads = min(MOST_THREADS, max(2, len(os.sched_getaffinity(0))))
        self._paths = paths
        self._ways = ways or ColdWays()
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            opened, self._opened = self._opened, {}
        for file in opened.values():
            file.close()

    def size(self, file: str) -> int:
        return self._open(file).nbytes

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        opened = self._open(file)
        try:
            count = self._read_cached(opened, offset, view) or self._read_cold(opened, offset, view[:COLD_BYTES])
        except OSError as error:
            raise SourceUnavailable(f"cannot read {opened.path}: {error.strerror}") from error
        if count == 0:
            raise IntegrityError(
                f"{opened.path} ends at byte {os.fstat(opened.handle).st_size}; byte {offset} was expected in it"
            )
        return count

    def read_cached(self, file: str, offset: int, view: memoryview, digest: Digest) -> tuple[int, bool]:
        """As `read_into`, of what is in the page cache. What is digested is in `view` now, or the file's own, the same
        as long as `holds`."""
        opened = self._open(file)
        mapped = opened.mapped() if len(view) >= _LEAST_MAPPED_BYTES else None
        if mapped is not None:
            for most_bytes in (len(view), COLD_BYTES):
                lent = mapped[offset : offset + min(len(view), most_bytes)]
                if len(lent) and is_cached(opened.handle, offset, len(lent)):
                    copy(view, lent, MAPPED_BYTES, digest)
                    return len(lent), True
        came = 0
        while came < len(view):
            try:
                count = self._read_cached(opened, offset + came, view[came:])
            except OSError as error:
                raise SourceUnavailable(f"cannot read {opened.path}: {error.strerror}") from error
            if count == 0:
                break
            digest(view[came : came + count])
            came += count
        return came, False

    def holds(self, file: str) -> bool:
        return self._open(file).is_held()

    def _open(self, file: str) -> _Opened:
        opened = self._opened.get(file)
        if opened is None:
            with self._lock:
                opened = self._opened.get(file)
                if opened is None:
                    if file not in self._paths:
                        raise SourceMissing(f"{self.name} has no file {file}")
                    opened = self._opened[file] = _Opened(self._paths[file])
        return opened

    def _read_cached(self, opened: _Opened, offset: int, view: memoryview) -> int:
        """What is in the page cache, without waiting for anything. 0: nothing at this place."""
        try:
            return os.preadv(opened.handle, [view[:HOT_BYTES]], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return 0
            raise

    def _read_cold(self, opened: _Opened, offset: int, view: memoryview) -> int:
        way = self._ways.choose(opened.device)
        whole = len(view) // _ALIGNMENT * _ALIGNMENT
        if way is Way.DIRECT and offset % _ALIGNMENT == 0 and whole:
            begin_s = time.monotonic()
            try:
                count = os.preadv(opened.direct, [view[:whole]], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._ways.give_up(opened.device, way)
            else:
                self._ways.learn(opened.device, way, count, time.monotonic() - begin_s)
                if count:
                    return count
        begin_s = time.monotonic()
        count = os.preadv(opened.handle, [view], offset)
        self._ways.learn(opened.device, Way.CACHED, count, time.monotonic() - begin_s)
        return count
