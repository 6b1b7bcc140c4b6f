"""The idle-time histogram and the windows that pay under it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.forecast import Costs
from autoscaler.forecasting.gaps import gap_law, idle_histogram, idle_histogram_hour, idle_histogram_pace
from autoscaler.forecasting.outlook import GapLaw, law_of_rates
from autoscaler.forecasting.warmth import Windows, gap_cost, spliced, warm_windows, within, worst_loss
from autoscaler.windows import History, Window
from tests.autoscaler.forecasting_support import DAY_S, START_S

CHEAP = Costs(start_s=0.25, devices=1, waiting_weight=30.0)


def near(values: float, spread: float, count: int, seed: int = 0) -> np.ndarray:
    return values + np.random.default_rng(seed).normal(0.0, spread, count)


def test_a_steady_caller_is_awaited_and_not_kept() -> None:
    windows = warm_windows(gap_law(near(60.0, 0.2, 10)), CHEAP)
    assert len(windows) == 1
    opens_s, closes_s = windows[0]
    assert 58.0 <= opens_s <= 59.8 and 60.2 <= closes_s <= 62.0


def test_a_caller_of_every_day_is_told_as_sharply() -> None:
    windows = warm_windows(gap_law(near(DAY_S, 20.0, 10)), Costs(start_s=10.0))
    opens_s, closes_s = windows[-1]
    assert DAY_S - 120 < opens_s < DAY_S < closes_s < DAY_S + 120


def test_two_habits_give_two_windows() -> None:
    gaps = np.concatenate([near(60.0, 0.3, 12), near(600.0, 2.0, 12)])
    windows = warm_windows(gap_law(gaps), CHEAP)
    assert [any(opens_s < at_s < closes_s for opens_s, closes_s in windows) for at_s in (60.0, 300.0, 600.0)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("weight", "kept"), [(5.0, False), (100.0, True)])
def test_calls_by_chance_are_kept_for_where_their_rate_times_a_start_exceeds_the_devices(
    weight: float, kept: bool
) -> None:
    gaps = np.random.default_rng(1).exponential(20.0, 500)
    windows = warm_windows(gap_law(gaps), Costs(start_s=2.0, waiting_weight=weight))
    held_s = sum(min(closes_s, 100.0) - opens_s for opens_s, closes_s in windows if opens_s < 100.0)
    assert (held_s > 90.0) if kept else (held_s < 10.0)


def test_beyond_every_gap_seen_a_replica_is_kept_for_no_longer_than_the_break_even() -> None:
    costs = Costs(start_s=10.0)
    windows = warm_windows(gap_law(np.full(200, 2.0)), costs)
    assert windows[0][0] == 0.0 and windows[-1][1] <= 1.5 * costs.break_even_s()


def test_minute_counts_alone_give_gaps_too() -> None:
    history = History()
    for minute in range(0, 1440, 30):
        history.add(Window(START_S + 60.0 * minute, 60.0, arrivals=3))
    history.observed(START_S, START_S + DAY_S)
    law = idle_histogram(history, START_S + DAY_S, 600.0, 10).law
    assert law is not None
    middle = law.edges_s[int(np.searchsorted(np.cumsum(law.chances), 0.5)) + 1]
    assert 1650.0 < middle < 1850.0


def test_the_hour_tells_short_gaps_of_the_day_from_long_ones_of_the_night() -> None:
    history = History()
    at_s = START_S
    while at_s < START_S + 3 * DAY_S:
        night = (at_s - START_S) % DAY_S < DAY_S / 2
        gap_s = 3600.0 if night else 600.0
        history.note_gap(at_s, gap_s)
        at_s += gap_s + 1.0
    costs = Costs(start_s=10.0, waiting_weight=10.0)

    def awaited(hour: float) -> bool:
        law = idle_histogram_hour(history, START_S + 3 * DAY_S + 3600.0 * hour, 600.0, 10).law
        assert law is not None
        return any(opens_s < 600.0 < closes_s for opens_s, closes_s in warm_windows(law, costs))

    assert awaited(18.0) and not awaited(6.0)


def test_the_pace_tells_a_burst_from_the_quiet_between() -> None:
    history, at_s = History(), START_S
    for gap_s in [5.0] * 40 + [900.0] * 40 + [5.0] * 40 + [900.0] * 40:
        history.note_gap(at_s, gap_s)
        at_s += gap_s + 1.0
    law = idle_histogram_pace(history, at_s, 600.0, 10).law
    assert law is not None
    late = law.chances[law.edges_s[:-1] > 800.0].sum()
    assert late > 0.85, "after 40 gaps of 15 minutes, the next is one too"


def brute(law: GapLaw, costs: Costs) -> float:
    """Least expected cost over all sets of cells."""
    cells = len(law.chances)
    middles = 0.5 * (law.edges_s[1:] + law.edges_s[:-1])
    beyond = 1.0 - law.chances.sum()
    best = math.inf
    for chosen in itertools.product((False, True), repeat=cells):
        windows: list[tuple[float, float]] = []
        for cell, warm in enumerate(chosen):
            if warm and windows and windows[-1][1] == law.edges_s[cell]:
                windows[-1] = (windows[-1][0], float(law.edges_s[cell + 1]))
            elif warm:
                windows.append((float(law.edges_s[cell]), float(law.edges_s[cell + 1])))
        best = min(best, expected(law, tuple(windows), costs, middles, beyond))
    return best


def expected(law: GapLaw, windows: Windows, costs: Costs, middles: np.ndarray, beyond: float) -> float:
    inside = sum(
        chance * gap_cost(windows, float(gap), costs) for chance, gap in zip(law.chances, middles, strict=True)
    )
    return float(inside + beyond * gap_cost(windows, float(law.edges_s[-1]) + 1e6, costs))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.sampled_from([1.0, 5.0, 40.0]))
def test_no_other_set_of_intervals_costs_much_less(weights: list[float], weight: float) -> None:
    total = sum(weights) + 0.3
    law = GapLaw(np.array([0.0, 2, 5, 9, 14, 22, 40, 60, 90]), np.array(weights) / total)
    costs = Costs(start_s=2.0, waiting_weight=weight)
    middles = 0.5 * (law.edges_s[1:] + law.edges_s[:-1])
    found = expected(law, warm_windows(law, costs), costs, middles, 1.0 - float(law.chances.sum()))
    # Arrivals within a start are taken at half its cost when planning.
    assert found <= brute(law, costs) + 0.1 * costs.of_start()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.1, 300.0)), max_size=4),
    st.floats(0.0, 400.0),
    st.floats(0.0, 2_000.0),
    st.booleans(),
)
def test_a_plan_cut_to_the_credit_loses_no_more_whatever_the_gap(
    pieces: list[tuple[float, float]], room: float, gap_s: float, ended: bool
) -> None:
    costs = Costs(start_s=2.0, waiting_weight=10.0)
    windows: list[tuple[float, float]] = []
    for after_s, length_s in pieces:
        opens_s = (windows[-1][1] + 1.0 if windows else 0.0) + after_s
        windows.append((opens_s, opens_s + length_s))
    reactive = ((0.0, costs.break_even_s()),)
    kept = within(tuple(windows), reactive, costs, room)
    if kept is None:
        assert worst_loss((), reactive, costs) > room
        return
    lost = gap_cost(kept, gap_s, costs, ended=ended) - gap_cost(reactive, gap_s, costs, ended=ended)
    assert lost <= room + 1e-6


def test_a_plan_is_changed_from_now_on_only() -> None:
    assert spliced(((0.0, 10.0), (50.0, 70.0)), ((55.0, 60.0), (90.0, 95.0)), 52.0) == (
        (0.0, 10.0),
        (50.0, 52.0),
        (55.0, 60.0),
        (90.0, 95.0),
    )
    assert spliced(((0.0, 10.0),), ((0.0, 40.0),), 5.0) == ((0.0, 40.0),)


def test_a_law_by_the_clock_adds_up_to_no_more_than_one() -> None:
    law = law_of_rates(np.array([0.5, 1.0, 0.3]), 600.0)
    assert law.chances.tolist() == [0.5, 0.5, 0.0]
