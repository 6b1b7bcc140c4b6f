"""What `Forecast` and `Costs` answer, in constant time, about the time ahead."""

from __future__ import annotations

import math

from autoscaler.forecast import Costs, Forecast

FORECAST = Forecast(
    source="test",
    made_s=100.0,
    step_s=60.0,
    rate=(1.0, 2.0),
    rate_high=(3.0, 4.0),
    warm=((58.0, 62.0), (118.0, math.inf)),
    floor=(0, 2),
    valid_until_s=220.0,
)


def test_a_start_costs_the_devices_and_the_waiting_of_everybody() -> None:
    assert Costs(start_s=10.0, devices=1, waiting_weight=30.0).of_start() == 310.0
    assert Costs(start_s=10.0, devices=2, waiting_weight=30.0).of_start(waiters=3.0) == 920.0
    assert Costs(start_s=10.0, devices=2, waiting_weight=30.0).break_even_s() == 160.0


def test_rates_are_looked_up_by_time_and_end_where_nothing_is_said() -> None:
    assert [FORECAST.rate_at(at_s) for at_s in (99.0, 100.0, 159.9, 160.0, 220.0)] == [None, 1.0, 1.0, 2.0, None]
    assert FORECAST.rate_high_at(160.0) == 4.0
    assert FORECAST.valid(220.0) and not FORECAST.valid(220.1)


def test_a_floor_is_the_most_that_is_asked_for_during_a_start() -> None:
    assert FORECAST.floor_until(100.0, 159.0) == 0
    assert FORECAST.floor_until(100.0, 160.0) == 2
    assert FORECAST.floor_until(300.0, 400.0) == 0


def test_warm_windows_are_found_by_idle_time() -> None:
    assert [FORECAST.pays_warm(idle_s) for idle_s in (0.0, 58.0, 62.0, 1e6)] == [False, True, False, True]
    assert FORECAST.warm_window(10.0) == (58.0, 62.0)
    assert FORECAST.warm_window(62.0) == (118.0, math.inf)
    assert Forecast("test", 0.0, warm=()).warm_window(0.0) is None
    assert Forecast("test", 0.0, warm=()).pays_warm(0.0) is False
    assert Forecast("test", 0.0).pays_warm(0.0) is None, "nobody said anything: the break-even keep-alive holds"


def test_a_forecast_moves_to_another_clock() -> None:
    moved = FORECAST.moved(-90.0)
    assert (moved.made_s, moved.valid_until_s, moved.rate_at(10.0)) == (10.0, 130.0, 1.0)
