"""How large parts are, that cutting loses nothing, and that parts side by side end together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_loader.objects.parts import FIRST_BYTES, LEAST_BYTES, MIB, MOST_BYTES, PartSize, cut, together
from model_loader.objects.resilience import Deadline


def test_parts_are_what_one_connection_moves_in_a_moment() -> None:
    far, near = PartSize(), PartSize()
    assert far.of(64 * MIB) == FIRST_BYTES
    for _ in range(50):
        far.learn(8 * MIB, 0.2)  # 40 MiB/s
        near.learn(8 * MIB, 0.01)  # 800 MiB/s
    assert far.of(16 * MIB) == LEAST_BYTES
    assert near.of(16 * MIB) == 16 * MIB
    assert near.of(100 * MIB) <= MOST_BYTES


def test_a_store_that_became_slow_is_noticed() -> None:
    size = PartSize()
    size.learn(8 * MIB, 0.01)
    assert size.of(16 * MIB) == 16 * MIB
    for _ in range(150):
        size.learn(8 * MIB, 0.2)
    assert size.of(16 * MIB) == LEAST_BYTES


def test_small_reads_teach_nothing() -> None:
    size = PartSize()
    size.learn(1000, 1.0)
    assert size.of(64 * MIB) == FIRST_BYTES


@given(st.integers(1, 500 * MIB), st.floats(0.001, 10))
def test_parts_cover_everything_within_their_bounds(total: int, seconds: float) -> None:
    size = PartSize()
    size.learn(8 * MIB, seconds)
    part = size.of(total)
    assert 0 < part <= MOST_BYTES
    assert part >= min(total, LEAST_BYTES // 2)


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_cutting_keeps_every_byte_in_order(parts: list[bytes], size: int) -> None:
    pieces = [b"".join(piece) for piece in cut([memoryview(part) for part in parts], size)]
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == size for piece in pieces[:-1]) and all(pieces)


def test_busy_helpers_delay_and_never_block() -> None:
    done: list[int] = []
    release = threading.Event()
    with ThreadPoolExecutor(1) as helpers:
        helpers.submit(release.wait)
        together(range(5), done.append, Deadline(10), helpers, 4)
        release.set()
    assert sorted(done) == list(range(5))


def test_the_first_error_interrupts_the_others_and_is_the_one_raised() -> None:
    deadline = Deadline(1000)
    both = threading.Barrier(2)

    def do(part: int) -> None:
        both.wait(10)
        if part == 0:
            raise ValueError("the cause")
        deadline.wait(1000)
        raise TimeoutError("interrupted")

    with ThreadPoolExecutor(2) as helpers, pytest.raises(ValueError, match="the cause"):
        together([0, 1], do, deadline, helpers, 2)
    assert deadline.abandoned
