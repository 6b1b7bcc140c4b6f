"""How many replicas are needed: by what was observed (`needed_now`), and by what a forecast expects (`floor_of`).

Observed load asks by concurrency, tokens, objectives and the marginal rule, the most of them counts; a forecast asks
for what would be ready when it comes true, never for less than is there. Limits: a burst is known by its arrivals in
ten seconds; what it does within them, only by the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from autoscaler.decision import Observed, Reason, ScalingSpec
from autoscaler.forecast import Forecast
from autoscaler.keeping import spare_kept_s, start_cost_s, start_s
from autoscaler.marginal import HORIZON_S, capacity, steady, worth_having
from autoscaler.service import ServiceModel

ASSUMED_CONCURRENCY: Final = 8.0
KV_FULL: Final = 0.95
"""Share of the KV memory above which replicas begin to put requests off."""
MARGIN: Final = 0.8
"""Share of an objective that has to hold with fewer replicas before there are fewer."""
BURST_MIN: Final = 8
"""Arrivals in ten seconds below which nothing is a burst."""
QUEUE_MIN: Final = 4
QUEUE_LEAST_S: Final = 0.5
"""Of several that came at the same moment it is not said how many come in the next."""
GOES_ON: Final = 5.0
"""Of 1, 2, 5 and 20 what cost least on clients and days that no benchmark scores: with 1, as long again as it has
lasted, replicas for a flood were asked for when half of it was over."""
BURST_FACTOR: Final = 2.0
"""Of the rate before: Knative's panic threshold."""


@dataclass(frozen=True, slots=True)
class Need:
    replicas: int
    reason: Reason
    detail: str
    again_s: float | None = None


def speeds_of(observed: Observed) -> ServiceModel | None:
    """Of a replica, where it is known what requests ask of it as well."""
    return observed.service if observed.output_tokens > 0 else None


def needed_for(demand: int, spec: ScalingSpec) -> int:
    """Replicas that `demand` requests at once need by concurrency, within the spec's bounds."""
    target = spec.target_concurrency or ASSUMED_CONCURRENCY
    return min(max(math.ceil(demand / target), spec.min_replicas), spec.max_replicas)


def places_of(spec: ScalingSpec, observed: Observed) -> float:
    """Requests at once for which one replica is there."""
    if spec.target_concurrency is not None:
        return spec.target_concurrency
    service = speeds_of(observed)
    if service is None:
        return ASSUMED_CONCURRENCY
    return service.full_batch(round(observed.prompt_tokens), round(observed.output_tokens))


def bursting(observed: Observed) -> bool:
    """Whether the arrivals of the last ten seconds are out of proportion to the fifty before, and not by chance."""
    last, minute = observed.arrivals_in_10_s, observed.arrivals_in_60_s
    if last is None or minute is None or last < BURST_MIN:
        return False
    usual = max(minute - last, 0) / 5.0
    return last > BURST_FACTOR * usual and last > usual + 3.0 * math.sqrt(usual + 1.0)


def expected_rates(observed: Observed, seconds: float, now_s: float) -> tuple[float, float]:
    """Arrivals a second to expect until a start is over, and in the `HORIZON_S` after it.

    What came within the last t seconds goes on for a while that is not known, as a rule for `GOES_ON` times as long as
    it has lasted, and ever less after that: n arrivals in t give n g ln(1 + h/tg) in the next h (durations of a Lomax
    law, whose rests grow with their age). The most counts of what says the queue, all of which came since the first of
    it did (a standard deviation less, so that few say little), ten seconds, thirty and sixty. So a batch that came at
    one moment is no flood, and a flood is known before ten seconds have passed.
    """
    soon = later = 0.0
    whole = seconds + HORIZON_S
    queued, since_s = observed.waiting, observed.waiting_since_s
    for count, age_s in (
        (0.0 if since_s is None or queued < QUEUE_MIN else queued - math.sqrt(queued), now_s - (since_s or 0.0)),
        (observed.arrivals_in_10_s or 0, 10.0),
        (observed.arrivals_in_30_s or 0, 30.0),
        (observed.arrivals_in_60_s or 0, 60.0),
    ):
        if count:
            age_s = max(age_s, QUEUE_LEAST_S)
            count, age_s = count * GOES_ON, age_s * GOES_ON
            until = count * math.log1p(seconds / age_s)
            soon = max(soon, until / max(seconds, 1e-3))
            later = max(later, (count * math.log1p(whole / age_s) - until) / HORIZON_S)
    return soon, later


