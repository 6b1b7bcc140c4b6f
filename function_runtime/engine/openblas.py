"""The OpenBLAS that comes with numpy: whether it is the faster one here, and how many threads it uses.

On the AMD machines this was measured on it multiplies few float32 rows by a matrix in half the time MKL takes (which
torch uses), and many rows in nine tenths. Limits: found by the name of the library numpy's wheels bundle; where that is
not loaded, or the processor is not AMD's, torch multiplies.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np

_SET_THREADS: Final = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads")


@cache
def _library() -> ctypes.CDLL | None:
    """The library as numpy has it loaded, where it is the faster one."""
    if np.dtype(np.float32).itemsize != 4 or not _is_amd():
        return None
    path = None
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "openblas" in line:
                path = line.split(maxsplit=5)[-1].strip()
                break
    return ctypes.CDLL(path) if path else None


def _is_amd() -> bool:
    try:
        with open("/proc/cpuinfo") as lines:
            return any("AuthenticAMD" in line for line in lines if line.startswith("vendor_id"))
    except OSError:
        return False


def is_faster() -> bool:
    return _library() is not None and _setter() is not None


def set_threads(count: int) -> None:
    """Nothing where the library is not there."""
    setter = _setter()
    if setter is not None:
        setter(count)


@cache
def _setter() -> ctypes._NamedFuncPointer | None:
    library = _library()
    for name in _SET_THREADS if library is not None else ():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = (ctypes.c_int,), None
            return function  # type: ignore[no-any-return]
    return None
