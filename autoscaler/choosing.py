"""Which forecast acts, for each function: those that would have cost less than doing without, judged by its own past.

`Choosing.refit` is called once a window with the function's history: it settles what has happened since (gaps with
`WarmContest`, minutes with `RateContest`), lets due forecasters plan anew, elects, and keeps the `Forecast` that
`decide` looks up. Schedules of the user need not win: what they ask for is a floor.
Limits: what is costly to fit is fitted every `PLAN_EVERY_S`, or when a tenth more gaps are known; one refit that plans
takes a millisecond or two, any other some microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoscaler.forecast import REACTIVE, Costs, Forecast, Quantiles
from autoscaler.forecasting.bursts import burst
from autoscaler.forecasting.clock import AHEAD_S, ByClock, minute_rates, plan_by_clock
from autoscaler.forecasting.gaps import (
    GAPS_NEEDED,
    gaps_of,
    idle_histogram,
    idle_histogram_hour,
    idle_histogram_pace,
)
from autoscaler.forecasting.holt_winters import holt_winters
from autoscaler.forecasting.outlook import DAY_S, Forecaster, Numbers
from autoscaler.forecasting.output_length import Work, output_length
from autoscaler.forecasting.rate_contest import HIGH, MINUTE_S, Need, RateContest, Told
from autoscaler.forecasting.rates import ewma
from autoscaler.forecasting.schedule import Asked, Cron, Schedule, asked_for, floors
from autoscaler.forecasting.seasonal import seasonal_day, seasonal_week
from autoscaler.forecasting.views import Once, Remembered, Until
from autoscaler.forecasting.warm_contest import WarmContest
from autoscaler.forecasting.warmth import warm_windows
from autoscaler.keeping import shortened_s

WARM: dict[str, Forecaster] = {
    "idle_histogram": idle_histogram,
    "idle_histogram_hour": idle_histogram_hour,
    "idle_histogram_pace": idle_histogram_pace,
    "seasonal_day": seasonal_day,
    "seasonal_week": seasonal_week,
}
"""Those that know a law of gaps."""
KEEP = {"keep:0": 0.0, "keep:0.5": 0.5, "keep:2": 2.0, "keep:4": 4.0, "keep:8": 8.0, "keep:16": 16.0}
"""A keep-alive of so many times the break-even: the plainest guess at the gaps, and a long memory of them."""
CLOCK = "clock"
"""Rates by the minute of the hour: a plan by the wall clock, made anew every `PLAN_EVERY_S`."""
CLOCK_QUIET_S = 2 * 3_600.0
"""After so long a silence nothing is expected by the minute."""
BY_THE_CLOCK = frozenset({"seasonal_day", "seasonal_week"})
"""Their laws count from now, not from the last activity."""
RATE: dict[str, Forecaster] = {
    "ewma": ewma,
    "seasonal_day": seasonal_day,
    "seasonal_week": seasonal_week,
    "holt_winters": holt_winters,
    "burst": burst,
}
QUICK = ("ewma", "burst")
"""Stale after a minute; asked while more than half of a replica is busy."""
PLAN_EVERY_S = 600.0
IDLE_PLAN_EVERY_S = 6 * 3_600.0
"""While nothing happens, only what goes by the clock is planned anew, and this seldom."""
STEPS = 20
HORIZON_S = STEPS * MINUTE_S
VALID_S = 600.0
QUIET_S = 120.0
CALENDAR_S = 6 * 3_600.0
WAITERS_MAX = 21.0
"""More would have been seen as load, and not as idleness."""
REPLAYS = 24
FINE_KEPT_S = 3_500.0
"""So far back windows of ten seconds reach."""
GAPS_KEPT = 64
"""By so many the reactive policy shortens its keep-alive."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one forecaster has done, for `stoker why` and the metrics."""

    name: str
    contest: str
    """`warm` or `rate`."""
    cost: float
    """Device-seconds, faded; compare with reactive's."""
    acting: bool


