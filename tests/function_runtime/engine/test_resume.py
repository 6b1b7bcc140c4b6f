"""A request taken up at any point of its log goes on byte for byte as the undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from function_runtime.engine.errors import InvalidWork
from function_runtime.engine.output import Restored
from function_runtime.protocol import TokenEvent
from tests.function_runtime.engine.support import Checkpoint, Driver, make_work, run_one, stored_kv

OPTIONS: dict[str, Any] = {"step_tokens": 20, "prefix_cache": False}
"""Chunks that end off any block."""

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40, "ignore_eos": True},
    "seeded": {"max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    "two-choices": {"max_tokens": 36, "temperature": 1.2, "n": 2, "seed": 5, "frequency_penalty": 0.3},
    "three-choices-that-end-apart": {
        "max_tokens": 40, "temperature": 1.5, "n": 3, "seed": 7, "stop_token_ids": tuple(range(6, 60)),
    },
}  # fmt: skip
PROMPT_TOKENS = 45


@pytest.mark.parametrize("restore", [False, True], ids=["recomputed", "restored"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_request_resumed_at_any_point_goes_on_exactly(llama2: Checkpoint, name: str, restore: bool) -> None:
    prompt = llama2.prompt(PROMPT_TOKENS)
    sampling = SAMPLINGS[name]
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt, **sampling))
    assert first.ended and first.prefill_ends == (0, 20, 40, 45)
    n = sampling.get("n", 1)
    lengths = [len(first.tokens(choice)) for choice in range(n)]
    if "end-apart" in name:
        assert len(set(lengths)) > 1
    engine = llama2.engine(**OPTIONS)
    for cut in range(len(first.events) + 1):
        produced = first.events[:cut]
        restored = stored_kv(first, len(prompt), produced, n) if restore and cut else None
        work = make_work(
            prompt, f"r{cut}", epoch=2, produced=produced, prefill_ends=first.prefill_ends if cut else (), **sampling
        )
        resumed = run_one(engine, work, restored)
        assert produced + resumed.events == first.events, f"resumed after {cut} tokens"
        assert resumed.seqs == list(range(cut + 1, len(first.events) + 1))
        assert resumed.ended


def test_a_second_resume_continues_the_first(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(PROMPT_TOKENS)
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt, max_tokens=30, ignore_eos=True))
    sampling = {"max_tokens": 30, "ignore_eos": True}
    log = first.events[:7]
    work = make_work(prompt, epoch=2, produced=log, prefill_ends=first.prefill_ends, **sampling)
    second = run_one(llama2.engine(**OPTIONS), work)
    assert second.prefill_ends == first.prefill_ends
    kv = stored_kv(second, len(prompt), first.events[:20], 1)
    log = first.events[:20]
    work = make_work(prompt, epoch=3, produced=log, prefill_ends=second.prefill_ends, **sampling)
    third = run_one(llama2.engine(**OPTIONS), work, kv)
    assert first.events[:20] + third.events == first.events


def test_admission_says_what_was_loaded_and_what_is_computed_again(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(PROMPT_TOKENS)
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt, max_tokens=30, ignore_eos=True))
    resume = {"epoch": 2, "max_tokens": 30, "ignore_eos": True, "produced": first.events[:25]}
    engine = llama2.engine(**OPTIONS)
    exact = engine.submit(make_work(prompt, "a", prefill_ends=first.prefill_ends, **resume))
    assert (exact.loaded_tokens, exact.recomputed_tokens, exact.exact) == (0, 70, True)
    kv = stored_kv(first, len(prompt), first.events[:25], 1)
    loaded = engine.submit(make_work(prompt, "b", prefill_ends=first.prefill_ends, **resume), kv)
    assert (loaded.loaded_tokens, loaded.recomputed_tokens, loaded.exact) == (64, 6, True)
    unknown = engine.submit(make_work(prompt, "c", **resume))
    assert not unknown.exact and "schedule" in unknown.detail
    cached = engine.submit(make_work(prompt, "d", prefill_ends=(16, 45), **resume))
    assert not cached.exact and "prefix cache" in cached.detail


def test_a_recorded_chunk_larger_than_the_budget_does_not_wait_for_ever(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(100)
    first = run_one(llama2.engine(step_tokens=512), make_work(prompt, max_tokens=8, ignore_eos=True))
    driver = Driver(llama2.engine(step_tokens=64))
    driver.submit(make_work(llama2.prompt(5, 1), "other", max_tokens=200, ignore_eos=True))
    driver.step()
    log = first.events[:2]
    work = make_work(prompt, epoch=2, max_tokens=8, ignore_eos=True, produced=log, prefill_ends=first.prefill_ends)
    resumed = driver.submit(work)
    for _ in range(10):
        driver.step()
    assert resumed.ended and log + resumed.events == first.events


def test_restored_prompt_is_cut_back_to_a_chunk_boundary(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(PROMPT_TOKENS)
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt))
    kv = Restored((32,), ((first.kv[0, 0, 32],),))
    work = make_work(prompt, epoch=2, produced=first.events[:3], prefill_ends=first.prefill_ends)
    assert llama2.engine(**OPTIONS).submit(work, kv).loaded_tokens == 20


def test_a_finished_log_ends_at_once(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(8)
    first = run_one(llama2.engine(), make_work(prompt, max_tokens=3, ignore_eos=True))
    engine = llama2.engine()
    again = run_one(engine, make_work(prompt, epoch=2, max_tokens=3, ignore_eos=True, produced=first.events))
    assert again.ended and not again.events
    assert engine.stats.kv_used_blocks == 0


def test_a_log_cut_inside_a_step_is_completed(llama2: Checkpoint) -> None:
    """The second choice's token of a step was not logged: it is drawn again, at the same place."""
    prompt = llama2.prompt(20)
    sampling = {"max_tokens": 12, "n": 2, "temperature": 1.0, "ignore_eos": True}
    first = run_one(llama2.engine(), make_work(prompt, **sampling))
    work = make_work(prompt, epoch=2, produced=first.events[:9], prefill_ends=first.prefill_ends, **sampling)
    assert first.events[:9] + run_one(llama2.engine(), work).events == first.events


@pytest.mark.parametrize(
    "events",
    [
        (TokenEvent(choice=1, token_id=7),),
        (TokenEvent(choice=0, token_id=10**6),),
        (TokenEvent(choice=0, token_id=7, finish="stop"), TokenEvent(choice=0, token_id=7)),  # type: ignore[arg-type]
    ],
    ids=["unknown-choice", "unknown-token", "goes-on-after-its-end"],
)
def test_a_log_that_cannot_be_is_refused(llama2: Checkpoint, events: tuple[TokenEvent, ...]) -> None:
    with pytest.raises(InvalidWork):
        llama2.engine().submit(make_work(llama2.prompt(5), produced=events))


def test_stored_kv_with_a_hole_is_refused(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(PROMPT_TOKENS)
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt))
    hole = Restored((45,), ((first.kv[0, 32, 45],),))
    with pytest.raises(InvalidWork, match="hole"):
        llama2.engine().submit(make_work(prompt, epoch=2, produced=first.events[:1]), hole)
