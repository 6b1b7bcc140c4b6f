"""What has landed of a form that is still being made: a page of the file itself, written by its loader, read by others.

    loading -> complete | failed        a group's time of landing is written once, 0 before

The loader holds a lock on the file for as long as it lives, so that whoever waits learns of its death from the kernel.
Waiters sleep on a word of the page that changes with every event. Times are of the machine's monotonic clock, which all
its processes share. Limits: one loader a file; a group is whatever its maker says (embedding, a layer, norm and head).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Final

from model_loader import futex
from model_loader.errors import FormatError, LoaderError, SourceUnavailable, error_from_code
from model_loader.pace import NOTES, Pace

_HEADER: Final = struct.Struct("<8sIIIIQ")
"""magic, word that changes, state, groups, bytes of the error, bytes landed"""
_MAGIC: Final = b"STOKRBD1"
_WORD_AT: Final = 8
_STATE_AT: Final = 12
_BYTES_AT: Final = 24
_NOTES_AT: Final = 32
_ERROR_AT: Final = 64
_ERROR_BYTES: Final = 960
_TIMES_AT: Final = _ERROR_AT + _ERROR_BYTES
_PAGE_BYTES: Final = 4096
LOOK_S: Final = 0.25
"""How often a waiter looks whether the loader lives."""
STALLED_S: Final = 120.0
"""A loader from which nothing comes for so long is given up by who waits."""


class LoadState(IntEnum):
    LOADING = 1
    COMPLETE = 2
    FAILED = 3


def board_bytes(groups: int) -> int:
    """Whole pages."""
    return -(-(_TIMES_AT + 8 * groups) // _PAGE_BYTES) * _PAGE_BYTES


class Board:
    """The writer's side. `handle` is the file's, locked for as long as it is open."""

    def __init__(self, handle: int, offset: int, groups: int) -> None:
        self.groups = groups
        self._map = mmap.mmap(handle, board_bytes(groups), offset=offset)
        self._map[:] = bytes(len(self._map))
        _HEADER.pack_into(self._map, 0, _MAGIC, 0, LoadState.LOADING, groups, 0, 0)
        self._handle = handle
        self._word = 0
        self._landed_bytes = 0
        self._began = (0, 0, 1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def landed(self, group: int, nbytes: int = 0) -> None:
        """Everything of `group` is there, verified. From one thread at a time."""
        at = _TIMES_AT + 8 * group
        if struct.unpack_from("<Q", self._map, at)[0] == 0:
            struct.pack_into("<Q", self._map, at, time.monotonic_ns())
        self.moved(nbytes)
        self._tell()

    def begin(self, far_bytes: int, threads: int) -> None:
        """Reading begins, by so many threads; `far_bytes` come over a network."""
        self._began = (time.monotonic_ns(), far_bytes, max(1, threads))
        self.note(0, 0.0)

    def note(self, came_bytes: int, waited_s: float) -> None:
        """What has come over the network, and how long threads waited for it, summed."""
        began_ns, far_bytes, threads = self._began
        waited_ms = min(int(waited_s * 1000), 0xFFFFFFFF)
        NOTES.pack_into(self._map, _NOTES_AT, began_ns, far_bytes, came_bytes, waited_ms, threads)

    def moved(self, nbytes: int) -> None:
        """Something came, so that who waits sees that the loader is not stuck when it looks. Wakes nobody."""
        self._landed_bytes += nbytes
        struct.pack_into("<Q", self._map, _BYTES_AT, self._landed_bytes)

    def complete(self) -> None:
        struct.pack_into("<I", self._map, _STATE_AT, LoadState.COMPLETE)
        self._tell()

    def fail(self, error: BaseException) -> None:
        code = error.code if isinstance(error, LoaderError) else LoaderError.code
        text = f"{code}\0{error}".encode()[:_ERROR_BYTES]
        self._map[_ERROR_AT : _ERROR_AT + len(text)] = text
        struct.pack_into("<I", self._map, _STATE_AT + 8, len(text))
        struct.pack_into("<I", self._map, _STATE_AT, LoadState.FAILED)
        self._tell()

    def close(self) -> None:
        """The loader is done with it. To be called before `handle` is closed."""
        # NOTE: a mapping keeps a duplicate of its descriptor, and with it the lock.
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        self._map.close()

    def _tell(self) -> None:
        self._word = (self._word + 1) & 0xFFFFFFFF
        struct.pack_into("<I", self._map, _WORD_AT, self._word)
        futex.wake(ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _WORD_AT)


class BoardView:
    """The reader's side: `mapping` is a read-only mapping of the file, `handle` one of the reader's own, kept open."""

    def __init__(self, mapping: memoryview, offset: int, handle: int, what: str) -> None:
        magic, _, _, groups, _, _ = _HEADER.unpack_from(mapping, offset)
        if magic != _MAGIC or offset + board_bytes(groups) > len(mapping):
            raise FormatError(f"{what} has no board of what has landed")
        self.groups: int = groups
        self._map = mapping
        self._offset = offset
        self._handle: int | None = handle
        self._what = what
        self._address = 0

    @property
    def state(self) -> LoadState:
        return LoadState(struct.unpack_from("<I", self._map, self._offset + _STATE_AT)[0])

    @property
    def landed_bytes(self) -> int:
        found: int = struct.unpack_from("<Q", self._map, self._offset + _BYTES_AT)[0]
        return found

    @property
    def is_complete(self) -> bool:
        return self.state is LoadState.COMPLETE

    def pace(self, form_bytes: int) -> Pace | None:
        """Of the load under way; None: there is none, or it has not begun to read."""
        began_ns, far_bytes, came_bytes, waited_ms, threads = NOTES.unpack_from(self._map, self._offset + _NOTES_AT)
        if not began_ns or self.state is not LoadState.LOADING:
            return None
        passed_s = max((time.monotonic_ns() - began_ns) / 1e9, 1e-6)
        waiting = waited_ms / 1e3 / (passed_s * max(1, threads))
        return Pace(passed_s, self.landed_bytes, form_bytes, far_bytes, came_bytes, waiting)

    def landed_ns(self, group: int) -> int:
        """When it landed; 0 while it has not."""
        found: int = struct.unpack_from("<Q", self._map, self._offset + _TIMES_AT + 8 * group)[0]
        return found

    def wait(
        self, group: int, while_waiting: Callable[[], None] | None = None, *, stalled_s: float = STALLED_S
    ) -> None:
        """Returns when `group` has landed. Raises the loader's error where it failed, SourceUnavailable where it died
        or is stuck. `while_waiting` is called now and then."""
        heard_s = time.monotonic()
        word, landed_bytes = self._read_word(), self.landed_bytes
        while self.landed_ns(group) == 0:
            state = self.state
            if state is LoadState.FAILED:
                raise self._error()
            if state is LoadState.LOADING and self._loader_is_gone() and self.state is LoadState.LOADING:
                raise SourceUnavailable(f"the process that loaded {self._what} is gone: it is loaded again when asked")
            if time.monotonic() - heard_s > stalled_s:
                raise SourceUnavailable(f"nothing of {self._what} has come for {stalled_s:g} s")
            futex.wait(self._word_address(), word, LOOK_S)
            if while_waiting is not None:
                while_waiting()
            found = self._read_word(), self.landed_bytes
            if found != (word, landed_bytes):
                (word, landed_bytes), heard_s = found, time.monotonic()

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def _read_word(self) -> int:
        found: int = struct.unpack_from("<I", self._map, self._offset + _WORD_AT)[0]
        return found

    def _word_address(self) -> int:
        if not self._address:
            import numpy as np

            self._address = int(np.frombuffer(self._map, np.uint8).ctypes.data) + self._offset + _WORD_AT
        return self._address

    def _loader_is_gone(self) -> bool:
        if self._handle is None:
            return False
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return True

    def _error(self) -> LoaderError:
        nbytes = struct.unpack_from("<I", self._map, self._offset + _STATE_AT + 8)[0]
        at = self._offset + _ERROR_AT
        raw = bytes(self._map[at : at + min(nbytes, _ERROR_BYTES)])
        code, _, message = raw.decode(errors="replace").partition("\0")
        return error_from_code(code, message)
