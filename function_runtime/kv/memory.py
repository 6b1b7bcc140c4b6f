"""Memory that KV on its way to and from the store lies in: used again once nobody can look at it any more.

    lease -> views of it (reads, arrivals, tensors, what waits to be written) -> the last is gone -> the next lease

Fresh memory costs more than copying into it does: the kernel clears every page first. Whoever holds any view of
a lease holds the lease, so that a read that ends late, or a tensor that is still looked at, keeps its bytes to itself.
Limits: as much as `kept_bytes` is kept between them; leases are as large as what is asked for, up to a page.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np

KEPT_BYTES: Final = 128 * 1024 * 1024
_ROUND_BYTES: Final = 256 * 1024
_HUGE_BYTES: Final = 2 * 1024 * 1024
"""From here on the kernel is asked for large pages: a five-hundredth of the faults."""


class ReadMemory:
    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._idle: deque[mmap.mmap] = deque()
        """The one that was used last comes first."""
        self._idle_bytes = 0
        # A lease may end wherever its last view is dropped, also by a collection inside of `lease`.
        self._lock = threading.RLock()

    def lease(self, nbytes: int) -> memoryview:
        """Writable memory of so many bytes, what is in it undefined."""
        block = self._take(nbytes) or _fresh(nbytes)
        owner = np.frombuffer(block, np.uint8)
        weakref.finalize(owner, self._give_back, block).atexit = False
        return owner.data[:nbytes]

    def _take(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            for block in self._idle:
                if nbytes <= len(block) <= 2 * nbytes:
                    self._idle.remove(block)
                    self._idle_bytes -= len(block)
                    return block
        return None

    def _give_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.appendleft(block)
            self._idle_bytes += len(block)
            while self._idle_bytes > self._kept_bytes:
                self._idle_bytes -= len(self._idle.pop())


def _fresh(nbytes: int) -> mmap.mmap:
    size = max(-(-nbytes // _ROUND_BYTES), 1) * _ROUND_BYTES
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(block) >= _HUGE_BYTES:
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


MEMORY: Final = ReadMemory()
"""Of this process."""
