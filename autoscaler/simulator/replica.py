"""One replica of a simulation: requests that share its steps.

Its clock counts steps: while n requests run, a step takes `step_s(n)` and gives each one token, so a request that is
taken at step v with m tokens to make ends at step v + m, however n changes meanwhile (processor sharing in virtual
time: Parekh and Gallager, 1993). While prompts are prefilled (`frozen_s`) the clock stands. Nothing here is an event:
the state is carried forward when somebody looks.
"""

from __future__ import annotations

from heapq import heappop
from typing import TYPE_CHECKING

from autoscaler.simulator.workload import SimFunction

if TYPE_CHECKING:
    from autoscaler.simulator.cluster import SimSlot


class SimReplica:
    __slots__ = (
        "at_s",
        "begun_s",
        "busy_since_s",
        "context",
        "devices",
        "ended",
        "frozen_s",
        "function",
        "heap",
        "is_ready",
        "next_s",
        "number",
        "ready_s",
        "slot",
        "step_s",
        "steps",
        "tier",
    )

    def __init__(
        self,
        number: int,
        function: SimFunction,
        slot: SimSlot,
        devices: tuple[int, ...],
        tier: str,
        begun_s: float,
        ready_s: float,
    ) -> None:
        self.number = number
        self.function = function
        self.slot = slot
        self.devices = devices
        self.tier = tier
        self.begun_s = begun_s
        self.ready_s = ready_s
        self.is_ready = False
        self.ended = False
        self.heap: list[tuple[float, int]] = []
        """(step at which it ends, its tokens of context) of each running request."""
        self.steps = 0.0
        """Steps done by `at_s`."""
        self.at_s = begun_s
        self.frozen_s = begun_s
        """Until then prompts are being prefilled."""
        self.step_s = 0.0
        self.next_s = float("inf")
        """When the next running request ends if none is added. Until then nothing here needs to be carried forward."""
        self.context = 0
        self.busy_since_s = 0.0

    def last_end_s(self, base_s: float, per_request_s: float, per_token_s: float) -> float:
        """When the last running request ends if none is added."""
        if not self.heap:
            return self.at_s
        at_s = self.at_s if self.at_s > self.frozen_s else self.frozen_s
        heap, steps, step_s, context = self.heap.copy(), self.steps, self.step_s, self.context
        while heap:
            target, tokens = heappop(heap)
            at_s += (target - steps) * step_s
            steps = target
            context -= tokens
            step_s = base_s + per_request_s * len(heap) + per_token_s * context
        return at_s
