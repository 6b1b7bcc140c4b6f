"""Stored KV is used when it is exactly what it should be; everything else is a miss."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.engine_like import KvLayout
from function_runtime.errors import KvError
from function_runtime.kv import chunk as format_of
from function_runtime.kv.checksum import crc32c
from function_runtime.kv.chunk import (
    ChunkHead,
    EncodedChunk,
    LayerPlace,
    NeedMore,
    check_layer,
    encode_chunk,
    header_nbytes,
    open_header,
    read_header,
)
from function_runtime.kv.fields import decode_fields, encode_fields
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.pack import build_pack, read_entries
from function_runtime.passes import NONE, Passes
from model_loader.errors import StoreError
from model_loader.objects import DirectoryStore
from tests.function_runtime.kv.opening import open_chunk

LAYOUT = KvLayout(num_layers=3, kv_heads=2, head_dim=4, dtype="float32", block_size=16)
IDENTITY = KvIdentity(checkpoint="c" * 64, layout=LAYOUT, rope="theta=1e4", engine_format="native-1/cpu")
TOKENS = tuple(range(100, 164))


def head_of(
    start: int = 16,
    end: int = 48,
    *,
    identity: KvIdentity = IDENTITY,
    scope: str = "a",
    tokens: tuple[int, ...] = TOKENS,
) -> ChunkHead:
    chain = Chain(identity, scope)
    return ChunkHead(
        identity, scope, chain.at(tokens, start), chain.at(tokens, end), start, end, tuple(tokens[start:end])
    )


def encoded(head: ChunkHead) -> tuple[EncodedChunk, bytes]:
    data = random.Random(1).randbytes(head.data_bytes)
    chunk = encode_chunk(head, memoryview(data))
    return chunk, chunk.head + bytes(chunk.data)


def test_a_chunk_gives_back_what_was_put_in() -> None:
    head = head_of()
    chunk, raw = encoded(head)
    assert bytes(open_chunk(memoryview(raw), chunk.digest, head)) == bytes(chunk.data)
    assert len(chunk.head) % 64 == 0


def test_every_byte_counts() -> None:
    head = head_of()
    chunk, raw = encoded(head)
    for index in range(0, len(raw), 7):
        altered = bytearray(raw)
        altered[index] ^= 1
        with pytest.raises(KvError):
            open_chunk(memoryview(altered), chunk.digest, head)


@settings(deadline=None)
@given(st.data())
def test_no_damage_is_believed(data: st.DataObject) -> None:
    head = head_of()
    chunk, raw = encoded(head)
    cut = data.draw(st.integers(0, len(raw)))
    insert = data.draw(st.binary(max_size=8))
    skip = data.draw(st.integers(0, 8))
    damaged = raw[:cut] + insert + raw[cut + skip :]
    if damaged != raw:
        with pytest.raises(KvError):
            open_chunk(memoryview(damaged), chunk.digest, head)


@settings(deadline=None)
@given(st.data())
def test_damage_under_a_recorded_digest_of_its_own_is_found_by_fields_and_checksums(data: st.DataObject) -> None:
    """As if whoever recorded the digest had read bytes that were damaged already."""
    head = head_of()
    chunk, raw = encoded(head)
    index = data.draw(st.integers(0, len(raw) - 1))
    bit = data.draw(st.integers(0, 7))
    altered = bytearray(raw)
    altered[index] ^= 1 << bit
    padding = raw[: len(chunk.head)].rstrip(b"\0")
    if len(padding) <= index < len(chunk.head):
        return
    with pytest.raises(KvError):
        open_chunk(memoryview(altered), hashlib.sha256(altered).hexdigest(), head)


def test_a_chunk_says_how_it_was_computed_and_one_of_the_first_version_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = NONE.with_pass(30, 200).with_rows(18, 1)
    head = dataclasses.replace(head_of(), passes=passes)
    chunk, raw = encoded(head)
    assert open_header(memoryview(raw), len(raw), head_of()).passes == passes
    assert header_nbytes(len(raw), head_of()) == len(chunk.head)
    fields = format_of._fields

    def older(head: ChunkHead, crcs: Sequence[int], layer_bytes: int, first: int) -> bytes:
        now = decode_fields(memoryview(fields(head, crcs, layer_bytes, first)))
        return encode_fields([field for field in now if field[0] != "passes"])

    monkeypatch.setattr(format_of, "_fields", older)
    monkeypatch.setattr(format_of, "VERSION", 1)
    chunk, raw = encoded(head)
    monkeypatch.undo()
    opened = open_header(memoryview(raw), len(raw), head_of())
    assert opened.passes is None and opened.places[0].offset == header_nbytes(len(raw), head_of())
    assert bytes(open_chunk(memoryview(raw), chunk.digest, head_of())) == bytes(chunk.data)


@pytest.mark.parametrize("bad", [NONE.with_pass(47, 47), NONE.with_pass(49, 49)])
def test_passes_that_end_elsewhere_are_a_miss(bad: Passes) -> None:
    _, raw = encoded(dataclasses.replace(head_of(), passes=bad))
    with pytest.raises(KvError, match="passes end at"):
        open_header(memoryview(raw), len(raw), head_of())


OTHERS = {
    "another tenant": head_of(scope="b"),
    "no tenant": head_of(scope=""),
    "another checkpoint": head_of(identity=dataclasses.replace(IDENTITY, checkpoint="d" * 64)),
    "another dtype": head_of(
        identity=dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, dtype="bfloat16"))
    ),
    "another layout": head_of(
        identity=dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, kv_heads=4, head_dim=2))
    ),
    "another block size": head_of(
        identity=dataclasses.replace(IDENTITY, layout=dataclasses.replace(LAYOUT, block_size=32))
    ),
    "another rope": head_of(identity=dataclasses.replace(IDENTITY, rope="theta=5e5")),
    "another engine": head_of(identity=dataclasses.replace(IDENTITY, engine_format="native-1/cuda")),
    "another adapter": head_of(identity=dataclasses.replace(IDENTITY, adapter="lora-1")),
    "other scales": head_of(identity=dataclasses.replace(IDENTITY, scales="fp8:1")),
    "another place": head_of(0, 32),
    "another end": head_of(16, 47),
    "other tokens": head_of(tokens=(*TOKENS[:20], 7, *TOKENS[21:])),
    "other tokens before it": head_of(tokens=(7, *TOKENS[1:])),
}


@pytest.mark.parametrize("wanted", OTHERS.values(), ids=OTHERS.keys())
def test_a_sound_chunk_of_something_else_is_a_miss(wanted: ChunkHead) -> None:
    chunk, raw = encoded(head_of())
    with pytest.raises(KvError):
        open_chunk(memoryview(raw), chunk.digest, wanted)


def test_chains_differ_wherever_anything_before_them_differs() -> None:
    chains = [head.chain for head in (head_of(), *OTHERS.values())]
    assert len(set(chains)) == len(chains)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), st.data())
def test_the_chain_depends_on_the_tokens_and_not_on_how_it_was_asked(tokens: list[int], data: st.DataObject) -> None:
    grown = Chain(IDENTITY, "a")
    for position in data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)):
        grown.at(tokens, position)
    end = data.draw(st.integers(0, len(tokens)))
    assert grown.at(tokens, end) == Chain(IDENTITY, "a").at(tokens, end)
    changed = list(tokens)
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed[index] ^= 1
    same = Chain(IDENTITY, "a").at(changed, end) == grown.at(tokens, end)
    assert same == (index >= end)


def test_the_chain_is_the_same_in_every_process() -> None:
    program = "from tests.function_runtime.kv.test_chunks import head_of; print(head_of().chain.hex())"
    for hash_seed in ("0", "1"):
        said = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert said.stdout.strip() == head_of().chain.hex()


@given(st.lists(st.tuples(st.text("abc_", max_size=5), st.binary(max_size=20)), max_size=6))
def test_fields_are_told_apart(fields: list[tuple[str, bytes]]) -> None:
    assert decode_fields(memoryview(encode_fields(fields))) == fields


@given(st.binary(max_size=64))
def test_bytes_that_are_no_fields_are_refused_or_read_within_their_bounds(data: bytes) -> None:
    try:
        fields = decode_fields(memoryview(data))
    except KvError:
        return
    assert encode_fields(fields) == data


@pytest.mark.parametrize("place", ["", "0123456789abcdef"])
def test_a_pack_says_itself_what_it_holds(tmp_path: Path, place: str) -> None:
    store = DirectoryStore(tmp_path)
    heads = [head_of(0, 16), head_of(16, 48), head_of(48, 53)]
    pack = build_pack([(head.chain, encoded(head)[0]) for head in heads], place)
    assert pack.key.startswith(f"kv/packs/{place}/" if place else "kv/packs/") and pack.key.count("/") == 3 + bool(
        place
    )
    store.put(pack.key, *pack.parts)
    entries = read_entries(store, pack.key)
    assert entries == pack.entries
    for entry, head in zip(entries, heads, strict=True):
        assert entry.chain == head.chain and entry.offset % 64 == 0
        open_chunk(memoryview(store.get(pack.key, entry.offset, entry.nbytes)), entry.digest, head)


def test_a_pack_whose_header_is_altered_is_no_longer_itself(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    head = head_of()
    pack = build_pack([(head.chain, encoded(head)[0])])
    whole = bytearray(b"".join(pack.parts))
    for index in range(96):
        altered = bytearray(whole)
        altered[index] ^= 4
        store.put(pack.key, altered)
        with pytest.raises((KvError, StoreError)):
            read_entries(store, pack.key)


def test_the_same_chunks_packed_twice_are_two_objects() -> None:
    """Or one replica would delete what another one counts on."""
    chunk = encoded(head_of())[0]
    assert build_pack([(head_of().chain, chunk)]).key != build_pack([(head_of().chain, chunk)]).key


def test_a_pack_of_version_1_is_still_read(tmp_path: Path) -> None:
    """Byte by byte as version 1 wrote it: without salt."""
    head = head_of()
    chunk, raw = encoded(head)
    header = struct.pack("<8sII", b"STKKVPK1", 1, 1)
    header += struct.pack("<32s32sQQ", bytes.fromhex(chunk.digest), head.chain, 128, chunk.nbytes)
    header += struct.pack("<I", crc32c(header))
    header = header.ljust(128, b"\0")
    name = hashlib.sha256(header).hexdigest()
    key = f"kv/packs/{name[:2]}/{name}"
    store = DirectoryStore(tmp_path)
    store.put(key, header, raw)
    (entry,) = read_entries(store, key)
    assert open_chunk(memoryview(store.get(key, entry.offset, entry.nbytes)), entry.digest, head) == chunk.data
    store.put(key, header.replace(struct.pack("<I", 1), struct.pack("<I", 3), 1), raw)
    with pytest.raises(KvError):
        read_entries(store, key)


def test_a_header_that_is_not_all_there_says_how_much_of_it_is_needed() -> None:
    head = head_of(0, 16)
    chunk = encode_chunk(head, memoryview(bytes(head.raw_bytes)))
    with pytest.raises(NeedMore) as more:
        read_header(memoryview(chunk.head)[:100], chunk.nbytes)
    header = read_header(memoryview(chunk.head)[: more.value.nbytes], chunk.nbytes)
    assert bytes(header.fields).startswith(head.encoded) and header.end == more.value.nbytes
    with pytest.raises(KvError, match="reaches beyond its end"):
        read_header(memoryview(chunk.head), header.end - 1)


@pytest.mark.parametrize("place", [LayerPlace(64, 8, 0), LayerPlace(60, 8, 0), LayerPlace(0, 0, 0)])
def test_a_layer_that_is_not_there_does_not_have_its_checksum(place: LayerPlace) -> None:
    with pytest.raises(KvError, match="layer 0"):
        check_layer(memoryview(bytes(64)), [place], 0)
