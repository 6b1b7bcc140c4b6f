"""Continuous batching: budgets, admission, preemption, cancellation, and what they must not change."""

from __future__ import annotations

from typing import Any

import pytest

from function_runtime.engine.errors import ContextExceeded, InvalidWork, NumericError
from function_runtime.protocol import FinishReason
from tests.function_runtime.engine.support import Checkpoint, Driver, make_work, run_many, run_one

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""layers x (key, value) x kv_heads x head_dim x item x block size of the `llama2` checkpoint."""


def blocks(count: int) -> dict[str, Any]:
    return {"kv_bytes": BLOCK_BYTES * count, "prefix_cache": False}


def test_requests_submitted_while_others_run_finish_with_the_same_tokens(llama2: Checkpoint) -> None:
    works = [make_work(llama2.prompt(10 + 13 * i, i), f"r{i}", max_tokens=20, ignore_eos=True) for i in range(5)]
    alone = [run_one(llama2.engine(), work).tokens() for work in works]
    driver = Driver(llama2.engine(step_tokens=64))
    for work in works:
        driver.submit(work)
        driver.step()
        driver.step()
    driver.run()
    assert [driver.transcripts[f"r{i}"].tokens() for i in range(5)] == alone


def test_prefill_of_a_long_prompt_does_not_stop_others(llama2: Checkpoint) -> None:
    driver = Driver(llama2.engine(step_tokens=64))
    short = driver.submit(make_work(llama2.prompt(5), "short", max_tokens=50, ignore_eos=True))
    driver.step()
    long = driver.submit(make_work(llama2.prompt(400, 1), "long", max_tokens=2, ignore_eos=True))
    before = len(short.events)
    while not long.events:
        driver.step()
    assert len(short.events) - before >= 6
    driver.run()


def test_no_more_requests_run_than_the_options_say(llama2: Checkpoint) -> None:
    driver = Driver(llama2.engine(max_requests=2))
    for i in range(5):
        driver.submit(make_work(llama2.prompt(5, i), f"r{i}", max_tokens=4, ignore_eos=True))
    while driver.engine.has_work:
        driver.step()
        assert driver.engine.stats.running <= 2
    assert all(t.ended for t in driver.transcripts.values())


@pytest.mark.parametrize("sampling", [{}, {"n": 2, "temperature": 1.0}], ids=["greedy", "two-choices"])
def test_preemption_keeps_every_output(llama2: Checkpoint, sampling: dict[str, Any]) -> None:
    """Blocks for little more than one request: the younger ones are preempted again and again, and nothing shows."""
    works = [make_work(llama2.prompt(20, i), f"r{i}", max_tokens=40, ignore_eos=True, **sampling) for i in range(3)]
    undisturbed = run_many(llama2.engine(), works)
    engine = llama2.engine(**blocks(9))
    squeezed = run_many(engine, works)
    assert engine.stats.preemptions > 0
    for before, after in zip(undisturbed, squeezed, strict=True):
        assert after.tokens(0) == before.tokens(0) and after.tokens(1) == before.tokens(1)
        assert after.seqs == before.seqs
    assert engine.stats.kv_used_blocks == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 30])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_preempted_at_any_time_is_exact(llama2: Checkpoint, steps: int, n: int) -> None:
    """It runs alone before and after; its log-probabilities say that no bit changed."""
    options = {"step_tokens": 20, "prefix_cache": False}
    work = make_work(llama2.prompt(45), max_tokens=40, ignore_eos=True, logprobs=3, n=n, temperature=0.5)
    expected = run_one(llama2.engine(**options), work)
    driver = Driver(llama2.engine(**options))
    preempted = driver.submit(work)
    for _ in range(steps):
        driver.step()
    driver.engine._scheduler._preempt(driver.engine._requests["r"])
    assert driver.engine.stats.kv_used_blocks == 0
    driver.run()
    assert preempted.events == expected.events and preempted.seqs == expected.seqs
    assert preempted.prefill_ends == expected.prefill_ends


def test_cancelling_frees_the_blocks_at_once(llama2: Checkpoint) -> None:
    engine = llama2.engine(prefix_cache=False)
    driver = Driver(engine)
    running = driver.submit(make_work(llama2.prompt(50), "running", max_tokens=100, ignore_eos=True, n=2))
    staying = driver.submit(make_work(llama2.prompt(16, 1), "staying", max_tokens=3, ignore_eos=True))
    for _ in range(2):
        driver.step()
    assert engine.cancel("running")
    assert engine.stats.kv_used_blocks == 2
    driver.run()
    assert running.ended and running.cancelled
    assert staying.ended and not staying.cancelled and len(staying.events) == 3
    assert engine.stats.kv_used_blocks == 0
    assert not engine.cancel("running")


@pytest.mark.parametrize("steps", range(4))
def test_a_request_cancelled_at_any_step_leaves_nothing(llama2: Checkpoint, steps: int) -> None:
    driver = Driver(llama2.engine(step_tokens=20, prefix_cache=False))
    transcript = driver.submit(make_work(llama2.prompt(45), max_tokens=100, ignore_eos=True))
    for _ in range(steps):
        driver.step()
    assert driver.engine.cancel("r")
    assert driver.engine.stats.kv_used_blocks == 0 and driver.engine.has_work
    driver.run()
    assert transcript.ended and transcript.cancelled


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(llama2: Checkpoint) -> None:
    engine = llama2.engine(max_context_tokens=64)
    with pytest.raises(ContextExceeded, match=r"70 tokens.* 64"):
        engine.submit(make_work(llama2.prompt(70)))
    with pytest.raises(ContextExceeded, match="KV blocks"):
        llama2.engine(**blocks(4)).submit(make_work(llama2.prompt(50), max_tokens=100))
    assert not engine.has_work


def test_generation_ends_at_the_context(llama2: Checkpoint) -> None:
    engine = llama2.engine(max_context_tokens=40)
    transcript = run_one(engine, make_work(llama2.prompt(33), max_tokens=100, ignore_eos=True))
    assert len(transcript.events) == 7
    assert transcript.events[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"n": 0},
        {"max_tokens": 0},
        {"stop_token_ids": (10**6,)},
        {"logit_bias": {3: float("inf")}},
        {"seed": -1},
    ],
    ids=lambda s: next(iter(s)),
)
def test_sampling_out_of_range_is_refused(llama2: Checkpoint, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidWork):
        llama2.engine().submit(make_work(llama2.prompt(5), **sampling))


def test_a_prompt_outside_the_vocabulary_is_refused(llama2: Checkpoint) -> None:
    for prompt in ((), (512,), (-1,)):
        with pytest.raises(InvalidWork):
            llama2.engine().submit(make_work(prompt))


def test_the_same_request_twice_is_refused(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    engine.submit(make_work(llama2.prompt(5)))
    with pytest.raises(InvalidWork, match="already"):
        engine.submit(make_work(llama2.prompt(5), epoch=2))


def test_logits_that_are_no_numbers_fail_the_request_and_spare_the_others(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    driver = Driver(engine)
    poisoned = driver.submit(make_work(llama2.prompt(20), "poisoned", max_tokens=30, ignore_eos=True))
    work = make_work(llama2.prompt(20, 1), "healthy", max_tokens=30, ignore_eos=True)
    healthy = driver.submit(work)
    driver.step()
    block = engine._requests["poisoned"].choices[0].blocks[0]
    for layer in engine._cache.layers:
        layer[:, :, block] = float("nan")
    driver.run()
    assert isinstance(poisoned.error, NumericError) and poisoned.error.code == "engine_numeric_error"
    assert len(poisoned.events) == 1
    assert healthy.tokens() == run_one(llama2.engine(), work).tokens()
    assert not any(layer.isnan().any() for layer in engine._cache.layers)
    assert not run_one(engine, make_work(llama2.prompt(20), max_tokens=2)).error
