"""Who says how many replicas are going to be needed: forecasters judged by the replicas they ask for, minute by minute.

A forecast only raises the floor, so with one there are as many replicas as the last minute needed or as it asks for,
whichever is more. Idle ones cost their devices; each one missing costs a start, waited for by half of what it serves.
The expected rate and its 0.9 quantile compete side by side: which is right depends on what waiting is worth.
Limits: replicas are counted by mean load and places, whole minutes; that stopping them takes a while is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.forecast import REACTIVE, Costs
from autoscaler.forecasting.credit import Credit
from autoscaler.forecasting.outlook import Forecaster

MINUTE_S = 60.0
FADES = 0.5 ** (1 / 4_320)
"""By the minute: half in three days."""
LEAD_STARTS = 2.0
LEAD_SHARE = 0.03
AHEAD_SHARE = 0.02
HIGH = ":high"


@dataclass(frozen=True, slots=True)
class Need:
    """Of replicas, for a rate."""

    service_s: float
    places: int

    def of(self, rate: float) -> int:
        return math.ceil(rate * self.service_s / self.places - 1e-9) if rate > 0 else 0

    def rate_of(self, replicas: int) -> float:
        return replicas * self.places / self.service_s if self.service_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Told:
    """What somebody said of the minutes from `made_s` on."""

    made_s: float
    rates: tuple[float, ...]

    def at(self, at_s: float) -> float | None:
        step = int((at_s - self.made_s) // MINUTE_S)
        return self.rates[step] if 0 <= step < len(self.rates) else None


class RateContest:
    __slots__ = ("acting", "cap", "costs", "credit", "minutes", "reactive", "told")

    def __init__(self, forecasters: Mapping[str, Forecaster]) -> None:
        names = [name + end for name in forecasters for end in ("", HIGH)]
        self.told: dict[str, Told | None] = dict.fromkeys(names)
        self.costs = dict.fromkeys(names, 0.0)
        self.reactive = 0.0
        self.acting: str | None = None
        self.cap = 0
        """Replicas beyond the last minute's that the acting one may ask for, as far as its credit goes."""
        self.credit = Credit()
        self.minutes = 0

    def settle(self, minute_s: float, arrived: float, before: float, need: Need, costs: Costs) -> None:
        """A minute is over: `arrived` requests a second came in it, `before` in the one before."""
        self.minutes += 1
        needed, last = need.of(arrived), need.of(before)
        reactive = _cost(last, needed, need, costs)
        self.reactive = FADES * self.reactive + reactive
        acted = reactive
        for name, told in self.told.items():
            rate = told.at(minute_s) if told is not None else None
            asked = 0 if rate is None else need.of(rate)
            paid = reactive if asked <= last else _cost(asked, needed, need, costs)
            self.costs[name] = FADES * self.costs[name] + paid
            if name == self.acting and asked > last:
                acted = _cost(min(asked, last + self.cap), needed, need, costs)
        self.credit.settle(acted, reactive, costs, need.places / 2)

    def elect(self, need: Need, costs: Costs) -> None:
        waiters = need.places / 2
        room = self.credit.room(costs, waiters)
        if self.acting is not None and (room <= 0.0 or self.costs[self.acting] > self.reactive):
            if room <= 0.0:
                self.credit.retirements += 1
                self.costs = {name: max(cost, self.reactive) for name, cost in self.costs.items()}
            self.acting = None
        best = min(self.costs, key=lambda name: (self.costs[name], name), default=None)
        if best is not None and self._leads(self.costs[best], costs, waiters):
            behind = math.inf if self.acting is None else (1.0 - AHEAD_SHARE) * self.costs[self.acting]
            self.acting = best if self.costs[best] < behind else self.acting
        self.cap = max(int(room / (max(costs.devices, 1e-9) * MINUTE_S)), 0)
        if self.cap == 0:
            self.acting = None

    def rates(self, now_s: float, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The acting one's rates, and the higher quantile beside them, for the minutes from `now_s` on."""
        if self.acting is None:
            return None
        name = self.acting.removesuffix(HIGH)
        told, above = self.told[self.acting], self.told[name + HIGH]
        if told is None or above is None:
            return None
        first = max(int((now_s - told.made_s) // MINUTE_S), 0)
        return told.rates[first : first + steps], above.rates[first : first + steps]

    def _leads(self, cost: float, costs: Costs, waiters: float) -> bool:
        lead = self.reactive - cost
        return lead > LEAD_STARTS * costs.of_start(waiters) and lead > LEAD_SHARE * self.reactive

    def standings(self) -> dict[str, float]:
        return {REACTIVE: self.reactive, **self.costs}


def _cost(had: int, needed: int, need: Need, costs: Costs) -> float:
    if had >= needed:
        return costs.devices * MINUTE_S * (had - needed)
    return (needed - had) * costs.of_start(need.places / 2)
