"""A request that began on KV of others goes on byte for byte when that KV is gone: their passes are run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from function_runtime.kv.arrival import Arrival, ArrivingChunk
from function_runtime.passes import ALONE, NONE, TAKEN, Passes, assembled, recorded, with_steps
from function_runtime.protocol import Begun, KvChunk
from tests.function_runtime.engine.support import Checkpoint, Driver, Transcript, make_work, run_many, run_one

SAMPLING: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "logprobs": 2, "ignore_eos": True}


def resumed(checkpoint: Checkpoint, prompt: tuple[int, ...], first: Transcript, cut: int, **options: Any) -> Transcript:
    """Elsewhere, with nothing but the record."""
    log = first.events[:cut]
    work = make_work(
        prompt, "again", epoch=2, produced=log, prefill_ends=first.prefill_ends, begun=first.begun,
        **SAMPLING,
    )  # fmt: skip
    engine = checkpoint.engine(**options)
    assert engine.submit(work).exact
    engine.cancel("again")
    return run_one(checkpoint.engine(**options), work)


def assert_same(first: Transcript, again: Transcript, cut: int) -> None:
    """Tokens, log-probabilities and every byte of KV."""
    assert first.events[:cut] + again.events == first.events
    assert again.kv.keys() == first.kv.keys() and again.passes == first.passes
    for place, kv in first.kv.items():
        assert torch.equal(kv, again.kv[place]), place


@pytest.mark.parametrize("step_tokens", [512, 20])
def test_on_a_part_of_anothers_prompt(llama2: Checkpoint, step_tokens: int) -> None:
    options = {"step_tokens": step_tokens}
    engine = llama2.engine(**options)
    longer = llama2.prompt(200)
    prompt = (*longer[:100], *llama2.prompt(9, 1))
    run_one(engine, make_work(longer, "a", **SAMPLING))
    first = run_one(engine, make_work(prompt, "b", **SAMPLING))
    assert first.cached_tokens == 96 and first.prefill_ends[0] == 96
    expected = (96, 200) if step_tokens == 512 else (20, 20, 40, 40, 60, 60, 80, 80, 96, 100)
    assert first.begun.passes == expected
    for cut in (0, 1, 13):
        assert_same(first, resumed(llama2, prompt, first, cut, **options), cut)


def test_the_shape_is_what_matters(llama2: Checkpoint) -> None:
    """What the others rely on: another number of rows gives other bits, so that equal ones are no accident."""
    longer = llama2.prompt(200)
    whole = run_one(llama2.engine(), make_work(longer, **SAMPLING)).kv[0, 0, 32]
    part = run_one(llama2.engine(step_tokens=20), make_work(longer, **SAMPLING)).kv[0, 0, 32]
    assert torch.allclose(whole, part, atol=1e-4) and not torch.equal(whole, part)


def test_in_a_conversation_of_several_turns(llama2: Checkpoint) -> None:
    """Every turn begins on prompts and answers of those before: passes of three requests and single steps."""
    engine = llama2.engine()
    prompt: tuple[int, ...] = llama2.prompt(70)
    for turn in range(4):
        first = run_one(engine, make_work(prompt, f"turn{turn}", **SAMPLING))
        if turn:
            assert first.cached_tokens > len(prompt) - 40 and first.begun.passes[0] == 70
            assert any(how == ALONE for how in first.begun.passes[1::2])
        for cut in (1, 20):
            assert_same(first, resumed(llama2, prompt, first, cut), cut)
        prompt = (*prompt, *first.tokens(), *llama2.prompt(11, turn + 1))
    assert len(first.begun.passes) == 2 * 2 * 3


def test_after_requests_that_computed_the_same_beginning_apart(llama2: Checkpoint) -> None:
    """Two compute one prefix at once in different passes; what follows is found behind the one it was computed on."""
    engine = llama2.engine(step_tokens=64)
    shared = llama2.prompt(150)
    a, b = (*shared, *llama2.prompt(7, 1)), (*shared, *llama2.prompt(60, 2))
    turns = run_many(engine, [make_work(a, "a", **SAMPLING), make_work(b, "b", **SAMPLING)])
    for prompt, before in zip((a, b), turns, strict=True):
        longer = (*prompt, *before.tokens(), *llama2.prompt(20, 3))
        first = run_one(engine, make_work(longer, "next", **SAMPLING))
        assert first.cached_tokens >= len(longer) - 20 - 16
        assert Passes.of(first.begun.passes).repeatable_from == 0


def arrival_of(*taken: tuple[Transcript, int, int]) -> Arrival:
    chunks: list[ArrivingChunk] = []
    for transcript, start, end in taken:
        data = transcript.kv[0, start, end].contiguous().flatten().numpy().tobytes()
        chunk = ArrivingChunk(KvChunk(0, start, end, "p", 0, len(data), "", ""), 2, memoryview(bytearray(data)))
        chunk.passes = transcript.passes[0, start, end]
        chunks.append(chunk)
    arrival = Arrival(chunks)
    for chunk in chunks:
        arrival.is_sound(chunk)
    return arrival


def begun_on(checkpoint: Checkpoint, prompt: tuple[int, ...], *taken: tuple[Transcript, int, int]) -> Transcript:
    driver = Driver(checkpoint.engine())
    driver.engine.submit(make_work(prompt, **SAMPLING), arrival_of(*taken))
    first = driver.transcripts["r"] = Transcript()
    driver.run()
    return first


def assert_goes_on(checkpoint: Checkpoint, prompt: tuple[int, ...], first: Transcript) -> Transcript:
    for cut in (1, 15):
        again = resumed(checkpoint, prompt, first, cut)
        assert first.events[:cut] + again.events == first.events
        for place, kv in first.kv.items():
            assert torch.equal(kv, again.kv[place]) and first.passes[place] == again.passes[place], place
    return again


def test_on_kv_of_several_that_was_computed_apart(llama2: Checkpoint) -> None:
    """The beginning is one's, what follows another's, who had computed a beginning of its own: as an index that keeps
    one chunk for the same tokens hands them out."""
    shared = llama2.prompt(64)
    a = run_one(llama2.engine(), make_work((*shared, *llama2.prompt(100, 1)), **SAMPLING))
    prompt = (*shared, *llama2.prompt(50, 2))
    d = run_one(llama2.engine(step_tokens=20), make_work(prompt, **SAMPLING))
    assert not torch.equal(a.kv[0, 0, 32], d.kv[0, 0, 32])
    parts = ((a, 0, 32), (a, 32, 64), (d, 64, 96))
    c_prompt = (*prompt[:110], *llama2.prompt(40, 3))
    c = begun_on(llama2, c_prompt, *parts)
    assert c.cached_tokens == 96 and Passes.of(c.begun.passes).sources() == [(64, d.passes[0, 64, 96])]
    again = assert_goes_on(llama2, c_prompt, c)
    for transcript, start, end in parts:
        assert torch.equal(again.kv[0, start, end], transcript.kv[0, start, end])
    e_prompt = (*c_prompt[:140], *llama2.prompt(10, 4))
    e = begun_on(llama2, e_prompt, (d, 0, 32), (a, 32, 64), (d, 64, 96), (c, 96, 128))
    assert e.cached_tokens == 128 and len(Passes.of(e.begun.passes).sources()) == 3
    assert_goes_on(llama2, e_prompt, e)


def test_on_kv_that_was_met_on_the_way(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(150)
    a = run_one(llama2.engine(), make_work(prompt, **SAMPLING))
    other = (*prompt[:100], *llama2.prompt(30, 1))
    b = begun_on(llama2, other, (a, 32, 64), (a, 64, 96))
    assert b.cached_tokens == 64 and Passes.of(b.begun.passes).parts == ((32, 32), (96, NONE.with_pass(96, 150)))
    assert_goes_on(llama2, other, b)


def test_on_kv_that_ends_with_the_prompt(llama2: Checkpoint) -> None:
    a = run_one(llama2.engine(), make_work(llama2.prompt(150), **SAMPLING))
    b = begun_on(llama2, llama2.prompt(96), (a, 0, 32), (a, 32, 64), (a, 64, 96))
    assert b.cached_tokens == 80
    assert_goes_on(llama2, llama2.prompt(96), b)


def test_where_blocks_ran_out_and_it_began_again(llama2: Checkpoint) -> None:
    engine = llama2.engine()
    longer = llama2.prompt(200)
    prompt = (*longer[:100], *llama2.prompt(9, 1))
    run_one(engine, make_work(longer, "a", **SAMPLING))
    first = run_one(engine, make_work(prompt, "b", **SAMPLING))
    small = llama2.engine(kv_bytes=2 * 2 * 2 * 16 * 4 * 16 * 13)
    driver = Driver(small)
    driver.submit(make_work(llama2.prompt(60, 5), "old", max_tokens=30, ignore_eos=True))
    work = make_work(
        prompt, "b", epoch=2, produced=first.events[:3], prefill_ends=first.prefill_ends,
        begun=first.begun, **SAMPLING,
    )  # fmt: skip
    again = driver.submit(work)
    driver.run()
    assert again.ended and [e.token_id for e in first.events[3:]] == again.tokens()


def test_a_record_that_does_not_say_how_is_not_exact(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(100)
    first = run_one(llama2.engine(), make_work(prompt, **SAMPLING))
    for prefix in ((), (32, 0), (64, -3), (48, 200), (7,)):
        work = make_work(
            prompt, epoch=2, produced=first.events[:2], prefill_ends=(64, 100), begun=Begun(prefix), **SAMPLING
        )
        admitted = llama2.engine().submit(work)
        assert not admitted.exact and "64 positions" in admitted.detail
        assert run_one(llama2.engine(), work).ended


def test_a_request_that_another_kind_of_device_began_is_not_exact(llama2: Checkpoint) -> None:
    prompt = llama2.prompt(100)
    first = run_one(llama2.engine(), make_work(prompt, **SAMPLING))
    fields: dict[str, Any] = {"epoch": 2, "produced": first.events[:2], "prefill_ends": first.prefill_ends, **SAMPLING}
    assert llama2.engine().submit(make_work(prompt, begun=first.begun, **fields)).exact
    admitted = llama2.engine().submit(make_work(prompt, begun=Begun((), "native-2/cuda/NVIDIA H200"), **fields))
    assert not admitted.exact and "NVIDIA H200" in admitted.detail


def test_passes_are_what_they_were_made_of() -> None:
    passes = NONE.with_pass(96, 200).with_pass(150, 150).with_rows(3, 1).with_rows(2, 1).with_rows(4, 3)
    assert passes.parts == ((96, 200), (150, 150), (155, -1), (159, -3))
    assert Passes.of(passes.numbers) == passes == Passes.from_bytes(passes.to_bytes())
    assert passes.upto(100).parts == ((96, 200), (100, 150)) and passes.upto(150) == passes.upto(151).upto(150)
    assert passes.upto(155).boundaries() == (0, 96, 150, 151, 152, 153, 154, 155)
    assert passes.repeatable_from == 159 and not passes.digest and passes.upto(155).digest
    assert [passes.cut_back(at) for at in (0, 95, 96, 149, 150, 153)] == [0, 0, 96, 96, 150, 153]
    assert passes.upto(90).block_aligned(16).parts == ((90, 0),)
    for numbers in ((1,), (0, 5), (10, 5), (10, 10, 10, 12)):
        with pytest.raises(ValueError):
            Passes.of(numbers)


def test_what_is_put_together_is_known_only_as_far_as_it_fits() -> None:
    a = NONE.with_pass(64, 64)
    b = NONE.with_pass(32, 48).with_pass(96, 96)
    assert assembled(NONE, [(0, 32, a.upto(32)), (32, 64, a)], 64) == a
    assert assembled(NONE, [(0, 32, a.upto(32)), (32, 64, b.upto(64))], 64).parts == ((32, 64), (64, b.upto(64)))
    assert assembled(NONE, [(0, 32, None), (32, 64, a)], 64).repeatable_from == 32
    mixed = assembled(NONE.with_pass(32, 32), [(0, 32, a.upto(32)), (32, 64, a), (64, 96, b)], 96)
    assert mixed.parts == ((32, 32), (64, a), (96, b))
    assert Passes.of(mixed.numbers) == mixed and mixed.digest and mixed.taken_until == 96
    assert mixed.upto(50).parts == ((32, 32), (50, a.upto(50))) and mixed.upto(64).with_pass(80, 80).cut_back(70) == 64
    assert [mixed.cut_back(at) for at in (0, 40, 95, 96)] == [0, 0, 0, 96]
    assert mixed.with_pass(110, 110).boundaries() == (0, 96, 110)
    assert mixed.sources() == [(32, a), (64, b)]
    further = assembled(NONE.with_pass(96, 96), [(96, 128, mixed.with_pass(128, 128))], 128)
    assert further.sources() == [(32, a), (64, b), (96, mixed.with_pass(128, 128))]
    grown = assembled(NONE.with_pass(32, 32), [(32, 64, b.upto(64)), (64, 96, b)], 96)
    assert grown.parts == ((32, 32), (96, b))


def nested(depth: int) -> list[int]:
    inner = nested(depth - 1) if depth else [40, 40]
    return [8, 8, 40, TAKEN - len(inner) // 2, *inner]


def test_sources_that_are_none_are_refused() -> None:
    assert Passes.of(nested(3)).depth == 4
    for numbers in (nested(40), [40, TAKEN - 1, 40, 40], [8, 8, 40, TAKEN - 1, 39, 39], [8, 8, 40, TAKEN - 1, 40, 0]):
        with pytest.raises(ValueError):
            Passes.of(numbers)


def test_steps_of_choices_that_end_apart() -> None:
    prefill = recorded((32, 100), (32, 40))
    assert prefill.parts == ((32, 40), (100, 100))
    lengths = [(5, True), (3, True), (9, False)]
    assert with_steps(prefill, lengths, 108).parts == (*prefill.parts, (102, -3), (104, -2), (108, -1))
    assert with_steps(prefill, lengths, 101).end == 101 and with_steps(prefill, lengths, 50) == prefill.upto(50)
