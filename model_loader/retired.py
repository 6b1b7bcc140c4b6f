"""A form's file that nobody uses any more, as memory to land the next one in.

Its pages exist; what costs is to enter them into a process's page tables. That is done sixteen at a time by a look that
populates, region by region as they are come to, or ahead of time by whoever waits for work and keeps the object: reads
then go straight into it. Limits: as far as the old file went; nobody else may have it mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

from model_loader.errors import SourceMissing

_REGION_BYTES: Final = 4 * 1024 * 1024
_MADV_POPULATE_READ: Final = 22
_libc: Final = ctypes.CDLL(None)


class Retired:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"there is no retired form at {path}: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            # Holes would be filled by faults, which cannot say that there is no memory left.
            self.nbytes = found.st_size if found.st_blocks * 512 >= found.st_size else 0
            self._map = mmap.mmap(handle, found.st_size) if self.nbytes else None
        finally:
            os.close(handle)
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self._entered = bytearray(-(-self.nbytes // _REGION_BYTES))
        self._address = 0
        if self._map is not None:
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self) -> None:
        """All of it, ahead of its use."""
        self._enter(0, self.nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """The file's bytes, to be written over; None beyond what it had."""
        if offset + nbytes > self.nbytes:
            return None
        self._enter(offset, offset + nbytes)
        return self._view[offset : offset + nbytes]

    def limit(self, nbytes: int) -> None:
        """The file has only so many bytes now."""
        self.nbytes = min(self.nbytes, nbytes)

    def _enter(self, begin: int, end: int) -> None:
        for region in range(begin // _REGION_BYTES, -(-end // _REGION_BYTES)):
            if not self._entered[region]:
                at = region * _REGION_BYTES
                count = min(_REGION_BYTES, self.nbytes - at)
                _libc.madvise(
                    ctypes.c_void_p(self._address + at), ctypes.c_size_t(count), ctypes.c_int(_MADV_POPULATE_READ)
                )
                self._entered[region] = 1
