"""A function's life on a fake clock: calls come, a history is written, its choosing is refitted once a minute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autoscaler.choosing import Choosing
from autoscaler.forecast import Costs, Forecast
from autoscaler.forecasting.warm_contest import Plan, windows_of
from autoscaler.forecasting.warmth import Windows, gap_cost
from autoscaler.windows import History, Window

START_S = 1_700_006_400.0
"""Midnight, UTC, a Wednesday."""
DAY_S = 86_400.0


@dataclass
class Life:
    costs: Costs
    service_s: float = 0.5
    places: int = 8
    now_s: float = START_S
    history: History = field(default_factory=History)
    choosing: Choosing = field(default_factory=Choosing)
    ended_s: float | None = None
    """When the last activity ended."""
    paid: float = 0.0
    """What the gaps have cost under what was said when they ran, and what they would have cost without."""
    reactive: float = 0.0
    warm_calls: list[bool] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    """Of each gap, the seconds without a replica."""

    def refit(self) -> Forecast:
        return self.choosing.refit(self.history, self.now_s, self.costs, idle_since_s=self.ended_s, places=self.places)

    def live(self, calls_s: Iterable[float], until_s: float, step_s: float = 60.0) -> None:
        """`calls_s`: in order, within (now, until]."""
        plan = self.plan()
        calls = list(calls_s)
        place = 0
        while self.now_s < until_s:
            end_s = self.now_s + step_s
            counts: dict[float, int] = {}
            while place < len(calls) and calls[place] <= end_s:
                call_s = calls[place]
                cell = call_s // 10 * 10
                counts[cell] = counts.get(cell, 0) + 1
                if self.ended_s is not None and call_s > self.ended_s:
                    gap_s = call_s - self.ended_s
                    self._pay(windows_of(plan, self.ended_s), gap_s)
                    self.history.note_gap(self.ended_s, gap_s)
                self.ended_s = max(call_s, self.ended_s or call_s) + self.service_s
                place += 1
            for cell, count in sorted(counts.items()):
                self.history.add(Window(cell, 10.0, arrivals=count, ended=count, service_s_sum=count * self.service_s))
            self.history.observed(self.now_s, end_s)
            self.now_s = end_s
            self.refit()
            plan = self.plan()

    def plan(self) -> Plan:
        forecast = self.choosing.forecast
        if forecast is None or not forecast.knows_gaps:
            return self.without()
        return self.choosing.warm.windows if forecast.warm is None else forecast.warm

    def windows(self) -> Windows:
        """Of the gap that runs."""
        return windows_of(self.plan(), self.now_s if self.ended_s is None else self.ended_s)

    def without(self) -> Windows:
        """What is done without a forecast."""
        return self.choosing.warm.without(self.costs, self.choosing.waiters)

    def _pay(self, windows: Windows, gap_s: float) -> None:
        self.paid += gap_cost(windows, gap_s, self.costs, self.choosing.waiters)
        self.reactive += gap_cost(self.without(), gap_s, self.costs, self.choosing.waiters)
        self.warm_calls.append(any(opens_s <= gap_s < closes_s for opens_s, closes_s in windows))
        held_s = sum(
            min(gap_s, closes_s) - max(opens_s - self.costs.start_s, 0.0)
            for opens_s, closes_s in windows
            if opens_s - self.costs.start_s < gap_s
        )
        self.cold_s.append(gap_s - held_s)

    def settle_silence(self) -> None:
        """The gap that runs, as far as it has come."""
        if self.ended_s is not None and self.now_s > self.ended_s:
            idle_s = self.now_s - self.ended_s
            waiters = self.choosing.waiters
            self.paid += gap_cost(self.windows(), idle_s, self.costs, waiters, ended=False)
            self.reactive += gap_cost(self.without(), idle_s, self.costs, waiters, ended=False)
