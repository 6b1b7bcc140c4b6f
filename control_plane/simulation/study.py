"""Several policies over one workload: each simulated once, or once for each weight where it decides by the weight.

`Row` is what one policy comes to at one weight. Limits: one seed; policies see the days before the scored ones as their
past, and run for `WARM_UP_S` before these begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.peers.named import PARAMETERS, peer
from autoscaler.simulator.peers.oracle import Replays, strongest
from autoscaler.simulator.policy import Policy
from autoscaler.simulator.result import Prices, Result
from autoscaler.simulator.stoker import Stoker
from autoscaler.simulator.workload import Workload
from control_plane.errors import InvalidRequest

WARM_UP_S: Final = 3600.0
SAMPLES: Final = 1000
OWN: Final = "stoker"
BY_WEIGHT: Final = frozenset({OWN, "reactive", "oracle"})
"""Policies that decide by the weight; what others do costs so much at each."""
ALL: Final = (OWN, "knative", "keepalive:600", "histogram", "reactive", "oracle")


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    cluster: Cluster
    weights: tuple[float, ...]
    since_s: float
    """Scored from here on; what came before is there to learn from."""
    until_s: float
    device_usd_per_hour: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    weight: float
    result: Result
    device_usd_per_hour: float

    @property
    def objective(self) -> float:
        return self.result.objective(self.weight)

    @property
    def idle_device_s(self) -> float:
        """Held, less what full batches would hold."""
        return self.result.total("held_device_s") - self.result.total("full_batch_device_s")

    @property
    def waited_s(self) -> float:
        """With each refusal counted as its function's objective."""
        refused_s = sum(each.refused * each.objective_s for each in self.result.functions)
        return self.result.total("waited_s") + refused_s

    @property
    def requests(self) -> int:
        return int(self.result.total("requests"))

    @property
    def usd(self) -> float:
        return self.result.total("held_device_s") / 3600 * self.device_usd_per_hour


def known(told: str) -> str:
    """The policy's name, before its parameters. Raises `InvalidRequest`."""
    name = told.partition(":")[0]
    if name != OWN and name not in PARAMETERS:
        names = ", ".join((OWN, *sorted(PARAMETERS)))
        raise InvalidRequest(f"there is no policy {told!r}; there are {names}", param="policy")
    return name


def policy_of(told: str, workload: Workload) -> Policy:
    if known(told) == OWN:
        if told not in (OWN, "stoker:reactive"):
            raise InvalidRequest(f"{told!r}: stoker takes no parameter but `reactive`", param="policy")
        return Stoker(forecasts=told == OWN)
    try:
        return peer(told, workload)
    except ValueError as error:
        raise InvalidRequest(str(error), param="policy") from error


def compare(plan: Plan, policies: Sequence[str], advance: Callable[[str], None]) -> list[Row]:
    """In the order of the policies, and of the weights within each."""
    for told in policies:
        policy_of(told, plan.workload)  # a name that is wrong is refused before an hour was spent on others
    rows: list[Row] = []
    replays = Replays(plan.workload)
    for told in policies:
        found: Result | None = None
        for weight in plan.weights:
            if found is None or known(told) in BY_WEIGHT:
                advance(f"{told} at {weight:g}" if known(told) in BY_WEIGHT else told)
                found = _simulated(plan, told, weight, replays)
            rows.append(Row(told, weight, found, plan.device_usd_per_hour))
    return rows


def _simulated(plan: Plan, told: str, weight: float, replays: Replays) -> Result:
    prices = Prices(weight, plan.device_usd_per_hour * 1e6 / 3600)
    begin_s = max(plan.since_s - WARM_UP_S, 0.0)
    if known(told) == "oracle":
        oracle, _ = strongest(
            plan.workload, plan.cluster, prices, plan.seed,
            begin_s=begin_s, since_s=plan.since_s, until_s=plan.until_s, replays=replays,
        )  # fmt: skip
        policy: Policy = oracle
    else:
        policy = policy_of(told, plan.workload)
    return simulate(
        plan.workload,
        plan.cluster,
        policy,
        plan.seed,
        prices,
        begin_s=begin_s,
        since_s=plan.since_s,
        until_s=plan.until_s,
        sample_s=max((plan.until_s - plan.since_s) / SAMPLES, 1.0),
    )
