"""Prefixes computed once are used again: within a tenant's scope, whole blocks, nothing else."""

from __future__ import annotations

import pytest
import torch

from function_runtime.engine.prefix import Chain, chain_next, chain_root
from tests.function_runtime.engine.support import Checkpoint, Driver, make_work, run_one


def test_a_repeated_prompt_is_not_computed_again(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    prompt = llama2.prompt(70)
    first = run_one(engine, make_work(prompt, "a", ignore_eos=True))
    again = run_one(engine, make_work(prompt, "b", ignore_eos=True))
    assert (first.cached_tokens, again.cached_tokens) == (0, 64)
    assert again.prefill_ends == (64, 70)
    assert again.tokens() == first.tokens()


def test_the_last_token_is_always_computed(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    prompt = llama2.prompt(64)
    run_one(engine, make_work(prompt, "a"))
    assert run_one(engine, make_work(prompt, "b")).cached_tokens == 48


def test_an_answer_serves_the_next_turn(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    prompt = llama2.prompt(30)
    first = run_one(engine, make_work(prompt, "a", max_tokens=40, ignore_eos=True))
    longer = [*prompt, *first.tokens(), *llama2.prompt(10, 3)]
    assert run_one(engine, make_work(longer, "b")).cached_tokens == 64


def test_tenants_do_not_meet(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    prompt = llama2.prompt(70)
    run_one(engine, make_work(prompt, "a", scope="one"))
    assert run_one(engine, make_work(prompt, "b", scope="two")).cached_tokens == 0


def test_it_can_be_switched_off(llama2: Checkpoint) -> None:
    engine = llama2.engine(prefix_cache=False)
    for name in "ab":
        assert run_one(engine, make_work(llama2.prompt(70), name)).cached_tokens == 0


def test_running_requests_share_blocks_without_a_copy(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    driver = Driver(engine)
    driver.submit(make_work(llama2.prompt(64), "a", max_tokens=8, ignore_eos=True))
    driver.step()
    before = engine.stats.kv_used_blocks
    driver.submit(make_work([*llama2.prompt(64), 9, 9], "b", max_tokens=8, ignore_eos=True))
    driver.step()
    assert engine.stats.kv_used_blocks == before + 2  # b's own last block, and a's next
    driver.run()


def test_prefixes_give_way_when_blocks_are_needed(llama2: Checkpoint) -> None:
    engine = llama2.engine(kv_bytes=2 * 2 * 2 * 16 * 4 * 16 * 10)
    for seed in range(6):
        transcript = run_one(engine, make_work(llama2.prompt(60, seed), f"r{seed}", max_tokens=4, ignore_eos=True))
        assert len(transcript.events) == 4 and transcript.cached_tokens == 0
    assert engine.stats.kv_used_blocks == 0


@pytest.mark.parametrize("n", [1, 3])
def test_exported_kv_is_what_the_blocks_hold(llama2: Checkpoint, n: int) -> None:
    """Whole chunks as they fill, the tail when prefill ends, each choice's own after the prompt; gapless together."""
    transcript = run_one(
        llama2.engine(), make_work(llama2.prompt(45), max_tokens=60, ignore_eos=True, n=n, temperature=1.0)
    )
    ranges = sorted(transcript.kv)
    assert [r for r in ranges if r[0] == 0] == [(0, 0, 32), (0, 32, 45), (0, 32, 64), (0, 64, 96)]
    for choice in range(1, n):
        assert [r for r in ranges if r[0] == choice] == [(choice, 32, 64), (choice, 64, 96)]
        assert torch.equal(transcript.kv[choice, 32, 64][:, :, :13], transcript.kv[0, 32, 45])
    assert transcript.kv[0, 0, 32].shape == (2, 2, 32, 2, 16)


def test_nothing_is_sealed_where_kv_is_not_to_be_written(llama2: Checkpoint) -> None:
    assert not run_one(llama2.engine(), make_work(llama2.prompt(70), write_kv=False)).kv


def test_tails_of_running_requests_can_be_flushed(llama2: Checkpoint) -> None:
    driver = Driver(llama2.engine())
    driver.submit(make_work(llama2.prompt(45), max_tokens=60, ignore_eos=True))
    for _ in range(4):
        driver.step()
    (tail,) = driver.engine.kv_tails("r")
    assert (tail.start, tail.end, tail.partial) == (32, 48, True)
    assert driver.engine.export_kv("r", 0, tail.start, tail.end).shape[2] == 16


def test_chains_are_the_same_in_every_process_and_differ_by_every_field() -> None:
    root = chain_root("scope", 16)
    assert root.hex()[:16] == "bfb620d643b1b9d7"
    links = {
        chain_next(root, [1, 2, 3]),
        chain_next(root, [1, 2]),
        chain_next(root, [1, 23]),
        chain_next(chain_root("other", 16), [1, 2, 3]),
        chain_next(chain_root("scope", 32), [1, 2, 3]),
    }
    assert len(links) == 5
    chain = Chain("scope", 2)
    chain.extend([1, 2, 3, 4, 5], 2)
    assert chain.hashes == [chain_next(chain_root("scope", 2), [1, 2]), chain_next(chain.hashes[0], [3, 4])]
