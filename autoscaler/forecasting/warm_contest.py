"""Who says when an idle function is kept or awaited: forecasters judged by what the gaps would have cost under them.

Each has a plan (`warmth`) that was made before the gap it is judged by; the reactive policy keeps a replica for the
break-even of a start. Costs fade by the gap. The cheapest acts if it leads the reactive policy by some starts and some
share, and only as far as the credit (`credit`) goes: its plan is cut where a gap could lose more than is left.
Limits: within one refit it may lose a start for each gap before that is seen; refit once a window.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoscaler.forecast import REACTIVE, Costs
from autoscaler.forecasting.credit import Credit
from autoscaler.forecasting.warmth import Windows, gap_cost, spliced, within

FADES = 0.5 ** (1 / 256)
LEAD_STARTS = 2.0
LEAD_SHARE = 0.03
AHEAD_SHARE = 0.02
"""Of the acting one's cost, by which another has to be cheaper to replace it."""


class WarmContest:
    __slots__ = (
        "acting",
        "costs",
        "credit",
        "gaps",
        "plans",
        "prewarms_used",
        "prewarms_wasted",
        "reactive",
        "windows",
    )

    def __init__(self, names: Iterable[str]) -> None:
        self.plans: dict[str, Windows | None] = dict.fromkeys(names)
        """None: it says nothing, and is as good as reactive."""
        self.costs = dict.fromkeys(self.plans, 0.0)
        self.reactive = 0.0
        self.acting: str | None = None
        self.windows: Windows = ()
        """What is acted on: the plan of the acting one as far as its credit goes."""
        self.credit = Credit()
        self.gaps = 0
        self.prewarms_used = 0
        self.prewarms_wasted = 0

    def settle(self, gap_s: float, costs: Costs, waiters: float) -> None:
        """A gap has ended: everybody pays for it."""
        self.gaps += 1
        reactive = gap_cost(reactive_windows(costs, waiters), gap_s, costs, waiters)
        self.reactive = FADES * self.reactive + reactive
        for name, plan in self.plans.items():
            paid = reactive if plan is None else gap_cost(plan, gap_s, costs, waiters)
            self.costs[name] = FADES * self.costs[name] + paid
        if self.acting is None:
            self.credit.settle(reactive, reactive, costs, waiters)
            return
        self.credit.settle(gap_cost(self.windows, gap_s, costs, waiters), reactive, costs, waiters)
        for opens_s, closes_s in self.windows:
            if opens_s > 0.0 and opens_s <= gap_s:
                used = gap_s < closes_s
                self.prewarms_used += used
                self.prewarms_wasted += not used

    def replan(self, name: str, plan: Windows | None, idle_s: float) -> None:
        """A new plan; of a gap that runs, only the rest is changed."""
        before = self.plans[name]
        if idle_s > 0.0 and before is not None and plan is not None:
            plan = spliced(before, plan, idle_s)
        self.plans[name] = plan

    def elect(self, costs: Costs, waiters: float, idle_s: float) -> None:
        """Chooses who acts from now on, and how far. `idle_s`: how long the present gap lasts; 0: there is none."""
        reactive = reactive_windows(costs, waiters)
        room = self.credit.room(costs, waiters)
        if self.acting is not None and (room <= 0.0 or self.costs[self.acting] > self.reactive):
            self._retire(lost=room <= 0.0)
        best = min(self.costs, key=lambda name: (self.costs[name], name), default=None)
        if best is not None and best != self.acting and self.plans[best] is not None:
            behind = None if self.acting is None else self.costs[self.acting]
            if self._leads(self.costs[best], costs, waiters) and (
                behind is None or self.costs[best] < (1.0 - AHEAD_SHARE) * behind
            ):
                self.acting = best
        plan = None if self.acting is None else self.plans[self.acting]
        kept = None if plan is None else within(plan, reactive, costs, room, waiters)
        if kept is None:
            self.acting = None
        self.windows = spliced(self.windows, reactive if kept is None else kept, idle_s)

    def _leads(self, cost: float, costs: Costs, waiters: float) -> bool:
        lead = self.reactive - cost
        return lead > LEAD_STARTS * costs.of_start(waiters) and lead > LEAD_SHARE * self.reactive

    def _retire(self, *, lost: bool) -> None:
        self.acting = None
        if lost:
            self.credit.retirements += 1
            self.costs = {name: max(cost, self.reactive) for name, cost in self.costs.items()}

    def standings(self) -> dict[str, float]:
        return {REACTIVE: self.reactive, **self.costs}


def reactive_windows(costs: Costs, waiters: float) -> Windows:
    return ((0.0, costs.break_even_s(waiters)),)
