"""What scaling looks at and what it answers: plain values, so that a decision can be replayed from its record.

`Observed` is a snapshot of one function; `Decision` says how many replicas there should be, why, and when to ask again.
Limits: nothing here reads a clock; all times are seconds on the caller's clock, unless a field says otherwise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autoscaler.forecast import Forecast
from autoscaler.service import ServiceModel

Input = float | int | str | None


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Reason(enum.StrEnum):
    HOLD_NO_DATA = "hold_no_data"
    """The caller does not see everything (just started, slot unreachable): keep what runs."""
    HOLD_BAD_DATA = "hold_bad_data"
    """A number that was observed cannot be (NaN, negative), or was observed too long ago: keep what runs."""
    HOLD_UNUSABLE = "hold_unusable"
    """The revision cannot start (bad checkpoint, back-off): start nothing, keep what runs."""
    FROM_ZERO = "from_zero"
    PREWARM = "prewarm"
    """Nobody waits yet: the forecast says that being ready in time costs less than a start in somebody's way."""
    SCHEDULE = "schedule"
    """As PREWARM and FORECAST_FLOOR, by a schedule that the user gave."""
    FORECAST_FLOOR = "forecast_floor"
    """The load expected when a start begun now would be ready needs more than what is there, or all of it."""
    SCALE_OUT = "scale_out"
    """By concurrency."""
    MARGINAL = "marginal"
    """A replica more costs less than the waiting that it saves."""
    TOKEN_PRESSURE = "token_pressure"
    """The KV memory of the replicas does not hold the tokens that run and wait."""
    OBJECTIVE = "objective"
    """An objective of the function (time to first token, time per token) is broken with what is ready."""
    PANIC = "panic"
    """Arrivals have jumped: scaled by those of the last ten seconds, and nothing ends meanwhile."""
    QUOTA = "quota"
    """More would be right, but the tenant may take no more devices."""
    AT_TARGET = "at_target"
    HOLD_STARTING = "hold_starting"
    """Fewer would do, but a replica is still starting, and what is starting is never counted as useless."""
    HOLD_WINDOW = "hold_window"
    """Fewer would do now, but not yet for as long as it takes to be worth it."""
    HOLD_BUDGET = "hold_budget"
    """Fewer would do, but the function was restarted too often within the hour."""
    SCALE_IN = "scale_in"
    KEEP_ALIVE = "keep_alive"
    """Idle, and within the keep-alive."""
    TO_ZERO = "to_zero"


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """The part of a function's spec that scaling reads."""

    min_replicas: int = 0
    max_replicas: int = 1
    target_concurrency: float | None = 8
    """Requests in flight per replica that scaling aims at. None: no aim of its own; what a replica can take, and the
    waiting it saves, decide (`Observed.service`), or `ASSUMED_CONCURRENCY` while that was never measured."""
    keep_alive_s: float | None = None
    """None: chosen from what a start costs (`scaling.keep_alive_s`)."""
    scale_in_window_s: float = 15.0
    """N -> fewer only if the peak of this long window would have needed fewer."""
    waiting_weight: float = 30.0
    """Device-seconds that one second of a person's waiting is worth."""
    devices: float = 1
    """Devices that one replica holds; a share of one where several functions divide it."""
    first_token_objective_s: float | None = None
    """Seconds to the first token that ready replicas should keep to; a start from zero is not judged by it."""
    token_objective_s: float | None = None
    """Seconds per further token."""
    restarts_per_hour: float | None = None
    """Above so many starts within the hour, stops are put off. None: what stops and starts cost is enough."""
    priority: int = 0
    """Whose work gives way where devices are short; the greater stays."""
    advisory: bool = False
    """The forecast only says what it would do."""


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
    cold_waiters: float = 1.0
    """Requests that waited for a start from zero, on average lately."""
    gaps_s: tuple[float, ...] = ()
    """Lengths of the last idle gaps between activity and the next request."""
    complete: bool = True
    unusable: str = ""
    cold_start_high_s: float | None = None
    """The 0.9 quantile of the same seconds: how early a start has to begin that must not be late."""
    seen_s: float | None = None
    """When this was observed; None: just now."""
    service: ServiceModel | None = None
    """Measured speeds of a replica; None: not known, and concurrency alone decides."""
    prompt_tokens: float = 0.0
    """Mean of the last requests'; 0: not known."""
    output_tokens: float = 0.0
    """Expected of the requests that run and wait, on average; 0: not known."""
    waiting_tokens: int = 0
    """Prompt tokens of the requests that wait."""
    running_tokens: int = 0
    """Tokens whose KV the running requests hold, or will when they have been read."""
    kv_used_share: float | None = None
    """Of the ready replicas' KV memory, by running requests."""
    first_token_s: float | None = None
    """Seconds to the first token lately, of requests that found a ready replica."""
    token_s: float | None = None
    """Seconds per further token lately."""
    waiting_since_s: float | None = None
    """When the one who waits longest came; None: not known."""
    arrivals_in_10_s: int | None = None
    arrivals_in_30_s: int | None = None
    arrivals_in_60_s: int | None = None
    peaks: tuple[tuple[float, int], ...] = ()
    """(when demand was last this high, how high), falling from peak to peak (`autoscaler.peaks`); () where only
    `peak_demand` is known."""
    restarts_in_hour: int = 0
    """Starts within the last hour that followed a stop."""
    restart_leaves_s: float | None = None
    """When the oldest of them will be an hour old."""
    may_have: int | None = None
    """Devices that the tenant may take besides those it has; None: any number."""
    device_price: float = 1.0
    """What a device is worth to others now: 1 while there are free ones, more while others wait for them."""

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
    spec: ScalingSpec | None = None
    observed: Observed | None = None
    forecast: Forecast | None = None
    now_s: float = 0.0
    floor: int = 0
    """Replicas that the forecast alone wants."""
    kept_s: float | None = None
    """Seconds of idleness that the last replica is kept, where that was asked."""
    advised: int | None = None
    """What would be desired if the forecast acted (advisory mode)."""
    advice: str = ""

    def holds_for(self, generation: int) -> bool:
        """Whether it may still be carried out. Going to zero is void once a request was accepted after the look."""
        return self.desired > 0 or generation == self.generation

    @property
    def inputs(self) -> dict[str, Input]:
        """What it was decided from, for the record. Made when asked for: most decisions change nothing."""
        observed, spec = self.observed, self.spec
        if observed is None or spec is None:
            return {}
        found: dict[str, Input] = {
            "waiting": observed.waiting,
            "running": observed.running,
            "ready": observed.count(Phase.READY),
            "starting": observed.count(Phase.STARTING),
            "peak_demand": observed.peak_demand,
            "target_concurrency": spec.target_concurrency,
            "max_replicas": spec.max_replicas,
            "min_replicas": spec.min_replicas,
            "keep_alive_s": None if self.kept_s is None else round(self.kept_s, 3),
            "cold_start_s": observed.cold_start_s,
            "idle_s": round(max(self.now_s - observed.last_activity_s, 0.0), 3),
        }
        optional: dict[str, Input] = {
            "waiting_weight": spec.waiting_weight,
            "devices": spec.devices if spec.devices != 1 else None,
            "kv_used_share": observed.kv_used_share,
            "first_token_s": observed.first_token_s,
            "token_s": observed.token_s,
            "arrivals_in_10_s": observed.arrivals_in_10_s,
            "arrivals_in_30_s": observed.arrivals_in_30_s,
            "arrivals_in_60_s": observed.arrivals_in_60_s,
            "waited_s": None if observed.waiting_since_s is None else round(self.now_s - observed.waiting_since_s, 3),
            "cold_waiters": round(observed.cold_waiters, 1) if observed.cold_waiters != 1.0 else None,
            "restarts_in_hour": observed.restarts_in_hour or None,
            "may_have": observed.may_have,
            "device_price": observed.device_price if observed.device_price != 1.0 else None,
            "advised": self.advised,
            "advice": self.advice or None,
        }
        if self.forecast is not None:
            optional["forecast"] = self.forecast.source
            optional["forecast_floor"] = self.floor
            optional["forecast_rate"] = self.forecast.rate_at(self.now_s)
        found.update((name, value) for name, value in optional.items() if value is not None)
        return found
