"""Early refusal: worked examples of the prediction, and what must hold of every verdict."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.admission import Line, Load, Server, depth, judge, left_tokens, line_up, own_s
from autoscaler.service import ServiceModel

SERVICE = ServiceModel(prefill_tokens_per_s=1000.0, step_base_s=0.1, step_per_request_s=0.0, max_requests=2)
"""A prompt of 100 tokens takes 0.1 s, an answer of 10 tokens 1 s; a place is held for 2 * 0.1 + 1 = 1.2 s."""


def load(*servers: Server, **more: object) -> Load:
    return Load(SERVICE, servers, prompt_tokens=100.0, output_tokens=10.0, **more)  # type: ignore[arg-type]


def test_a_free_place_waits_for_the_prompts_before_it_only() -> None:
    line = line_up(load(Server((5.0,), 2, unread_tokens=300)))
    assert line.wait_s(0) == pytest.approx(0.3)
    assert own_s(SERVICE, 100) == pytest.approx(0.1 + 0.1)


def test_who_waits_has_its_turn_when_so_many_have_ended() -> None:
    line = line_up(load(Server((4.0, 9.0), 2)))
    # The first that runs ends after 4 steps, the second after 9; from then on each place is held for 1.2 s.
    turns = [0.4, 0.9, 1.6, 2.1, 2.8]
    assert [line.wait_s(ahead) for ahead in range(5)] == pytest.approx(turns)
    assert [line.depth(within_s) for within_s in (0.3, 0.4, 1.0, 2.8)] == [0, 1, 2, 5]


def test_a_replica_that_comes_shortens_the_wait_from_then_on() -> None:
    full = Server((40.0, 90.0), 2)
    assert line_up(load(full)).wait_s(0) == pytest.approx(4.0)
    line = line_up(load(full, coming_s=(1.0,)))
    # Its second place has one prompt before it; both are free again before anything else is.
    assert [line.wait_s(ahead) for ahead in range(4)] == pytest.approx([1.0, 1.1, 2.2, 2.3])


def test_a_request_is_refused_with_the_prediction_and_when_to_come_back() -> None:
    line = line_up(load(Server((4.0, 9.0), 2)))
    taken = judge(line, SERVICE, 100, 1, 1.2)
    assert (taken.refused, taken.first_token_s) == (False, pytest.approx(1.1))
    refused = judge(line, SERVICE, 100, 2, 1.2)
    assert refused.refused and refused.first_token_s == pytest.approx(1.8)
    assert refused.retry_after_s == pytest.approx(0.6)
    # Two were told so before: they have their turns first.
    assert judge(line, SERVICE, 100, 2, 1.2, deferred=2).retry_after_s == pytest.approx(1.8)


def test_a_prompt_longer_than_the_objective_allows_is_taken_where_nothing_is_before_it() -> None:
    """Coming back would not make it shorter."""
    assert own_s(SERVICE, 5000) > 1.0
    assert not judge(line_up(load(Server((), 2))), SERVICE, 5000, 0, 1.0).refused
    assert judge(line_up(load(Server((50.0, 50.0), 2))), SERVICE, 5000, 0, 1.0).refused
    # It may wait a little, or those that are shorter would always be before it.
    assert not judge(line_up(load(Server((2.0, 2.0), 2))), SERVICE, 5000, 0, 1.0).refused


def test_who_holds_more_than_its_share_is_refused_first() -> None:
    line = line_up(load(Server((4.0, 9.0), 2)))
    assert not judge(line, SERVICE, 100, 1, 1.2).refused
    assert judge(line, SERVICE, 100, 1, 1.2, strictness=0.5).refused


@pytest.mark.parametrize(
    ("made", "most", "lengths", "left"),
    [
        pytest.param(0, 100, [], 100.0, id="nothing was measured"),
        pytest.param(0, 100, [10, 10, 20, 20], 15.0, id="the mean"),
        pytest.param(10, 100, [10, 10, 20, 20], 10.0, id="of those that were longer"),
        pytest.param(0, 5, [10, 10, 20, 20], 5.0, id="never more than it may"),
        pytest.param(30, 100, [10, 10, 20, 20], 30.0, id="past all: as much again"),
    ],
)
def test_what_a_request_still_has_to_make(made: int, most: int, lengths: list[int], left: float) -> None:
    assert left_tokens(made, most, lengths) == left


seconds = st.floats(0.0, 20.0).map(lambda value: round(value, 3))
lines = st.builds(
    lambda ready, cycle_s: Line(tuple(sorted(ready)), cycle_s),
    st.lists(seconds, min_size=1, max_size=8),
    st.floats(0.05, 5.0).map(lambda value: round(value, 3)),
)


def turns(line: Line, count: int) -> list[float]:
    """The definition: whoever is next takes the place that is free first, and holds it for a cycle."""
    places = list(line.ready_s)
    heapq.heapify(places)
    found: list[float] = []
    for _ in range(count):
        found.append(places[0])
        heapq.heapreplace(places, places[0] + line.cycle_s)
    return found


@settings(max_examples=60, deadline=None)
@given(lines, st.integers(1, 60))
def test_turns_are_those_of_one_queue_and_many_places(line: Line, count: int) -> None:
    assert [line.wait_s(ahead) for ahead in range(count)] == pytest.approx(turns(line, count), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(lines, st.integers(0, 60))
def test_so_many_fit_within_the_wait_of_the_last_of_them(line: Line, ahead: int) -> None:
    wait_s = line.wait_s(ahead)
    assert line.depth(wait_s + 1e-6) >= ahead + 1
    assert line.depth(wait_s - 1e-6) <= ahead


services = st.builds(
    ServiceModel,
    prefill_tokens_per_s=st.floats(10.0, 10_000.0),
    step_base_s=st.floats(0.001, 0.5),
    step_per_request_s=st.floats(0.0, 0.05),
    max_requests=st.integers(1, 8),
)


@settings(max_examples=60, deadline=None)
@given(lines, services, st.integers(1, 2000), st.integers(0, 80), st.floats(0.1, 20.0), st.floats(0.1, 1.0))
def test_a_verdict_is_the_bounds_and_coming_back_when_told_is_being_taken(
    line: Line, service: ServiceModel, prompt_tokens: int, ahead: int, objective_s: float, strictness: float
) -> None:
    verdict = judge(line, service, prompt_tokens, ahead, objective_s, strictness=strictness)
    assert verdict.refused == (verdict.first_token_s > verdict.bound_s * (1 + 1e-9))
    assert verdict.refused == (ahead >= depth(line, service, prompt_tokens, objective_s, strictness)) or (
        verdict.first_token_s == pytest.approx(verdict.bound_s, abs=1e-6)
    )
    if verdict.retry_after_s is None:
        return
    # Nobody else comes meanwhile: those before it take their turns, and what has begun is held on.
    later_s, started = verdict.retry_after_s, 0
    places = list(line.ready_s)
    heapq.heapify(places)
    while started < ahead and places[0] <= later_s:
        started += 1
        heapq.heapreplace(places, places[0] + line.cycle_s)
    then = Line(tuple(sorted(max(each - later_s, 0.0) for each in places)), line.cycle_s)
    again = judge(then, service, prompt_tokens, ahead - started, objective_s, strictness=strictness)
    assert again.first_token_s <= again.bound_s + 1e-6
    if verdict.retry_after_s > 0.1:
        # And not much earlier: it is no longer than it has to be.
        assert verdict.first_token_s - verdict.retry_after_s == pytest.approx(verdict.bound_s, abs=1e-6)
