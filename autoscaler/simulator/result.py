"""What a simulation came to: device-seconds, seconds waited, starts and stops, by function; and the objective of them.

`Result.objective(weight)`: device-seconds held, less what the same requests at full batches would hold, plus `weight`
times seconds to the first token, a refusal counted as the function's objective. One simulation of a policy that does
not look at the weight gives its objective at every weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Prices:
    waiting_weight: float = 30.0
    """Device-seconds that one second of a person's waiting is worth."""
    device_microusd_per_s: float = 0.0


@dataclass(slots=True)
class FunctionResult:
    name: str
    requests: int = 0
    """Scored ones: those that arrived in the scored time."""
    refused: int = 0
    waited_s: float = 0.0
    """From arrival to first token, summed."""
    objective_s: float = 0.0
    held_device_s: float = 0.0
    starting_device_s: float = 0.0
    """Of those held: before a replica was ready."""
    busy_device_s: float = 0.0
    """Of those held: while a replica ran anything."""
    full_batch_device_s: float = 0.0
    starts: int = 0
    starts_by_tier: dict[str, int] = field(default_factory=dict)
    stops: int = 0
    start_s_sum: float = 0.0
    cold_requests: int = 0
    """That arrived when no replica was ready."""
    stopped_before_ready: int = 0
    devices: float = 1.0
    away_s: list[float] = field(default_factory=list)
    """Seconds from each stop to the next start."""
    expected_start_s: float = 0.0
    """From a pool, where that was measured."""

    def objective(self, weight: float) -> float:
        waited_s = self.waited_s + self.refused * self.objective_s
        return self.held_device_s - self.full_batch_device_s + weight * waited_s

    def restarts(self, weight: float) -> int:
        """Starts within the break-even time of a stop: that long, holding on would have cost less than the start."""
        break_even_s = self.expected_start_s * (1.0 + weight / self.devices)
        return sum(away_s < break_even_s for away_s in self.away_s)


@dataclass(slots=True)
class Result:
    policy: str
    since_s: float
    until_s: float
    functions: tuple[FunctionResult, ...]
    first_token_s: NDArray[np.float32]
    """By scored request, in order of arrival; NaN: refused."""
    series: NDArray[np.float64]
    """Rows: time, devices held, replicas ready, replicas starting, requests waiting, requests running."""
    function_series: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int32))
    """[time, function, (ready, starting, waiting, running)], at the times of `series`, where asked for."""
    events: int = 0
    no_room: int = 0
    """Starts that had to wait for devices."""

    def total(self, what: str) -> float:
        return float(sum(getattr(function, what) for function in self.functions))

    def objective(self, weight: float) -> float:
        return sum(function.objective(weight) for function in self.functions)

    def restarts(self, weight: float) -> int:
        return sum(function.restarts(weight) for function in self.functions)

    def quantile_s(self, q: float) -> float:
        """Of seconds to the first token."""
        waits = self.first_token_s[~np.isnan(self.first_token_s)]
        return float(np.quantile(waits, q)) if len(waits) else 0.0
