"""What is loaded and what is recomputed follows from the speeds, and is never predicted to be worse than either."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.kv.plan import MAX_DEADLINE_S, Candidate, Costs, Known, Plan, plan
from function_runtime.kv.speeds import PRIOR, Speeds

CHUNK_BYTES = 32 * 46080


def chunks(end: int, *, start: int = 0, size: int = 32, token_bytes: int = 46080) -> list[Candidate]:
    edges = [*range(start, end, size), end]
    return [Candidate(a, b, (b - a) * token_bytes) for a, b in itertools.pairwise(edges)]


def speeds(**given: float) -> Speeds:
    return replace(PRIOR, **given)  # type: ignore[arg-type]


KNOWN = Known(prompt=1000, total=1020, boundaries=(0, 512, 1000))


def loaded(found: Plan) -> list[tuple[int, int]]:
    return [(d.start, d.end) for d in found.decisions if d.load]


def test_a_fast_store_is_loaded_from() -> None:
    found = plan(KNOWN, chunks(1019), speeds(bytes_per_s=1e10, latency_s=1e-4))
    assert (found.start, found.end) == (0, 1019) and found.predicted_s < found.recompute_s / 10


def test_a_slow_store_is_not() -> None:
    found = plan(KNOWN, chunks(1019), speeds(bytes_per_s=1e5, latency_s=1.0))
    assert not found.loads and found.predicted_s == found.recompute_s and not loaded(found)
    assert "recomputing" in found.reason


def test_between_the_two_the_front_is_computed_while_the_back_is_read() -> None:
    known = Known(prompt=8000, total=8001, boundaries=(*range(0, 8000, 512), 8000))
    found = plan(known, chunks(8000), speeds(bytes_per_s=60e6, latency_s=0.001))
    assert 0 < found.start < found.end == 8000
    assert found.predicted_s < 0.7 * min(found.load_s, found.recompute_s)
    front_s = Costs(known, PRIOR).between(0, found.start)
    read_s = found.nbytes / 60e6
    assert front_s == pytest.approx(read_s, rel=0.15), "they meet"


def test_decoding_again_is_what_loading_saves_in_an_exact_resume() -> None:
    generated = Known(prompt=32, total=600, boundaries=(0, 32))
    slow = speeds(bytes_per_s=10e6, latency_s=0.5)
    assert plan(generated, chunks(599), slow).end == 599
    assert not plan(replace(generated, fast=True), chunks(599), slow).loads


def test_kv_after_a_hole_in_front_is_used_where_the_hole_is_computed() -> None:
    found = plan(KNOWN, chunks(1019, start=512), speeds(bytes_per_s=1e9))
    assert (found.start, found.end) == (512, 1019)


def test_a_beginning_that_came_from_a_prefix_cache_is_loaded_whatever_it_costs() -> None:
    taken = replace(KNOWN, boundaries=(256, 768, 1000))
    slow = speeds(bytes_per_s=1e5)
    found = plan(taken, chunks(1019), slow)
    assert found.start == 0 and found.end >= 256 and "exactness" in found.reason
    assert all(d.deadline_s == MAX_DEADLINE_S for d in found.decisions if d.load)
    assert not plan(replace(taken, fast=True), chunks(1019), slow).loads


def test_a_run_inside_one_recorded_chunk_of_prefill_is_of_no_use_in_an_exact_resume() -> None:
    found = plan(KNOWN, chunks(500, start=100), speeds(bytes_per_s=1e12, latency_s=0.0))
    assert not found.loads
    assert plan(replace(KNOWN, fast=True), chunks(500, start=100), speeds(bytes_per_s=1e12, latency_s=0.0)).loads


def test_layers_come_in_pieces_where_a_long_pass_can_follow_them() -> None:
    known = Known(prompt=3000, total=3001, fast=True, layers=30, pass_tokens=512)
    near = speeds(latency_s=1e-5, bytes_per_s=200e6)
    assert plan(known, chunks(2600, size=512), near).pieces > 1
    assert plan(known, chunks(2600, size=512), replace(near, latency_s=1.0)).pieces == 1


def test_nothing_stored_and_the_last_token_alone_are_no_plan() -> None:
    assert not plan(KNOWN, [], PRIOR).loads
    assert not plan(Known(prompt=5, total=5), [Candidate(4, 5, 100)], PRIOR).loads


def test_a_read_is_waited_for_as_long_as_recomputing_is_dearer() -> None:
    found = plan(KNOWN, chunks(1019), speeds(bytes_per_s=1e9, decode_s=0.5))
    generated = [d.deadline_s for d in found.decisions if d.end > 1000]
    assert all(d == MAX_DEADLINE_S for d in generated), "without one of these every token is generated again"
    prompt = [d.deadline_s for d in found.decisions if d.end <= 1000]
    assert max(prompt) < 1.0


positions = st.integers(1, 3000)
measured = st.builds(
    Speeds,
    prefill_s=st.floats(1e-6, 0.01),
    prefill_position_s=st.floats(0, 1e-6),
    decode_s=st.floats(1e-4, 0.2),
    decode_position_s=st.floats(0, 1e-5),
    latency_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e4, 1e11),
)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_plan_is_never_predicted_to_be_worse_than_the_better_of_the_two(data: st.DataObject) -> None:
    prompt = data.draw(positions)
    total = prompt + data.draw(st.integers(0, 300))
    step = data.draw(st.integers(16, 1024))
    known = Known(
        prompt=prompt,
        total=total,
        boundaries=data.draw(st.sampled_from([(), (*range(0, prompt, step), prompt)])),
        fast=data.draw(st.booleans()),
        layers=data.draw(st.integers(1, 40)),
    )
    end = data.draw(st.integers(1, total))
    start = data.draw(st.integers(0, end - 1))
    candidates = chunks(
        end, start=data.draw(st.sampled_from([0, start])), size=data.draw(st.sampled_from([16, 32, 256]))
    )
    found = plan(known, candidates, data.draw(measured))
    assert found.predicted_s <= min(found.load_s, found.recompute_s) * (1 + 1e-9)
    runs = loaded(found)
    assert bool(runs) == found.loads
    if runs:
        assert runs[0][0] == found.start and runs[-1][1] == found.end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(runs)), "a gapless run"
        assert found.start <= prompt
        assert all(0 < d.deadline_s <= MAX_DEADLINE_S for d in found.decisions if d.load)
