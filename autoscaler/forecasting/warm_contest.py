"""Who says when an idle function is kept or awaited: forecasters judged by what the gaps would have cost under them.

Each has a plan (`warmth`, or by the wall clock: `clock`) that was made before the gap it is judged by; the reactive
policy keeps a replica for the break-even of a start, or for less where known gaps say so. Who starts anew is done with
its work later, and the gap that follows is as much shorter: all are judged as if they had lived through the same calls.
Costs fade by the gap. The cheapest acts if it leads the reactive policy by some starts and some share, and only as far
as the credit (`credit`) goes: its plan is cut where a gap could lose more than is left.
Limits: within one refit it may lose a start for each gap before that is seen; refit once a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from autoscaler.forecast import REACTIVE, Costs
from autoscaler.forecasting.clock import ByClock
from autoscaler.forecasting.credit import Credit
from autoscaler.forecasting.warmth import Windows, gap_cost, is_cold, spliced, within

Plan: TypeAlias = Windows | ByClock

FADES = 0.5 ** (1 / 256)
LEAD_STARTS = 2.0
LEAD_SHARE = 0.03
AHEAD_SHARE = 0.02
"""Of the acting one's cost, by which another has to be cheaper to replace it."""


class WarmContest:
    __slots__ = (
        "_shifts_s",
        "acting",
        "costs",
        "credit",
        "gaps",
        "kept_s",
        "plans",
        "prewarms_used",
        "prewarms_wasted",
        "reactive",
        "windows",
    )

    def __init__(self, names: Iterable[str]) -> None:
        self.plans: dict[str, Plan | None] = dict.fromkeys(names)
        """None: it says nothing, and is as good as reactive."""
        self.costs = dict.fromkeys(self.plans, 0.0)
        self.reactive = 0.0
        self.acting: str | None = None
        self.windows: Plan = ()
        """What is acted on: the plan of the acting one as far as its credit goes."""
        self.kept_s: float | None = None
        """The reactive policy's keep-alive, where known gaps have shortened it."""
        self.credit = Credit()
        self.gaps = 0
        self.prewarms_used = 0
        self.prewarms_wasted = 0
        self._shifts_s = dict.fromkeys([*self.plans, REACTIVE], 0.0)
        """By how much each would have been done earlier (less than 0: later) with what came before this gap."""

    def without(self, costs: Costs, waiters: float) -> Windows:
        """The reactive policy's windows."""
        return ((0.0, costs.break_even_s(waiters) if self.kept_s is None else self.kept_s),)

    def settle(
        self, gap_s: float, costs: Costs, waiters: float, start_s: float = 0.0, kept_s: float | None = None
    ) -> None:
        """A gap that began at `start_s` has ended: everybody pays for it. `waiters`: who would have waited for a start
        at its end. `kept_s`: for how long the reactive policy would have kept a replica in it."""
        self.gaps += 1
        without = self.without(costs, waiters) if kept_s is None else ((0.0, kept_s),)
        acted = without if self.acting is None else windows_of(self.windows, start_s)
        was_cold, shifts_s = is_cold(acted, gap_s), self._shifts_s
        first_s = shifts_s[REACTIVE]
        reactive, then_s = _paid(without, gap_s, first_s, costs, waiters, was_cold=was_cold)
        shifts_s[REACTIVE] = then_s
        self.reactive = FADES * self.reactive + reactive
        for name, plan in self.plans.items():
            windows = without if plan is None else windows_of(plan, start_s)
            if windows is without and shifts_s[name] == first_s:
                cost, shifts_s[name] = reactive, then_s
            else:
                cost, shifts_s[name] = _paid(windows, gap_s, shifts_s[name], costs, waiters, was_cold=was_cold)
            self.costs[name] = FADES * self.costs[name] + cost
        # The account is kept by the gaps as they were: by those that might have been one could be misled.
        spared = gap_cost(without, gap_s, costs, waiters)
        if self.acting is None:
            self.credit.settle(spared, spared, costs, waiters)
            return
        self.credit.settle(gap_cost(acted, gap_s, costs, waiters), spared, costs, waiters)
        for opens_s, closes_s in acted:
            if opens_s > 0.0 and opens_s <= gap_s:
                used = gap_s < closes_s
                self.prewarms_used += used
                self.prewarms_wasted += not used

    def replan(self, name: str, plan: Plan | None, idle_s: float, now_s: float = 0.0) -> None:
        """A new plan; of a gap that runs, only the rest is changed."""
        before = self.plans[name]
        if idle_s > 0.0 and before is not None and plan is not None:
            plan = _changed(before, plan, idle_s, now_s)
        self.plans[name] = plan

    def elect(self, costs: Costs, waiters: float, idle_s: float, now_s: float = 0.0) -> None:
        """Chooses who acts from now on, and how far. `idle_s`: how long the present gap lasts; 0: there is none."""
        reactive = self.without(costs, waiters)
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
        kept: Plan | None
        if isinstance(plan, ByClock):
            running = windows_of(self.windows, now_s - idle_s)
            spent = gap_cost(running, idle_s, costs, waiters, ended=False)
            spent -= gap_cost(reactive, idle_s, costs, waiters, ended=False)
            kept = plan.within(costs, room - max(spent, 0.0), waiters)
        else:
            kept = None if plan is None else within(plan, reactive, costs, room, waiters)
        if kept is None:
            self.acting = None
        self.windows = _changed(self.windows, reactive if kept is None else kept, idle_s, now_s)

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


def _paid(
    windows: Windows, gap_s: float, earlier_s: float, costs: Costs, waiters: float, *, was_cold: bool
) -> tuple[float, float]:
    """What a gap costs somebody who was done `earlier_s` earlier, and by how much that is so after it. Runs for every
    plan at every gap: a keep-alive, which most are, is reckoned at once."""
    lived_s = gap_s + min(earlier_s, 0.0)
    if lived_s <= 0.0:
        return 0.0, costs.start_s if was_cold else 0.0
    if len(windows) == 1 and windows[0][0] == 0.0:
        closes_s = windows[0][1]
        cold = lived_s >= closes_s
        cost = costs.devices * closes_s + costs.of_start(waiters) if cold else costs.devices * lived_s
    else:
        cold = is_cold(windows, lived_s)
        cost = gap_cost(windows, lived_s, costs, waiters)
    # Who was done earlier had a replica meanwhile, unless it was let go behind the call in any case.
    held = costs.devices * earlier_s if earlier_s > 0.0 and not cold else 0.0
    return cost + held, costs.start_s * (was_cold - cold)


def windows_of(plan: Plan, gap_start_s: float) -> Windows:
    return plan.windows(gap_start_s) if isinstance(plan, ByClock) else plan


def _changed(before: Plan, after: Plan, idle_s: float, now_s: float) -> Plan:
    """`after`, and in the gap that has run for `idle_s` what held before it until now."""
    if idle_s <= 0.0:
        return after
    past = windows_of(before, now_s - idle_s)
    return after.following(past) if isinstance(after, ByClock) else spliced(past, after, idle_s)
