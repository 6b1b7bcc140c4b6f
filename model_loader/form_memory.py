"""The memory of a form that is being filled: its own file, mapped, so that bytes are read straight to where they stay.

    new file -> region by region, as bytes come: huge pages made, entered        a form nobody needs -> there already

A region is 2 MiB; `view` enters those it touches, so that writing to it can neither fault nor fail. What was made of
huge pages is mapped again in a millisecond a GB, so that nobody has to map a retired form ahead of its use. Limits:
files in shared memory; nobody else may use a retired form; a kernel slow to find huge pages is asked for no more.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from model_loader.errors import SourceMissing, from_os_error
from model_loader.file_memory import HUGE_BYTES, address_of, enter_for_writing, enter_huge, map_file

_LOCKS: Final = 16
_TRIALS: Final = 8
"""Huge pages made before their price is judged."""
_WORTH_S: Final = 0.006
"""Small pages cost 0.002 to make and something wherever they are mapped. Where no huge page is free the kernel makes
one by moving others, and it waits for every processor each time: on busy ones that is longer than it is worth."""


class FormMemory:
    def __init__(self, path: Path, handle: int, nbytes: int, new_from: int = 0) -> None:
        """`handle` is open for writing and stays the caller's. From byte `new_from` on the file has no pages yet."""
        self.path = path
        self.nbytes = nbytes
        self._new_from = new_from
        self._view = map_file(handle, nbytes, writable=True)
        self._address = address_of(self._view)
        self._entered = bytearray(-(-nbytes // HUGE_BYTES))
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._asks_huge = True
        self._made, self._made_s = 0, 0.0

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
        for region in range(offset // HUGE_BYTES, -(-(offset + nbytes) // HUGE_BYTES)):
            if not self._entered[region]:
                with self._locks[region % _LOCKS]:
                    if not self._entered[region]:
                        self._enter(region * HUGE_BYTES)
                        self._entered[region] = 1

    def _enter(self, at: int) -> None:
        count = min(HUGE_BYTES, self.nbytes - at)
        try:
            if count == HUGE_BYTES and at >= self._new_from and self._asks_huge:
                begin_s = time.monotonic()
                if enter_huge(self._address + at):
                    self._judge(time.monotonic() - begin_s)
                    return
                self._asks_huge = False
            enter_for_writing(self._address + at, count)
        except OSError as error:
            raise from_os_error(error, str(self.path)) from error

    def _judge(self, seconds: float) -> None:
        self._made, self._made_s = self._made + 1, self._made_s + seconds
        if self._made >= _TRIALS and self._made_s > self._made * _WORTH_S:
            self._asks_huge = False
