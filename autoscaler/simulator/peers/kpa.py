"""Knative's pod autoscaler (KPA), one decision at a time, and the averages it decides by.

`Kpa.scale` is the algorithm of knative/serving `pkg/autoscaler/scaling/autoscaler.go`, `WindowAverage` that of
`pkg/autoscaler/aggregation/bucketing.go` (release 1.12 and later); both are held to the numbers those packages test
themselves with (`tests/autoscaler/simulator/test_kpa.py`). Limits: the `linear` window, not the weighted one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

TICK_S: Final = 2.0
GRANULARITY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class KpaSpec:
    """Defaults: `config-autoscaler` of Knative."""

    target: float = 70.0
    """Value per pod that is aimed at: container-concurrency-target-default 100 times its percentage, 70 %."""
    total: float = 100.0
    """Value per pod at most."""
    stable_window_s: float = 60.0
    panic_window_percentage: float = 10.0
    panic_threshold: float = 2.0
    """Of panic pods to ready ones: panic-threshold-percentage / 100."""
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    target_burst_capacity: float = 211.0
    activation_scale: int = 1
    scale_down_delay_s: float = 0.0
    scale_to_zero_grace_s: float = 30.0
    pod_retention_s: float = 0.0
    reachable: bool = True

    @property
    def panic_window_s(self) -> float:
        return max(self.stable_window_s * self.panic_window_percentage / 100.0, GRANULARITY_S)


@dataclass(frozen=True, slots=True)
class Scale:
    desired: int
    excess_burst_capacity: int
    """Below 0: the activator stays in the request path."""
    valid: bool = True
    """False: there was no data; whatever runs is left alone."""


INVALID: Final = Scale(0, 0, valid=False)


class Kpa:
    """One revision's autoscaler."""

    __slots__ = ("_delay", "max_panic_pods", "panic_s", "spec")

    def __init__(self, spec: KpaSpec, ready: int = 0, now_s: float = 0.0) -> None:
        """One that is made while more than one pod is ready has lost its history: it starts in panic, which holds the
        scale until there is data."""
        self.spec = spec
        self.panic_s: float | None = now_s if ready > 1 else None
        self.max_panic_pods = ready
        self._delay = MaxWindow(spec.scale_down_delay_s, TICK_S) if spec.scale_down_delay_s > 0 else None

    def scale(self, stable: float | None, panic: float | None, ready: int, now_s: float) -> Scale:
        """`stable`, `panic`: averages over the two windows; None: no data.

        Target 10, 50 in the stable window and 100 in the panic window, one pod ready: 10 pods, in panic.
        """
        if stable is None or panic is None:
            return INVALID
        spec = self.spec
        pods = max(1, ready)
        most = math.ceil(spec.max_scale_up_rate * pods)
        least = math.floor(pods / spec.max_scale_down_rate) if spec.reachable else 0
        stable_pods = math.ceil(stable / spec.target)
        panic_pods = math.ceil(panic / spec.target)
        desired_stable = min(max(stable_pods, least), most)
        desired_panic = min(max(panic_pods, least), most)
        if spec.activation_scale > 1:
            if stable_pods > 0:
                desired_stable = max(desired_stable, spec.activation_scale)
            if panic_pods > 0:
                desired_panic = max(desired_panic, spec.activation_scale)

        if panic_pods / pods >= spec.panic_threshold:
            self.panic_s = now_s
        elif self.panic_s is not None and self.panic_s + spec.stable_window_s < now_s:
            self.panic_s = None
            self.max_panic_pods = 0
        desired = desired_stable
        if self.panic_s is not None:
            # In panic it only ever goes up.
            self.max_panic_pods = max(self.max_panic_pods, desired, desired_panic)
            desired = self.max_panic_pods
        if self._delay is not None and spec.reachable:
            self._delay.record(now_s, desired)
            desired = self._delay.current()
        return Scale(desired, self._excess(ready, panic))

    def _excess(self, ready: int, panic: float) -> int:
        burst = self.spec.target_burst_capacity
        if burst == 0:
            return 0
        if burst < 0:
            return -1
        return math.floor(ready * self.spec.total - burst - panic)


class MaxWindow:
    """The largest value of a sliding window, by steps of `granularity_s` (`aggregation/max`): exact for the last
    `duration / granularity` steps."""

    __slots__ = ("_granularity_s", "_steps", "_values")

    def __init__(self, duration_s: float, granularity_s: float) -> None:
        self._granularity_s = granularity_s
        self._steps = math.ceil(duration_s / granularity_s)
        self._values: deque[tuple[int, int]] = deque()

    def record(self, now_s: float, value: int) -> None:
        step = math.floor(now_s / self._granularity_s)
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((step, value))
        while values[0][0] <= step - self._steps:
            values.popleft()

    def current(self) -> int:
        return self._values[0][1]


class WindowAverage:
    """The average of a sliding window by whole seconds (`TimedFloat64Buckets`): what is recorded within one second is
    added up, a second without a record counts as zero, and before the window has filled only the seconds since the
    first record count."""

    __slots__ = ("_buckets", "_first", "_last", "_size", "_total")

    def __init__(self, window_s: float) -> None:
        self._size = math.ceil(window_s / GRANULARITY_S)
        self._buckets = [0.0] * self._size
        self._first = 0
        self._last: int | None = None
        self._total = 0.0

    def record(self, now_s: float, value: float) -> None:
        second = math.floor(now_s / GRANULARITY_S)
        last = self._last
        if last is None or second - last >= self._size:
            self._buckets = [0.0] * self._size
            self._total = 0.0
            self._first = self._last = second
        elif second > last:
            for gone in range(last + 1, second + 1):
                self._total -= self._buckets[gone % self._size]
                self._buckets[gone % self._size] = 0.0
            self._last = second
        elif last - second >= self._size:
            return
        elif second < self._first:
            self._first = second
        self._buckets[second % self._size] += value
        self._total += value

    def is_empty(self, now_s: float) -> bool:
        """Nothing was recorded within the window."""
        return self._last is None or math.floor(now_s / GRANULARITY_S) - self._last > self._size

    def average(self, now_s: float) -> float:
        if self._last is None:
            return 0.0
        second = math.floor(now_s / GRANULARITY_S)
        passed = second - self._last
        filled = self._last - self._first + 1
        if passed <= 0:
            return _rounded(self._total / min(filled, self._size))
        if passed >= self._size:
            return 0.0
        left = self._total
        for gone in range(self._last + 1, second + 1):
            left -= self._buckets[gone % self._size]
        return _rounded(left / min(filled, self._size - passed))


def _rounded(value: float) -> float:
    """Down to six digits: what is left of adding and taking away again must not count as load."""
    return math.floor(value * 1e6) / 1e6
