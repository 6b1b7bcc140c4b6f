"""The part of a function's spec that says how it is scaled: bounds, objectives, schedules, what waiting is worth.

What contradicts itself is refused when it is deployed, with the field and the reason. Limits: whether a ready replica
can keep an objective is known only once one was measured; `too_fast` says so then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

if TYPE_CHECKING:
    from autoscaler.decision import ScalingSpec
    from autoscaler.forecasting.schedule import Schedule as ParsedSchedule
    from autoscaler.service import ServiceModel

Seconds: TypeAlias = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
SCHEDULES_MAX: Final = 32


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Objectives(Part):
    """What ready replicas should keep to; a start from zero is not judged by them."""

    first_token_s: Seconds | None = None
    """Seconds from a request's arrival to its first token. Requests that would break it are refused early."""
    token_s: Seconds | None = None
    """Seconds from one token to the next."""


class Schedule(Part):
    """From each time of `cron` on, for `for_s`, at least so many replicas are ready."""

    cron: str = Field(min_length=1, max_length=200)
    """Five fields: minute, hour, day of the month, month, day of the week (`0 8 * * mon-fri`)."""
    for_s: float = Field(ge=60, le=7 * 86400, allow_inf_nan=False)
    replicas: int = Field(default=1, ge=1, le=1000)
    time_zone: str = Field(default="UTC", min_length=1, max_length=64)
    """Its name in the time zone database: `Europe/Berlin`."""

    @field_validator("cron")
    @classmethod
    def _cron(cls, cron: str) -> str:
        from autoscaler.forecasting.schedule import Cron

        Cron.parsed(cron)
        return cron

    @field_validator("time_zone")
    @classmethod
    def _time_zone(cls, name: str) -> str:
        zone_of(name)
        return name

    def parsed(self) -> ParsedSchedule:
        from autoscaler.forecasting.schedule import Schedule as ParsedSchedule

        return ParsedSchedule.parsed(self.cron, self.for_s, self.replicas, zone_of(self.time_zone))


def zone_of(name: str) -> Any:
    """The offset from UTC at an instant, in seconds. Raises ValueError for a name that is none."""
    import datetime
    import zoneinfo

    try:
        zone = zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name[:64]!r} is no time zone: use a name such as Europe/Berlin, or UTC") from None

    def offset_s(at_s: float) -> float:
        offset = datetime.datetime.fromtimestamp(at_s, zone).utcoffset()
        return 0.0 if offset is None else offset.total_seconds()

    return offset_s


class Scaling(Part):
    min_replicas: int = Field(default=0, ge=0, le=1000)
    """Replicas kept whatever the load; 0 lets the function cost nothing while nobody calls it."""
    max_replicas: int = Field(default=1, ge=1, le=1000)
    target_concurrency: float | None = Field(default=8.0, gt=0, le=10_000, allow_inf_nan=False)
    """Requests per replica that scaling aims at; null: as many as its measured speed makes cheapest."""
    max_concurrency: int = Field(default=32, ge=1, le=10_000)
    """Requests a replica takes at once; more wait."""
    keep_alive: Literal["auto"] | Annotated[float, Field(ge=0, le=30 * 86400, allow_inf_nan=False)] = "auto"
    """Seconds a replica outlives its last request; `auto` takes what the gaps between requests and the cold start make
    cheapest."""
    waiting_weight: float = Field(default=30.0, ge=0, le=100_000, allow_inf_nan=False)
    """Device-seconds that one second of a person's waiting is worth. More keeps replicas longer and starts them
    earlier."""
    objectives: Objectives = Objectives()
    schedules: tuple[Schedule, ...] = Field(default=(), max_length=SCHEDULES_MAX)
    """Times at which replicas have to be ready, whatever was observed."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Among the functions of a tenant: where devices are short, lower ones make room for higher."""
    mode: Literal["active", "advisory"] = "active"
    """advisory: forecasts only say what they would do (`stoker why`); the function is scaled by observed load."""
    restarts_per_hour: float | None = Field(default=None, ge=0, le=3600, allow_inf_nan=False)
    """After so many starts within an hour that followed a stop, stops are put off. It never delays a start."""

    @model_validator(mode="after")
    def _consistent(self) -> Scaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        if self.target_concurrency is not None and self.target_concurrency > self.max_concurrency:
            raise ValueError(
                f"target_concurrency ({self.target_concurrency:g}) is above max_concurrency ({self.max_concurrency})"
            )
        for number, schedule in enumerate(self.schedules):
            if schedule.replicas > self.max_replicas:
                raise ValueError(
                    f"schedules[{number}] asks for {schedule.replicas} replicas, above max_replicas "
                    f"({self.max_replicas})"
                )
        return self

    def check_against(self, first_token_limit_s: float, idle_limit_s: float) -> None:
        """Raises ValueError where an objective lies beyond the limit at which a request is ended."""
        first_s, token_s = self.objectives.first_token_s, self.objectives.token_s
        if first_s is not None and first_s > first_token_limit_s:
            raise ValueError(
                f"scaling.objectives.first_token_s ({first_s:g}) is above timeouts.first_token_s "
                f"({first_token_limit_s:g}), which ends requests before"
            )
        if token_s is not None and token_s > idle_limit_s:
            raise ValueError(
                f"scaling.objectives.token_s ({token_s:g}) is above timeouts.idle_s ({idle_limit_s:g}), which ends "
                "requests before"
            )

    def to_decide(self, devices: int, window_s: float) -> ScalingSpec:
        """As scaling reads it."""
        from autoscaler.decision import ScalingSpec

        return ScalingSpec(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            target_concurrency=self.target_concurrency,
            keep_alive_s=None if self.keep_alive == "auto" else float(self.keep_alive),
            scale_in_window_s=window_s,
            waiting_weight=self.waiting_weight,
            devices=devices,
            first_token_objective_s=self.objectives.first_token_s,
            token_objective_s=self.objectives.token_s,
            restarts_per_hour=self.restarts_per_hour,
            priority=self.priority,
            advisory=self.mode == "advisory",
        )


def too_fast(objectives: Objectives, service: ServiceModel) -> tuple[str, str] | None:
    """The field that asks for more than a ready, idle replica was measured to do, and why."""
    first_s, token_s = service.first_token_s(1, 1), service.step_s(1)
    if objectives.first_token_s is not None and objectives.first_token_s < first_s:
        return (
            "scaling.objectives.first_token_s",
            f"{objectives.first_token_s:g} s is less than the {first_s:.3g} s that a ready replica with nothing else "
            "to do was measured to take for the shortest prompt",
        )
    if objectives.token_s is not None and objectives.token_s < token_s:
        return (
            "scaling.objectives.token_s",
            f"{objectives.token_s:g} s is less than the {token_s:.3g} s that a ready replica with nothing else to do "
            "was measured to take",
        )
    return None
