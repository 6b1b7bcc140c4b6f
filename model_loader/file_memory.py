"""Files mapped where huge pages fit: at addresses that are multiples of 2 MiB, file offset and address in step.

What a form costs is mostly its pages: 262,144 of 4 KiB a GB, each zeroed, charged and entered by a fault of its own
(1.1 to 1.4 s of processor time), and entered again by every process that maps it (0.09 s). `enter_huge` has the kernel
make one huge page of 2 MiB (MADV_COLLAPSE, which needs no mount option and no setting): 0.4 s a GB for memory that is
new, and 0.001 s for whoever maps it later. Limits: huge pages need Linux 6.1, else, and where none is free, pages are
small; addresses are raw: a view must not be used after the file has become shorter.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

HUGE_BYTES: Final = 2 * 1024 * 1024
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_SYS_CACHESTAT: Final = 451
_MOST_REFUSALS: Final = 64
"""In a row: memory is in pieces."""
_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = None


def map_file(handle: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """The file's first `nbytes`, shared. The mapping goes when the last view of it does. Raises `OSError`."""
    if nbytes <= 0:
        return memoryview(b"")
    # Address space to cut an aligned piece out of; what is beside it is given back.
    room = nbytes + HUGE_BYTES
    begin = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-begin // HUGE_BYTES) * HUGE_BYTES
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _map(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, handle)
    except OSError:
        _libc.munmap(begin, room)
        raise
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > begin:
        _libc.munmap(begin, address - begin)
    if begin + room > end:
        _libc.munmap(end, begin + room - end)
    held = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(held, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(held).cast("B")
    return view if writable else view.toreadonly()


def address_of(view: memoryview) -> int:
    import numpy as np  # not at once: agents map forms and do without

    # NOTE: `.ctypes.data` costs ten times as much.
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


def copy(target: memoryview, source: memoryview, step_bytes: int, then: Callable[[memoryview], object]) -> None:
    """All of `source` to the beginning of `target`; `then` is given each step's piece of `source` behind its copy. Does
    not hold the interpreter's lock meanwhile."""
    # NOTE: loads are made of this loop. After a copy nothing of the interpreter is in the processor's caches, so that
    # every line in it costs more than it seems to.
    to, begin, nbytes = address_of(target), address_of(source), len(source)
    if nbytes > len(target):
        raise ValueError(f"{nbytes} bytes do not fit into {len(target)}")
    for at in range(0, nbytes, step_bytes):
        piece = source[at : at + step_bytes]
        _libc.memmove(to + at, begin + at, len(piece))
        then(piece)


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CacheFound(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def is_cached(handle: int, offset: int, nbytes: int) -> bool:
    """Whether all of a file's piece is in the page cache, so that looking at it waits for nothing. Where the kernel has
    no word for that (cachestat, Linux 6.5), whether its ends are."""
    found = _CacheFound()
    wanted = _CacheRange(offset, nbytes)
    if _libc.syscall(_SYS_CACHESTAT, handle, ctypes.byref(wanted), ctypes.byref(found), 0) == 0:
        pages = -(-(offset + nbytes) // mmap.PAGESIZE) - offset // mmap.PAGESIZE
        return bool(found.cached >= pages)
    byte = bytearray(1)
    try:
        return all(os.preadv(handle, [byte], at, os.RWF_NOWAIT) for at in (offset, offset + nbytes - 1))
    except OSError:
        return False


def enter_for_reading(address: int, nbytes: int) -> bool:
    """Enters what is there into this process's page tables. Does not hold the interpreter's lock. Best effort."""
    return bool(_libc.madvise(address, nbytes, _MADV_POPULATE_READ) == 0)


def enter_for_writing(address: int, nbytes: int) -> None:
    """The same, making pages where there are none; a fault could not say that there is no memory. Raises `OSError`."""
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        # EFAULT: a fault there would have ended in SIGBUS.
        raise OSError(errno.ENOSPC if code == errno.EFAULT else code, os.strerror(code))


def enter_huge(address: int, nbytes: int) -> bool:
    """Huge pages for so many multiples of `HUGE_BYTES` at `address`, where the kernel has them to give; False: not for
    all. Any page of each must be there, else it declines: the first is made. Raises `OSError` where there is no memory
    at all."""
    for at in range(address, address + nbytes, HUGE_BYTES):
        enter_for_writing(at, mmap.PAGESIZE)
    return bool(_libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0)


def huge_share(path: Path) -> float:
    """Which part of a file in shared memory lies in huge pages; 1 where it has none that are whole. Milliseconds a GB.
    Raises `OSError`."""
    view, whole = _map_whole(path)
    if not whole:
        return 1.0
    address = address_of(view)
    for at in range(0, whole, HUGE_BYTES):
        view[at]  # enters one page, or all of a huge one
    begin = f"{address:x}-"
    with open("/proc/self/smaps") as lines:
        is_it = False
        for line in lines:
            if line.startswith("ShmemPmdMapped:"):
                if is_it:
                    return int(line.split()[1]) * 1024 / whole
            elif not line[0].isupper():
                is_it = line.startswith(begin)
    return 1.0


def make_huge(path: Path) -> tuple[int, int]:
    """Puts a file in shared memory into huge pages where it is not, while others have it mapped. Gives the bytes of it
    that lie in such now, as far as the kernel says, and those that could. Raises `OSError`."""
    view, whole = _map_whole(path)
    address, made, refused = address_of(view), 0, 0
    for at in range(0, whole, HUGE_BYTES):
        if _libc.madvise(address + at, HUGE_BYTES, _MADV_COLLAPSE) == 0:
            made, refused = made + HUGE_BYTES, 0
        else:
            refused += 1
            if refused == _MOST_REFUSALS:
                break
    return made, whole


def _map_whole(path: Path) -> tuple[memoryview, int]:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(handle).st_size
        return map_file(handle, nbytes), nbytes // HUGE_BYTES * HUGE_BYTES
    finally:
        os.close(handle)


def _map(address: int | None, nbytes: int, protection: int, flags: int, handle: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, handle, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    return int(found)
