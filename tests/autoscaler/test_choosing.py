"""Which forecast acts: the one whose past would have cost least, within its credit, and only while that lasts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoscaler.choosing import Choosing
from autoscaler.forecast import REACTIVE, Costs
from autoscaler.forecasting.credit import SHARE, STARTS
from autoscaler.forecasting.schedule import Schedule
from autoscaler.forecasting.warmth import gap_cost
from autoscaler.windows import History, Window
from tests.autoscaler.forecasting_support import DAY_S, START_S, Life

CHEAP = Costs(start_s=0.25, devices=1, waiting_weight=30.0)


def every(period_s: float, since_s: float, until_s: float, jitter_s: float = 0.0, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    times = np.arange(since_s + period_s, until_s, period_s)
    return sorted((times + rng.normal(0.0, jitter_s, len(times))).tolist() if jitter_s else times.tolist())


def test_a_caller_of_every_minute_is_awaited_from_the_tenth_call_on() -> None:
    life = Life(CHEAP)
    assert CHEAP.break_even_s() < 60.0, "a keep-alive does not pay"
    hour_s = START_S + 3_600.0
    life.live(every(60.5, START_S, hour_s, jitter_s=0.05), hour_s)
    later = slice(10, None)
    assert np.mean(life.warm_calls[later]) >= 0.9
    assert min(life.cold_s[later]) > 50.0, "no process for most of each gap"
    assert life.paid < 0.9 * life.reactive
    forecast = life.choosing.forecast
    assert forecast is not None and forecast.source.startswith("idle_histogram")


def test_nobody_acts_before_having_won_and_reactive_scaling_needs_no_win() -> None:
    life = Life(CHEAP)
    assert life.refit().warm is None and life.refit().source == REACTIVE
    life.live([START_S + 60.0], START_S + 300.0)
    forecast = life.choosing.forecast
    assert forecast is not None and forecast.warm is None and forecast.rate == ()


def test_what_is_said_of_chance_does_not_cost_more_than_doing_without() -> None:
    life = Life(Costs(start_s=5.0, waiting_weight=10.0))
    calls = np.cumsum(np.random.default_rng(3).exponential(55.0, 600)) + START_S
    life.live(calls.tolist(), START_S + 8 * 3_600.0)
    assert life.paid <= 1.03 * life.reactive + STARTS * life.costs.of_start(life.choosing.waiters)


def flip_phase() -> tuple[list[float], float]:
    """Every minute exactly, then just after the awaited moment, then just before, over and over."""
    calls, at_s, rng = [], START_S, np.random.default_rng(5)
    for part in range(28):
        period_s = (60.0, 75.0, 8.0, 33.0)[part % 4]
        for _ in range(int(rng.integers(12, 40))):
            at_s += period_s
            calls.append(at_s)
    return calls, at_s


def silence() -> tuple[list[float], float]:
    """Busy enough to be kept warm for good, then nothing."""
    calls = every(20.0, START_S, START_S + 6 * 3_600.0, 2.0)
    return calls, START_S + DAY_S / 2


def spikes() -> tuple[list[float], float]:
    """Heaps of calls at random, quiet between."""
    rng = np.random.default_rng(6)
    begins = np.sort(rng.uniform(START_S, START_S + DAY_S, 150))
    calls = np.sort(np.concatenate([begin + rng.exponential(0.4, 40).cumsum() for begin in begins]))
    return calls.tolist(), START_S + DAY_S + 600.0


def flip_days() -> tuple[list[float], float]:
    """Calls by day for two days, by night for two, by turns: what was learnt is wrong each time."""
    calls: list[float] = []
    for day in range(4):
        night = DAY_S / 2 if (day // 2) % 2 else 0.0
        begin_s = START_S + day * DAY_S + night
        calls += every(600.0, begin_s, begin_s + DAY_S / 2 - 600.0, 20.0, seed=day)
    return calls, START_S + 4 * DAY_S


@pytest.mark.parametrize("trace", [flip_phase, silence, spikes, flip_days], ids=lambda trace: trace.__name__)
@pytest.mark.parametrize("costs", [Costs(0.25, 1, 30.0), Costs(10.0, 2, 10.0)], ids=["cheap start", "dear start"])
def test_adversarial_traffic_costs_no_more_than_the_stated_credit(trace, costs: Costs) -> None:  # type: ignore[no-untyped-def]
    calls, until_s = trace()
    life = Life(costs)
    life.live(calls, until_s, step_s=120.0 if trace is flip_days else 60.0)
    life.settle_silence()
    # Between two refits a window, gaps that end within it may each lose a start before that is seen.
    within_a_window = 120.0 / 8.0 * costs.of_start(life.choosing.waiters)
    assert (
        life.paid - life.reactive
        <= STARTS * costs.of_start(life.choosing.waiters) + SHARE * life.reactive + within_a_window
    )


@pytest.mark.parametrize("costs", [Costs(0.25, 1, 30.0), Costs(10.0, 2, 10.0)], ids=["cheap start", "dear start"])
def test_an_adversary_who_sees_the_plan_costs_no_more_than_the_stated_credit(costs: Costs) -> None:
    """Calls come steadily until somebody acts, then four at the worst moment to each steady one; over and over."""
    life, lure_s, worst, acted, idled = Life(costs), 4.0 * costs.break_even_s(), -math.inf, 0, 0
    life.live([START_S + 30.0], START_S + 60.0)
    for _ in range(200):
        assert life.ended_s is not None
        calls = [max(life.ended_s + lure_s, life.now_s + 1.0)]
        windows, without = life.windows(), life.without()
        if life.choosing.warm.acting is None:
            idled += 1
        else:
            acted += 1
            edges = [edge_s + off for each in (*windows, *without) for edge_s in each for off in (-0.3, 0.3, 20.0)]
            worst_s = max(
                (edge_s for edge_s in edges if 0.1 < edge_s < 50.0 * lure_s),
                key=lambda gap_s: gap_cost(windows, gap_s, costs) - gap_cost(without, gap_s, costs),
            )
            for _ in range(4):
                calls.append(calls[-1] + life.service_s + worst_s)
        life.live(calls, life.now_s + 60.0 * math.ceil((calls[-1] - life.now_s) / 60.0))
        worst = max(worst, life.paid - life.reactive - STARTS * costs.of_start() - SHARE * life.reactive)
    assert acted >= 4 and idled > 20, "it was lured, and not for ever"
    # What happens before the next refit is not seen.
    assert worst <= 4 * costs.of_start()


def test_a_forecast_that_turns_bad_is_retired_and_comes_back_by_winning_again() -> None:
    life = Life(CHEAP)
    life.live(every(60.5, START_S, START_S + 3_600.0), START_S + 3_600.0)
    assert life.choosing.warm.acting is not None
    # Now calls come a moment after the window has closed: every pre-warm is wasted, every call waits.
    noon_s = life.now_s + 4 * 3_600.0
    times, at_s, rng = [], life.now_s, np.random.default_rng(0)
    while at_s < noon_s - 70.0:
        at_s += float(rng.uniform(1.0, 7.0)) if rng.random() < 0.7 else float(rng.uniform(62.0, 200.0))
        times.append(at_s)
    life.live(times, noon_s)
    retired = life.choosing.warm.credit.lost
    life.live(every(60.5, noon_s, noon_s + 4 * 3_600.0), noon_s + 4 * 3_600.0)
    assert life.choosing.warm.acting is not None
    assert life.choosing.warm.credit.lost < retired
    assert all(life.warm_calls[-10:])


def test_a_clock_that_steps_teaches_nothing_wrong() -> None:
    life = Life(CHEAP)
    life.live(every(60.5, START_S, START_S + 3_600.0), START_S + 3_600.0)
    before = life.choosing.warm.credit.lost
    assert life.history.note_gap(math.nan, 5.0) is False
    assert life.history.note_gap(START_S, 60.0) is False, "known already"
    # An hour back: what is noted from there on is refused or late, and nothing is settled twice.
    life.choosing.refit(life.history, life.now_s - 3_600.0, life.costs)
    assert life.choosing.warm.credit.lost == before
    forecast = life.choosing.forecast
    assert forecast is not None and all(math.isfinite(value) for value in forecast.rate)
    # A day ahead at once: the gap that runs is as long as the clock says, and nothing acts beyond its credit.
    life.now_s += DAY_S
    life.refit()
    life.settle_silence()
    assert life.paid - life.reactive <= STARTS * CHEAP.of_start(life.choosing.waiters) + SHARE * life.reactive


def test_after_a_clock_was_put_back_gaps_are_settled_again() -> None:
    life = Life(CHEAP)
    life.live(every(60.5, START_S, START_S + 7_200.0), START_S + 7_200.0)
    back_s = START_S + 3_600.0
    life.history.forget_after(back_s)
    life.now_s = life.ended_s = back_s
    settled = life.choosing.warm.gaps
    life.live(every(30.0, back_s, back_s + 1_200.0), back_s + 1_200.0)
    assert life.choosing.warm.gaps > settled + 30
    forecast = life.choosing.forecast
    assert forecast is not None and forecast.pays_warm(29.5), "what is learnt since counts"


def test_times_nobody_watched_are_not_taken_for_quiet() -> None:
    life = Life(Costs(start_s=10.0, waiting_weight=30.0), service_s=20.0)
    history = life.history
    for day in range(5):
        for cell in range(144):
            at_s = START_S + day * DAY_S + 600.0 * cell
            if day != 3:
                history.add(Window(at_s, 600.0, arrivals=600, ended=600, service_s_sum=12_000.0))
    now_s = START_S + 5 * DAY_S
    from autoscaler.forecasting.holt_winters import holt_winters
    from autoscaler.forecasting.seasonal import seasonal_day

    for forecaster in (seasonal_day, holt_winters):
        rate = forecaster(history, now_s, 1_200.0, 20).rate
        assert rate is not None and np.allclose(rate, 1.0, rtol=0.05), forecaster.__name__


def test_the_state_follows_from_the_history() -> None:
    life = Life(CHEAP)
    life.live(every(60.5, START_S, START_S + 7_200.0, 0.05), START_S + 7_200.0)
    again = Choosing.rebuilt(History.from_bytes(life.history.to_bytes()), life.now_s, CHEAP)
    assert again.forecast is not None and life.choosing.forecast is not None
    assert again.warm.acting is not None
    windows = again.forecast.warm
    assert windows and any(opens_s < 60.0 < closes_s for opens_s, closes_s in windows)


def test_a_daily_rush_has_its_replicas_before_it_comes() -> None:
    life = Life(Costs(start_s=30.0, devices=1, waiting_weight=10.0), service_s=20.0, places=4)
    history, choosing = life.history, life.choosing
    rate_at = []
    for minute in range(4 * 1440):
        at_s = START_S + 60.0 * minute
        rush = 9 * 60 <= minute % 1440 < 11 * 60
        arrivals = 120 if rush else 3
        history.add(Window(at_s, 60.0, arrivals=arrivals, ended=arrivals, service_s_sum=20.0 * arrivals))
        if minute % 10 == 9 or minute % 1440 in range(8 * 60 + 55, 9 * 60 + 5):
            forecast = choosing.refit(history, at_s + 60.0, life.costs, places=4)
            if minute > 3 * 1440 and minute % 1440 == 8 * 60 + 58:
                rate_at = [forecast.rate_at(at_s + 60.0 * ahead) for ahead in (1, 3, 5)]
    assert choosing.rate.acting is not None
    assert choosing.rate.credit.lost < 0
    assert rate_at[-1] is not None and rate_at[-1] > 1.0, "two a second are coming, a twentieth of that is now"


def test_a_schedule_acts_without_having_won() -> None:
    choosing = Choosing()
    schedules = (Schedule.parsed("0 9 * * *", 3_600.0, 2),)
    at_s = START_S + 9 * 3_600.0 - 300.0
    forecast = choosing.refit(History(), at_s, CHEAP, schedules=schedules)
    assert forecast.source == "schedule"
    assert forecast.floor_until(at_s, at_s + 10.0) == 0
    assert forecast.floor_until(at_s, at_s + 300.0) == 2
    assert choosing.refit(History(), at_s + 60.0, CHEAP).source == REACTIVE, "and no longer than it is given"


def test_standings_name_who_acts_in_each_contest() -> None:
    life = Life(CHEAP)
    life.live(every(60.5, START_S, START_S + 3_600.0), START_S + 3_600.0)
    standings = life.choosing.standings()
    assert {standing.contest for standing in standings} == {"warm", "rate"}
    acting = [standing.name for standing in standings if standing.acting and standing.contest == "warm"]
    assert acting == [life.choosing.warm.acting]
    reactive = next(s.cost for s in standings if s.name == REACTIVE and s.contest == "warm")
    assert next(s.cost for s in standings if s.name == acting[0]) < reactive
