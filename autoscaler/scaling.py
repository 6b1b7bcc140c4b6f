"""How many replicas a function should have: `decide`, a pure function of what was observed.

Up at once, by concurrency; down in two stages (N -> 1 by the peak of a window, 1 -> 0 by the keep-alive); missing data
means hold; what is starting is never counted as useless. Forecasts are not part of it yet: it reacts to observed load.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autoscaler.decision import Decision, Observed, Phase, Reason, ReplicaView, ScalingSpec

KEEP_ALIVE_MIN_S = 1.0
KEEP_ALIVE_MAX_S = 3600.0
ASSUMED_COLD_START_S = 10.0
GAPS_NEEDED = 20


def keep_alive_s(spec: ScalingSpec, cold_start_s: float | None, gaps_s: tuple[float, ...]) -> float:
    """Seconds an idle last replica is kept.

    A start costs `cold_start_s` of the device and as long of a person's waiting, worth `waiting_weight` device-seconds
    a second. Keeping an idle device just as long as a start costs is never worse than twice the best choice made in
    hindsight (the ski-rental bound); known gaps may shorten it to what would have been cheapest for them, and never
    lengthen it.
    With 0.25 s and the default weight of 30: 0.25 * 31 = 7.75 s (`test_keep_alive_is_the_break_even_of_a_start`).
    """
    if spec.keep_alive_s is not None:
        return spec.keep_alive_s
    start_cost_s = (ASSUMED_COLD_START_S if cold_start_s is None else cold_start_s) * (1.0 + spec.waiting_weight)
    break_even_s = min(max(start_cost_s, KEEP_ALIVE_MIN_S), KEEP_ALIVE_MAX_S)
    if len(gaps_s) < GAPS_NEEDED:
        return break_even_s

    def cost(kept_s: float) -> float:
        return sum(gap if gap <= kept_s else kept_s + start_cost_s for gap in gaps_s)

    candidates = {KEEP_ALIVE_MIN_S, break_even_s} | {
        gap * 1.1 for gap in gaps_s if KEEP_ALIVE_MIN_S <= gap * 1.1 <= break_even_s
    }
    return min(sorted(candidates, reverse=True), key=cost)


def needed_for(demand: int, spec: ScalingSpec) -> int:
    """Replicas that `demand` requests at once need, within the spec's bounds."""
    return min(max(math.ceil(demand / spec.target_concurrency), spec.min_replicas), spec.max_replicas)


def decide(spec: ScalingSpec, observed: Observed, now_s: float) -> Decision:
    """The number of replicas there should be now. Worked example: target 8, 17 requests waiting at zero -> 3."""
    ready, starting = observed.count(Phase.READY), observed.count(Phase.STARTING)
    current = ready + starting
    demand = observed.waiting + observed.running
    kept_s = keep_alive_s(spec, observed.cold_start_s, observed.gaps_s)
    inputs: dict[str, float | int | str | None] = {
        "waiting": observed.waiting,
        "running": observed.running,
        "ready": ready,
        "starting": starting,
        "peak_demand": observed.peak_demand,
        "target_concurrency": spec.target_concurrency,
        "max_replicas": spec.max_replicas,
        "min_replicas": spec.min_replicas,
        "keep_alive_s": round(kept_s, 3),
        "cold_start_s": observed.cold_start_s,
        "idle_s": round(max(now_s - observed.last_activity_s, 0.0), 3),
    }

    def answer(desired: int, reason: Reason, detail: str, ask_again_s: float | None = None) -> Decision:
        return Decision(desired, reason, detail, ask_again_s, observed.generation, inputs)

    if observed.unusable:
        return answer(min(current, spec.max_replicas), Reason.HOLD_UNUSABLE, observed.unusable)
    needed = needed_for(demand, spec)
    if needed > current:
        if not observed.complete and current > 0:
            return answer(current, Reason.HOLD_NO_DATA, "not everything is in sight yet")
        reason = Reason.FROM_ZERO if current == 0 else Reason.SCALE_OUT
        bound = f", bounded by max_replicas {spec.max_replicas}" if needed == spec.max_replicas else ""
        return answer(needed, reason, f"{demand} at once at a target of {spec.target_concurrency} need {needed}{bound}")
    if not observed.complete:
        return answer(current, Reason.HOLD_NO_DATA, "not everything is in sight yet")
    if needed == current:
        return answer(current, Reason.AT_TARGET, f"{demand} at once need {needed}")
    if starting and current > spec.max_replicas and ready >= spec.max_replicas:
        return answer(spec.max_replicas, Reason.SCALE_IN, f"max_replicas is {spec.max_replicas} now")
    if starting:
        return answer(current, Reason.HOLD_STARTING, f"{starting} still starting")
    return _scale_in(spec, observed, now_s, current, demand, kept_s, answer)


def _scale_in(
    spec: ScalingSpec,
    observed: Observed,
    now_s: float,
    current: int,
    demand: int,
    kept_s: float,
    answer: Callable[..., Decision],
) -> Decision:
    """Fewer than `current` are needed and none is starting."""
    floor = max(1, spec.min_replicas)
    stage_one = max(needed_for(max(observed.peak_demand, demand), spec), floor)
    if current > stage_one:
        missing_s = spec.scale_in_window_s - observed.window_covered_s
        if missing_s > 0:
            return answer(
                current,
                Reason.HOLD_WINDOW,
                f"watched {observed.window_covered_s:.1f} s so far",
                now_s + missing_s,
            )
        return answer(
            stage_one,
            Reason.SCALE_IN,
            f"at most {observed.peak_demand} at once in {spec.scale_in_window_s:.0f} s need {stage_one}",
        )
    if demand > 0 or spec.min_replicas > 0 or current > 1:
        # The window's peak still needs them; it can only fall as time passes.
        return answer(
            current,
            Reason.HOLD_WINDOW,
            f"up to {observed.peak_demand} at once within {spec.scale_in_window_s:.0f} s",
            now_s + spec.scale_in_window_s / 4,
        )
    idle_until_s = observed.last_activity_s + kept_s
    if now_s < idle_until_s:
        return answer(current, Reason.KEEP_ALIVE, f"idle, kept for {kept_s:.2f} s", idle_until_s)
    return answer(0, Reason.TO_ZERO, f"idle for {now_s - observed.last_activity_s:.2f} s, kept {kept_s:.2f} s")


def choose_victims(replicas: tuple[ReplicaView, ...], count: int) -> tuple[str, ...]:
    """Which `count` ready replicas to drain: old revisions first, then the fewest requests in flight (least is lost),
    then the youngest (its caches are the coldest). Starting and draining replicas are never chosen."""
    ready = [replica for replica in replicas if replica.phase is Phase.READY]
    ready.sort(key=lambda r: (r.current_revision, r.in_flight, -r.since_s, r.replica_id))
    return tuple(replica.replica_id for replica in ready[:count])


def warm_workers(functions_below_max: int, configured: int) -> int:
    """Workers to keep forked and waiting in a slot: as configured while any function could start a replica there."""
    return configured if functions_below_max > 0 else 0
