"""Observations that cannot be: not a number, negative, too old, or from the future. Scaling holds on them and says so.

Limits: what is merely unlikely is taken for true.
"""

from __future__ import annotations

import math
from typing import Final

from autoscaler.decision import Observed
from autoscaler.forecast import Forecast

LATE_S: Final = 10.0
"""A snapshot older than this says nothing about now."""
AHEAD_S: Final = 1.0
"""Clocks within one process do not differ by more."""
_INFINITY: Final = math.inf


def fault_of(observed: Observed, now_s: float) -> str:
    """What is wrong with it, or nothing. NaN fails every comparison, so that one chain of them finds all; among
    many it makes their sum NaN."""
    seen_s = now_s if observed.seen_s is None else observed.seen_s
    if (
        0 <= observed.waiting < _INFINITY
        and 0 <= observed.peak_demand < _INFINITY
        and observed.window_covered_s >= 0
        and -_INFINITY < observed.last_activity_s < _INFINITY
        and 0 <= observed.prompt_tokens < _INFINITY
        and 0 <= observed.output_tokens < _INFINITY
        and 0 <= observed.waiting_tokens < _INFINITY
        and 0 <= observed.running_tokens < _INFINITY
        and 0 <= observed.restarts_in_hour < _INFINITY
        and 0 <= observed.cold_waiters < _INFINITY
        and 0 < observed.device_price < _INFINITY
        and -AHEAD_S <= now_s - seen_s <= LATE_S
        and not any(
            value is not None and not 0 <= value < _INFINITY
            for value in (
                observed.cold_start_s,
                observed.cold_start_high_s,
                observed.kv_used_share,
                observed.first_token_s,
                observed.token_s,
                observed.arrivals_in_10_s,
                observed.arrivals_in_30_s,
                observed.arrivals_in_60_s,
                observed.may_have,
            )
        )
        and (observed.waiting_since_s is None or -_INFINITY < observed.waiting_since_s <= now_s + AHEAD_S)
        and (observed.restart_leaves_s is None or -_INFINITY < observed.restart_leaves_s < _INFINITY)
        and all(replica.in_flight >= 0 for replica in observed.replicas)
        and (not observed.gaps_s or min(observed.gaps_s) >= 0 <= sum(observed.gaps_s))
        and all(demand >= 0 and at_s < _INFINITY for at_s, demand in observed.peaks)
    ):
        return ""
    if not -AHEAD_S <= now_s - seen_s <= LATE_S:
        age_s = now_s - seen_s
        return f"observed {age_s:.1f} s ago" if age_s > 0 else f"observed {-age_s:.1f} s in the future"
    return _named(observed, now_s)


def _named(observed: Observed, now_s: float) -> str:
    for name in Observed.__slots__:
        value = getattr(observed, name)
        if name in ("last_activity_s", "restart_leaves_s", "waiting_since_s"):
            bad = value is not None and not -_INFINITY < value < _INFINITY
            bad = bad or (name == "waiting_since_s" and value is not None and value > now_s + AHEAD_S)
        elif name == "device_price":
            bad = not 0 < value < _INFINITY
        elif isinstance(value, bool) or not isinstance(value, int | float) or name == "seen_s":
            continue
        else:
            bad = not value >= 0 or value == _INFINITY
        if bad:
            return f"{name} is {value}"
    for replica in observed.replicas:
        if not replica.in_flight >= 0:
            return f"in_flight of {replica.replica_id} is {replica.in_flight}"
    return "a gap or a peak is negative or not a number"


def forecast_fault(forecast: Forecast, now_s: float) -> str:
    """Why it counts for nothing now, or nothing."""
    if not now_s <= forecast.valid_until_s:
        return "expired"
    if not forecast.made_s <= now_s + AHEAD_S:
        return "made in the future"
    if not forecast.step_s > 0:
        return "its step is not positive"
    # NaN makes a sum NaN; a negative rate among others does not show in it, and is as wrong.
    if forecast.rate and not (0 <= sum(forecast.rate) < _INFINITY and min(forecast.rate) >= 0):
        return "a rate is negative or not a number"
    for opens_s, closes_s in forecast.warm or ():
        if not 0 <= opens_s <= closes_s:
            return f"a window is {opens_s} to {closes_s}"
    for from_s, ready_s, until_s in forecast.clock or ():
        if not -_INFINITY < from_s <= until_s < _INFINITY or not from_s <= ready_s:
            return f"a span is {from_s} to {until_s}, ready at {ready_s}"
    return ""
