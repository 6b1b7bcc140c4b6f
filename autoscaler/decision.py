"""What scaling looks at and what it answers: plain values, so that a decision can be replayed from its record.

`Observed` is a snapshot of one function; `Decision` says how many replicas there should be, why, and when to ask again.
Limits: nothing here reads a clock; all times are seconds on the caller's clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Reason(enum.StrEnum):
    HOLD_NO_DATA = "hold_no_data"
    """The caller does not see everything (just started, slot unreachable): keep what runs."""
    HOLD_UNUSABLE = "hold_unusable"
    """The revision cannot start (bad checkpoint, back-off): start nothing, keep what runs."""
    FROM_ZERO = "from_zero"
    SCALE_OUT = "scale_out"
    AT_TARGET = "at_target"
    HOLD_STARTING = "hold_starting"
    """Fewer would do, but a replica is still starting, and what is starting is never counted as useless."""
    HOLD_WINDOW = "hold_window"
    """Fewer would do now, but not yet for the whole scale-in window."""
    SCALE_IN = "scale_in"
    KEEP_ALIVE = "keep_alive"
    """Idle, and within the keep-alive."""
    TO_ZERO = "to_zero"


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """The part of a function's spec that scaling reads."""

    min_replicas: int = 0
    max_replicas: int = 1
    target_concurrency: int = 8
    """Requests in flight per replica that scaling aims at."""
    keep_alive_s: float | None = None
    """None: chosen from what a start costs (`scaling.keep_alive_s`)."""
    scale_in_window_s: float = 15.0
    """N -> fewer only if the peak of this long window would have needed fewer."""
    waiting_weight: float = 30.0
    """Device-seconds that one second of a person's waiting is worth; used by the automatic keep-alive."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    replica_id: str
    phase: Phase
    in_flight: int
    since_s: float
    """When it entered its phase."""
    current_revision: bool = True


@dataclass(frozen=True, slots=True)
class Observed:
    waiting: int
    """Requests accepted and not with a replica."""
    replicas: tuple[ReplicaView, ...]
    peak_demand: int
    """Largest waiting + running seen within the scale-in window."""
    window_covered_s: float
    """How much of the scale-in window has been watched; less than the window after a restart."""
    last_activity_s: float
    """When a request was last waiting or running (or, if never, when the function was deployed)."""
    generation: int = 0
    """Grows with every request accepted. A decision to go to zero holds for this generation only."""
    cold_start_s: float | None = None
    """Measured median seconds from asking for a replica to its being ready; None: never measured."""
    gaps_s: tuple[float, ...] = ()
    """Lengths of the last idle gaps between activity and the next request."""
    complete: bool = True
    unusable: str = ""

    @property
    def running(self) -> int:
        return sum(replica.in_flight for replica in self.replicas)

    def count(self, phase: Phase) -> int:
        return sum(replica.phase is phase for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class Decision:
    desired: int
    """Replicas that should be starting or ready."""
    reason: Reason
    detail: str
    ask_again_s: float | None
    """On the caller's clock; None: nothing changes by the passing of time alone."""
    generation: int
    inputs: dict[str, float | int | str | None] = field(default_factory=dict)
