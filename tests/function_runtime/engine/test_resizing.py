"""KV memory that becomes more or less while requests run: no token of any of them changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from function_runtime.engine.engine import Engine
from function_runtime.engine.errors import OutOfMemory
from function_runtime.engine.kv_cache import KvCache
from function_runtime.engine_like import KvLayout
from function_runtime.kv_room import AGAIN_NS, TRIES, KvRoom
from tests.function_runtime.engine.support import Checkpoint, Driver, make_work, run_many, run_one
from tests.function_runtime.engine.test_batching import BLOCK_BYTES

CONTEXT = {"max_context_tokens": 256}
LEAST = 256 // 16 + 2


def cache_of(blocks: int) -> KvCache:
    cache = KvCache(KvLayout(3, 2, 4, "float32", 16), blocks, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    return cache


@pytest.mark.parametrize("blocks", [4, 8, 20])
def test_what_counts_moves_with_its_numbers_and_the_rest_is_zero(blocks: int) -> None:
    cache, numbers = cache_of(8), {1: 1, 6: 0, 7: 3} if blocks == 4 else {1: 1, 6: 6, 7: 7}
    before = [layer.clone() for layer in cache.layers]
    read = cache.read([1, 6, 7], 3, 45)
    cache.resize(blocks, numbers)
    for layer, was in zip(cache.layers, before, strict=True):
        assert layer.shape[2] == blocks
        for old, new in numbers.items():
            assert torch.equal(layer[:, :, new], was[:, :, old])
        rest = [block for block in range(blocks) if block not in numbers.values()]
        assert not layer[:, :, rest].any()
    table = [numbers[block] for block in (1, 6, 7)]
    assert torch.equal(cache.read(table, 3, 45), read)
    cache.write(table, 3, read + 1)
    assert torch.equal(cache.read(table, 3, 45), read + 1)
    assert cache.keys[2].data_ptr() == cache.layers[2].data_ptr() and cache.key_slots[0].shape[1] == blocks * 16


def test_without_memory_for_the_last_layer_all_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(8)
    before, fresh = [layer.clone() for layer in cache.layers], cache._fresh
    grown = 0

    def scarce(blocks: int) -> torch.Tensor:
        nonlocal grown
        grown += blocks > 8
        if blocks > 8 and grown == 3:
            raise OutOfMemory("none left")
        return fresh(blocks)

    monkeypatch.setattr(cache, "_fresh", scarce)
    with pytest.raises(OutOfMemory):
        cache.resize(12, {block: block for block in range(8)})
    assert cache.blocks == 8 and all(map(torch.equal, cache.layers, before))
    assert cache.keys[0].shape[1] == 8


@pytest.mark.parametrize("sampling", [{}, {"n": 3, "temperature": 1.0}], ids=["greedy", "three choices"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_no_token_changes_however_often_the_memory_does(
    llama2: Checkpoint, sampling: dict[str, Any], prefix_cache: bool
) -> None:
    options = {**CONTEXT, "prefix_cache": prefix_cache, "step_tokens": 32}
    works = [
        make_work(llama2.prompt(9 + 17 * i, i), f"r{i}", max_tokens=30, ignore_eos=True, **sampling) for i in range(5)
    ]
    undisturbed = run_many(llama2.engine(**options), works)
    engine, chance = llama2.engine(kv_bytes=80 * BLOCK_BYTES, **options), random.Random(7)
    driver, sizes = Driver(engine), set()
    for work in works:
        driver.submit(work)
        for _ in range(3):
            driver.step()
            sizes.add(engine.resize_kv(chance.randrange(20, 100) * BLOCK_BYTES))
    while engine.has_work:
        driver.step()
        sizes.add(engine.resize_kv(chance.randrange(LEAST, 60) * BLOCK_BYTES))
    assert len(sizes) > 10, "it was changed"
    for work, before in zip(works, undisturbed, strict=True):
        after = driver.transcripts[work.request_id]
        for choice in range(work.sampling.n):
            assert after.tokens(choice) == before.tokens(choice) and after.text(choice) == before.text(choice)
        assert after.seqs == before.seqs
    assert engine.stats.kv_used_blocks == 0


def test_what_requests_need_is_never_given_up(llama2: Checkpoint) -> None:
    engine = llama2.engine(kv_bytes=200 * BLOCK_BYTES, prefix_cache=False, **CONTEXT)
    assert engine.resize_kv(1) == LEAST * BLOCK_BYTES, "one request of the longest context"
    engine.resize_kv(200 * BLOCK_BYTES)
    driver = Driver(engine)
    work = make_work(llama2.prompt(30), "many", n=8, max_tokens=40, ignore_eos=True, temperature=1.0)
    driver.submit(work)
    needs = 1 + 8 * (5 - 1) + 2
    assert engine.resize_kv(1) == needs * BLOCK_BYTES
    driver.run()
    assert engine.resize_kv(1) == LEAST * BLOCK_BYTES, "its requests have ended"
    assert driver.transcripts["many"].tokens(7) == run_one(llama2.engine(), work).tokens(7)


def test_a_prefix_is_found_again_where_it_lies_now(llama2: Checkpoint) -> None:
    engine, prompt = llama2.engine(kv_bytes=100 * BLOCK_BYTES, **CONTEXT), llama2.prompt(70)
    others = [make_work(llama2.prompt(60, seed), f"o{seed}", max_tokens=2, ignore_eos=True) for seed in range(1, 7)]
    run_many(engine, others)
    first = run_one(engine, make_work(prompt, "a", ignore_eos=True))
    engine.resize_kv(LEAST * BLOCK_BYTES)
    again = run_one(engine, make_work(prompt, "b", ignore_eos=True))
    assert again.cached_tokens == 64 and again.tokens() == first.tokens()
    assert run_one(engine, others[0]).cached_tokens == 0, "prefixes used longer ago were given up for it"


def test_memory_that_is_not_there_leaves_an_engine_as_it_was(
    llama2: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llama2.engine(kv_bytes=40 * BLOCK_BYTES, prefix_cache=False, **CONTEXT)
    driver, work = Driver(engine), make_work(llama2.prompt(40), "a", max_tokens=40, ignore_eos=True)
    driver.submit(work)
    driver.step()

    def none_left(blocks: int) -> torch.Tensor:
        raise OutOfMemory("none left")

    monkeypatch.setattr(engine._cache, "_fresh", none_left)
    assert engine.resize_kv(90 * BLOCK_BYTES) == 40 * BLOCK_BYTES
    driver.run()
    assert driver.transcripts["a"].tokens() == run_one(llama2.engine(), work).tokens()


# --- what a replica was told ---


class Sized:
    """An engine of which only its KV memory is looked at."""

    def __init__(self, engine: Engine, most_bytes: int, least_bytes: int = 0) -> None:
        self.kv_layout = engine.kv_layout
        self.stats = engine.stats
        self.most_bytes, self.least_bytes, self.asked = most_bytes, least_bytes, 0

    def resize_kv(self, kv_bytes: int) -> int:
        self.asked += 1
        return min(max(kv_bytes // BLOCK_BYTES * BLOCK_BYTES, self.least_bytes), self.most_bytes)


def test_a_share_is_tried_until_it_is_reached(llama2: Checkpoint) -> None:
    engine: Any = Sized(llama2.engine(kv_bytes=40 * BLOCK_BYTES), 90 * BLOCK_BYTES, 30 * BLOCK_BYTES)
    room, now_ns = KvRoom(), 1
    assert not room.settle(engine, now_ns) and engine.asked == 0, "nothing was told"
    room.tell(20 * BLOCK_BYTES + 5)
    for _ in range(TRIES + 5):
        room.settle(engine, now_ns)
        room.settle(engine, now_ns + 1)
        now_ns += AGAIN_NS
    assert engine.asked == TRIES + 5, "requests need more: once in a while it is tried again"
    engine.least_bytes = 0
    room.settle(engine, now_ns)
    room.settle(engine, now_ns + 2 * AGAIN_NS)
    assert engine.asked == TRIES + 6


def test_more_than_can_be_had_is_given_up(llama2: Checkpoint) -> None:
    engine: Any = Sized(llama2.engine(kv_bytes=40 * BLOCK_BYTES), 40 * BLOCK_BYTES)
    room = KvRoom()
    room.tell(100 * BLOCK_BYTES)
    for number in range(3 * TRIES):
        room.settle(engine, 1 + number * AGAIN_NS)
    assert engine.asked == TRIES
