"""Forecasts made in the background: from a history, on the monotonic clock, and never in the way of anything."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from autoscaler.start_times import StartTimes
from autoscaler.windows import History, Window
from control_plane.forecasting import QUIET_S, REFIT_S, Forecasting
from control_plane.observations import FunctionLoad
from control_plane.scaling_spec import Scaling

KEY = ("default", "fn")
T0 = 1_700_000_400.0
MONOTONIC_S = 5000.0


def called_every_minute(calls: int) -> FunctionLoad:
    """The last call ended at T0."""
    history = History()
    since_s = T0 - 60 * calls
    for n in range(calls):
        at_s = since_s + 60 * (n + 1)
        history.observed(at_s - 60, at_s - 10)
        history.add(Window(at_s - 10, 10, arrivals=1, ended=1, ended_output_tokens=5, service_s_sum=0.5))
        history.note_gap(at_s - 60, 59.5)
    return FunctionLoad(history, T0, StartTimes.of([0.25]))


class Observed:
    def __init__(self, load: FunctionLoad) -> None:
        self.restored = True
        self.load = load

    def of(self, key: tuple[str, str]) -> FunctionLoad | None:
        return self.load if key == KEY else None

    def catch_up(self, load: FunctionLoad, until_s: float) -> None:
        load.history.observed(load.seen_s, until_s)


class Plane:
    def __init__(self, load: FunctionLoad, **scaling: Any) -> None:
        spec = SimpleNamespace(scaling=Scaling(**scaling), resources=SimpleNamespace(devices=1))
        functions: Any = SimpleNamespace(list=lambda: [SimpleNamespace(tenant=KEY[0], name=KEY[1], spec=spec)])
        observed: Any = Observed(load)
        self.observed = observed
        self.passed_s = 0.0
        self.told: list[tuple[str, str]] = []
        self.forecasting = Forecasting(
            observed, functions, lambda key, now_s: MONOTONIC_S, lambda: T0 + self.passed_s,
            lambda: MONOTONIC_S + self.passed_s,
        )  # fmt: skip
        self.forecasting.on_forecast = self.told.append


async def test_a_function_called_every_minute_is_wanted_warm_about_a_minute_after_its_last_call() -> None:
    plane = Plane(called_every_minute(30))
    await plane.forecasting.look()
    forecast = plane.forecasting.of(KEY)
    assert forecast is not None
    assert plane.told == [KEY]
    assert forecast.made_s == MONOTONIC_S
    assert forecast.pays_warm(59.4)
    assert not forecast.pays_warm(30.0)
    assert any(each.acting for each in plane.forecasting.choosing(KEY).standings())  # type: ignore[union-attr]
    (said,) = plane.forecasting.said(KEY)
    assert said.at_s == math.ceil(T0 / 10) * 10
    assert said.warm == forecast.warm


async def test_it_is_made_anew_when_load_came_and_seldom_while_it_is_quiet() -> None:
    load = called_every_minute(30)
    plane = Plane(load)
    await plane.forecasting.look()
    plane.passed_s = REFIT_S + 1
    await plane.forecasting.look()
    assert plane.forecasting.refits == 1
    load.changed = True
    await plane.forecasting.look()
    assert plane.forecasting.refits == 2
    plane.passed_s += QUIET_S
    await plane.forecasting.look()
    assert plane.forecasting.refits == 3


async def test_a_schedule_counts_without_any_history() -> None:
    load = FunctionLoad(History(), T0, StartTimes())
    plane = Plane(load, max_replicas=3, schedules=({"cron": "* * * * *", "for_s": 60.0, "replicas": 3},))
    await plane.forecasting.look()
    forecast = plane.forecasting.of(KEY)
    assert forecast is not None
    assert forecast.floor_until(MONOTONIC_S + 1, MONOTONIC_S + 30) == 3


async def test_one_that_cannot_be_made_leaves_the_function_to_what_is_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = Plane(called_every_minute(30))
    monkeypatch.setattr("control_plane.forecasting._fit", lambda *given: 1 / 0)
    await plane.forecasting.look()
    assert plane.forecasting.of(KEY) is None
    assert plane.forecasting.failures == 1


async def test_nothing_is_said_before_the_histories_are_restored_and_a_new_lead_begins_anew() -> None:
    plane = Plane(called_every_minute(30))
    plane.observed.restored = False
    await plane.forecasting.look()
    assert plane.forecasting.of(KEY) is None
    plane.observed.restored = True
    await plane.forecasting.look()
    plane.forecasting.begin()
    assert plane.forecasting.of(KEY) is None


async def test_the_event_loop_goes_on_while_a_forecast_is_made() -> None:
    plane = Plane(called_every_minute(400))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await plane.forecasting.look()
    counting.cancel()
    assert turns > 3


async def test_it_reckons_with_as_many_as_were_found_to_wait_for_a_start() -> None:
    plane = Plane(called_every_minute(30))
    plane.forecasting.cold_waiters = lambda key: 9.0
    await plane.forecasting.look()
    choosing = plane.forecasting.choosing(KEY)
    assert choosing is not None and choosing.waiters == 5.0
