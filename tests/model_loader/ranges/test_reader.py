"""The verified reader: what is wanted, in order, and nothing that is not as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, SourceMissing, SourceUnavailable
from model_loader.ranges.reader import ReadLimits, Span, VerifiedReader
from model_loader.ranges.source import Digest, RangeSource, Tier
from model_loader.ranges.window import Window
from tests.model_loader.ranges.sources import MemorySource, chunks_of

A, B = random.Random(1).randbytes(5 * CHUNK_BYTES + 777), random.Random(2).randbytes(CHUNK_BYTES // 2)
FILES = {"a": A, "b": B}
CHUNKS = {name: chunks_of(content) for name, content in FILES.items()}
WHOLE = [Span("b", 0, len(B), len(A), 1), Span("a", 0, len(A), 0, 0)]


class Target:
    """Memory that spans are written to, and the groups that landed, with what was there when they did."""

    def __init__(self, nbytes: int = len(A) + len(B)) -> None:
        self.memory = bytearray(nbytes)
        self.landed: list[int] = []

    def write(self, to: int, piece: memoryview) -> None:
        self.memory[to : to + len(piece)] = piece


def reader(*sources: RangeSource, threads: int = 0) -> VerifiedReader:
    return VerifiedReader(CHUNKS, sources, threads=threads, pause=lambda _: None)


def flip(at: int, times: int = 1 << 30) -> Callable[[str, int, int], bytes | None]:
    """Answers with one flipped bit of "a", the first `times` times it is asked for it."""
    left = [times]

    def before(file: str, offset: int, nbytes: int) -> bytes | None:
        if file != "a" or not offset <= at < offset + nbytes or left[0] == 0:
            return None
        left[0] -= 1
        bad = bytearray(A[offset : offset + nbytes])
        bad[at - offset] ^= 1
        return bytes(bad)

    return before


@pytest.mark.parametrize("most_bytes", [1 << 30, 300_000])
def test_every_byte_comes_to_its_place_and_is_counted(most_bytes: int) -> None:
    source, target = MemorySource(FILES, most_bytes=most_bytes), Target()
    reading = reader(source)
    reading.read(WHOLE, target.write, target.landed.append)
    assert target.memory == A + B
    assert sorted(target.landed) == [0, 1]
    assert reading.stats.by_tier() == {"store": len(A) + len(B)}
    assert (reading.stats.chunks, reading.stats.bad_chunks) == (7, 0)


def test_files_are_asked_for_in_the_order_wanted() -> None:
    source = MemorySource(FILES)
    spans = [Span("a", 4 * CHUNK_BYTES, 10, 0, 0), Span("b", 5, 10, 10, 1), Span("a", 0, 10, 20, 2)]
    reader(source, threads=1).read(spans, Target().write)
    assert [(file, offset) for file, offset, _ in source.asked] == [("a", 4 * CHUNK_BYTES), ("b", 0), ("a", 0)]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_spans_give_the_bytes_they_name(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    spans, wanted, to = [], bytearray(), 0
    for number in range(count):
        begin = data.draw(st.integers(0, len(A)))
        nbytes = data.draw(st.integers(0, len(A) - begin))
        spans.append(Span("a", begin, nbytes, to, number % 3))
        wanted += A[begin : begin + nbytes]
        to += nbytes
    target = Target(len(wanted))
    reader(MemorySource(FILES)).read(spans, target.write, target.landed.append)
    assert target.memory == wanted
    assert sorted(target.landed) == sorted({span.group for span in spans})


def test_a_bad_chunk_is_fetched_again_from_another_source() -> None:
    at = 3 * CHUNK_BYTES + 5
    ill, good, target = MemorySource(FILES, "ill", Tier.PEER, flip(at)), MemorySource(FILES, "good"), Target()
    reading = reader(ill, good)
    reading.read(WHOLE, target.write, target.landed.append)
    assert target.memory == A + B
    assert good.asked == [("a", 3 * CHUNK_BYTES, CHUNK_BYTES)]
    assert reading.stats.bad_chunks == 1
    assert reading.stats.by_tier() == {"peer": len(A) + len(B), "store": CHUNK_BYTES}


def test_a_chunk_that_was_bad_once_is_read_from_the_same_source_again() -> None:
    target = Target()
    reader(MemorySource(FILES, before=flip(9, times=1))).read(WHOLE, target.write)
    assert target.memory == A + B


def test_a_chunk_that_stays_bad_is_refused_by_file_offset_and_expected_value_and_its_group_never_lands() -> None:
    at, target = 2 * CHUNK_BYTES + 1, Target()
    with pytest.raises(IntegrityError) as caught:
        reader(MemorySource(FILES, before=flip(at))).read(WHOLE, target.write, target.landed.append)
    message = str(caught.value)
    assert "a of memory" in message and str(2 * CHUNK_BYTES) in message and CHUNKS["a"].expected(2).hex() in message
    assert 0 not in target.landed


def test_one_range_that_fails_is_asked_for_again_and_not_the_rest() -> None:
    failed = threading.Event()

    def before(file: str, offset: int, nbytes: int) -> bytes | None:
        if (file, offset) == ("a", CHUNK_BYTES) and not failed.is_set():
            failed.set()
            raise SourceUnavailable("the connection ended")
        return None

    source, target = MemorySource(FILES, before=before), Target()
    reading = reader(source)
    reading.read(WHOLE, target.write)
    assert target.memory == A + B
    assert len(source.asked) == 7 + 1
    assert reading.stats.retries == 1


def test_a_source_that_stays_away_is_named_after_as_many_tries_as_allowed() -> None:
    def before(file: str, offset: int, nbytes: int) -> bytes | None:
        raise SourceUnavailable("nobody answers at 10.0.0.9")

    source, pauses = MemorySource(FILES, before=before), list[float]()
    reading = VerifiedReader(
        CHUNKS, [source], threads=1, limits=ReadLimits(attempts=4, first_pause_s=0.1), pause=pauses.append
    )
    with pytest.raises(SourceUnavailable, match=r"10\.0\.0\.9"):
        reading.read(WHOLE, Target().write)
    assert len(source.asked) == 4
    assert pauses == pytest.approx([0.1, 0.2, 0.4])


def test_what_the_nearest_source_has_not_comes_from_the_next() -> None:
    def before(file: str, offset: int, nbytes: int) -> bytes | None:
        if file == "b":
            raise SourceMissing("no b here")
        return None

    near, far, target = MemorySource(FILES, "near", Tier.PEER, before), MemorySource(FILES, "far"), Target()
    reader(near, far).read(WHOLE, target.write)
    assert target.memory == A + B
    assert {file for file, _, _ in far.asked} == {"b"}


def test_a_source_known_to_lack_a_file_is_not_asked_for_its_ranges() -> None:
    near, far, target = MemorySource({"b": B}, "near", Tier.DISK), MemorySource(FILES, "far"), Target()
    reading = reader(near, far)
    reading.check_sizes()
    reading.read(WHOLE, target.write)
    assert target.memory == A + B and reading.stats.retries == 0
    assert {file for file, _, _ in near.asked} == {"b"} and {file for file, _, _ in far.asked} == {"a"}


def test_a_file_that_became_shorter_is_refused_before_the_first_byte() -> None:
    source = MemorySource({"a": A[:-1], "b": B})
    with pytest.raises(IntegrityError, match=f"{len(A) - 1} bytes, expected are {len(A)}"):
        reader(source).check_sizes()
    assert not source.asked


def test_spans_outside_the_file_are_refused() -> None:
    for span in (Span("a", len(A) - 1, 2, 0, 0), Span("a", -1, 2, 0, 0), Span("c", 0, 1, 0, 0)):
        with pytest.raises(IntegrityError):
            reader(MemorySource(FILES)).read([span], Target().write)


def test_groups_land_while_the_last_range_is_withheld() -> None:
    """Whoever waits for the first group has it, however long the last one takes."""
    gate, first = threading.Event(), threading.Event()

    def before(file: str, offset: int, nbytes: int) -> bytes | None:
        if offset == 5 * CHUNK_BYTES:
            assert gate.wait(30)
        return None

    target = Target()

    def landed(group: int) -> None:
        target.landed.append(group)
        first.set()

    spans = [Span("a", 0, 3 * CHUNK_BYTES, 0, 0), Span("a", 3 * CHUNK_BYTES, len(A) - 3 * CHUNK_BYTES, 0, 1)]
    reading = threading.Thread(
        target=lambda: reader(MemorySource(FILES, before=before)).read(spans, lambda *_: None, landed)
    )
    reading.start()
    try:
        assert first.wait(30)
        assert target.landed == [0]
    finally:
        gate.set()
        reading.join(30)
    assert target.landed == [0, 1]


def test_a_window_gives_any_bytes_and_fetches_neighbours_once() -> None:
    source = MemorySource(FILES)
    window = Window(reader(source), budget_bytes=2 * CHUNK_BYTES)
    found = bytearray(2 * CHUNK_BYTES)
    window.read_into("a", CHUNK_BYTES - 100, memoryview(found)[:200])
    window.read_into("a", CHUNK_BYTES + 100, memoryview(found)[200:300])
    assert found[:300] == A[CHUNK_BYTES - 100 : CHUNK_BYTES + 100] + A[CHUNK_BYTES + 100 : CHUNK_BYTES + 200]
    assert len(source.asked) == 2
    window.read_into("a", len(A) - 500, memoryview(found)[:500])
    window.read_into("a", 0, memoryview(found)[500:900])
    assert found[:900] == A[-500:] + A[:400]


def test_a_window_lets_no_bad_chunk_pass_and_forgets_it() -> None:
    window = Window(reader(MemorySource(FILES, before=flip(3, times=2))))
    with pytest.raises(IntegrityError):
        window.read_into("a", 0, memoryview(bytearray(10)))
    found = bytearray(10)
    window.read_into("a", 0, memoryview(found))
    assert found == A[:10]


class AtHand(MemorySource):
    """Everything is at hand."""

    def read_cached(self, file: str, offset: int, view: memoryview, digest: Digest) -> tuple[int, bool]:
        got = self.read_into(file, offset, view, within_s=0.0)
        for at in range(0, got, 1_000_000):
            digest(view[at : min(got, at + 1_000_000)])
        return got, False

    def holds(self, file: str) -> bool:
        raise AssertionError("nothing was lent")


class Memory(Target):
    """Can be read into as far as `upto`."""

    def __init__(self, upto: int) -> None:
        super().__init__()
        self.upto, self.direct_bytes = upto, 0

    def view(self, to: int, nbytes: int) -> memoryview | None:
        return memoryview(self.memory)[to : to + nbytes] if to + nbytes <= self.upto else None

    def moved(self, nbytes: int) -> None:
        self.direct_bytes += nbytes


@pytest.mark.parametrize("upto", [0, 2 * CHUNK_BYTES + 5000, len(A) + len(B)])
def test_what_is_at_hand_is_read_straight_into_the_destination_and_verified_there(upto: int) -> None:
    target = Memory(upto)
    reading = reader(AtHand(FILES))
    reading.read(WHOLE, target.write, target.landed.append, target)
    assert target.memory == A + B
    assert sorted(target.landed) == [0, 1]
    assert upto - CHUNK_BYTES < target.direct_bytes <= upto
    assert reading.stats.nbytes == len(A) + len(B)


def test_a_bad_chunk_read_straight_into_the_destination_is_read_again_or_refused() -> None:
    at, target = 2 * CHUNK_BYTES + 1, Memory(len(A) + len(B))
    reader(AtHand(FILES, before=flip(at, times=1))).read(WHOLE, target.write, target.landed.append, target)
    assert target.memory == A + B
    with pytest.raises(IntegrityError, match=str(2 * CHUNK_BYTES)):
        reader(AtHand(FILES, before=flip(at))).read(WHOLE, target.write, landing=Memory(len(A) + len(B)))


def test_bytes_wanted_in_two_places_come_to_both() -> None:
    target = Memory(len(A) + len(B))
    spans = [Span("a", 100, 200_000, 0, 0), Span("a", 150_000, 300_000, 1_000_000, 1)]
    reader(AtHand(FILES)).read(spans, target.write, target.landed.append, target)
    assert target.memory[:200_000] == A[100:200_100]
    assert target.memory[1_000_000:1_300_000] == A[150_000:450_000]
