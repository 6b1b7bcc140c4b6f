"""Chunks on disk: verified, within their budget, and never in the way of a load."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from pathlib import Path

import pytest

from model_loader import disk_tier
from model_loader.chunks import CHUNK_BYTES, DIGEST_BYTES, ChunkList, digest_chunk
from model_loader.disk_tier import DiskTier
from model_loader.errors import FormatError


class Content:
    """A file of some small chunks; only the last chunk of a file may be short, so each is a file of its own."""

    def __init__(self, seed: int, nbytes: int = 1000) -> None:
        self.data = random.Random(seed).randbytes(nbytes)
        self.name = hashlib.sha256(self.data).hexdigest()
        self.chunks = ChunkList(nbytes, digest_chunk(self.data))

    def read(self, tier: DiskTier) -> bytes | None:
        view = memoryview(bytearray(len(self.data)))
        return bytes(view) if tier.read_into(self.name, self.chunks, 0, view) else None


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "chunks", 10_000)


def age(tier: DiskTier, content: Content, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(tier.directory / content.name / "0.chunk", (then, then))


def test_what_was_put_is_read_by_whoever_opens_the_directory(tier: DiskTier) -> None:
    one = Content(1)
    assert one.read(tier) is None
    assert tier.put(one.name, 0, one.data) and tier.put(one.name, 0, one.data)
    assert one.read(tier) == one.data
    again = DiskTier(tier.directory, 10_000)
    assert again.used_bytes == tier.used_bytes == 1000
    assert one.read(again) == one.data and again.count(one.name) == 1


def test_every_chunk_of_a_longer_file_has_its_own_place(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(CHUNK_BYTES + 5)
    parts = [data[:CHUNK_BYTES], data[CHUNK_BYTES:]]
    chunks = ChunkList(len(data), b"".join(digest_chunk(part) for part in parts))
    assert len(chunks.digests) == 2 * DIGEST_BYTES
    tier = DiskTier(tmp_path, 1 << 30)
    name = hashlib.sha256(data).hexdigest()
    for index in (1, 0):
        tier.put(name, index, parts[index])
    for index, part in enumerate(parts):
        view = memoryview(bytearray(len(part)))
        assert tier.read_into(name, chunks, index, view) and bytes(view) == part
    with pytest.raises(FormatError, match="room for 3"):
        tier.read_into(name, chunks, 1, memoryview(bytearray(3)))


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "another's"])
def test_a_chunk_that_is_not_what_it_was_is_a_miss_and_goes(tier: DiskTier, damage: str) -> None:
    one, other = Content(1), Content(2)
    tier.put(one.name, 0, one.data)
    path = tier.directory / one.name / "0.chunk"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    wrong = {"cut": data[:-1], "longer": data + b"x", "empty": b"", "another's": other.data}.get(damage, data)
    path.write_bytes(wrong)
    assert one.read(tier) is None
    assert not path.exists()
    assert tier.put(one.name, 0, one.data) and one.read(tier) == one.data


def test_the_budget_is_kept_and_what_was_read_last_stays(tier: DiskTier) -> None:
    contents = [Content(seed) for seed in range(10)]
    for at, content in enumerate(contents):
        tier.put(content.name, 0, content.data)
        age(tier, content, 100 - at)
    assert contents[0].read(tier) is not None
    new = Content(99)
    assert tier.put(new.name, 0, new.data)
    assert tier.used_bytes <= tier.budget_bytes
    assert sum(path.stat().st_size for path in tier.directory.glob("*/*")) == tier.used_bytes
    assert contents[0].read(tier) is not None and new.read(tier) is not None
    assert contents[1].read(tier) is None


def test_a_chunk_larger_than_the_budget_is_not_kept_and_evicts_nothing(tier: DiskTier) -> None:
    small, large = Content(1), Content(2, 20_000)
    tier.put(small.name, 0, small.data)
    assert not tier.put(large.name, 0, large.data)
    assert small.read(tier) is not None


def test_a_full_disk_costs_the_tier_and_not_the_load(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Content(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk_tier.os, "replace", full)
        assert not tier.put(one.name, 0, one.data)
    assert list(tier.directory.glob("*/*")) == [] and list(tier.directory.glob("*/.*")) == []
    monkeypatch.setattr(disk_tier, "FREE_BYTES", 1 << 62)
    assert not tier.put(one.name, 0, one.data)
    assert tier.used_bytes == 0


def test_names_are_content_names(tier: DiskTier) -> None:
    for name in ("../../etc", "a" * 63, "A" * 64, ""):
        with pytest.raises(FormatError, match="no content name"):
            tier.put(name, 0, b"x")


def test_a_sweep_counts_anew_keeps_a_smaller_budget_and_removes_what_a_crash_left(tier: DiskTier) -> None:
    contents = [Content(seed) for seed in range(4)]
    for content in contents:
        tier.put(content.name, 0, content.data)
    half = tier.directory / contents[0].name / ".0.chunk.abc123.tmp"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    fresh = tier.directory / contents[0].name / ".1.chunk.abc123.tmp"
    fresh.write_bytes(b"being written")
    smaller = DiskTier(tier.directory, 2500)
    assert smaller.sweep() == 2000
    assert smaller.used_bytes == 2000
    assert not half.exists() and fresh.exists()


def test_forgetting_a_file_removes_it_alone(tier: DiskTier) -> None:
    one, other = Content(1), Content(2)
    for content in (one, other):
        tier.put(content.name, 0, content.data)
    tier.forget(one.name)
    assert one.read(tier) is None and other.read(tier) is not None
    assert tier.used_bytes == 1000


def test_several_writers_and_readers_never_see_a_wrong_byte(tmp_path: Path) -> None:
    contents = [Content(seed) for seed in range(20)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        mine, choose = DiskTier(tmp_path, 8_000), random.Random(seed)
        for _ in range(150):
            content = choose.choice(contents)
            found = content.read(mine)
            if found is None:
                mine.put(content.name, 0, content.data)
            elif found != content.data:
                wrong.append(content.name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    last = DiskTier(tmp_path, 8_000)
    last.sweep()
    assert last.used_bytes <= 8_000
