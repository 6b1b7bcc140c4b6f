"""Waiting for a word of shared memory to change, between processes that know nothing of each other but the memory.

Limits: Linux on x86-64 and 64-bit ARM; a waiter wakes up at times for no reason and has to look for itself.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERYBODY: Final = 0x7FFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, within_s: float) -> None:
    """Sleeps until woken, but not if the 32-bit word at `address` is not `value` any more, and `within_s` at most.
    Does not hold the interpreter's lock."""
    whole = int(within_s)
    limit = _Timespec(whole, int((within_s - whole) * 1e9))
    _libc.syscall(
        ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), ctypes.c_int(_FUTEX_WAIT), ctypes.c_uint32(value),
        ctypes.byref(limit), None, ctypes.c_int(0),
    )  # fmt: skip


def wake(address: int) -> None:
    """Everybody who waits for the word at `address`."""
    _libc.syscall(
        ctypes.c_long(_SYS_FUTEX), ctypes.c_void_p(address), ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY),
        None, None, ctypes.c_int(0),
    )  # fmt: skip
