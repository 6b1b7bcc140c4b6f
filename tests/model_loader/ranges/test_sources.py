"""This machine's disk and an object store as sources of ranges."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, SourceMissing
from model_loader.objects.directory import DirectoryStore
from model_loader.ranges.local import COLD_BYTES, TRIALS, ColdWays, LocalSource, Way
from model_loader.ranges.reader import Span, VerifiedReader
from model_loader.ranges.stored import StoredSource
from tests.model_loader.ranges.sources import chunks_of

CONTENT = random.Random(3).randbytes(2 * CHUNK_BYTES + 4321)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "model.safetensors"
    target.write_bytes(CONTENT)
    return target


def read_all(source: LocalSource | StoredSource) -> bytes:
    target = bytearray(len(CONTENT))

    def write(to: int, piece: memoryview) -> None:
        target[to : to + len(piece)] = piece

    reading = VerifiedReader({"f": chunks_of(CONTENT)}, [source], pause=lambda _: None)
    reading.check_sizes()
    reading.read([Span("f", 0, len(CONTENT), 0, 0)], write)
    return bytes(target)


def drop_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


@pytest.mark.parametrize("way", list(Way))
def test_a_file_is_read_by_either_way_cached_or_not(path: Path, way: Way) -> None:
    ways = ColdWays()
    ways.give_up(path.stat().st_dev, Way.CACHED if way is Way.DIRECT else Way.DIRECT)
    for dropped in (True, False):
        if dropped:
            drop_cache(path)
        with LocalSource({"f": path}, ways) as source:
            assert read_all(source) == CONTENT


def test_a_store_gives_the_same_bytes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "objects")
    store.put("models/f", CONTENT)
    assert read_all(StoredSource(store, {"f": "models/f"})) == CONTENT


def test_files_that_are_gone_or_cut_are_told(path: Path, tmp_path: Path) -> None:
    with LocalSource({"f": path, "g": tmp_path / "absent"}) as source:
        with pytest.raises(SourceMissing, match="absent"):
            source.size("g")
        with pytest.raises(SourceMissing, match="no file h"):
            source.size("h")
        assert source.size("f") == len(CONTENT)
        os.truncate(path, 100)
        with pytest.raises(IntegrityError, match="ends at byte 100"):
            source.read_into("f", 4096, memoryview(bytearray(10)), within_s=1.0)
    store = DirectoryStore(tmp_path / "objects")
    stored = StoredSource(store, {"f": "f"})
    with pytest.raises(SourceMissing):
        stored.size("f")
    store.put("f", b"short")
    with pytest.raises(IntegrityError):
        stored.read_into("f", 0, memoryview(bytearray(10)), within_s=1.0)


def test_a_file_rewritten_in_place_is_refused(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(CHUNK_BYTES + 17)
        file.write(b"other")
    with LocalSource({"f": path}) as source, pytest.raises(IntegrityError, match=str(CHUNK_BYTES)):
        read_all(source)


def test_the_faster_cold_way_is_chosen_after_both_were_tried_and_is_remembered(tmp_path: Path) -> None:
    remember = tmp_path / "ways.json"
    ways = ColdWays(remember)
    tried = set()
    for number in range(2 * TRIALS):
        way = ways.choose(7)
        tried.add(way)
        # One slow outlier says nothing of a way.
        ways.learn(7, way, COLD_BYTES, 9.0 if number < 2 else 0.002 if way is Way.CACHED else 0.004)
    assert tried == set(Way)
    assert {ways.choose(7) for _ in range(4)} == {Way.CACHED}
    assert {ColdWays(remember).choose(7) for _ in range(4)} == {Way.CACHED}
    assert {ways.choose(8) for _ in range(4)} == set(Way)


def test_a_memory_of_ways_that_cannot_be_read_is_no_memory(tmp_path: Path) -> None:
    remember = tmp_path / "ways.json"
    for content in (b"", b"[1]", b'{"7": "by air"}'):
        remember.write_bytes(content)
        ways = ColdWays(remember)
        assert {ways.choose(7) for _ in range(2)} == set(Way)


def test_a_cached_file_is_lent_while_nobody_can_write_to_it(path: Path) -> None:
    content, view = path.read_bytes(), memoryview(bytearray(200_000))
    digested: list[memoryview] = []
    with LocalSource({"f": path}) as source:
        assert source.read_cached("f", 100_000, view, digested.append) == (200_000, True)
        assert b"".join(digested) == bytes(view) == content[100_000:300_000]
        assert all(piece.obj is not view.obj for piece in digested) and source.holds("f")
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        assert not source.holds("f")
        digested.clear()
        assert source.read_cached("f", 0, view, digested.append) == (200_000, False)
        assert digested[0].obj is view.obj and b"".join(digested) == bytes(view) == content[:200_000]
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # whoever waited may
    with LocalSource({"f": path}) as source:
        source.read_cached("f", 0, view, digested.append)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # nothing is held afterwards


def test_a_file_that_is_open_to_write_is_not_lent(path: Path) -> None:
    view = memoryview(bytearray(200_000))
    with open(path, "r+b"), LocalSource({"f": path}) as source:
        assert source.read_cached("f", 0, view, lambda _: None) == (200_000, False)
        assert not source.holds("f")


def test_a_chunk_that_was_lent_while_somebody_began_to_write_is_read_again(path: Path) -> None:
    content, half, gap = path.read_bytes(), 3_000_000, 4096
    chunks, target = chunks_of(content), bytearray(len(content) + gap)

    class Memory:
        """Two halves of the file do not lie behind one another here, so that they are looked for one by one."""

        looks = 0

        def view(self, to: int, nbytes: int) -> memoryview | None:
            self.looks += 1
            if self.looks == 2:
                with pytest.raises(BlockingIOError):
                    os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            return memoryview(target)[to : to + nbytes]

        def moved(self, nbytes: int) -> None: ...

    def write(to: int, piece: memoryview) -> None:
        target[to : to + len(piece)] = piece

    with LocalSource({"f": path}) as source:
        reading = VerifiedReader({"f": chunks}, [source], threads=1, pause=lambda _: None)
        spans = [Span("f", 0, half, 0, 0), Span("f", half, len(content) - half, half + gap, 0)]
        reading.read(spans, write, landing=Memory())
    assert target[:half] + target[half + gap :] == content
    assert reading.stats.retries == 1 and reading.stats.bad_chunks == 0
