"""Small workloads, policies that follow a plan, and a naive simulation of one replica to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoscaler.service import ServiceModel
from autoscaler.simulator.policy import Asked, View, Wish
from autoscaler.simulator.workload import SimFunction, Workload
from autoscaler.start_times import TOTAL, StartTimes

SERVICE = ServiceModel(prefill_tokens_per_s=1000.0, step_base_s=0.02, step_per_request_s=0.005, max_requests=4)


def start_times(pool_s: float = 2.0, disk_s: float = 4.0, store_s: float = 10.0) -> StartTimes:
    times = StartTimes()
    for tier, seconds in (("pool", pool_s), ("disk", disk_s), ("store", store_s)):
        for _ in range(4):
            times.note(tier, TOTAL, seconds)
    return times


def make_function(name: str = "f", **changed: object) -> SimFunction:
    values: dict[str, object] = {
        "name": name, "tenant": "t", "model_bytes": 10**9, "service": SERVICE, "starts": start_times(), **changed,
    }  # fmt: skip
    return SimFunction(**values)  # type: ignore[arg-type]


def make_workload(
    requests: Sequence[tuple[float, int, int, int]], functions: Sequence[SimFunction] | None = None
) -> Workload:
    """Of (arrival, function, prompt tokens, output tokens)."""
    return Workload(
        tuple(functions or (make_function(),)),
        np.array([each[0] for each in requests], dtype=np.float64),
        np.array([each[1] for each in requests], dtype=np.int32),
        np.array([each[2] for each in requests], dtype=np.int32),
        np.array([each[3] for each in requests], dtype=np.int32),
    )


class Planned(Asked):
    """Answers by functions of what is seen."""

    name = "planned"

    def __init__(
        self,
        on_arrival: Callable[[View, float], Wish],
        on_idle: Callable[[View, float], Wish] = lambda view, now_s: Wish(view.ready + view.starting),
        on_timer: Callable[[View, float], Wish] = lambda view, now_s: Wish(view.ready + view.starting),
    ) -> None:
        self.on_arrival, self.on_idle, self.on_timer = on_arrival, on_idle, on_timer  # type: ignore[method-assign]

    def on_arrival(self, view: View, now_s: float) -> Wish:
        raise NotImplementedError

    def on_idle(self, view: View, now_s: float) -> Wish:
        raise NotImplementedError

    def on_timer(self, view: View, now_s: float) -> Wish:
        raise NotImplementedError


def naive(service: ServiceModel, requests: Sequence[tuple[float, int, int, int]], ready_s: float) -> list[float]:
    """First-token times of requests on one replica that is ready at `ready_s`, by looking for the next thing to happen
    each time: an arrival, or the end of whichever running request has the least left."""
    waiting: list[int] = []
    left: dict[int, float] = {}
    first = [float("nan")] * len(requests)
    at_s, frozen_s, coming = 0.0, ready_s, 0

    def context() -> int:
        return sum(requests[each][2] + requests[each][3] // 2 for each in left)

    def take() -> None:
        nonlocal frozen_s
        while waiting and at_s >= ready_s and len(left) < service.max_requests:
            number = waiting.pop(0)
            left[number] = float(max(requests[number][3], 1))
            frozen_s = max(frozen_s, at_s) + requests[number][2] / service.prefill_tokens_per_s
            first[number] = frozen_s + service.step_s(len(left), context())

    while coming < len(requests) or left or waiting:
        step_s = service.step_s(len(left), context())
        moments = [requests[coming][0]] if coming < len(requests) else []
        if at_s < ready_s:
            moments.append(ready_s)
        if left:
            moments.append(max(at_s, frozen_s) + min(left.values()) * step_s)
        then_s = min(moments)
        if left:
            done = max(then_s - max(at_s, frozen_s), 0.0) / step_s
            for number in list(left):
                left[number] -= done
                if left[number] <= 1e-9:
                    del left[number]
        at_s = then_s
        if coming < len(requests) and requests[coming][0] <= at_s:
            waiting.append(coming)
            coming += 1
        take()
    return first
