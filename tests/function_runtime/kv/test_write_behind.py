"""Writing behind: capped, never in the way of serving, told once when it stops and once when it goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.kv import writer as writer_module
from function_runtime.kv.bandwidth import Bandwidth
from function_runtime.kv.keeping import OBSERVE_ONE_IN, Prefix, Speeds, StorePrices, decide
from function_runtime.kv.known import KNOWN_FOR_S, KnownChunks
from function_runtime.kv.settings import KvReplicaSettings
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.protocol import KvChunk
from model_loader.errors import OutOfSpace
from model_loader.objects import DirectoryStore
from tests.function_runtime.kv.test_chunks import head_of
from tests.function_runtime.kv.test_writing_and_reading import into


class Failing(DirectoryStore):
    broken = True

    def put(self, key: str, *parts: Any, **options: Any) -> int:
        if self.broken:
            raise OutOfSpace("no space left: free some")
        return super().put(key, *parts, **options)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pending(number: int = 0, owner: str = "r") -> Pending:
    head = head_of(0, 16, tokens=tuple(range(number, number + 64)))
    return Pending(owner, 0, head, memoryview(bytearray(head.data_bytes)), is_wanted=lambda: True)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[tuple[Failing, KvWriter, list[Any], Clock]]:
    store, told, clock = Failing(tmp_path), [], Clock()
    writer = KvWriter(lambda: store, into(told), linger_s=0.0, clock=clock)
    yield store, writer, told, clock
    writer.close()


def test_a_full_disk_stops_write_behind_and_says_so_once(
    failing: tuple[Failing, KvWriter, list[Any], Clock], capsys: pytest.CaptureFixture[str]
) -> None:
    store, writer, told, clock = failing
    writer.put(pending(0))
    assert writer.flush(5)
    for number in range(1, 20):
        writer.put(pending(number))
    assert writer.flush(5)
    assert [dropped for _, _, dropped in told][:2] == [
        "no space left: free some",
        "write-behind is stopped: no space left: free some",
    ]
    counts = writer.counts
    assert (counts.failures, counts.dropped_chunks, counts.chunks) == (1, 20, 0)
    assert capsys.readouterr().err.count("kv write-behind stops") == 1
    store.broken = False
    clock.now_s += 2.0
    writer.put(pending(30))
    assert writer.flush(5)
    writer.put(pending(31))
    assert writer.flush(5)
    assert writer.counts.chunks == 2 and writer.stopped == ""
    assert capsys.readouterr().err.count("kv write-behind goes on") == 1


def test_while_the_store_stays_away_it_is_tried_ever_more_seldom(
    failing: tuple[Failing, KvWriter, list[Any], Clock],
) -> None:
    _, writer, _, clock = failing
    for number in range(200):
        writer.put(pending(number))
        assert writer.flush(5)
        clock.now_s += 1.0
    # 1 + 2 + 4 + ... + 60 seconds of pauses, then one try a minute.
    assert 7 <= writer.counts.failures <= 9 and writer.counts.dropped_chunks == 200


def test_the_cap_holds_over_any_second_and_a_flush_does_not_keep_to_it(tmp_path: Path) -> None:
    told: list[Any] = []
    clock = Clock()
    nbytes = head_of(0, 16).data_bytes
    writer = KvWriter(lambda: DirectoryStore(tmp_path), into(told), linger_s=0.0, bytes_per_s=nbytes / 10, clock=clock)
    writer.put(pending(0))
    assert writer.flush(5) and len(told) == 1
    assert writer._bandwidth.wait_s(clock()) > 5
    writer.put(pending(1))
    assert len(told) == 1  # its turn comes when the clock says so, and the clock stands
    assert writer.flush(5) and len(told) == 2
    writer.close()


@settings(deadline=None, max_examples=200)
@given(st.floats(1, 1e9), st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**9)), max_size=30))
def test_no_more_than_the_cap_and_one_pack_is_ever_let_through(rate: float, tries: list[tuple[float, int]]) -> None:
    bucket, now_s, sent, largest = Bandwidth(rate, 0.0), 0.0, 0, 0
    for pause_s, nbytes in tries:
        now_s += pause_s
        if bucket.wait_s(now_s) <= 0:
            assert sent <= rate * (now_s + 0.5) * 1.001 + 1
            bucket.spend(nbytes, now_s)
            sent, largest = sent + nbytes, max(largest, nbytes)
    assert sent <= rate * (now_s + 0.5) * 1.001 + largest + 1


def test_packs_are_bounded_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    gate = threading.Event()
    monkeypatch.setattr(writer_module, "MAX_CHUNKS", 4)

    def store() -> DirectoryStore:
        gate.wait(10)
        return DirectoryStore(tmp_path)

    writer = KvWriter(store, into(told))
    for number in range(10):
        writer.put(pending(number, owner=f"r{number}"))
    gate.set()
    assert writer.flush(10)
    writer.close()
    packs = [chunks[0].pack for _, chunks, _ in told]
    assert len(packs) == 10 and max(packs.count(pack) for pack in packs) <= 4


# --- the rule ------------------------------------------------------------------------------------------------------

FAST = Speeds(token_us=32, read_bytes_per_s=1.25e9, read_latency_s=0.1)
"""An 8B model on an H200 behind 10 Gb/s."""
SLOW = Speeds(token_us=1000, read_bytes_per_s=1e9, read_latency_s=0.002)
"""A small model on a CPU beside a directory."""


def prefix(tokens: int, bytes_per_token: int, name: bytes = b"\xff" * 32) -> Prefix:
    return Prefix(tokens, tokens * bytes_per_token, max(1, tokens * bytes_per_token >> 24), name)


def test_what_reading_back_takes_longer_than_computing_is_not_kept() -> None:
    choice = decide(prefix(8192, 131_072), 1.0, 3_000_000, FAST, StorePrices())
    assert not choice.keep and "0.000 s saved" in choice.reason
    faster = Speeds(token_us=32, read_bytes_per_s=12e9, read_latency_s=0.02)
    assert decide(prefix(8192, 131_072), 1.0, 6_000_000, faster, StorePrices()).keep


def test_a_slow_device_makes_keeping_worth_it_and_no_chance_of_reuse_never_does() -> None:
    prices = StorePrices(put=0, get=0)
    assert decide(prefix(2000, 46_080), 0.2, 1_000_000, SLOW, prices).keep
    assert not decide(prefix(2000, 46_080), 0.0, 1_000_000, SLOW, prices).keep
    assert not decide(prefix(0, 46_080), 1.0, 1_000_000, SLOW, prices).keep


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 100_000), st.floats(0.01, 1), st.integers(1, 10**7), st.floats(1, 10_000), st.floats(1e6, 1e11))
def test_the_rule_is_monotone(tokens: int, p: float, price: int, token_us: float, bandwidth: float) -> None:
    """More chance of reuse, dearer devices, slower computing or faster reading never turn a kept prefix away."""
    here = Speeds(token_us, bandwidth, 0.01)
    if not decide(prefix(tokens, 1000), p, price, here, StorePrices(get=0)).keep:
        return
    assert decide(prefix(tokens, 1000), min(1, p * 1.1), price, here, StorePrices(get=0)).keep
    assert decide(prefix(tokens, 1000), p, price * 2, here, StorePrices(get=0)).keep
    assert decide(prefix(tokens, 1000), p, price, Speeds(token_us * 2, bandwidth * 2, 0.01), StorePrices(get=0)).keep


def test_a_share_is_kept_to_see_whether_it_is_reused() -> None:
    dear = StorePrices(gib_month=1e12)
    names = [number.to_bytes(4, "big") + bytes(28) for number in range(160)]
    kept = [decide(prefix(2000, 46_080, name), 0.2, 1_000_000, SLOW, dear) for name in names]
    assert sum(choice.keep for choice in kept) == 160 // OBSERVE_ONE_IN
    assert all("observe" in choice.reason for choice in kept if choice.keep)


def test_a_name_is_good_for_a_minute_or_while_somebody_counts_on_it() -> None:
    clock = Clock()
    known = KnownChunks(clock)
    chunk = KvChunk(0, 0, 32, "kv/packs/p", 0, 1, "d" * 64, "ab" * 32)
    key = (bytes.fromhex(chunk.chain), 0, "")
    known.add(chunk)
    clock.now_s += KNOWN_FOR_S - 1
    assert known.find(key, lambda pack: False) == chunk
    clock.now_s += 2
    assert known.find(key, lambda pack: pack == "kv/packs/p") == chunk
    assert known.find(key, lambda pack: False) is None and known.find(key, lambda pack: True) is None


def test_settings_that_do_not_parse_are_said_and_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    read = KvReplicaSettings.of("s3://bucket/x", {"STOKER_KV_BYTES_PER_S": "lots", "STOKER_KV_LINGER_S": "2"})
    assert (read.bytes_per_s, read.linger_s, read.prices) == (0.0, 2.0, StorePrices())
    assert "STOKER_KV_BYTES_PER_S='lots'" in capsys.readouterr().err
    assert KvReplicaSettings.of("file:///x", {"STOKER_KV_PRICES": "1,2,3"}).prices == StorePrices(1, 2, 3)


def test_an_error_that_nobody_foresaw_is_a_failure_of_the_store_and_the_writer_lives(
    failing: tuple[Failing, KvWriter, list[Any], Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer, told, clock = failing

    def refuse(key: str, *parts: Any, **options: Any) -> int:
        raise RuntimeError("a library's own")

    with monkeypatch.context() as broken:
        broken.setattr(store, "put", refuse)
        writer.put(pending(0, "a"))
        assert writer.flush(10)
    assert told == [("a", (), "RuntimeError: a library's own")]
    store.broken = False
    clock.now_s += 2
    writer.put(pending(1, "b"))
    assert writer.flush(10)
    assert told[-1][0] == "b" and len(told[-1][1]) == 1
