"""What placement, pools and slots make of forecasts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from autoscaler.forecast import Forecast
from control_plane.predicted import Predicted

KEY = ("default", "fn")


def predicted(forecasts: dict[tuple[str, str], Forecast], living: int = 1, now_s: float = 1000.0) -> Predicted:
    scaling = SimpleNamespace(min_replicas=0, max_replicas=3, target_concurrency=8.0)
    functions: Any = SimpleNamespace(
        list=lambda: [
            SimpleNamespace(tenant=tenant, name=name, spec=SimpleNamespace(scaling=scaling))
            for tenant, name in (KEY, ("default", "other"), ("default", "unknown"))
        ]
    )
    fleet: Any = SimpleNamespace(count_of=lambda key: living)
    made = Predicted(functions, fleet, lambda: now_s)
    made.forecast = forecasts.get
    return made


def forecast(*rate: float, **fields: Any) -> Forecast:
    return Forecast("test", 940.0, 60.0, rate, service_s=2.0, **fields)


def test_a_device_is_busy_while_at_least_one_request_is_there() -> None:
    seen = predicted({KEY: forecast(9.0, 0.5, 0.0)})
    assert seen.load(KEY) == pytest.approx((1 - math.exp(-1.0), 0.0)), "the first step is over"
    assert predicted({KEY: forecast(9.0, 0.5, 0.0)}, living=2).load(KEY)[0] == pytest.approx(1 - math.exp(-0.5))
    assert seen.load(("default", "unknown")) == ()


def test_arrivals_are_counted_over_whole_and_part_steps() -> None:
    seen = predicted({KEY: forecast(9.0, 0.5, 0.1)}, now_s=1030.0)
    assert seen.expected(KEY, 30.0) == pytest.approx(15.0)
    assert seen.expected(KEY, 60.0) == pytest.approx(18.0)
    assert seen.expected(KEY, 1e6) == pytest.approx(21.0)
    assert seen.expected(("default", "unknown"), 60.0) == 0.0


def test_a_forecast_that_is_over_says_nothing() -> None:
    seen = predicted({KEY: forecast(1.0, 1.0, valid_until_s=999.0, prompt_tokens=100, output_tokens=20)})
    assert (seen.load(KEY), seen.expected(KEY, 60.0), seen.context_tokens(KEY)) == ((), 0.0, 0.0)
    held = predicted({KEY: forecast(1.0, 1.0, prompt_tokens=100, output_tokens=20)})
    assert held.context_tokens(KEY) == 120


async def test_what_all_functions_need_together_is_what_slots_are_for() -> None:
    other = ("default", "other")
    seen = predicted({KEY: forecast(0.0, 5.0, 90.0), other: forecast(0.0, 1.0, 0.0)})
    assert seen.replicas("") == ()
    await seen.look()
    assert seen.replicas("") == ((1000.0, 3.0), (1060.0, 3.0)), "2 and 1; 23 of which 3 may be, and none"
    assert seen.replicas("another class") == ()
