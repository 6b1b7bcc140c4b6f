"""Memory of reads: used again, and never while anybody can still look at it."""

from __future__ import annotations

import gc

import pytest
import torch

from function_runtime.kv.memory import ReadMemory

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def _no_cycles() -> None:
    gc.collect()


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    memory = ReadMemory()
    first = memory.lease(3 * MIB)
    first[:5] = b"first"
    part = first[1:4]
    del first
    assert memory._idle_bytes == 0, "a part of it is still looked at"
    other = memory.lease(3 * MIB)
    other[:5] = b"other"
    assert bytes(part) == b"irs"
    del part
    assert memory._idle_bytes >= 3 * MIB
    again = memory.lease(3 * MIB)
    assert bytes(again[:5]) == b"first", "the same memory, as it was left"
    assert memory._idle_bytes == 0


def test_a_tensor_over_a_lease_keeps_it() -> None:
    memory = ReadMemory()
    view = memory.lease(MIB)
    view[:] = bytes(MIB)
    tensor = torch.frombuffer(view, dtype=torch.float32).view(4, -1)[2]
    del view
    other = memory.lease(MIB)
    other[:] = b"\xff" * MIB
    assert memory._idle_bytes == 0
    assert not tensor.any()
    del tensor
    assert memory._idle_bytes > 0


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    memory = ReadMemory(kept_bytes=3 * MIB)
    leases = [memory.lease(MIB) for _ in range(5)]
    for number, lease in enumerate(leases):
        lease[:1] = bytes([number])
    del lease
    while leases:
        leases.pop(0)
    assert memory._idle_bytes == 3 * MIB
    found = [memory.lease(MIB) for _ in range(3)]
    assert sorted(view[0] for view in found) == [2, 3, 4]


def test_a_small_lease_does_not_take_a_large_block() -> None:
    memory = ReadMemory()
    large = memory.lease(8 * MIB)
    del large
    small = memory.lease(MIB)
    assert len(small) == MIB
    assert memory._idle_bytes == 8 * MIB


def test_a_lease_has_the_length_that_was_asked_for_and_can_be_written() -> None:
    memory = ReadMemory()
    for nbytes in (1, 4095, 256 * 1024 + 1, 5 * MIB + 3):
        view = memory.lease(nbytes)
        assert len(view) == nbytes
        assert view.format == "B"
        assert not view.readonly
        view[nbytes - 1] = 7
