"""Sealed ranges open in their own place only, in whatever pieces they are read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.kv.sealing import ChunkSeal

KEY = bytes(range(32))
PACK = "kv/packs/ab/" + "ab" * 32


@settings(deadline=None)
@given(
    data=st.binary(max_size=300),
    offset=st.integers(0, 2**40),
    cut=st.integers(0, 300),
)
def test_any_range_of_what_was_sealed_opens_alone(data: bytes, offset: int, cut: int) -> None:
    seal = ChunkSeal(KEY)
    sealed = seal.apply(PACK, offset, data)
    cut = min(cut, len(data))
    assert seal.apply(PACK, offset, sealed) == data
    assert seal.apply(PACK, offset + cut, memoryview(sealed)[cut:]) == data[cut:]
    assert b"".join(seal.apply_parts(PACK, offset, [data[:cut], memoryview(data)[cut:]])) == sealed


def test_another_key_pack_or_place_gives_something_else() -> None:
    data = bytes(64)
    sealed = ChunkSeal(KEY).apply(PACK, 128, data)
    others = [
        ChunkSeal(KEY[::-1]).apply(PACK, 128, sealed),
        ChunkSeal(KEY).apply(PACK.replace("ab", "cd"), 128, sealed),
        ChunkSeal(KEY).apply(PACK, 112, sealed),
    ]
    assert data not in others
    assert sealed != data


def test_without_a_key_nothing_is_changed() -> None:
    assert not ChunkSeal(b"")
    assert ChunkSeal(b"").apply(PACK, 0, b"clear") == b"clear"


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        ChunkSeal(b"short")
