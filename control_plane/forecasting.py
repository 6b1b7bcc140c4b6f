"""Forecasts of every function, made again in the background by the leader, and looked up by the control loop.

A function's history is read in another thread while its lock is held, one function at a time, with pauses as long as
the work took: never more than half of a core. Forecasts are on the calendar's clock; `of` gives them on the monotonic
one, by which decisions are made.
Limits: a function to which nothing came is looked at every `QUIET_S`; numpy is loaded with the first history.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from autoscaler.forecast import REACTIVE, Costs, Forecast
from autoscaler.keeping import ASSUMED_COLD_START_S
from control_plane.lanes import FunctionKey
from control_plane.load_meter import WINDOW_S
from control_plane.observations import FunctionLoad, Observations, Turns

if TYPE_CHECKING:
    from autoscaler.choosing import Choosing
    from control_plane.functions import Function, FunctionStore

logger = logging.getLogger(__name__)

REFIT_S: Final = 10.0
"""Between two refits of a function that has load: a window's time."""
QUIET_S: Final = 300.0
SCHEDULED_S: Final = 60.0
SAID_KEPT: Final = 32
SOON_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """What was forecast at some moment, to be held against what came."""

    at_s: float
    """On the wall clock."""
    source: str
    expected: float | None
    """Arrivals within `SOON_S`; None: it said nothing about them."""
    warm: tuple[tuple[float, float], ...] | None
    """When being warm pays, in seconds since the last activity."""


class _Fitted:
    __slots__ = ("choosing", "fitted_s", "forecast", "said", "said_s")

    def __init__(self) -> None:
        self.choosing: Choosing | None = None
        self.fitted_s = float("-inf")
        self.forecast: Forecast | None = None
        """On the monotonic clock."""
        self.said: deque[Said] = deque(maxlen=SAID_KEPT)
        self.said_s = float("-inf")


class Forecasting:
    def __init__(
        self,
        observations: Observations,
        functions: FunctionStore,
        idle_since_s: Callable[[FunctionKey, float], float | None],
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observations = observations
        self._functions = functions
        self._idle_since_s = idle_since_s
        self._wall = wall
        self._monotonic = monotonic
        self._fitted: dict[FunctionKey, _Fitted] = {}
        self.on_forecast: Callable[[FunctionKey], None] = lambda key: None
        """Told of a function whose forecast was made anew and says something."""
        self.cold_waiters: Callable[[FunctionKey], float] = lambda key: 1.0
        """Requests that were found to wait for a start from zero."""
        self.refits = 0
        self.refit_s = 0.0
        self.failures = 0

    def begin(self) -> None:
        """What was fitted on another leader's time counts no more."""
        self._fitted.clear()

    def of(self, key: FunctionKey) -> Forecast | None:
        """None: nothing is known, and observed load alone decides."""
        fitted = self._fitted.get(key)
        return None if fitted is None else fitted.forecast

    def choosing(self, key: FunctionKey) -> Choosing | None:
        fitted = self._fitted.get(key)
        return None if fitted is None else fitted.choosing

    def said(self, key: FunctionKey) -> tuple[Said, ...]:
        fitted = self._fitted.get(key)
        return () if fitted is None else tuple(fitted.said)

    # --- fitting ---

    async def look(self) -> None:
        """Make those anew that are due."""
        if not self._observations.restored:
            return
        known = {(function.tenant, function.name): function for function in self._functions.list()}
        for key in self._fitted.keys() - known.keys():
            del self._fitted[key]
        turns = Turns()
        for key, function in known.items():
            await turns.over()
            load = self._observations.of(key)
            if load is None or not self._due(key, load, function):
                continue
            began_s = time.perf_counter()
            try:
                await self._refit(key, load, function)
            except Exception:
                # A forecast is a help: without one the function is scaled by what is observed.
                self.failures += 1
                self._fitted[key] = _Fitted()
                self._fitted[key].fitted_s = self._monotonic()
                logger.exception("event=forecast_failed function=%s", key[1])
            spent_s = time.perf_counter() - began_s
            await asyncio.sleep(spent_s)

    def _due(self, key: FunctionKey, load: FunctionLoad, function: Function) -> bool:
        fitted = self._fitted.get(key)
        if fitted is None:
            return True
        age_s = self._monotonic() - fitted.fitted_s
        if age_s >= QUIET_S or (age_s >= SCHEDULED_S and function.spec.scaling.schedules):
            return True
        return load.changed and age_s >= REFIT_S

    async def _refit(self, key: FunctionKey, load: FunctionLoad, function: Function) -> None:
        fitted = self._fitted.setdefault(key, _Fitted())
        now_s, wall_s = self._monotonic(), self._wall()
        idle_since_s = self._idle_since_s(key, now_s)
        scaling = function.spec.scaling
        costs = Costs(load.starts.expected_s() or ASSUMED_COLD_START_S, function.spec.resources.devices,
                      scaling.waiting_weight)  # fmt: skip
        places = round(scaling.target_concurrency or scaling.max_concurrency)
        async with load.lock:
            load.changed = False
            self._observations.catch_up(load, wall_s)
            choosing, forecast, spent_s = await asyncio.to_thread(
                _fit, fitted.choosing, load, wall_s, costs, max(places, 1), scaling.schedules,
                None if idle_since_s is None else idle_since_s - now_s + wall_s, self.cold_waiters(key),
            )  # fmt: skip
        fitted.choosing, fitted.fitted_s = choosing, now_s
        says = forecast.source != REACTIVE
        fitted.forecast = forecast.moved(now_s - wall_s)
        self.refits += 1
        self.refit_s += spent_s
        if wall_s - fitted.said_s >= SOON_S:
            fitted.said_s = wall_s
            rate = forecast.rate_at(wall_s)
            # From the next window on, so that what came can be counted.
            at_s = math.ceil(wall_s / WINDOW_S) * WINDOW_S
            fitted.said.append(Said(at_s, forecast.source, None if rate is None else rate * SOON_S, forecast.warm))
        if says:
            self.on_forecast(key)


def _fit(
    choosing: Choosing | None,
    load: FunctionLoad,
    wall_s: float,
    costs: Costs,
    places: int,
    schedules: tuple[Any, ...],
    idle_since_s: float | None,
    waited: float,
) -> tuple[Choosing, Forecast, float]:
    """In a thread of its own: nothing here touches what the event loop does."""
    from autoscaler.choosing import Choosing

    began_s = time.thread_time()
    if choosing is None:
        choosing = Choosing.rebuilt(load.history, wall_s, costs, places, waited)
    forecast = choosing.refit(
        load.history, wall_s, costs, idle_since_s=idle_since_s, places=places,
        schedules=tuple(schedule.parsed() for schedule in schedules), waited=waited,
    )  # fmt: skip
    return choosing, forecast, time.thread_time() - began_s
