"""What goes first when room is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model_loader.eviction import HALF_LIFE_S, Candidate, first_to_go

GIB = 1 << 30


def candidate(key: str, **fields: float | None) -> Candidate:
    values = {"nbytes": GIB, "reload_s": 1.0, "idle_s": 10.0, "chance": None} | fields
    return Candidate(key, **values)  # type: ignore[arg-type]


def goes_first(*candidates: Candidate) -> str:
    chosen = first_to_go(candidates)
    assert chosen is not None
    return chosen.key


def test_nothing_to_let_go_is_said() -> None:
    assert first_to_go([]) is None


@given(idle_s=st.lists(st.floats(0, 1e6), min_size=1, max_size=8, unique=True), data=st.data())
def test_without_any_forecast_the_least_recently_used_goes_whatever_else_differs(
    idle_s: list[float], data: st.DataObject
) -> None:
    cost = st.floats(0.1, 100)
    candidates = [
        candidate(str(at), idle_s=idle, reload_s=data.draw(cost), nbytes=data.draw(st.integers(1, GIB)))
        for at, idle in enumerate(idle_s)
    ]
    assert goes_first(*candidates) == str(idle_s.index(max(idle_s)))


def test_the_unlikely_goes_before_the_likely_even_if_it_was_used_just_now() -> None:
    assert (
        goes_first(candidate("likely", chance=0.9, idle_s=500), candidate("unlikely", chance=0.1, idle_s=0))
        == "unlikely"
    )


def test_what_is_quickly_there_again_goes_before_what_takes_long() -> None:
    assert goes_first(candidate("slow", chance=0.5, reload_s=30), candidate("fast", chance=0.5, reload_s=2)) == "fast"


def test_of_two_of_equal_worth_the_larger_frees_more() -> None:
    assert goes_first(candidate("small", chance=0.5), candidate("large", chance=0.5, nbytes=4 * GIB)) == "large"


def test_without_a_forecast_of_its_own_recency_counts_as_a_chance() -> None:
    even = candidate("forecast", chance=0.5)
    assert goes_first(even, candidate("old", idle_s=2 * HALF_LIFE_S)) == "old"
    assert goes_first(even, candidate("new", idle_s=HALF_LIFE_S / 2)) == "forecast"


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100), st.integers(1, GIB)), min_size=1, max_size=8))
def test_never_is_more_expected_time_per_byte_given_up_than_needed(rows: list[tuple[float, float, int]]) -> None:
    candidates = [
        candidate(str(at), chance=chance, reload_s=reload_s, nbytes=nbytes)
        for at, (chance, reload_s, nbytes) in enumerate(rows)
    ]
    chosen = candidates[int(goes_first(*candidates))]
    assert chosen.cost_per_byte == min(c.cost_per_byte for c in candidates)
