"""The memory of a form that is being filled: its own file, mapped, so that bytes are read straight to where they stay.

    new file -> region by region, as bytes come: huge pages made, entered        a form nobody needs -> there already

A region is eight huge pages; `view` enters those it touches, so that writing to it can neither fault nor fail. What was
made of huge pages is mapped again in a millisecond a GB, so that nobody has to map a retired form ahead of its use.
Limits: files in shared memory; nobody else may use a retired form; a kernel that has to work hard for huge pages is
asked for no more.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from model_loader.errors import SourceMissing, from_os_error
from model_loader.file_memory import HUGE_BYTES, address_of, enter_for_writing, enter_huge, map_file

REGION_BYTES: Final = 8 * HUGE_BYTES
"""Made by one call: each waits until every processor has put its lists of pages in order, which takes longest where
they are busy."""
_LOCKS: Final = 16
_TRIALS: Final = 8
"""Huge pages made before their price is judged."""
_REFUSALS: Final = 3
"""Where memory is in pieces, one in fifty huge pages was not to be had though the next was."""
_WORTH_S: Final = 0.004
"""Of this thread's processor time, a huge page. Small pages in its place cost 0.002, and something wherever they are
mapped; a huge one costs 0.0002 where the kernel has it whole, and 0.002 where it must first move others away. Not by
the clock on the wall: on a busy machine that is long for both."""


class FormMemory:
    def __init__(self, path: Path, handle: int, nbytes: int, new_from: int = 0) -> None:
        """`handle` is open for writing and stays the caller's. From byte `new_from` on the file has no pages yet."""
        self.path = path
        self.nbytes = nbytes
        self._new_from = new_from
        self._view = map_file(handle, nbytes, writable=True)
        self._address = address_of(self._view)
        self._entered = bytearray(-(-nbytes // REGION_BYTES))
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._asks_huge = True
        self._made, self._made_s, self._refused = 0, 0.0, 0

    @staticmethod
    def retired(path: Path) -> FormMemory:
        """Of a form that nobody needs any more. Raises `SourceMissing`."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"there is no retired form at {path}: {error.strerror}") from error
        try:
            nbytes = os.fstat(handle).st_size
            return FormMemory(path, handle, nbytes, new_from=nbytes)
        except OSError as error:
            raise SourceMissing(f"the retired form at {path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(handle)

    def resized(self, handle: int, nbytes: int) -> FormMemory:
        """Of the same file, which has so many bytes now. Views given before are void where it became shorter."""
        if nbytes > self.nbytes:
            return FormMemory(self.path, handle, nbytes, self._new_from)
        self.nbytes = nbytes
        return self

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The file's bytes, to be written over. Raises `OutOfSpace`."""
        self.enter(offset, nbytes)
        return self._view[offset : offset + nbytes]

    def look(self, offset: int, nbytes: int) -> memoryview:
        """The same, of what was written before."""
        return self._view[offset : offset + nbytes]

    def enter(self, offset: int, nbytes: int) -> None:
        """From any thread."""
        for region in range(offset // REGION_BYTES, -(-(offset + nbytes) // REGION_BYTES)):
            if not self._entered[region]:
                self._make(region)

    def _make(self, region: int) -> None:
        lock = self._locks[region % _LOCKS]
        if not lock.acquire(blocking=False):
            # Another thread is at it: the one behind it, which is wanted next, is made meanwhile.
            ahead = self._locks[(region + 1) % _LOCKS]
            if region + 1 < len(self._entered) and ahead.acquire(blocking=False):
                try:
                    self._enter(region + 1)
                finally:
                    ahead.release()
            lock.acquire()
        try:
            self._enter(region)
        finally:
            lock.release()

    def _enter(self, region: int) -> None:
        """With the region's lock."""
        if self._entered[region]:
            return
        begin = region * REGION_BYTES
        end = min(begin + REGION_BYTES, self.nbytes)
        huge = min(end, max(begin, -(-self._new_from // HUGE_BYTES) * HUGE_BYTES))
        huge_end = huge + (end - huge) // HUGE_BYTES * HUGE_BYTES
        try:
            if huge < huge_end and self._asks_huge and self._make_huge(huge, huge_end - huge):
                parts = [(begin, huge), (huge_end, end)]
            else:
                parts = [(begin, end)]
            for low, high in parts:
                if low < high:
                    enter_for_writing(self._address + low, high - low)
        except OSError as error:
            raise from_os_error(error, str(self.path)) from error
        self._entered[region] = 1

    def _make_huge(self, at: int, nbytes: int) -> bool:
        begin_s = time.thread_time()
        given = enter_huge(self._address + at, nbytes)
        self._made_s += time.thread_time() - begin_s
        if given:
            self._made += nbytes // HUGE_BYTES
        else:
            self._refused += 1
        too_dear = self._made >= _TRIALS and self._made_s > self._made * _WORTH_S
        if too_dear or self._refused >= _REFUSALS:
            self._asks_huge = False
        return given
