"""A request that begins on a lossy prefix goes on from it byte for byte, wherever it is taken up, or it is said."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from function_runtime.engine.engine import Engine
from function_runtime.kv.arrival import Arrival, ArrivingChunk
from function_runtime.kv.forms import Form, decode, encode
from function_runtime.passes import NONE, Passes
from function_runtime.protocol import KvChunk, Work
from tests.function_runtime.engine.support import Checkpoint, Transcript, make_work, run_one
from tests.function_runtime.engine.test_arriving import OPTIONS, SAMPLINGS, Watching

PROMPT_TOKENS = 75
LAYERS = 2
FORMS: tuple[Form, ...] = ("fp8", "int4")


class Prefix:
    """The KV of a prompt's first 64 tokens in a lossy form, as a reader gives it to an engine."""

    def __init__(self, engine: Engine, plain: Transcript, form: Form) -> None:
        self.form = form
        self.data: list[bytes] = []
        self.records: list[KvChunk] = []
        self.passes: list[Passes] = []
        passes = NONE
        for start in (0, 32):
            raw = plain.kv[0, start, start + 32].contiguous().flatten().view(torch.uint8).numpy().data
            stored = encode(form, engine.kv_layout, raw)
            digest = hashlib.sha256(stored).hexdigest()
            passes = passes.with_loaded(start + 32, digest)
            self.data.append(bytes(decode(form, engine.kv_layout, 32, stored)))
            self.records.append(KvChunk(0, start, start + 32, "kv/packs/00/00", 0, 1, digest, "", form=form))
            self.passes.append(passes)

    def arriving(self, failed: Sequence[int] = (), behind: Transcript | None = None) -> Arrival:
        """`behind`: what was computed after it, as its request stored it."""
        chunks: list[ArrivingChunk] = []
        for record, data, passes in zip(self.records, self.data, self.passes, strict=True):
            chunk = ArrivingChunk(record, LAYERS, memoryview(bytearray(data)))
            chunk.passes = passes
            chunks.append(chunk)
        lossy = len(chunks)
        for (choice, start, end), tensor in sorted(behind.kv.items()) if behind is not None else ():
            if start < 64 or (choice, start, PROMPT_TOKENS) == (0, start, end):
                continue
            data = tensor.contiguous().flatten().numpy().tobytes()
            chunk = ArrivingChunk(
                KvChunk(choice, start, end, "kv/packs/00/01", 0, 1, "", ""), LAYERS, memoryview(bytearray(data))
            )
            chunk.passes = behind.passes[choice, start, end] if behind is not None else None
            chunks.append(chunk)
        arrival = Arrival(chunks)
        for index, chunk in enumerate(chunks):
            if index < lossy and index in failed:
                arrival.has_failed(chunk, "its digest is another one")
            else:
                arrival.is_sound(chunk)
        return arrival


def run_with(engine: Engine, work: Work, arrival: Arrival) -> tuple[Transcript, Watching]:
    driver = Watching(engine)
    transcript = driver.submit(work, arrival)  # type: ignore[arg-type]
    driver.run()
    return transcript, driver


@pytest.fixture(params=FORMS)
def prefix(request: pytest.FixtureRequest, llama2: Checkpoint) -> Prefix:
    engine = llama2.engine(**OPTIONS)
    return Prefix(engine, run_one(engine, work_of(llama2, "greedy", "r")), request.param)


def work_of(checkpoint: Checkpoint, sampling: str, name: str, *, tail: int = 0, **fields: Any) -> Work:
    """`tail`: another ending of the same system prompt."""
    prompt = checkpoint.prompt(PROMPT_TOKENS)
    prompt = (*prompt[:66], *checkpoint.prompt(PROMPT_TOKENS, tail)[66:])
    work = make_work(prompt, name, **fields, **SAMPLINGS[sampling])
    return type(work)(**{**{f: getattr(work, f) for f in work.__struct_fields__}, "prefix_form": "fp8"})


def resumed(checkpoint: Checkpoint, first: Transcript, sampling: str, cut: int, **fields: Any) -> Work:
    work = work_of(checkpoint, sampling, "again", epoch=2, produced=first.events[:cut], **fields)
    recorded = {"prefill_ends": first.prefill_ends, "begun": first.begun}
    return type(work)(**{**{f: getattr(work, f) for f in work.__struct_fields__}, **recorded})


def test_the_passes_say_what_the_beginning_was_loaded_from(llama2: Checkpoint, prefix: Prefix) -> None:
    engine = llama2.engine(**OPTIONS)
    plain = run_one(engine, work_of(llama2, "greedy", "p"))
    first, driver = run_with(engine, work_of(llama2, "greedy", "r"), prefix.arriving())
    (admitted,) = driver.admitted
    assert admitted.loaded_tokens == 64 and first.cached_tokens == 64 and "fp8" in admitted.detail
    assert first.prefill_ends[0] == 64 and Passes.of(first.begun.passes) == prefix.passes[-1]
    behind = {place: passes for place, passes in first.passes.items() if place[2] > 64}
    assert behind and all(passes.loaded_until == 64 and passes.digest for passes in behind.values())
    # What was computed after it is another KV than the tokens alone give: it must not go by the same name.
    place = max(place for place in behind if place in plain.kv)
    assert not torch.equal(first.kv[place], plain.kv[place]) and plain.passes[place].digest != behind[place].digest


