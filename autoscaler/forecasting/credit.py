"""How much a forecast may cost, against what would have been without it: an account for each function.

What acting has cost so far, less what the reactive policy would have cost, never exceeds the stated credit: `STARTS`
starts of the function, plus `SHARE` of what the reactive policy has cost since it is watched. What was won counts
only up to `KEPT_STARTS` starts, so that a forecast that turns bad is stopped soon, however good it was. Used up, the
forecast is retired; it acts again when it has won anew, with whatever the credit has grown to.
Limits: costs are those of the model (gaps, starts, waiting at a start), not those of a bill.
"""

from __future__ import annotations

from autoscaler.forecast import Costs

STARTS = 6.0
SHARE = 0.02
KEPT_STARTS = 30.0
"""What was won is kept up to this many starts, to be lost again."""


class Credit:
    __slots__ = ("balance", "lost", "retirements", "spent_reactive")

    def __init__(self) -> None:
        self.lost = 0.0
        """What acting has cost more than the reactive policy would have, since ever."""
        self.balance = 0.0
        """The same with the other sign; of what was won, no more than is kept."""
        self.spent_reactive = 0.0
        self.retirements = 0

    def limit(self, costs: Costs, waiters: float = 1.0) -> float:
        return STARTS * costs.of_start(waiters) + SHARE * self.spent_reactive

    def room(self, costs: Costs, waiters: float = 1.0) -> float:
        """Device-seconds that may still be lost."""
        return self.limit(costs, waiters) + self.balance

    def settle(self, acted: float, reactive: float, costs: Costs, waiters: float = 1.0) -> None:
        self.spent_reactive += reactive
        self.lost += acted - reactive
        self.balance = min(self.balance + reactive - acted, KEPT_STARTS * costs.of_start(waiters))
