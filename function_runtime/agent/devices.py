"""The devices of a slot and their memory: the CPU with what machine or container have to give, GPUs as NVML tells.

NVML is the driver's own library (`libnvidia-ml`), asked through ctypes: no device is touched and no context made, and
without a driver there are no GPUs. Limits: CUDA_VISIBLE_DEVICES is followed where it names indices; MIG parts count as
their whole device.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

from function_runtime.protocol import DeviceState
from model_loader.memory_limit import read_memory

CPU: Final = "cpu"
CUDA: Final = "cuda"
_OK: Final = 0
_LIBRARY: Final = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Devices:
    def __init__(self, library: Any = None) -> None:
        """`library`: as ctypes loads NVML; None: the machine's, if it has one."""
        self._library = _opened() if library is None else library
        self._handles: list[ctypes.c_void_p] = []
        if self._library is not None and self._library.nvmlInit_v2() == _OK:
            self._handles = _visible(_handles_of(self._library), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def read(self) -> tuple[DeviceState, ...]:
        memory = read_memory()
        cpu = DeviceState(CPU, 0, memory.limit_bytes, min(memory.available_bytes, memory.limit_bytes))
        return (cpu, *(self._gpu(index, handle) for index, handle in enumerate(self._handles)))

    def _gpu(self, index: int, handle: ctypes.c_void_p) -> DeviceState:
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != _OK:
            return DeviceState(CUDA, index, 0, 0)  # nothing is placed on what does not answer
        return DeviceState(CUDA, index, memory.total, memory.free)


def _opened() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def _handles_of(library: Any) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
        return []
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _OK:
            handles.append(handle)
    return handles


def _visible(handles: list[ctypes.c_void_p], said: str | None) -> list[ctypes.c_void_p]:
    """In the order in which CUDA will number them."""
    if said is None:
        return handles
    chosen: list[ctypes.c_void_p] = []
    for word in said.split(","):
        if not word.strip().isdigit() or int(word) >= len(handles):
            break  # as CUDA reads it: what follows an unknown one is not visible
        chosen.append(handles[int(word)])
    return chosen
