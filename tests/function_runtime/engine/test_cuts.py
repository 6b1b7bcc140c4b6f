"""Every kind of request, cut after every token and taken up by an engine that has never seen it: nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from function_runtime.protocol import FinishReason
from tests.function_runtime.engine.kinds import KINDS, PROMPT_TOKENS
from tests.function_runtime.engine.support import Checkpoint, make_work, run_one, stored_kv

OPTIONS: dict[str, Any] = {"step_tokens": 16, "prefix_cache": False, "kv_bytes": 4 << 20}


@pytest.mark.parametrize("name", KINDS)
def test_a_request_of_any_kind_cut_after_any_token_goes_on_exactly(llama2: Checkpoint, name: str) -> None:
    """Its KV is computed again at every fourth cut, and taken from the store at the others."""
    kind = KINDS[name]
    sampling = kind.sampling(llama2)
    prompt = llama2.prompt(PROMPT_TOKENS)
    first = run_one(llama2.engine(**OPTIONS), make_work(prompt, **sampling))
    assert first.ended and first.error is None
    kind.check(llama2, first)
    choices = sampling.get("n", 1)
    for cut in range(len(first.events) + 1):
        produced = first.events[:cut]
        stored = stored_kv(first, len(prompt), produced, choices) if cut % 4 else None
        work = make_work(prompt, epoch=2, produced=produced, prefill_ends=first.prefill_ends if cut else (), **sampling)
        resumed = run_one(llama2.engine(**OPTIONS), work, stored)
        assert resumed.error is None
        assert produced + resumed.events == first.events, f"resumed after {cut} tokens"
        assert resumed.seqs == list(range(cut + 1, len(first.events) + 1))
        assert resumed.ended


def test_every_kind_is_decided_by_its_own_parameters(llama2: Checkpoint) -> None:
    """The kinds differ from one another: none of them passes because its parameters were dropped on the way."""
    prompt = llama2.prompt(PROMPT_TOKENS)
    answers = {
        name: tuple(run_one(llama2.engine(**OPTIONS), make_work(prompt, **kind.sampling(llama2))).tokens())
        for name, kind in KINDS.items()
    }
    assert len(set(answers.values())) == len(answers)


def test_a_request_of_any_kind_is_the_same_among_others(llama2: Checkpoint) -> None:
    """All kinds at once in one engine end as they must; what a batch changes in the last bit is the model's own."""
    from tests.function_runtime.engine.support import run_many

    works = [make_work(llama2.prompt(PROMPT_TOKENS), name, **kind.sampling(llama2)) for name, kind in KINDS.items()]
    for transcript, kind in zip(run_many(llama2.engine(), works), KINDS.values(), strict=True):
        assert transcript.ended and transcript.error is None
        kind.check(llama2, transcript)
        assert all(e.finish in (None, FinishReason.STOP, FinishReason.LENGTH) for e in transcript.events)
