"""What forecasts say to placement, pools and slots: how busy a function will keep its devices, how many arrivals come,
how long its requests are, how many replicas all functions together will run.

A device on which a function runs is busy while at least one of its requests is there: with arrivals that come
independently, the share 1 - exp(-rate x service time) (M/G/infinity). Limits: functions without a forecast say nothing;
what all need together is added up now and then (`look`), a few functions at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from autoscaler.forecast import Forecast
from control_plane.fleet import Fleet
from control_plane.functions import FunctionStore
from control_plane.lanes import FunctionKey

LOOK_S: Final = 30.0
STEPS: Final = 6
"""Of a forecast, that placement looks at."""
AT_ONCE: Final = 200
"""Functions that are added up without letting anything else run."""


class Predicted:
    def __init__(self, functions: FunctionStore, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._functions = functions
        self._fleet = fleet
        self._clock = clock
        self._replicas: dict[str, tuple[tuple[float, float], ...]] = {}
        """By class of slots."""
        self.forecast: Callable[[FunctionKey], Forecast | None] = lambda key: None
        """Of a function, if one holds."""
        self.kind_of: Callable[[FunctionKey], str] = lambda key: ""
        """Class of slots that a function needs."""

    def _of(self, key: FunctionKey) -> Forecast | None:
        forecast = self.forecast(key)
        return forecast if forecast is not None and forecast.valid(self._clock()) else None

    def load(self, key: FunctionKey) -> tuple[float, ...]:
        """Busy share of the devices of one of its replicas, step by step from now on."""
        forecast = self._of(key)
        if forecast is None or not forecast.rate or not forecast.service_s:
            return ()
        first = max(int((self._clock() - forecast.made_s) / forecast.step_s), 0)
        replicas = max(self._fleet.count_of(key), 1)
        return tuple(
            1.0 - math.exp(-rate * forecast.service_s / replicas) for rate in forecast.rate[first : first + STEPS]
        )

    def expected(self, key: FunctionKey, horizon_s: float) -> float:
        """Arrivals within so many seconds."""
        forecast = self._of(key)
        if forecast is None or not forecast.rate:
            return 0.0
        begin_s = self._clock() - forecast.made_s
        end_s = begin_s + horizon_s
        total = 0.0
        for step, rate in enumerate(forecast.rate):
            overlap_s = min((step + 1) * forecast.step_s, end_s) - max(step * forecast.step_s, begin_s)
            total += rate * max(overlap_s, 0.0)
        return total

    def context_tokens(self, key: FunctionKey) -> float:
        forecast = self._of(key)
        return forecast.prompt_tokens + forecast.output_tokens if forecast is not None else 0.0

    def replicas(self, class_name: str) -> tuple[tuple[float, float], ...]:
        """(from when on, replicas that are then expected to run), of all functions that need this class of slots."""
        return self._replicas.get(class_name, ())

    async def look(self) -> None:
        now_s = self._clock()
        together: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        step_s = 0.0
        for count, function in enumerate(self._functions.list()):
            if count % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            forecast = self._of((function.tenant, function.name))
            if forecast is None:
                continue
            step_s = step_s or forecast.step_s
            scaling = function.spec.scaling
            of_class = together[self.kind_of((function.tenant, function.name))]
            first = max(int((now_s - forecast.made_s) / forecast.step_s), 0)
            for step, rate in enumerate((forecast.rate_high or forecast.rate)[first:]):
                places = scaling.target_concurrency or scaling.max_concurrency
                wanted = math.ceil(rate * forecast.service_s / places - 1e-9)
                of_class[int(step * forecast.step_s / step_s)] += min(
                    max(wanted, scaling.min_replicas), scaling.max_replicas
                )
        self._replicas = {
            name: tuple((now_s + step * step_s, of_class[step]) for step in sorted(of_class))
            for name, of_class in together.items()
        }
