"""How many replicas a function should have: `decide`, a pure function of what was observed and what is expected.

Up at once, to where the next replica would cost more than the waiting it saves; down in two stages (N -> fewer by the
peaks of observed load, 1 -> 0 by the keep-alive); a forecast only raises the floor; missing or impossible data means
hold; what is starting is never counted as useless. Limits: who gets the devices where they are short is not decided
here: `may_have` and `device_price` say what was (`autoscaler.shares`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from autoscaler.decision import Decision, Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.forecast import Forecast
from autoscaler.keeping import KEEP_ALIVE_MIN_S, keep_alive_s, start_s
from autoscaler.needs import (
    Need,
    bursting,
    fewer_would_break,
    floor_of,
    needed_for,
    needed_now,
    places_of,
    spare_until_s,
    sustained,
)
from autoscaler.readings import fault_of, forecast_fault

__all__ = ["choose_victims", "decide", "keep_alive_s", "needed_for", "warm_workers"]

BUDGET_AGAIN_S: Final = 60.0
PANIC_AGAIN_S: Final = 5.0
HELD_AGAIN_S: Final = 5.0
QUOTA_AGAIN_S: Final = 1.0
WAITING_AGAIN_S: Final = (0.5, 5.0)
_FROM_ZERO: Final = frozenset({Reason.SCALE_OUT, Reason.MARGINAL, Reason.PANIC})
"""What is called FROM_ZERO where there was nothing."""


def decide(spec: ScalingSpec, observed: Observed, forecast: Forecast | None, now_s: float) -> Decision:
    """The number of replicas there should be now.

    Worked examples, at a target of 8: 17 requests waiting at zero -> 3. Idle at a minute's distance from a call that a
    forecast expects, with a start of 2 s: 0, to be asked again 2 s before; then 1 (`PREWARM`).
    """
    if not spec.advisory or forecast is None:
        return _decide(spec, observed, forecast, now_s)
    acting, advice = _decide(spec, observed, None, now_s), _decide(spec, observed, forecast, now_s)
    return Decision(
        acting.desired, acting.reason, acting.detail, _sooner(acting.ask_again_s, advice.ask_again_s),
        acting.generation, spec, observed, forecast, now_s, advice.floor, acting.kept_s,
        advice.desired, f"{advice.reason}: {advice.detail}",
    )  # fmt: skip


def _decide(spec: ScalingSpec, observed: Observed, forecast: Forecast | None, now_s: float) -> Decision:
    ready = starting = running = 0
    for replica in observed.replicas:
        running += replica.in_flight
        if replica.phase is Phase.READY:
            ready += 1
        elif replica.phase is Phase.STARTING:
            starting += 1
    current = ready + starting
    demand = observed.waiting + running
    floor = 0

    def answer(
        desired: int, reason: Reason, detail: str, ask_again_s: float | None = None, kept_s: float | None = None
    ) -> Decision:
        return Decision(
            desired, reason, detail, ask_again_s, observed.generation, spec, observed, forecast, now_s, floor, kept_s
        )

    fault = fault_of(observed, now_s)
    if fault:
        # Somebody who waits at zero is believed whatever else is wrong: holding zero would be refusing to serve.
        woken = current == 0 and observed.waiting > 0 and not observed.unusable and spec.max_replicas > 0
        return answer(1 if woken else current, Reason.HOLD_BAD_DATA, fault)
    if observed.unusable:
        return answer(min(current, spec.max_replicas), Reason.HOLD_UNUSABLE, observed.unusable)
    ignored = ""
    if forecast is not None and (wrong := forecast_fault(forecast, now_s)):
        ignored, forecast = f"; the forecast of {forecast.source} counts for nothing: {wrong}", None
    need = needed_now(spec, observed, ready, starting, demand, now_s)
    again_s = None
    expected = None if forecast is None else floor_of(spec, observed, forecast, demand, current, now_s)
    if expected is not None:
        floor, again_s = expected.replicas, expected.again_s
        if expected.replicas > need.replicas:
            need = expected
    if need.replicas > current:
        if not observed.complete and current > 0:
            return answer(current, Reason.HOLD_NO_DATA, "not everything is in sight yet")
        return _scale_out(spec, observed, need, current, now_s, again_s, answer)
    if not observed.complete:
        return answer(current, Reason.HOLD_NO_DATA, "not everything is in sight yet")
    if need.replicas == current:
        if need is expected:
            return answer(current, need.reason, need.detail, again_s)
        if observed.waiting and not starting:
            # Whether one more is worth it may change although nothing happens.
            again_s = _sooner(again_s, now_s + min(max(start_s(observed) / 4, WAITING_AGAIN_S[0]), WAITING_AGAIN_S[1]))
        return answer(current, Reason.AT_TARGET, f"{demand} at once need {current}{ignored}", again_s)
    if starting and current > spec.max_replicas and ready >= spec.max_replicas:
        return answer(spec.max_replicas, Reason.SCALE_IN, f"max_replicas is {spec.max_replicas} now")
    if starting:
        return answer(current, Reason.HOLD_STARTING, f"{starting} still starting", again_s)
    return _scale_in(spec, observed, forecast, now_s, current, demand, max(need.replicas, floor), again_s, answer)


def _scale_out(
    spec: ScalingSpec,
    observed: Observed,
    need: Need,
    current: int,
    now_s: float,
    again_s: float | None,
    answer: Callable[..., Decision],
) -> Decision:
    reason, detail = need.reason, need.detail
    if current == 0 and reason in _FROM_ZERO:
        reason = Reason.FROM_ZERO
    if need.replicas == spec.max_replicas and reason in _FROM_ZERO | {Reason.FROM_ZERO} and "bounded" not in detail:
        detail = f"{detail}, bounded by max_replicas {spec.max_replicas}"
    if observed.may_have is not None:
        allowed = current + math.floor(observed.may_have / spec.devices)
        if need.replicas > allowed:
            return answer(
                allowed,
                Reason.QUOTA,
                f"{detail}; the tenant may take {observed.may_have} devices more, at {spec.devices:g} a replica",
                now_s + QUOTA_AGAIN_S,
            )
    return answer(need.replicas, reason, detail, again_s)


def _scale_in(
    spec: ScalingSpec,
    observed: Observed,
    forecast: Forecast | None,
    now_s: float,
    current: int,
    demand: int,
    needed: int,
    again_s: float | None,
    answer: Callable[..., Decision],
) -> Decision:
    """Fewer than `current` are needed and none is starting. What a forecast wants is in `needed` already."""
    idle_until_s, kept_s, why = math.inf, None, ""
    if demand == 0:
        kept_s, why = _kept(spec, observed, forecast)
        if needed == 0:
            idle_until_s = observed.last_activity_s + kept_s
    if current > 1:
        return _fewer(spec, observed, now_s, current, demand, needed, idle_until_s, again_s, answer)
    if now_s < idle_until_s:
        return answer(current, Reason.KEEP_ALIVE, why, _sooner(again_s, idle_until_s), kept_s)
    if _budget_spent(spec, observed):
        return _over_budget(spec, observed, current, now_s, answer)
    idle_s = now_s - observed.last_activity_s
    return answer(0, Reason.TO_ZERO, f"idle for {idle_s:.2f} s, {why}", again_s, kept_s)


def _kept(spec: ScalingSpec, observed: Observed, forecast: Forecast | None) -> tuple[float, str]:
    """Seconds of idleness that the last replica is kept outside the windows of a forecast."""
    if spec.keep_alive_s is not None:
        return spec.keep_alive_s, f"kept for {spec.keep_alive_s:.2f} s as the function says"
    if forecast is not None and forecast.knows_gaps:
        kept_s = min(KEEP_ALIVE_MIN_S, 0.1 * start_s(observed))
        return kept_s, f"{forecast.source}: being ready does not pay now"
    rate = (observed.arrivals_in_60_s or 0) / 60.0
    price, waiters = observed.device_price, observed.cold_waiters
    kept_s = keep_alive_s(spec, observed.cold_start_s, observed.gaps_s, rate, price, waiters)
    return kept_s, f"kept for {kept_s:.2f} s, what a start is worth"


def _fewer(
    spec: ScalingSpec,
    observed: Observed,
    now_s: float,
    current: int,
    demand: int,
    needed: int,
    idle_until_s: float,
    again_s: float | None,
    answer: Callable[..., Decision],
) -> Decision:
    """Stage one: never below one, and by what was seen for as long as starting the replica again is worth."""
    floor = max(1, spec.min_replicas, needed)
    missing_s = spec.scale_in_window_s - observed.window_covered_s
    if missing_s > 0:
        return answer(
            current, Reason.HOLD_WINDOW, f"watched {observed.window_covered_s:.1f} s so far", now_s + missing_s
        )
    if demand and bursting(observed):
        return answer(current, Reason.PANIC, "arrivals have jumped", now_s + PANIC_AGAIN_S)
    places = places_of(spec, observed)
    peak = max(observed.peak_demand, demand)
    stage_one = max(min(max(math.ceil(peak / places), sustained(spec, observed, demand)), spec.max_replicas), floor)
    until_s = now_s + spec.scale_in_window_s / 4
    if observed.peaks and stage_one < current and now_s < idle_until_s:
        # Each has its own window; the last one goes first. Where the first is not worth keeping, no other is.
        while stage_one < current and (kept_until_s := spare_until_s(spec, observed, stage_one + 1)) > now_s:
            stage_one, until_s = stage_one + 1, kept_until_s
    if stage_one >= current:
        detail = f"up to {peak} at once within {spec.scale_in_window_s:.0f} s, or more not long enough ago"
        return answer(current, Reason.HOLD_WINDOW, detail, _sooner(again_s, until_s))
    if demand and (broken := fewer_would_break(spec, observed, current, stage_one)):
        return answer(current, Reason.HOLD_WINDOW, broken, _sooner(again_s, now_s + HELD_AGAIN_S))
    if _budget_spent(spec, observed):
        return _over_budget(spec, observed, current, now_s, answer)
    return answer(
        stage_one,
        Reason.SCALE_IN,
        f"at most {peak} at once in {spec.scale_in_window_s:.0f} s need {stage_one}",
        _sooner(again_s, until_s),
    )


def _budget_spent(spec: ScalingSpec, observed: Observed) -> bool:
    return spec.restarts_per_hour is not None and observed.restarts_in_hour >= spec.restarts_per_hour


def _over_budget(
    spec: ScalingSpec, observed: Observed, current: int, now_s: float, answer: Callable[..., Decision]
) -> Decision:
    leaves_s = observed.restart_leaves_s
    return answer(
        current,
        Reason.HOLD_BUDGET,
        f"restarted {observed.restarts_in_hour} times within the hour, the budget is {spec.restarts_per_hour:g}",
        now_s + BUDGET_AGAIN_S if leaves_s is None else max(leaves_s, now_s + 1.0),
    )


def _sooner(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return one_s if other_s is None else other_s
    return min(one_s, other_s)


def choose_victims(replicas: tuple[ReplicaView, ...], count: int) -> tuple[str, ...]:
    """Which `count` ready replicas to drain: old revisions first, then the fewest requests in flight (least is lost),
    then the youngest (its caches are the coldest). Starting and draining replicas are never chosen."""
    ready = [replica for replica in replicas if replica.phase is Phase.READY]
    ready.sort(key=lambda r: (r.current_revision, r.in_flight, -r.since_s, r.replica_id))
    return tuple(replica.replica_id for replica in ready[:count])


def warm_workers(functions_below_max: int, configured: int) -> int:
    """Workers to keep forked and waiting in a slot: as configured while any function could start a replica there."""
    return configured if functions_below_max > 0 else 0