class Choosing:
    """Of one function. Its state follows from the history: see `rebuilt`."""

    __slots__ = (
        "_asked",
        "_asked_until_s",
        "_clock_planned_s",
        "_kept_s",
        "_minute_s",
        "_minutes_planned_s",
        "_now_s",
        "_places",
        "_planned_gaps",
        "_planned_s",
        "_rates_on",
        "_schedules",
        "_scored_s",
        "_waited",
        "_work",
        "floor",
        "forecast",
        "rate",
        "waiters",
        "warm",
    )

    def __init__(self) -> None:
        self.warm = WarmContest([*WARM, *KEEP, CLOCK])
        self.rate = RateContest(RATE)
        self.forecast: Forecast | None = None
        self.floor: tuple[int, ...] = ()
        self._now_s = self._scored_s = -math.inf
        self._planned_s = self._clock_planned_s = self._asked_until_s = self._minutes_planned_s = -math.inf
        self._schedules: tuple[tuple[Cron, float, int, float], ...] = ()
        self._asked: tuple[Asked, ...] = ()
        self._planned_gaps = 0
        self._minute_s: float | None = None
        self._kept_s: float | None = None
        """How long the reactive policy keeps a replica where few come, as known gaps have shortened it."""
        self.waiters = 1.0
        """Who wait for a start: the first call, and half of what comes while it lasts."""
        self._waited = 1.0
        self._places = 1
        self._work = Work()
        self._rates_on = False

    @classmethod
    def rebuilt(cls, history: Remembered, now_s: float, costs: Costs, places: int = 8, waited: float = 1.0) -> Choosing:
        """As it would be, had it been there: replays the gaps the history remembers, planning `REPLAYS` times."""
        choosing = cls()
        starts, lengths, _ = gaps_of(history, now_s)
        if len(starts) > GAPS_NEEDED:
            ends = starts + lengths
            step = max(len(ends) // REPLAYS, 1)
            for at_s in ends[GAPS_NEEDED::step].tolist():
                choosing.refit(Until(history, at_s), at_s, costs, places=places, waited=waited)
        choosing.refit(history, now_s, costs, places=places, waited=waited)
        return choosing

    def refit(
        self,
        history: Remembered,
        now_s: float,
        costs: Costs,
        *,
        idle_since_s: float | None = None,
        places: int = 8,
        schedules: tuple[Schedule, ...] = (),
        waited: float = 1.0,
    ) -> Forecast:
        """What is said from now on. `idle_since_s`: when the last activity ended; None: something is going on.
        `places`: requests at once that one replica is meant to take. `waited`: requests that were found to wait for a
        start from zero, on average: more than windows tell of where they come together."""
        history = Once(history)
        self._waited = waited
        idle_s = 0.0 if idle_since_s is None else max(now_s - idle_since_s, 0.0)
        self._places = max(places, 1)
        if now_s < self._now_s:
            self._planned_s = self._clock_planned_s = self._asked_until_s = self._minutes_planned_s = -math.inf
            self._minute_s = None
        if now_s < self._scored_s and not history.gaps_after(now_s):
            # The clock was put back, and the history has forgotten what lay beyond: what comes now counts.
            self._scored_s = now_s
        self._now_s = now_s
        changed = self._settle_gaps(history, now_s, costs)
        if changed:
            self._plan_gaps(history, now_s, costs, idle_s)
        # What acts was cut to what may be lost whatever the gap: while nothing ends and nothing is planned, it stands.
        planned = self._plan_by_clock(history, now_s, costs, idle_s)
        if self._plan_minutes(history, now_s, costs, idle_s) or planned or changed:
            self.warm.elect(costs, self.waiters, idle_s, now_s)
        need = Need(self._work.service_s, self._places)
        if self._rates_on:
            self._settle_minutes(history, now_s, need, costs)
        # Zones are functions, and the same one may come as another each time: told apart by what they say now.
        given = tuple((each.cron, each.length_s, each.replicas, each.zone(now_s)) for each in schedules)
        if given != self._schedules or (given and now_s + HORIZON_S > self._asked_until_s):
            self._schedules, self._asked_until_s = given, now_s + CALENDAR_S
            self._asked = asked_for(schedules, now_s, self._asked_until_s)
        self.floor = floors(self._asked, now_s, MINUTE_S, STEPS)
        last = 0.0 if idle_s > QUIET_S else history.total("arrivals", 10, now_s - MINUTE_S, now_s) / MINUTE_S
        self.forecast = self._said(now_s, costs, need, last)
        return self.forecast

    def standings(self) -> tuple[Standing, ...]:
        return tuple(
            Standing(name, contest, cost, name == (acting or REACTIVE))
            for contest, costs, acting in (
                ("warm", self.warm.standings(), self.warm.acting),
                ("rate", self.rate.standings(), self.rate.acting),
            )
            for name, cost in costs.items()
        )

    # --- whether to be warm ---

    def _settle_gaps(self, history: Remembered, now_s: float, costs: Costs) -> bool:
        """Whether any gap was."""
        new = history.gaps_after(self._scored_s)
        if not new:
            return False
        first_s, waited = new[0][0] - MINUTE_S, self._waited - 1.0
        window_s = 10 if now_s - first_s < FINE_KEPT_S else 60
        since_s = max(first_s // window_s * window_s, now_s - DAY_S)
        windows, counts = history.arrivals(window_s, since_s, now_s)
        if not len(windows):
            windows, counts = np.array([since_s]), np.zeros(1)
        edges = np.append(windows, windows[-1] + window_s)
        so_far = np.concatenate([[0.0], np.cumsum(np.where(np.isnan(counts), 0.0, counts))])
        starts_s = np.array([start_s for start_s, _ in new])
        ends_s = starts_s + np.array([length_s for _, length_s in new])
        at_start, at_end, at_ready = (
            np.interp(at_s, edges, so_far) for at_s in (starts_s, ends_s, ends_s + costs.start_s)
        )
        before = at_start - np.interp(starts_s - MINUTE_S, edges, so_far)
        usual_s = costs.break_even_s(self._kept_waiters(costs, 0.0))
        share = 1.0 if self._kept_s is None else self._kept_s / usual_s
        for (start_s, length_s), rate, after in zip(
            new, (before / MINUTE_S).tolist(), (at_ready - at_end).tolist(), strict=True
        ):
            met = min(1.0 + 0.5 * max(after, waited, 0.0), WAITERS_MAX)
            kept_s = share * costs.break_even_s(self._kept_waiters(costs, rate))
            self.warm.settle(length_s, costs, met, start_s, kept_s)
            self._scored_s = start_s
        waiters = self._kept_waiters(costs, 0.0)
        start_cost = costs.of_start(waiters) / max(costs.devices, 1e-9)
        self._kept_s = shortened_s(usual_s, start_cost, history.gaps_s[-GAPS_KEPT:].tolist())
        rate = float(so_far[-1] - np.interp(now_s - MINUTE_S, edges, so_far)) / MINUTE_S
        self.warm.kept_s = self._kept_s / usual_s * costs.break_even_s(self._kept_waiters(costs, rate))
        return True

    def _kept_waiters(self, costs: Costs, rate: float) -> float:
        """Who wait for a start, as `decide` reckons where no forecast speaks: see `keeping.start_cost_s`."""
        return 1.0 + max(min(rate * costs.start_s, WAITERS_MAX - 1.0), self._waited - 1.0) / 2.0

    def _plan_gaps(self, history: Remembered, now_s: float, costs: Costs, idle_s: float) -> None:
        if self.warm.gaps > 64 and now_s - self._planned_s < PLAN_EVERY_S:
            return
        if self.warm.gaps - self._planned_gaps < min(self.warm.gaps, 512) // 10:
            return
        self._planned_gaps, self._planned_s = self.warm.gaps, now_s
        self._measure(history, now_s, costs)
        for name, times in KEEP.items():
            self.warm.replan(name, ((0.0, times * costs.break_even_s(self.waiters)),) if times else (), 0.0)
        for name, forecaster in WARM.items():
            if name not in BY_THE_CLOCK:
                law = forecaster(history, now_s, HORIZON_S, STEPS).law
                plan = None if law is None else warm_windows(law, costs, self.waiters)
                self.warm.replan(name, plan, idle_s)

    def _plan_by_clock(self, history: Remembered, now_s: float, costs: Costs, idle_s: float) -> bool:
        if now_s - self._clock_planned_s < (IDLE_PLAN_EVERY_S if idle_s > PLAN_EVERY_S else PLAN_EVERY_S):
            return False
        self._clock_planned_s = now_s
        self._measure(history, now_s, costs)
        for name in WARM.keys() | (RATE.keys() - set(QUICK) if self._rates_on else set()):
            if name not in BY_THE_CLOCK and name not in RATE:
                continue
            outlook = RATE[name](history, now_s, HORIZON_S, STEPS)
            if name in BY_THE_CLOCK:
                plan = None
                if outlook.law is not None:
                    windows = warm_windows(outlook.law, costs, self.waiters)
                    plan = tuple((opens_s + idle_s, closes_s + idle_s) for opens_s, closes_s in windows)
                self.warm.replan(name, plan, idle_s)
            if self._rates_on and name not in QUICK:
                self._tell(name, now_s, outlook.rate, outlook.rate_high)
        return True

    def _plan_minutes(self, history: Remembered, now_s: float, costs: Costs, idle_s: float) -> bool:
        if now_s - self._minutes_planned_s < PLAN_EVERY_S:
            return False
        self._minutes_planned_s = now_s
        plan: ByClock | None = None
        rates = None if idle_s > CLOCK_QUIET_S else minute_rates(history, now_s, int(AHEAD_S / MINUTE_S) + 1)
        if rates is not None:
            plan = plan_by_clock(rates, now_s, costs, self.waiters, self._work.service_s)
        changes = plan is not None or self.warm.plans[CLOCK] is not None
        self.warm.replan(CLOCK, plan, idle_s, now_s)
        return changes

    def _measure(self, history: Remembered, now_s: float, costs: Costs) -> None:
        """How many wait for a start, what a request takes, and whether more than one replica is ever needed."""
        self._work = output_length(history, now_s)
        for resolution_s, span_s in ((60, DAY_S), (600, 14 * DAY_S)):
            _, counts = history.arrivals(resolution_s, now_s - span_s, now_s)
            first = counts[1:][(counts[1:] > 0) & (counts[:-1] == 0)]
            if len(first) or resolution_s == 600:
                break
        following = (float(first.mean()) - 1.0) / (resolution_s / 2) if len(first) else 0.0
        come = max(costs.start_s * max(following, 0.0), self._waited - 1.0)
        self.waiters = min(1.0 + 0.5 * come, WAITERS_MAX)
        busiest = float(np.nanmax(counts)) / resolution_s if not np.isnan(counts).all() else 0.0
        self._rates_on = busiest * self._work.service_s > 0.9 * self._places

    # --- how many ---

    def _settle_minutes(self, history: Remembered, now_s: float, need: Need, costs: Costs) -> None:
        end_s = now_s // MINUTE_S * MINUTE_S
        since_s = end_s - MINUTE_S if self._minute_s is None else self._minute_s
        if end_s <= since_s:
            return
        starts, counts = history.arrivals(60, max(since_s, end_s - 3_600.0) - MINUTE_S, end_s)
        rates = (counts / MINUTE_S).tolist()
        for minute_s, before, arrived in zip(starts.tolist()[1:], rates, rates[1:], strict=False):
            if before == before and arrived == arrived:
                self.rate.settle(minute_s, arrived, before, need, costs)
        self._minute_s = end_s
        quick = QUICK if rates and need.of(2.0 * rates[-1]) > 1 else ()
        for name in quick:
            outlook = RATE[name](history, now_s, HORIZON_S, STEPS)
            self._tell(name, now_s, outlook.rate, outlook.rate_high)
        self.rate.elect(need, costs)

    def _tell(self, name: str, now_s: float, rate: Numbers | None, rate_high: Numbers | None) -> None:
        # Minutes are judged whole: what is said now counts from the next one on.
        made_s = math.ceil(now_s / MINUTE_S) * MINUTE_S
        self.rate.told[name] = None if rate is None else Told(made_s, tuple(rate.tolist()))
        self.rate.told[name + HIGH] = None if rate_high is None else Told(made_s, tuple(rate_high.tolist()))

    # --- what is said ---

    def _said(self, now_s: float, costs: Costs, need: Need, last: float) -> Forecast:
        rates = self.rate.rates(now_s, STEPS) if self._rates_on else None
        rate, rate_high = rates or ((), ())
        if rate:
            most = need.rate_of(need.of(last) + self.rate.cap)
            rate, rate_high = tuple(min(x, most) for x in rate), tuple(min(x, most) for x in rate_high)
        names = [name for name in (self.warm.acting, self.rate.acting if rate else None) if name is not None]
        expected = (rate[0] if rate else last) * costs.start_s
        acted = None if self.warm.acting is None else self.warm.windows
        return Forecast(
            source="+".join(dict.fromkeys(names)) or ("schedule" if self.floor else REACTIVE),
            made_s=now_s,
            step_s=MINUTE_S,
            rate=rate,
            rate_high=rate_high,
            warm=None if isinstance(acted, ByClock) else acted,
            clock=tuple((span.from_s, span.ready_s, span.until_s) for span in acted.spans)
            if isinstance(acted, ByClock)
            else None,
            floor=self.floor,
            service_s=self._work.service_s,
            prompt_tokens=self._work.prompt_tokens,
            output_tokens=self._work.output_tokens,
            output_spread=self._work.output_spread,
            arrivals=_poisson(expected),
            valid_until_s=now_s + VALID_S,
        )


def _poisson(mean: float) -> Quantiles:
    """Quantiles of a Poisson count: by its sums while small, by the normal curve beyond."""
    if mean > 50.0:
        deviation = math.sqrt(mean)
        return Quantiles(mean, mean + 1.2816 * deviation, mean + 2.3263 * deviation)
    found: list[float] = []
    term = total = math.exp(-mean)
    count = 0
    for share in (0.5, 0.9, 0.99):
        while total < share:
            count += 1
            term *= mean / count
            total += term
        found.append(float(count))
    return Quantiles(*found)
