"""Forecasts of rates: seasons, levels, bursts; and what a request will take."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoscaler.forecast import remaining_tokens
from autoscaler.forecasting.bursts import burst
from autoscaler.forecasting.holt_winters import holt_winters
from autoscaler.forecasting.output_length import output_length
from autoscaler.forecasting.rates import ewma, last_value
from autoscaler.forecasting.seasonal import seasonal_day, seasonal_week
from autoscaler.windows import History, Window
from tests.autoscaler.forecasting_support import DAY_S, START_S


def filled(days: int, count_at, resolution_s: int = 600) -> History:  # type: ignore[no-untyped-def]
    history = History()
    cells = int(days * DAY_S / resolution_s)
    counts = [count_at(resolution_s * cell) for cell in range(cells)]
    history.add_many(resolution_s, START_S, START_S + days * DAY_S, {"arrivals": counts})
    return history


def by_day(at_s: float) -> float:
    return 600.0 if 9 <= at_s % DAY_S / 3600 < 17 else 60.0


def by_week(at_s: float) -> float:
    return by_day(at_s) if at_s % (7 * DAY_S) < 5 * DAY_S else 60.0


def test_the_last_value_and_the_mean_follow_what_was_seen() -> None:
    history = History()
    for cell in range(60):
        history.add(Window(START_S + 10.0 * cell, 10.0, arrivals=10 if cell >= 30 else 0))
    now_s = START_S + 600.0
    flat = last_value(history, now_s, 600.0, 10).rate
    mean = ewma(history, now_s, 600.0, 10).rate
    assert flat is not None and mean is not None
    assert np.allclose(flat, 1.0)
    assert 0.5 < mean[0] < 0.8, "five minutes of one a second after five of none, the newer ones weigh more"
    assert last_value(History(), now_s, 600.0, 10).rate is None


@pytest.mark.parametrize("forecaster", [seasonal_day, holt_winters], ids=lambda each: each.__name__)
def test_a_daily_season_is_known_before_it_comes(forecaster) -> None:  # type: ignore[no-untyped-def]
    history = filled(6, by_day)
    rate = forecaster(history, START_S + 6 * DAY_S, 11 * 3600.0, 66).rate
    assert rate is not None
    assert rate[: 8 * 6].max() < 0.4, "night"
    assert rate[9 * 6 + 1 :].min() > 0.7, "day"


def test_a_weekly_season_tells_saturday_from_friday() -> None:
    history = filled(15, by_week)
    now_s = START_S + 15 * DAY_S
    noon = 12 * 6
    monday = seasonal_week(history, now_s, 12.5 * 3600.0, noon + 3).rate
    saturday = seasonal_week(history, now_s - 3 * DAY_S, 12.5 * 3600.0, noon + 3).rate
    assert monday is not None and saturday is not None
    assert monday[noon] > 0.9 and saturday[noon] < 0.2


def test_todays_level_scales_the_season() -> None:
    history = filled(6, lambda at_s: by_day(at_s) * (2.0 if at_s >= 5 * DAY_S else 1.0))
    rate = seasonal_day(history, START_S + 6 * DAY_S, 600.0, 10).rate
    assert rate is not None and 0.15 < rate[0] < 0.28


def test_a_rare_function_called_at_nine_has_its_law_there() -> None:
    history = filled(10, lambda at_s: 1.0 if abs(at_s % DAY_S - 9 * 3600.0) < 1.0 else 0.0)
    law = seasonal_day(history, START_S + 10 * DAY_S, 600.0, 10).law
    assert law is not None
    middle_s = float(law.edges_s[int(np.argmax(law.chances))])
    assert abs(middle_s - 9 * 3600.0) <= 600.0
    assert law.chances.sum() > 0.8


def test_a_burst_is_expected_to_last_as_bursts_did() -> None:
    history = History()
    cells = 360
    rng = np.random.default_rng(2)
    for cell in range(cells):
        in_burst = cell % 60 >= 50
        history.add(Window(START_S + 10.0 * cell, 10.0, arrivals=int(rng.poisson(200 if in_burst else 2))))
    end_s = START_S + 10.0 * cells
    rate = burst(history, end_s, 600.0, 10).rate
    assert rate is not None
    assert rate[0] > 5.0 > rate[-1], "it goes on for a while, and not for ever"
    calm = burst(history, end_s - 200.0, 600.0, 10)
    assert calm.rate is not None and calm.rate_high is not None
    assert calm.rate[0] < 3.0


def test_quantiles_lie_above_the_mean_and_all_is_finite() -> None:
    history = filled(15, by_week)
    for forecaster in (last_value, ewma, seasonal_day, seasonal_week, holt_winters, burst):
        outlook = forecaster(history, START_S + 15 * DAY_S, 1200.0, 20)
        assert outlook.rate is not None and outlook.rate_high is not None, forecaster.__name__
        assert len(outlook.rate) == len(outlook.rate_high) == 20
        assert np.isfinite(outlook.rate).all() and np.isfinite(outlook.rate_high).all()
        assert (outlook.rate >= 0).all() and (outlook.rate_high >= outlook.rate - 1e-12).all(), forecaster.__name__


def test_an_empty_history_says_nothing() -> None:
    for forecaster in (last_value, ewma, seasonal_day, seasonal_week, holt_winters, burst):
        assert forecaster(History(), START_S, 600.0, 10).rate is None


def test_what_is_left_of_a_long_answer_is_what_is_left_of_the_long_ones() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.lognormal(math.log(100.0) - 0.5, 1.0, 200_000)
    for done in (20.0, 100.0, 500.0):
        left = float(lengths[lengths > done].mean()) - done
        assert math.isclose(remaining_tokens(100.0, 1.0, done), left, rel_tol=0.05)
    assert remaining_tokens(100.0, 0.0, 1_000.0) == 100.0, "all alike, or unknown: no memory"
    assert remaining_tokens(0.0, 0.0, 10.0) == 0.0
    far = [remaining_tokens(100.0, 0.3, done) for done in (10.0**power for power in range(1, 9))]
    assert all(math.isfinite(left) and left >= 1.0 for left in far)


def test_the_spread_of_lengths_is_that_of_the_requests_that_ended() -> None:
    history, rng = History(), np.random.default_rng(5)
    for cell in range(60):
        lengths = rng.lognormal(4.0, 0.8, 20)
        history.add(
            Window(
                START_S + 10.0 * cell,
                10.0,
                arrivals=20,
                ended=20,
                ended_output_tokens=lengths.sum(),
                ended_output_tokens_sq=(lengths**2).sum(),
            )
        )
    assert math.isclose(output_length(history, START_S + 600.0).output_spread, 0.8, rel_tol=0.1)


def test_the_next_request_is_like_those_that_ended_lately() -> None:
    history = History()
    for cell in range(60):
        history.add(
            Window(
                START_S + 10.0 * cell,
                10.0,
                arrivals=2,
                prompt_tokens=200,
                ended=2,
                ended_output_tokens=100,
                service_s_sum=8.0,
            )
        )
    work = output_length(history, START_S + 600.0)
    assert (work.prompt_tokens, work.output_tokens, work.service_s) == (100.0, 50.0, 4.0)
    assert output_length(History(), START_S).service_s == 0.0
