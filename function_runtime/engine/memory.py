"""Freed memory stays with the process.

A step's intermediate results are some megabytes each and live for microseconds. By default the C library gives such
memory back to the kernel and faults it in again, zeroed, for the next one, which was measured to cost a quarter of a
prefill. Limits: glibc only; elsewhere nothing is changed.
"""

from __future__ import annotations

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 30


def keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
