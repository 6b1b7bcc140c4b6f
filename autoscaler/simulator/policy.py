"""What a policy is asked and what it answers: how many replicas a function should have, and when to be asked again.

The simulator asks at moments, not at every request: an arrival that no ready replica has room for (`on_arrival`), a
function that has been idle (`on_idle`), a replica that became ready or a moment the policy named (`on_timer`). What
happened in between is in the view: arrivals, area under the concurrency, peak, gaps. An answer holds until the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autoscaler.simulator.workload import SimFunction, Workload

if TYPE_CHECKING:
    from autoscaler.simulator.cluster import Cluster
    from autoscaler.simulator.result import Prices


@dataclass(frozen=True, slots=True)
class Wish:
    desired: int
    """Replicas that should be starting or ready. What is starting is never stopped: the least is `view.starting`."""
    ask_again_s: float | None = None
    """`on_timer` is called then; each answer replaces the one before. None: not by time alone."""
    idle_after_s: float = 0.0
    """`on_idle` is called when the function has been idle for so long, once for each time it is idle; infinite:
    never."""
    busy_above: int = 1 << 60
    """`on_arrival` is also called for a request that found a place if more than so many run then."""


class View(Protocol):
    """One function as a policy may see it. All of it is of this moment; do not keep it."""

    @property
    def index(self) -> int: ...
    @property
    def function(self) -> SimFunction: ...
    @property
    def ready(self) -> int: ...
    @property
    def starting(self) -> int: ...
    @property
    def draining(self) -> int: ...
    @property
    def waiting(self) -> int:
        """Requests that have arrived and run nowhere."""
        ...

    @property
    def running(self) -> int: ...
    @property
    def arrivals(self) -> int:
        """Requests that have arrived so far, refused ones included."""
        ...

    @property
    def refused(self) -> int: ...
    @property
    def last_arrival_s(self) -> float:
        """-inf: none yet."""
        ...

    @property
    def idle_since_s(self) -> float | None:
        """When the last request ended; None while any waits or runs. The time of `begin` if there was none yet."""
        ...

    @property
    def gaps_s(self) -> Sequence[float]:
        """Lengths of all idle gaps that have ended, the latest last."""
        ...

    @property
    def gap_starts_s(self) -> Sequence[float]:
        """When each of them began."""
        ...

    @property
    def arrival_times_s(self) -> Sequence[float]:
        """Of all arrivals so far."""
        ...

    @property
    def starts_s(self) -> Sequence[float]:
        """Seconds that each start so far took, the latest last."""
        ...

    @property
    def first_token_s_sum(self) -> float: ...
    @property
    def prompt_tokens_sum(self) -> int: ...
    @property
    def output_tokens_sum(self) -> int: ...
    @property
    def waiting_since_s(self) -> float | None:
        """When the oldest waiting request arrived."""
        ...

    def area_s(self, now_s: float) -> float:
        """Request-seconds waiting or running since the beginning: its difference over a window, divided by the
        window, is the average concurrency."""
        ...

    def take_peak(self) -> int:
        """Most requests waiting or running at once since this was last called."""
        ...

    def running_by_replica(self) -> list[int]:
        """Of ready replicas."""
        ...


class Policy(Protocol):
    name: str
    stops_starting: bool
    """Whether fewer than are starting may be wished for, and starts be given up (Kubernetes does so)."""

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        """Before the first event. `workload` holds only what lies before `now_s`: the past to learn from."""
        ...

    def on_arrival(self, view: View, now_s: float) -> Wish: ...

    def on_idle(self, view: View, now_s: float) -> Wish: ...

    def on_timer(self, view: View, now_s: float) -> Wish: ...

    def admits(self, view: View, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
        """Asked when a request would have to wait although a replica is ready; False refuses it."""
        ...

    def loss_s(self, view: View, now_s: float) -> float | None:
        """Asked when no slot has room for somebody's start: expected seconds of people's waiting that ending an idle
        replica of this function costs. None: nobody has to go for another."""
        ...


class Asked:
    """What a policy answers that has no opinion: nothing is refused, nobody makes room."""

    stops_starting = False

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        pass

    def admits(self, view: View, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
        return True

    def loss_s(self, view: View, now_s: float) -> float | None:
        return None


class Fixed(Asked):
    """`replicas` of every function, always: the trivial policy, for tests and as an upper bound of cost."""

    def __init__(self, replicas: int = 1) -> None:
        self.name = f"fixed:{replicas}"
        self._wish = Wish(replicas, None, float("inf"))

    def on_arrival(self, view: View, now_s: float) -> Wish:
        return self._wish

    def on_idle(self, view: View, now_s: float) -> Wish:
        return self._wish

    def on_timer(self, view: View, now_s: float) -> Wish:
        return self._wish