def needed_now(spec: ScalingSpec, observed: Observed, ready: int, starting: int, demand: int, now_s: float) -> Need:
    """By observed load alone. More than there is only where more would help."""
    least = min(spec.min_replicas, spec.max_replicas)
    if demand == 0:
        return Need(least, Reason.SCALE_OUT, f"min_replicas is {spec.min_replicas}")
    current = ready + starting
    places = places_of(spec, observed)
    by_places = min(max(math.ceil(demand / places), 1), spec.max_replicas)
    if spec.target_concurrency is None and speeds_of(observed) is not None:
        # Full places are no reason of their own: whether a replica more is worth it is for the marginal rule to say.
        by_places = max(min(by_places, current), 1)
        found = Need(max(by_places, least), Reason.SCALE_OUT, f"{demand} at once in places of {places:g}")
    else:
        found = Need(
            max(by_places, least), Reason.SCALE_OUT, f"{demand} at once at a target of {places:g} need {by_places}"
        )
    if speeds_of(observed) is not None and (current == 0 or demand > places * ready):
        found = _greater(found, _by_worth(spec, observed, now_s))
    if current:
        found = _greater(found, _by_tokens(spec, observed, ready, starting))
        found = _greater(found, _by_objectives(spec, observed, ready, starting))
    if found.replicas > spec.max_replicas:
        return Need(spec.max_replicas, found.reason, f"{found.detail}, bounded by max_replicas {spec.max_replicas}")
    return found


def _greater(one: Need, other: Need | None) -> Need:
    return one if other is None or other.replicas <= one.replicas else other


def _by_worth(spec: ScalingSpec, observed: Observed, now_s: float) -> Need | None:
    service = speeds_of(observed)
    if service is None:
        return None
    seconds = start_s(observed)
    rates = expected_rates(observed, seconds, now_s)
    replicas, saved = worth_having(spec, observed, service, rates, seconds, now_s, spare_kept_s(spec, seconds, 0.0))
    reason = Reason.PANIC if bursting(observed) else Reason.MARGINAL
    if saved <= 0:
        return Need(replicas, reason, f"one start for {observed.waiting} waiting")
    detail = f"{observed.waiting} wait, {rates[0]:.2g} a second come: the last of {replicas} saves {saved:.0f}"
    return Need(replicas, reason, f"{detail} device-seconds")


def _by_tokens(spec: ScalingSpec, observed: Observed, ready: int, starting: int) -> Need | None:
    """The KV memory that running and waiting requests take, against that of the replicas."""
    kv_tokens = observed.service.kv_tokens if observed.service is not None else 0
    tokens = observed.waiting_tokens + observed.running_tokens
    if kv_tokens > 0 and tokens > KV_FULL * kv_tokens * (ready + starting) and spec.target_concurrency is not None:
        needed = math.ceil(tokens / (KV_FULL * kv_tokens))
        return Need(needed, Reason.TOKEN_PRESSURE, f"{tokens} tokens at {kv_tokens} a replica need {needed}")
    share = observed.kv_used_share
    if share is not None and share > KV_FULL and observed.waiting and not starting:
        return Need(ready + 1, Reason.TOKEN_PRESSURE, f"{share:.0%} of the KV memory is used, {observed.waiting} wait")
    return None


