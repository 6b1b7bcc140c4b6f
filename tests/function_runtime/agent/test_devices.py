"""What a slot tells of its devices: the machine's memory, and GPUs by NVML, of which a stand-in is asked here."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from function_runtime.agent import devices
from function_runtime.agent.devices import Devices
from model_loader.memory_limit import Memory

GB = 10**9


class Nvml:
    """Two devices of 80 GB; the second does not answer if told so."""

    def __init__(self, works: bool = True, mute: int | None = None) -> None:
        self._works, self._mute = works, mute

    def nvmlInit_v2(self) -> int:
        return 0 if self._works else 9

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 100 + index
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        index = (handle.value or 0) - 100
        if index == self._mute:
            return 15
        memory._obj.total, memory._obj.free = 80 * GB, (60 + index) * GB
        return 0


def told(devices: Devices) -> list[tuple[str, int, int, int]]:
    return [(each.kind, each.index, each.total_bytes // GB, each.free_bytes // GB) for each in devices.read()[1:]]


def test_the_cpu_is_a_device_with_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Devices(Nvml(works=False)).read()
    assert [each.kind for each in cpu] == ["cpu"]
    assert 0 < cpu[0].free_bytes <= cpu[0].total_bytes


def test_a_container_has_what_its_limit_leaves_and_not_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_memory", lambda: Memory(8 * GB, 3 * GB))
    (cpu,) = Devices(Nvml(works=False)).read()
    assert (cpu.total_bytes, cpu.free_bytes) == (8 * GB, 3 * GB)


def test_gpus_are_numbered_as_the_engine_will_number_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert told(Devices(Nvml())) == [("cuda", 0, 80, 60), ("cuda", 1, 80, 61)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert told(Devices(Nvml())) == [("cuda", 0, 80, 61), ("cuda", 1, 80, 60)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told(Devices(Nvml())) == []


def test_a_gpu_that_does_not_answer_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert told(Devices(Nvml(mute=1))) == [("cuda", 0, 80, 60), ("cuda", 1, 0, 0)]
