"""A fixed keep-alive, and the keep-alive that breaks even with a start.

`KeepAlive`: what most serverless platforms do (10 minutes at AWS and OpenWhisk, 20 at Azure, by measurement; Shahrad et
al., ATC 2020, section 2). `Reactive`: each function is kept just as long as a start of it costs, which is never worse
than twice the best choice in hindsight (the ski-rental bound; Karlin et al., Algorithmica 1988): Stoker without
forecasts. Limits: see `by_load`.
"""

from __future__ import annotations

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.peers.by_load import ByLoad
from autoscaler.simulator.policy import View
from autoscaler.simulator.result import Prices
from autoscaler.simulator.workload import Workload


class KeepAlive(ByLoad):
    def __init__(self, seconds: float, *, utilisation: float = 1.0, scale_in_s: float = 60.0) -> None:
        if seconds < 0:
            raise ValueError(f"a keep-alive of {seconds} s is below 0")
        super().__init__(f"keepalive:{seconds:g}", utilisation=utilisation, scale_in_s=scale_in_s)
        self._seconds = seconds

    def keep_alive_s(self, view: View) -> float:
        return self._seconds


class Reactive(ByLoad):
    """`factor` times the break-even time; 1 is the rule itself, others are for tuning it."""

    def __init__(self, *, factor: float = 1.0, utilisation: float = 1.0, scale_in_s: float = 60.0) -> None:
        super().__init__("reactive", utilisation=utilisation, scale_in_s=scale_in_s)
        self._factor = factor
        self._seconds: list[float] = []

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        super().begin(workload, cluster, prices, now_s)
        self._seconds = [
            self._factor
            * (function.starts.expected_s() or 0.0)
            * (1.0 + prices.waiting_weight / max(function.held_devices, 1e-9))
            for function in workload.functions
        ]

    def keep_alive_s(self, view: View) -> float:
        return self._seconds[view.index]
