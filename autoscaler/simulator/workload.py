"""What is replayed: functions, and their requests as arrays in order of arrival.

24 bytes a request. Limits: a request is its lengths; whose prefix it shares is not known to the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoscaler.service import ServiceModel


class Starts(Protocol):
    """Measured seconds from asking for a replica to its being ready (`autoscaler.start_times.StartTimes`)."""

    def expected_s(self, tier: str | None = None) -> float | None: ...

    def quantile_s(self, q: float, tier: str | None = None) -> float | None: ...

    def draw(self, u: float, tier: str | None = None) -> float:
        """The start time at `u` in [0, 1) of what was measured from `tier`."""
        ...


@dataclass(frozen=True, slots=True)
class SimFunction:
    name: str
    tenant: str
    model_bytes: int
    service: ServiceModel
    starts: Starts
    devices: int = 1
    objective_s: float = 10.0
    """Promised seconds to the first token; what a refusal costs."""
    device_share: float = 1.0
    """Of each of its devices: below 1 where several functions share a device's memory."""
    min_replicas: int = 0
    max_replicas: int = 8
    target_concurrency: float = 0
    """0: the service model's `max_requests`."""
    priority: int = 0
    keep_alive_s: float | None = None
    """Where the function sets a number."""
    ends_s: float = 0.0
    """Seconds that a replica's devices are held after it was told to end and has nothing left to do."""
    way_s: float = 0.0
    """Seconds of each request's time to its first token that are spent on the way to the replica and back."""

    @property
    def held_devices(self) -> float:
        """Device-seconds a replica costs per second."""
        return self.devices * self.device_share


@dataclass(frozen=True, slots=True)
class Workload:
    functions: tuple[SimFunction, ...]
    arrival_s: NDArray[np.float64]
    """In order. Seconds on the trace's clock; `epoch_s` says when that began."""
    function: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    epoch_s: float = 0.0
    """Unix time of the trace's second 0: seasons follow the calendar."""

    def __post_init__(self) -> None:
        counts = {len(self.function), len(self.prompt_tokens), len(self.output_tokens), len(self.arrival_s)}
        if len(counts) != 1:
            raise ValueError(f"arrays of different lengths: {sorted(counts)}")
        if len(self.arrival_s) == 0:
            return
        if not np.isfinite(self.arrival_s).all() or (np.diff(self.arrival_s) < 0).any():
            raise ValueError("arrivals are not in order, or not finite")
        if self.function.min() < 0 or self.function.max() >= len(self.functions):
            raise ValueError("a request of a function that is not in the list")
        if self.prompt_tokens.min() < 0 or self.output_tokens.min() < 0:
            raise ValueError("negative tokens")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def between(self, since_s: float, until_s: float) -> Workload:
        first, last = np.searchsorted(self.arrival_s, [since_s, until_s])
        part = slice(int(first), int(last))
        return Workload(
            self.functions,
            self.arrival_s[part],
            self.function[part],
            self.prompt_tokens[part],
            self.output_tokens[part],
            self.epoch_s,
        )

    def of(self, index: int) -> Workload:
        """One function's requests alone."""
        mine = np.flatnonzero(self.function == index)
        return Workload(
            (self.functions[index],),
            self.arrival_s[mine],
            np.zeros(len(mine), dtype=np.int32),
            self.prompt_tokens[mine],
            self.output_tokens[mine],
            self.epoch_s,
        )

    def full_batch_device_s(self) -> NDArray[np.float64]:
        """By function: what serving its requests at full batches would hold; the constant of the objective."""
        total = np.zeros(len(self.functions))
        for index, function in enumerate(self.functions):
            mine = self.function == index
            service = function.service
            prompts = self.prompt_tokens[mine].astype(np.float64)
            outputs = self.output_tokens[mine].astype(np.float64)
            batch = np.full(len(prompts), float(service.max_requests))
            if service.kv_tokens > 0:
                batch = np.clip(service.kv_tokens // np.maximum(prompts + outputs, 1), 1, service.max_requests)
            # `ServiceModel.full_batch_device_s` of each, added up.
            step_s = (
                service.step_base_s
                + service.step_per_request_s * batch
                + service.step_per_context_token_s * batch * (prompts + outputs // 2)
            )
            seconds = prompts / service.prefill_tokens_per_s + np.maximum(outputs, 1) * step_s / batch
            total[index] = function.held_devices * float(seconds.sum())
        return total
