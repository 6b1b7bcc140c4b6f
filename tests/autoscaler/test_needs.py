"""How many replicas observed load needs: the marginal rule, tokens, objectives, bursts; and what bounds them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.decision import Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.marginal import steady, waited_s, worth_having
from autoscaler.needs import bursting, expected_rates
from autoscaler.peaks import KEPT, Peaks
from autoscaler.scaling import decide
from autoscaler.service import ServiceModel

ONE_PLACE = ServiceModel(prefill_tokens_per_s=1e9, step_base_s=0.1, step_per_request_s=0.0, max_requests=1)
"""100 tokens in 10 s, one request at a time."""
MANY = ServiceModel(5000.0, 0.02, 0.001, max_requests=16, kv_tokens=20_000)
AUTO = ScalingSpec(max_replicas=8, target_concurrency=None)
NOW_S = 500.0


def seen(ready: int = 0, in_flight: int = 0, starting: int = 0, **more: object) -> Observed:
    replicas = tuple(ReplicaView(f"r{i}", Phase.READY, in_flight, 0.0) for i in range(ready))
    replicas += tuple(ReplicaView(f"s{i}", Phase.STARTING, 0, NOW_S) for i in range(starting))
    values: dict[str, object] = {
        "waiting": 0, "replicas": replicas, "peak_demand": 0, "window_covered_s": 100.0, "last_activity_s": NOW_S,
        "cold_start_s": 20.0, "service": ONE_PLACE, "prompt_tokens": 1.0, "output_tokens": 100.0,
        "arrivals_in_10_s": 0, "arrivals_in_60_s": 0,
    }  # fmt: skip
    values.update(more)
    return Observed(**values)  # type: ignore[arg-type]


CALM = (0.0, 0.0)


def weighing(weight: float, **more: object) -> ScalingSpec:
    return dataclasses.replace(AUTO, waiting_weight=weight, **more)  # type: ignore[arg-type]


def test_a_second_replica_is_worth_it_by_the_weight_of_waiting() -> None:
    queue = seen(ready=1, in_flight=1, waiting=3)
    assert worth_having(weighing(1.0), queue, ONE_PLACE, CALM, 20.0, NOW_S, 20.0)[0] == 1
    replicas, saved = worth_having(weighing(30.0), queue, ONE_PLACE, CALM, 20.0, NOW_S, 20.0)
    assert replicas == 2 and saved > 0


def test_a_queue_that_is_gone_before_a_start_is_over_starts_nothing() -> None:
    queue = seen(ready=1, in_flight=1, waiting=2)
    slow = dataclasses.replace(queue, cold_start_s=600.0)
    assert decide(weighing(30.0), slow, None, NOW_S).desired == 1
    assert decide(weighing(30.0), dataclasses.replace(queue, cold_start_s=1.0), None, NOW_S).desired > 1


def test_somebody_who_waits_at_zero_gets_a_start_however_little_waiting_weighs() -> None:
    decision = decide(weighing(0.0), seen(waiting=1), None, NOW_S)
    assert (decision.desired, decision.reason) == (1, Reason.FROM_ZERO)


def test_speeds_without_what_requests_ask_of_them_say_nothing() -> None:
    unknown = {"ready": 1, "in_flight": 8, "waiting": 20, "prompt_tokens": 0.0, "output_tokens": 0.0}
    with_speeds = decide(AUTO, seen(**unknown, service=MANY), None, NOW_S)
    assert with_speeds.desired == decide(AUTO, seen(**unknown, service=None), None, NOW_S).desired > 1


def test_devices_that_cost_more_are_asked_for_less() -> None:
    queue = seen(ready=1, in_flight=1, waiting=12)
    one = decide(weighing(10.0), queue, None, NOW_S).desired
    four = decide(weighing(10.0, devices=8), queue, None, NOW_S).desired
    assert one > four >= 1


def test_what_is_starting_is_counted_before_more_is_asked_for() -> None:
    queue = seen(ready=1, in_flight=1, waiting=4)
    wanted = decide(weighing(30.0), queue, None, NOW_S).desired
    assert wanted > 1
    asked = seen(ready=1, in_flight=1, waiting=4, starting=wanted - 1)
    assert decide(weighing(30.0), asked, None, NOW_S).desired == wanted


def test_each_request_that_waits_counts_as_everybody_after_it() -> None:
    assert waited_s(4.0, 0.0, 0.5, 100.0) == (16.0, 0.0)
    assert waited_s(4.0, 1.0, 0.5, 2.0) == (9.0, 5.0)
    assert waited_s(0.0, 0.0, 0.0, 10.0) == (0.0, 0.0)


@given(
    waiting=st.integers(0, 200),
    ready=st.integers(0, 5),
    starting=st.integers(0, 3),
    rate=st.floats(0, 5),
    weight=st.floats(0, 200),
)
def test_the_marginal_rule_never_takes_away_and_asks_for_more_where_waiting_weighs_more(
    waiting: int, ready: int, starting: int, rate: float, weight: float
) -> None:
    observed = seen(ready=ready, in_flight=1, starting=starting, waiting=waiting)
    spec = weighing(weight, max_replicas=20)
    replicas, saved = worth_having(spec, observed, ONE_PLACE, (rate, rate), 20.0, NOW_S, 20.0)
    assert ready + starting <= replicas <= max(20, ready + starting)
    assert saved >= 0
    more, _ = worth_having(weighing(2 * weight, max_replicas=20), observed, ONE_PLACE, (rate, rate), 20.0, NOW_S, 20.0)
    assert more >= replicas


def test_steady_load_needs_what_its_requests_occupy_and_some_spare_by_weight() -> None:
    assert steady(weighing(1.0), ONE_PLACE, 0.0, 1, 100) == 0
    cheap = steady(weighing(0.01), ONE_PLACE, 0.35, 1, 100)
    dear = steady(weighing(100.0), ONE_PLACE, 0.35, 1, 100)
    assert 4 <= cheap < dear


def test_tokens_that_do_not_fit_ask_for_memory() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=16)
    full = seen(ready=1, in_flight=4, service=MANY, running_tokens=16_000, waiting_tokens=30_000, waiting=4)
    decision = decide(spec, full, None, NOW_S)
    assert (decision.desired, decision.reason) == (3, Reason.TOKEN_PRESSURE)
    measured = seen(ready=2, in_flight=4, service=None, kv_used_share=0.97, waiting=1)
    decision = decide(spec, measured, None, NOW_S)
    assert (decision.desired, decision.reason) == (3, Reason.TOKEN_PRESSURE)
    assert decide(spec, dataclasses.replace(measured, kv_used_share=0.5), None, NOW_S).reason is Reason.HOLD_WINDOW


def test_a_broken_objective_asks_for_one_more_and_no_further_while_it_starts() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=16, token_objective_s=0.05, first_token_objective_s=2.0)
    slow = seen(ready=2, in_flight=8, service=None, token_s=0.09)
    decision = decide(spec, slow, None, NOW_S)
    assert (decision.desired, decision.reason) == (3, Reason.OBJECTIVE)
    assert decide(spec, seen(ready=2, in_flight=8, starting=1, service=None, token_s=0.09), None, NOW_S).desired == 3
    late = seen(ready=2, in_flight=8, service=None, first_token_s=4.0)
    assert decide(spec, late, None, NOW_S).reason is Reason.OBJECTIVE
    alone = seen(ready=2, in_flight=1, service=None, first_token_s=4.0, peak_demand=32)
    assert decide(spec, alone, None, NOW_S).desired == 2, "a request that is alone is as fast as it gets"


def test_what_an_objective_or_memory_asked_for_is_not_taken_back_at_once() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=16, token_objective_s=0.05)
    for kept in ({"token_s": 0.045}, {"kv_used_share": 0.5}):
        held = decide(spec, seen(ready=2, in_flight=4, service=None, **kept), None, NOW_S)
        assert (held.desired, held.reason) == (2, Reason.HOLD_WINDOW), kept
    for enough in ({"token_s": 0.03}, {"kv_used_share": 0.3}):
        assert decide(spec, seen(ready=2, in_flight=4, service=None, **enough), None, NOW_S).desired == 1, enough


def test_an_objective_per_token_is_kept_by_what_a_step_of_so_many_takes() -> None:
    spec = dataclasses.replace(AUTO, token_objective_s=0.025)
    decision = decide(spec, seen(ready=1, in_flight=12, service=MANY), None, NOW_S)
    assert (decision.desired, decision.reason) == (3, Reason.OBJECTIVE)


def test_no_replica_is_added_for_an_objective_that_none_could_keep() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=16, first_token_objective_s=1.0)
    long = seen(ready=1, in_flight=4, service=MANY, prompt_tokens=50_000.0, first_token_s=30.0)
    assert decide(spec, long, None, NOW_S).desired == 1


@pytest.mark.parametrize(
    ("in_10_s", "in_60_s", "burst"),
    [(20, 20, True), (20, 30, True), (20, 100, False), (5, 5, False), (None, None, False), (200, 1100, False)],
)
def test_a_burst_is_out_of_proportion_and_not_chance(in_10_s: int | None, in_60_s: int | None, burst: bool) -> None:
    assert bursting(seen(arrivals_in_10_s=in_10_s, arrivals_in_60_s=in_60_s)) is burst


def test_a_burst_is_scaled_by_its_own_rate_and_nothing_ends_meanwhile() -> None:
    load = {"ready": 1, "in_flight": 1, "waiting": 8}
    calm = decide(weighing(5.0), seen(**load, arrivals_in_10_s=8, arrivals_in_60_s=60), None, NOW_S)
    burst = decide(weighing(5.0), seen(**load, arrivals_in_10_s=30, arrivals_in_60_s=30), None, NOW_S)
    assert burst.reason is Reason.PANIC and burst.desired >= calm.desired
    falling = seen(ready=3, in_flight=0, waiting=1, arrivals_in_10_s=30, arrivals_in_60_s=30)
    held = decide(weighing(5.0), falling, None, NOW_S)
    assert (held.desired, held.reason) == (3, Reason.PANIC)


def test_a_queue_tells_of_a_burst_before_ten_seconds_have_passed() -> None:
    """Nine came within half a second: at the rate of a minute they would be nothing, at their own they are a flood."""
    queue = {"starting": 1, "waiting": 9, "arrivals_in_10_s": 9, "arrivals_in_60_s": 9, "cold_start_s": 6.0}
    spec = weighing(10.0)
    blind = decide(spec, seen(**queue, service=MANY, prompt_tokens=1000.0, output_tokens=200.0), None, NOW_S)
    seeing = decide(
        spec, seen(**queue, service=MANY, prompt_tokens=1000.0, output_tokens=200.0, waiting_since_s=NOW_S - 0.5),
        None, NOW_S,
    )  # fmt: skip
    assert blind.desired == 1 < seeing.desired
    slow = decide(
        spec, seen(**queue, service=MANY, prompt_tokens=1000.0, output_tokens=200.0, waiting_since_s=NOW_S - 50),
        None, NOW_S,
    )  # fmt: skip
    assert slow.desired == blind.desired
    few, many = seen(waiting=3, waiting_since_s=NOW_S), seen(waiting=30, waiting_since_s=NOW_S - 2)
    assert expected_rates(few, 6.0, NOW_S) == (0.0, 0.0), "three are no rate"
    soon, later = expected_rates(many, 6.0, NOW_S)
    assert 0 < later < soon < 15, "it goes on for some times as long as it has lasted"


def test_a_flood_that_goes_on_is_expected_to_go_on() -> None:
    """A hundred a second for the last half minute, and nothing before: most of that is expected while a start lasts."""
    flood = seen(arrivals_in_10_s=1000, arrivals_in_30_s=3000, arrivals_in_60_s=3000)
    soon, later = expected_rates(flood, 15.0, NOW_S)
    assert 90 < soon < 100 and 60 < later < soon
    batch = seen(arrivals_in_10_s=1000, arrivals_in_30_s=1000, arrivals_in_60_s=1000)
    assert expected_rates(batch, 15.0, NOW_S)[0] < soon, "what has lasted for ten seconds is less sure"


def test_quota_bounds_what_is_started_and_not_what_is_there() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=1, devices=2)
    asked = seen(ready=1, in_flight=1, service=None, waiting=5, may_have=5)
    decision = decide(spec, asked, None, NOW_S)
    assert (decision.desired, decision.reason) == (3, Reason.QUOTA)
    none = dataclasses.replace(asked, may_have=0)
    assert (decide(spec, none, None, NOW_S).desired, decide(spec, none, None, NOW_S).reason) == (1, Reason.QUOTA)
    assert decide(spec, seen(ready=1, in_flight=1, service=None, may_have=0), None, NOW_S).reason is Reason.AT_TARGET


def test_a_spent_budget_of_restarts_delays_stops_and_no_start() -> None:
    spec = ScalingSpec(max_replicas=8, target_concurrency=1, keep_alive_s=5.0, restarts_per_hour=3)
    spent = {"restarts_in_hour": 3, "restart_leaves_s": NOW_S + 900, "service": None, "last_activity_s": 0.0}
    idle = decide(spec, seen(ready=1, **spent), None, NOW_S)
    assert (idle.desired, idle.reason, idle.ask_again_s) == (1, Reason.HOLD_BUDGET, NOW_S + 900)
    assert decide(spec, seen(ready=3, **spent), None, NOW_S).reason is Reason.HOLD_BUDGET
    assert decide(spec, seen(waiting=2, **spent), None, NOW_S).desired == 2
    assert decide(spec, seen(ready=1, **{**spent, "restarts_in_hour": 2}), None, NOW_S).desired == 0


def test_each_replica_is_kept_for_its_own_break_even_after_it_was_last_needed() -> None:
    """A start of 20 s, weight 1, and one more waiter for 10 s or less: 25 to 30 s after demand was last that high."""
    spec = weighing(1.0)
    peaks = ((NOW_S - 100, 4), (NOW_S - 26, 3), (NOW_S - 10, 2))
    observed = seen(ready=4, in_flight=0, waiting=1, peaks=peaks, peak_demand=2)
    decision = decide(spec, observed, None, NOW_S)
    assert (decision.desired, decision.reason) == (2, Reason.SCALE_IN)
    fresh = dataclasses.replace(observed, peaks=((NOW_S - 20, 4),))
    held = decide(spec, fresh, None, NOW_S)
    assert (held.desired, held.reason) == (4, Reason.HOLD_WINDOW)
    assert held.ask_again_s is not None and held.ask_again_s <= NOW_S + 10


def test_a_replica_is_kept_for_batches_that_fewer_would_prefill_one_after_another() -> None:
    """Sixty at once on 64 places fit one replica and would wait for its prefills: 60^2 * 0.2 / 4 = 180 s together,
    which at a weight of 10 are worth 1,800 device-seconds; five would not wait for long."""
    roomy = dataclasses.replace(MANY, max_requests=64, kv_tokens=0)
    calm = {
        "ready": 2,
        "service": roomy,
        "waiting": 1,
        "prompt_tokens": 1000.0,
        "output_tokens": 20.0,
        "peak_demand": 1,
    }
    many = seen(**calm, peaks=((NOW_S - 300, 60),))
    assert decide(weighing(10.0), many, None, NOW_S).desired == 2
    assert decide(weighing(0.01), many, None, NOW_S).desired == 1
    assert decide(weighing(10.0), seen(**calm, peaks=((NOW_S - 300, 5),)), None, NOW_S).desired == 1


def test_going_to_zero_is_void_once_another_request_was_accepted() -> None:
    decision = decide(AUTO, seen(ready=1, last_activity_s=-1e5, generation=7), None, NOW_S)
    assert decision.desired == 0
    assert decision.holds_for(7) and not decision.holds_for(8)


BAD = [
    ("waiting", math.nan), ("waiting", -1), ("peak_demand", -1), ("window_covered_s", math.nan),
    ("last_activity_s", math.nan), ("last_activity_s", math.inf), ("cold_start_s", -1.0), ("cold_start_s", math.nan),
    ("kv_used_share", math.nan), ("first_token_s", -0.1), ("token_s", math.inf), ("arrivals_in_10_s", -1),
    ("arrivals_in_60_s", math.nan), ("prompt_tokens", math.nan), ("output_tokens", -1.0), ("waiting_tokens", -1),
    ("running_tokens", math.nan), ("restarts_in_hour", -1), ("may_have", -1), ("device_price", 0.0),
    ("device_price", math.nan), ("gaps_s", (1.0, math.nan)), ("peaks", ((1.0, -1),)), ("seen_s", NOW_S - 60),
    ("waiting_since_s", math.nan), ("waiting_since_s", NOW_S + 60), ("restart_leaves_s", math.inf),
    ("seen_s", NOW_S + 60),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_be_holds_what_is_there_and_is_named(name: str, value: object) -> None:
    observed = dataclasses.replace(seen(ready=2, last_activity_s=-1e6), **{name: value})  # type: ignore[arg-type]
    decision = decide(AUTO, observed, None, NOW_S)
    assert (decision.desired, decision.reason) == (2, Reason.HOLD_BAD_DATA)
    said = {"seen_s": "observed", "gaps_s": "gap", "peaks": "peak"}.get(name, name)
    assert said in decision.detail
    assert decision.inputs["ready"] == 2


def test_somebody_who_waits_at_zero_is_believed_whatever_else_is_wrong() -> None:
    assert decide(AUTO, seen(waiting=3, kv_used_share=math.nan), None, NOW_S).desired == 1
    assert decide(AUTO, seen(kv_used_share=math.nan), None, NOW_S).desired == 0


@given(changes=st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 30)), max_size=60), back_s=st.floats(0, 100))
def test_peaks_know_the_highest_demand_of_any_window(changes: list[tuple[float, int]], back_s: float) -> None:
    peaks, now_s, level = Peaks(), 0.0, 0
    stretches: list[tuple[float, int]] = []
    """(when it ended, demand)"""
    for seconds, demand in changes:
        peaks.note(now_s, demand)
        level = demand
        now_s += seconds
        stretches.append((now_s, level))
    from_s = now_s - back_s
    ended = stretches[:-1] if stretches else []
    expected = max([level, *(demand for until_s, demand in ended if until_s >= from_s)])
    assert peaks.since(from_s) == expected
    steps = peaks.steps()
    assert all(a[0] <= b[0] and a[1] > b[1] for a, b in itertools.pairwise(steps))


def test_what_is_remembered_of_peaks_is_bounded_and_errs_upwards() -> None:
    peaks = Peaks()
    for n in range(500):
        peaks.note(n, 1000 - n)
    assert len(peaks.steps()) <= KEPT
    for back in (10, 100, 400):
        assert peaks.since(499 - back) >= 1000 - 499 + back
