"""Digests of a file's chunks: made in one pass, checked in any order, kept as bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_loader.chunks import CHUNK_BYTES, DIGEST_BYTES, ChunkDigester, ChunkList, count_chunks, digest_chunk
from model_loader.errors import FormatError, IntegrityError

CONTENT = random.Random(7).randbytes(2 * CHUNK_BYTES + 12_345)


def list_of(content: bytes) -> ChunkList:
    digester = ChunkDigester()
    digester.update(content)
    return digester.finish()


def test_every_chunk_of_the_file_passes_and_no_other_does() -> None:
    chunks = list_of(CONTENT)
    assert (len(chunks), chunks.nbytes) == (3, len(CONTENT))
    for index in (2, 0, 1):
        begin, nbytes = chunks.bounds(index)
        chunks.check(index, memoryview(CONTENT)[begin : begin + nbytes])
        with pytest.raises(IntegrityError):
            chunks.check((index + 1) % 3, memoryview(CONTENT)[begin : begin + nbytes])


@pytest.mark.parametrize("at", [CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES - 1])
def test_one_flipped_bit_is_named_by_file_offset_and_expected_value(at: int) -> None:
    chunks, bad = list_of(CONTENT), bytearray(CONTENT)
    bad[at] ^= 1
    with pytest.raises(IntegrityError) as caught:
        chunks.check(1, memoryview(bad)[CHUNK_BYTES : 2 * CHUNK_BYTES], "model.safetensors")
    message = str(caught.value)
    assert "model.safetensors" in message and str(CHUNK_BYTES) in message
    assert digest_chunk(memoryview(CONTENT)[CHUNK_BYTES : 2 * CHUNK_BYTES]).hex() in message


@pytest.mark.parametrize("tail", [CONTENT[2 * CHUNK_BYTES : -1], CONTENT[2 * CHUNK_BYTES :] + b"\0"])
def test_a_last_chunk_that_is_too_short_or_too_long_is_refused(tail: bytes) -> None:
    with pytest.raises(IntegrityError):
        list_of(CONTENT).check(2, tail)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, CHUNK_BYTES + 7), min_size=1, max_size=12))
def test_the_sizes_of_the_pieces_make_no_difference(sizes: list[int]) -> None:
    digester, at = ChunkDigester(), 0
    for size in sizes:
        digester.update(CONTENT[at : at + size])
        at = min(at + size, len(CONTENT))
    digester.update(CONTENT[at:])
    assert digester.finish() == list_of(CONTENT)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_list_survives_being_kept_as_bytes(nbytes: int) -> None:
    chunks = list_of(CONTENT[:nbytes])
    raw = chunks.to_bytes()
    assert ChunkList.from_bytes(raw) == chunks
    assert len(raw) == ChunkList.nbytes_for(nbytes)
    assert len(chunks) == count_chunks(nbytes)


def test_a_list_that_is_cut_of_another_kind_or_contradicts_itself_is_refused() -> None:
    raw = list_of(CONTENT).to_bytes()
    huge = raw[:24] + (1 << 60).to_bytes(8, "little") + raw[32:]
    for bad in (b"", raw[:20], raw[:-1], raw + b"\0" * DIGEST_BYTES, b"X" + raw[1:], raw[:8] + b"md5     " + raw[16:]):
        with pytest.raises(FormatError):
            ChunkList.from_bytes(bad)
    with pytest.raises(FormatError):
        ChunkList.from_bytes(huge)


def test_the_chunks_that_hold_a_range_are_found() -> None:
    chunks = list_of(CONTENT)
    assert list(chunks.covering(0, 1)) == [0]
    assert list(chunks.covering(CHUNK_BYTES - 1, 2)) == [0, 1]
    assert list(chunks.covering(CHUNK_BYTES, CHUNK_BYTES)) == [1]
    assert list(chunks.covering(5, 0)) == []