def _by_objectives(spec: ScalingSpec, observed: Observed, ready: int, starting: int) -> Need | None:
    """One more at a time, and only while requests share replicas: alone, a request is as fast as it gets."""
    running, service = observed.running, observed.service
    if ready == 0 or running + observed.waiting <= ready:
        return None
    objective_s, measured_s = spec.token_objective_s, observed.token_s
    if objective_s is not None:
        if service is not None:
            context = observed.running_tokens // ready
            most = min(running, spec.max_replicas)
            needed = ready
            while (
                needed < most and service.step_s(math.ceil(running / needed), context * ready // needed) > objective_s
            ):
                needed += 1
            if needed > ready + starting:
                return Need(needed, Reason.OBJECTIVE, f"{running} at once break {objective_s:g} s a token on {ready}")
        if measured_s is not None and measured_s > objective_s and not starting:
            return Need(ready + 1, Reason.OBJECTIVE, f"{measured_s:.3g} s a token, the objective is {objective_s:g}")
    objective_s, measured_s = spec.first_token_objective_s, observed.first_token_s
    if objective_s is None or starting:
        return None
    alone_s = expected_s = 0.0
    if service is not None:
        _, drain, alone_s = capacity(service, observed.prompt_tokens, observed.output_tokens)
        expected_s = observed.waiting / (ready * drain) + alone_s
    if alone_s > objective_s:
        return None  # no number of replicas would keep it
    if measured_s is not None and measured_s > objective_s:
        return Need(ready + 1, Reason.OBJECTIVE, f"{measured_s:.3g} s to the first token, promised {objective_s:g}")
    if expected_s > objective_s and expected_s > start_s(observed):
        return Need(ready + 1, Reason.OBJECTIVE, f"{expected_s:.3g} s to the first token expected of {ready}")
    return None


def fewer_would_break(spec: ScalingSpec, observed: Observed, ready: int, fewer: int) -> str:
    """What of tokens and objectives would not hold with `fewer` ready replicas, if what runs now were moved together;
    nothing if all would. With a margin, so that what was added for a reason is not taken back at once."""
    running = observed.running
    if fewer < 1 or running + observed.waiting <= fewer:
        return ""
    more, service = ready / fewer, observed.service
    share = observed.kv_used_share
    if share is not None and share * more > MARGIN * KV_FULL:
        return f"{share:.0%} of the KV memory on {ready} is too much for {fewer}"
    if service is not None and service.kv_tokens:
        tokens = observed.running_tokens + observed.waiting_tokens
        if tokens > MARGIN * service.kv_tokens * fewer:
            return f"{tokens} tokens are too many for {fewer}"
    objective_s = spec.token_objective_s
    if objective_s is not None:
        expected_s = 0.0 if observed.token_s is None else observed.token_s
        if service is not None:
            expected_s = service.step_s(math.ceil(running / fewer), observed.running_tokens // fewer)
        if expected_s > MARGIN * objective_s:
            return f"{expected_s:.3g} s a token are too near to {objective_s:g} for {fewer}"
    objective_s = spec.first_token_objective_s
    if objective_s is not None and observed.first_token_s is not None and observed.first_token_s > MARGIN * objective_s:
        return f"{observed.first_token_s:.3g} s to the first token are too near to {objective_s:g} for {fewer}"
    return ""


def lead_s(observed: Observed) -> float:
    """How long before it must be ready a start has to begin."""
    high_s = observed.cold_start_high_s
    return start_s(observed) if high_s is None else max(high_s, start_s(observed))


def floor_of(
    spec: ScalingSpec, observed: Observed, forecast: Forecast, demand: int, current: int, now_s: float
) -> Need | None:
    """What the forecast wants to be there. None: it wants nothing now, and will not by the passing of time alone.

    Where devices are short (`device_price` above 1) what is expected starts nothing; it still holds what is there.
    """
    found = _by_schedule(spec, observed, forecast, now_s)
    if demand == 0:
        found = _later(found, _by_windows(spec, observed, forecast, now_s))
        found = _later(found, _by_clock(observed, forecast, current, now_s))
    found = _later(found, _by_rate(spec, observed, forecast, demand, now_s))
    if found is None:
        return None
    replicas = min(found.replicas, spec.max_replicas)
    if replicas > current and observed.device_price > 1.0 and found.reason is not Reason.SCHEDULE:
        replicas = current
    return found if replicas == found.replicas else Need(replicas, found.reason, found.detail, found.again_s)


def _later(one: Need | None, other: Need | None) -> Need | None:
    """The greater; asked again as soon as either wants it."""
    if one is None or other is None:
        return one or other
    more, less = (one, other) if one.replicas >= other.replicas else (other, one)
    if less.again_s is None or (more.again_s is not None and more.again_s <= less.again_s):
        return more
    return Need(more.replicas, more.reason, more.detail, less.again_s)


def _by_schedule(spec: ScalingSpec, observed: Observed, forecast: Forecast, now_s: float) -> Need | None:
    if not forecast.floor:
        return None
    lead = lead_s(observed)
    replicas = forecast.floor_until(now_s, now_s + lead)
    step_s = forecast.step_s
    passed = int((now_s + lead - forecast.made_s) // step_s) + 1
    return Need(
        replicas,
        Reason.SCHEDULE,
        f"the schedule asks for {replicas} within {lead:.3g} s",
        max(forecast.made_s + passed * step_s - lead, now_s + 0.1),
    )


def _by_windows(spec: ScalingSpec, observed: Observed, forecast: Forecast, now_s: float) -> Need | None:
    """The windows in which being ready pays, from 0 to 1 and for the last replica."""
    if not forecast.warm:
        return None
    last_s, lead = observed.last_activity_s, lead_s(observed)
    idle_s = now_s - last_s
    price = observed.device_price
    for opens_s, closes_s in forecast.warm:
        if price > 1.0:
            closes_s = opens_s + (closes_s - opens_s) / price
        if idle_s >= closes_s:
            continue
        if idle_s < opens_s - lead:
            detail = f"ready at {opens_s:.3g} s of idleness is early enough"
            return Need(0, Reason.PREWARM, detail, last_s + opens_s - lead)
        again_s = last_s + closes_s if closes_s < math.inf else None
        detail = f"{forecast.source}: being ready pays from {opens_s:.3g} to {closes_s:.3g} s after the last activity"
        return Need(1, Reason.PREWARM if opens_s > 0 else Reason.KEEP_ALIVE, detail, again_s)
    return None


def _by_clock(observed: Observed, forecast: Forecast, current: int, now_s: float) -> Need | None:
    """The spans in which being ready pays: to hold what is there, and to have one ready where there is none."""
    lead, price = lead_s(observed), observed.device_price
    for from_s, ready_s, until_s in forecast.clock or ():
        if price > 1.0:
            until_s = max(ready_s if ready_s < until_s else from_s, from_s) + (until_s - from_s) / price
        if now_s >= until_s:
            continue
        begins_s = min(from_s, ready_s - lead) if current else ready_s - lead
        if begins_s >= until_s:
            continue
        said = f"{forecast.source}: being ready pays for the next {until_s - max(now_s, from_s):.3g} s"
        if now_s < begins_s:
            return Need(0, Reason.PREWARM, f"{said}, in {max(from_s - now_s, 0.0):.3g} s", begins_s)
        return Need(1, Reason.KEEP_ALIVE if current else Reason.PREWARM, said, until_s)
    return None


def _by_rate(spec: ScalingSpec, observed: Observed, forecast: Forecast, demand: int, now_s: float) -> Need | None:
    """For the load expected when a start begun now would be ready."""
    if not forecast.rate:
        return None
    seconds = start_s(observed)
    rate = forecast.rate_at(now_s + seconds)
    if not rate:
        return None
    price = observed.device_price
    step_s = forecast.step_s
    next_s = forecast.made_s + (int((now_s + seconds - forecast.made_s) // step_s) + 1) * step_s - seconds
    again_s = max(next_s, now_s + 0.1)
    if demand == 0:
        if forecast.knows_gaps:
            return None  # gaps are known better than by their mean
        worth = rate * start_cost_s(spec, seconds, rate, price, observed.cold_waiters) > spec.devices * price
        if not worth:
            return Need(0, Reason.FORECAST_FLOOR, f"{rate:.2g} a second are too few to wait for", again_s)
    service = speeds_of(observed)
    if service is not None:
        replicas = steady(spec, service, rate, observed.prompt_tokens, observed.output_tokens, price)
    elif forecast.service_s > 0:
        replicas = math.ceil(rate * forecast.service_s / places_of(spec, observed))
    else:
        replicas = 1
    detail = f"{forecast.source} expects {rate:.2g} a second in {seconds:.2g} s, for which {replicas} are best"
    return Need(replicas, Reason.FORECAST_FLOOR, detail, again_s)


def sustained(spec: ScalingSpec, observed: Observed, demand: int) -> int:
    """Replicas that arrivals as they came in the last minute need while they go on."""
    service = speeds_of(observed)
    if service is None or not demand or not observed.arrivals_in_60_s:
        return 0
    rate, price = observed.arrivals_in_60_s / 60.0, observed.device_price
    return steady(spec, service, rate, observed.prompt_tokens, observed.output_tokens, price)


def spare_until_s(spec: ScalingSpec, observed: Observed, rank: int) -> float:
    """Until when the `rank`-th replica (from 2) is kept for the sake of demand that was seen: after each peak for the
    break-even of starting it again, had such a peak come without it.

    A peak of n requests that come together is prefilled one after another on each of k replicas: n^2 p / 2k seconds of
    waiting of all together, which the k-th takes n^2 p / 2k(k-1) of, and no more than its share of them has to wait
    for it to start (n S / k).
    """
    seconds, price = start_s(observed), observed.device_price
    places = places_of(spec, observed)
    prefill_s = 0.0
    if observed.service is not None:
        prefill_s = observed.prompt_tokens / observed.service.prefill_tokens_per_s
    needed_above = places * (rank - 1)
    until_s = -math.inf
    for at_s, demand in observed.peaks:
        if prefill_s:
            waits_s = min(demand * demand * prefill_s / (2 * rank * (rank - 1)), demand * seconds / rank)
        elif demand > needed_above:
            waits_s = seconds
        else:
            break
        kept_s = spare_kept_s(spec, 0.0, waits_s, price)
        if demand > needed_above:
            kept_s = max(kept_s + seconds, spec.scale_in_window_s)
        elif kept_s > seconds:
            kept_s += seconds  # it would have been started for such a peak
        until_s = max(until_s, at_s + kept_s)
    return until_s
