"""Reads as they are planned: in the order of layers, together where chunks are neighbours, and not at all."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from function_runtime.kv import fetch
from function_runtime.kv.arrival import Arrival, ArrivalFailed, ArrivingChunk, ChunkState
from function_runtime.kv.memory import ReadMemory
from function_runtime.kv.plan import Decision, Plan
from function_runtime.kv.reader import Capabilities, Reading, may_probe
from function_runtime.kv.speeds import PRIOR, Measured
from function_runtime.protocol import KvChunk
from model_loader.objects import DirectoryStore
from model_loader.objects.resilience import DEFAULT_LIMITS
from tests.function_runtime.kv.test_chunks import IDENTITY, LAYOUT
from tests.function_runtime.kv.test_writing_and_reading import Stored, request


class Watched(DirectoryStore):
    """Remembers its reads; those from `held_from` on wait to be let go."""

    def __init__(self, root: Path, held_from: int = 10**6) -> None:
        super().__init__(root)
        self.ranges: list[tuple[int, int]] = []
        self.held_from = held_from
        self.let_go = threading.Event()
        self.is_asked = threading.Event()

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        self.ranges.append((offset, len(view)))
        self.is_asked.set()
        if len(self.ranges) > self.held_from:
            self.let_go.wait(20)
        super().get_into(key, offset, view, within_s=within_s)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    stored = Stored(tmp_path / "objects")
    yield stored
    stored.writer.close()


def everything(reading: Reading, pieces: int = 1, start: int = 0, within_s: float = 20.0) -> Plan:
    chunks = [w.chunk for w in reading.wanted if w.chunk.choice == 0]
    decisions = tuple(Decision(c.start, c.end, c.start >= start, within_s) for c in chunks)
    return Plan(start, chunks[-1].end, pieces, decisions, 0, 0.0, 0.0, 0.0, "told to")


def wait(arrival: Arrival) -> None:
    while not arrival.resolved:
        arrival.wait(5.0)


def three(stored: Stored) -> Reading:
    for start, end in [(0, 16), (16, 32), (32, 48)]:
        stored.write(0, start, end)
    return Reading(request(stored.chunks()), IDENTITY)


def test_neighbours_are_read_as_one(stored: Stored) -> None:
    reading = three(stored)
    store = Watched(stored.store.root)
    with ThreadPoolExecutor(1) as executor:
        arrival = reading.begin(everything(reading), store, executor)
        wait(arrival)
    assert len(store.ranges) == 1 and arrival.is_sound_throughout and arrival.reach(0, 0) == 48


def test_layers_come_in_order_and_can_be_looked_at_before_the_rest_is_there(stored: Stored) -> None:
    reading = three(stored)
    store = Watched(stored.store.root, held_from=3)
    with ThreadPoolExecutor(1) as executor:
        arrival = reading.begin(everything(reading, pieces=LAYOUT.num_layers), store, executor)
        arrival.wait_for_layer(0)
        assert [chunk.layers for chunk in arrival.chunks] == [bytearray(b"\1\0\0")] * 3
        assert not arrival.is_sound_throughout
        store.let_go.set()
        arrival.wait_for_all()
    assert len(store.ranges) == 3 * LAYOUT.num_layers


def test_the_back_is_read_first_where_the_front_is_computed(stored: Stored) -> None:
    stored.write(0, 0, 16)
    stored.chunks()
    stored.write(0, 16, 32)
    stored.chunks()
    stored.write(0, 32, 48)
    reading = Reading(request(stored.chunks()), IDENTITY)
    store = Watched(stored.store.root)
    with ThreadPoolExecutor(1) as executor:
        arrival = reading.begin(everything(reading, start=16), store, executor)
        wait(arrival)
    assert [offset for offset, _ in store.ranges] == [c.record.offset for c in reversed(arrival.chunks)]
    assert arrival.begins_at == 16 and arrival.reach(0, 16) == 48 and not arrival.layered


def test_sound_layers_of_a_chunk_with_another_digest_never_make_it_sound(stored: Stored) -> None:
    stored.write(0, 0, 32)
    (chunk,) = stored.chunks()
    reading = Reading(request((msgspec.structs.replace(chunk, digest="0" * 64),)), IDENTITY)
    with ThreadPoolExecutor(1) as executor:
        arrival = reading.begin(everything(reading, pieces=3), stored.store, executor)
        with pytest.raises(ArrivalFailed, match="digest"):
            arrival.wait_for_all()
    assert all(arrival.chunks[0].layers), "each was looked at"
    assert arrival.chunks[0].state is ChunkState.FAILED and [reason for _, reason in reading.outcome.bad]


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
def test_a_layer_that_is_altered_is_never_given_out(stored: Stored, layer: int) -> None:
    stored.write(0, 0, 32)
    (chunk,) = stored.chunks()
    path = stored.store.root / chunk.pack
    raw = bytearray(path.read_bytes())
    layer_bytes = LAYOUT.nbytes_per_token // LAYOUT.num_layers * 32
    raw[chunk.offset + chunk.nbytes - (LAYOUT.num_layers - layer) * layer_bytes + 5] ^= 1
    path.write_bytes(raw)
    reading = Reading(request((chunk,)), IDENTITY)
    with ThreadPoolExecutor(4) as executor:
        arrival = reading.begin(everything(reading, pieces=3), stored.store, executor)
        wait(arrival)
    assert not arrival.chunks[0].layers[layer]
    assert arrival.chunks[0].reason == f"layer {layer} does not have its checksum"


def test_a_pack_that_ends_too_early_costs_only_what_is_missing(stored: Stored) -> None:
    reading = three(stored)
    last = reading.wanted[-1].chunk
    path = stored.store.root / last.pack
    path.write_bytes(path.read_bytes()[: last.offset + 10])
    with ThreadPoolExecutor(2) as executor:
        arrival = reading.begin(everything(reading), stored.store, executor)
        wait(arrival)
    assert arrival.reach(0, 0) == 32


def test_what_was_given_up_is_not_read(stored: Stored) -> None:
    reading = three(stored)
    store = Watched(stored.store.root, held_from=0)
    with ThreadPoolExecutor(1) as executor:
        arrival = reading.begin(everything(reading, pieces=3), store, executor)
        arrival.abandon()
        store.let_go.set()
    assert len(store.ranges) <= 1


def test_a_store_that_is_slower_than_computing_is_not_read(stored: Stored) -> None:
    reading = three(stored)
    slow = reading.plan(replace(PRIOR, latency_s=60.0), Capabilities(LAYOUT.num_layers))
    assert not slow.loads and "recomputing" in slow.reason
    quick = reading.plan(replace(PRIOR, latency_s=1e-6, bytes_per_s=1e12), Capabilities(LAYOUT.num_layers))
    assert quick.loads and quick.end == 48


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_memory_is_free_as_soon_as_the_arrival_is_let_go(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, is_abandoned: bool
) -> None:
    memory = ReadMemory()
    monkeypatch.setattr(fetch, "MEMORY", memory)
    reading = three(stored)
    store = Watched(stored.store.root, held_from=0 if is_abandoned else 10**6)
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as executor:
            arrival = reading.begin(everything(reading), store, executor)
            if is_abandoned:
                assert store.is_asked.wait(20)
                arrival.abandon()
                store.let_go.set()
            else:
                wait(arrival)
        assert memory._idle_bytes == 0
        del arrival
        assert memory._idle_bytes > 0, "a cycle holds it until the collector comes by"
    finally:
        gc.enable()


def test_a_store_that_is_faster_than_was_thought_is_noticed_by_reading_a_little_of_it(stored: Stored) -> None:
    reading = three(stored)
    capabilities = Capabilities(LAYOUT.num_layers)
    thought_slow = Measured(replace(PRIOR, latency_s=60.0, prefill_s=1.0))
    chosen = reading.plan(thought_slow.speeds, capabilities)
    assert not chosen.loads
    with ThreadPoolExecutor(2) as executor:
        arrival = reading.begin_steered(chosen, thought_slow, capabilities, stored.store, executor)
        assert arrival is not None
        wait(arrival)
        assert arrival.is_sound_throughout and thought_slow.has_read
        assert thought_slow.speeds.latency_s < 60.0
        # Just measured, and again not worth it: not even a little is read.
        very_slow = replace(chosen, recompute_s=0.01)
        assert three_again(stored).begin_steered(very_slow, Measured(), capabilities, stored.store, executor) is None
        assert three_again(stored).begin_steered(chosen, thought_slow, capabilities, stored.store, executor) is None


@pytest.mark.parametrize(("behind", "looks_after_s"), [(0.9, 1), (2, 4), (5, 25), (float("inf"), 25)])
def test_the_further_a_store_is_behind_the_rarer_it_is_looked_at(
    stored: Stored, behind: float, looks_after_s: float
) -> None:
    slow = three(stored).plan(replace(PRIOR, latency_s=60.0, prefill_s=1.0), Capabilities(LAYOUT.num_layers))
    plan = replace(slow, recompute_s=2.0, load_s=2.0 * behind)
    assert not may_probe(plan, looks_after_s - 0.1)
    assert may_probe(plan, looks_after_s + 0.1)


def three_again(stored: Stored) -> Reading:
    return Reading(request(stored.chunks()), IDENTITY)


def test_a_read_of_everything_waits_as_long_as_bytes_may_take(stored: Stored) -> None:
    reading = three(stored)
    with ThreadPoolExecutor(1) as executor:
        nbytes = sum(each.chunk.nbytes for each in reading.wanted)
        before_s = time.monotonic()
        arrival = reading.begin_all(10.0, stored.store, executor)
        latest_s = before_s + 10.0 + nbytes / DEFAULT_LIMITS.slowest_bytes_s
        assert nbytes and all(chunk.deadline_s >= latest_s for chunk in arrival.chunks)
        arrival.abandon()


def test_a_pass_that_waits_for_a_layer_says_so_all_the_while() -> None:
    record = KvChunk(0, 0, 32, "pack", 0, 10, "digest", "chain")
    chunk = ArrivingChunk(record, 2, memoryview(b""))
    arrival = Arrival([chunk], layered=True)
    said = 0

    def waiting() -> None:
        nonlocal said
        said += 1
        if said == 3:
            arrival.has_layers(chunk, 0, 1)

    arrival.while_waiting = waiting
    arrival.wait_for_layer(0)
    assert said == 3