@pytest.mark.parametrize("cut", [1, 11])
@pytest.mark.parametrize("sampling", ["greedy", "seeded", "two-choices"])
def test_a_resume_on_the_same_chunks_is_exact(llama2: Checkpoint, prefix: Prefix, sampling: str, cut: int) -> None:
    first, _ = run_with(llama2.engine(**OPTIONS), work_of(llama2, sampling, "r"), prefix.arriving())
    again, driver = run_with(llama2.engine(**OPTIONS), resumed(llama2, first, sampling, cut), prefix.arriving())
    assert first.events[:cut] + again.events == first.events
    (admitted,) = driver.admitted
    assert admitted.exact and admitted.loaded_tokens >= 64


def test_what_was_computed_after_it_is_loaded_with_it(llama2: Checkpoint, prefix: Prefix) -> None:
    first, _ = run_with(llama2.engine(**OPTIONS), work_of(llama2, "greedy", "r"), prefix.arriving())
    arrival = prefix.arriving(behind=first)
    again, driver = run_with(llama2.engine(**OPTIONS), resumed(llama2, first, "greedy", 25), arrival)
    assert first.events[:25] + again.events == first.events
    (admitted,) = driver.admitted
    assert admitted.exact and admitted.loaded_tokens > PROMPT_TOKENS


@pytest.mark.parametrize("failed", [(0,), (1,), (0, 1)])
def test_without_the_whole_prefix_a_resume_says_that_it_is_not_exact(
    llama2: Checkpoint, prefix: Prefix, failed: tuple[int, ...]
) -> None:
    first, _ = run_with(llama2.engine(**OPTIONS), work_of(llama2, "greedy", "r"), prefix.arriving())
    arrival = prefix.arriving(failed)
    again, driver = run_with(llama2.engine(**OPTIONS), resumed(llama2, first, "greedy", 11), arrival)
    (admitted,) = driver.admitted
    assert not admitted.exact and "prefix of 64 positions that it began on is not to be had" in admitted.detail
    assert len(again.events) == len(first.events) - 11 and driver.engine.stats.kv_used_blocks == 0


def test_behind_a_hole_nothing_lossy_is_taken_up(llama2: Checkpoint, prefix: Prefix) -> None:
    undisturbed = run_one(llama2.engine(**OPTIONS), work_of(llama2, "greedy", "p"))
    first, _ = run_with(llama2.engine(**OPTIONS), work_of(llama2, "greedy", "r"), prefix.arriving((0,)))
    assert first.events == undisturbed.events and first.cached_tokens == 0
    assert all(passes.loaded_until == 0 for passes in first.passes.values())


def test_the_prefix_cache_serves_it_to_the_next_which_resumes_on_it(llama2: Checkpoint, prefix: Prefix) -> None:
    options = {**OPTIONS, "prefix_cache": True}
    engine = llama2.engine(**options)
    run_with(engine, work_of(llama2, "greedy", "r"), prefix.arriving())
    next_work = work_of(llama2, "greedy", "c", tail=3)
    assert engine.cached_prefix(next_work) == 64
    second = run_one(engine, next_work)
    assert second.cached_tokens == 64 and Passes.of(second.begun.passes) == prefix.passes[-1]
    assert second.passes[0, 0, 32] == prefix.passes[0], "it may be named as the chunk that it was loaded from"
    work = resumed(llama2, second, "greedy", 11, tail=3)
    again, driver = run_with(llama2.engine(**OPTIONS), work, prefix.arriving())
    assert second.events[:11] + again.events == second.events and driver.admitted[0].exact


def test_plain_and_lossy_blocks_of_the_same_tokens_are_not_mixed(llama2: Checkpoint, prefix: Prefix) -> None:
    options = {**OPTIONS, "prefix_cache": True}
    engine = llama2.engine(**options)
    plain = run_one(engine, work_of(llama2, "greedy", "p"))
    first, _ = run_with(engine, work_of(llama2, "greedy", "r"), prefix.arriving())
    for recorded in (plain, first):
        again = run_one(engine, resumed(llama2, recorded, "greedy", 11))
        assert recorded.events[:11] + again.events == recorded.events


def test_a_preempted_request_that_lost_its_prefix_says_so(llama2: Checkpoint, prefix: Prefix) -> None:
    block = 16 * 2 * 2 * 2 * 16 * 4
    engine = llama2.engine(**{**OPTIONS, "kv_bytes": 13 * block, "max_requests": 2, "max_context_tokens": 150})
    driver = Watching(engine)
    older = driver.submit(make_work(llama2.prompt(PROMPT_TOKENS, 5), "older", max_tokens=60, ignore_eos=True))
    work = work_of(llama2, "greedy", "r")
    younger = driver.submit(work, prefix.arriving())  # type: ignore[arg-type]
    driver.run()
    assert engine.stats.preemptions and older.ended and len(younger.events) == 30
    first, then = driver.admitted
    assert first.exact and first.loaded_tokens == 64
    assert not then.exact and then.request_id == "r" and "preempted: the first 64 positions" in then.detail


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_shadow_allows_what_the_form_loses_and_no_more(llama2: Checkpoint, prefix: Prefix, is_wrong: bool) -> None:
    if is_wrong:
        # Sound bytes, of other tokens.
        prefix.data.reverse()
    arrival = prefix.arriving()
    arrival.is_sampled = True
    work = msgspec.structs.replace(work_of(llama2, "greedy", "r"), prefix_form=prefix.form)
    _, driver = run_with(llama2.engine(**OPTIONS), work, arrival)
    shadow = driver.engine.shadow
    assert shadow.compared == 2 and shadow.equal_bits == 0
    assert [doubt.chunk.start for doubt in driver.doubts] == ([0, 32] if is_wrong else [])
    assert all(prefix.form in doubt.reason for doubt in driver.doubts)
