"""What a forecast may do to a decision: raise the floor ahead of need and end a keep-alive that does not pay."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.decision import Decision, Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.forecast import Forecast
from autoscaler.scaling import decide
from autoscaler.service import ServiceModel

SPEC = ScalingSpec(max_replicas=4)
AUTO = ScalingSpec(max_replicas=4, target_concurrency=None)
SERVICE = ServiceModel(prefill_tokens_per_s=5000, step_base_s=0.02, step_per_request_s=0.001, max_requests=8)
IDLE_SINCE_S = 1000.0
WINDOWS = Forecast("idle_histogram", made_s=0.0, warm=((0.0, 5.0), (55.0, 70.0)))


def seen(*phases: Phase, **more: object) -> Observed:
    replicas = tuple(ReplicaView(f"r{i}", phase, 0, 0.0) for i, phase in enumerate(phases))
    values: dict[str, object] = {
        "waiting": 0, "replicas": replicas, "peak_demand": 0, "window_covered_s": 100.0,
        "last_activity_s": IDLE_SINCE_S, "cold_start_s": 2.0,
    }  # fmt: skip
    values.update(more)
    return Observed(**values)  # type: ignore[arg-type]


def after(idle_s: float, *phases: Phase, forecast: Forecast | None = WINDOWS, **more: object) -> Decision:
    return decide(SPEC, seen(*phases, **more), forecast, IDLE_SINCE_S + idle_s)


def test_a_replica_is_started_so_early_that_it_is_ready_when_its_window_opens() -> None:
    early = after(40.0)
    assert (early.desired, early.ask_again_s) == (0, IDLE_SINCE_S + 53.0)
    due = after(53.0)
    assert (due.desired, due.reason) == (1, Reason.PREWARM)
    assert due.inputs["forecast"] == "idle_histogram"


def test_a_start_that_may_be_slow_begins_earlier() -> None:
    assert after(48.9, cold_start_high_s=6.0).desired == 0
    assert after(49.1, cold_start_high_s=6.0).desired == 1


def test_within_a_window_the_last_replica_is_held_and_beyond_it_ended() -> None:
    held = after(4.0, Phase.READY)
    assert (held.desired, held.reason, held.ask_again_s) == (1, Reason.KEEP_ALIVE, IDLE_SINCE_S + 5.0)
    assert after(60.0, Phase.READY).desired == 1
    between = after(6.0, Phase.READY)
    assert (between.desired, between.reason, between.ask_again_s) == (0, Reason.TO_ZERO, IDLE_SINCE_S + 53.0)
    assert after(70.5, Phase.READY).reason is Reason.TO_ZERO


def test_while_a_window_holds_the_first_replica_the_others_are_kept_for_as_long_as_their_starts_are_worth() -> None:
    lately = {"peaks": ((IDLE_SINCE_S, 30),), "service": SERVICE, "prompt_tokens": 2000.0, "output_tokens": 20.0}
    held = decide(AUTO, seen(Phase.READY, Phase.READY, **lately), WINDOWS, IDLE_SINCE_S + 4.0)
    assert (held.desired, held.reason) == (2, Reason.HOLD_WINDOW)
    closed = decide(AUTO, seen(Phase.READY, Phase.READY, **lately), WINDOWS, IDLE_SINCE_S + 10.0)
    assert (closed.desired, closed.reason) == (1, Reason.SCALE_IN), "where the first is not worth it, no other is"


def test_a_window_that_never_closes_needs_no_further_question() -> None:
    forever = dataclasses.replace(WINDOWS, warm=((0.0, math.inf),))
    decision = after(1e6, Phase.READY, forecast=forever)
    assert (decision.desired, decision.ask_again_s) == (1, None)


def test_never_while_idle_is_said_by_no_window_and_nothing_by_none() -> None:
    assert after(3.0, Phase.READY, forecast=dataclasses.replace(WINDOWS, warm=())).desired == 0
    reactive = after(3.0, Phase.READY, forecast=dataclasses.replace(WINDOWS, warm=None))
    assert (reactive.desired, reactive.reason) == (1, Reason.KEEP_ALIVE)
    assert reactive.kept_s == pytest.approx(2.0 * 31)


def test_what_the_user_set_as_keep_alive_is_not_shortened() -> None:
    spec = dataclasses.replace(SPEC, keep_alive_s=30.0)
    decision = decide(spec, seen(Phase.READY), WINDOWS, IDLE_SINCE_S + 20.0)
    assert (decision.desired, decision.reason) == (1, Reason.KEEP_ALIVE)


def test_a_prewarmed_replica_that_is_still_starting_is_never_useless() -> None:
    late = after(80.0, Phase.STARTING)
    assert (late.desired, late.reason) == (1, Reason.HOLD_STARTING)


def test_where_devices_are_short_what_is_expected_starts_nothing() -> None:
    assert after(54.0, device_price=2.0).desired == 0
    assert after(56.0, Phase.READY, device_price=2.0).desired == 1, "but holds what is there"
    assert after(64.0, Phase.READY, device_price=2.0).desired == 0, "for less long"


def test_a_regular_caller_finds_a_replica_ready_and_none_between() -> None:
    """A call every 60 s that takes 1 s, a start of 2 s; windows as a histogram of such gaps gives them."""
    forecast = Forecast("idle_histogram", made_s=0.0, warm=((58.0, 62.0),))
    ready_at_s: float | None = None
    cold = held = 0
    now_s = last_s = 0.0
    for tick in range(10 * 60 * 10):
        now_s = tick / 10
        in_call = now_s % 60.0 < 1.0
        if in_call:
            last_s = now_s
        ready = ready_at_s is not None and now_s >= ready_at_s
        cold += now_s % 60.0 == 0 and not ready
        held += ready_at_s is not None
        phases = () if ready_at_s is None else ((Phase.READY,) if ready else (Phase.STARTING,))
        replicas = tuple(ReplicaView("r", phase, int(in_call and ready), 0.0) for phase in phases)
        decision = decide(
            SPEC, seen(waiting=int(in_call and not ready), replicas=replicas, last_activity_s=last_s), forecast, now_s
        )
        if decision.desired and ready_at_s is None:
            ready_at_s = now_s + 2.0
        elif not decision.desired:
            ready_at_s = None
    assert cold == 1, "the first"
    assert held / 10 < 0.1 * now_s


def test_expected_load_is_met_by_what_it_will_need_when_a_start_is_over() -> None:
    forecast = Forecast("seasonal_day", made_s=0.0, step_s=60.0, rate=(0.1, 40.0))
    busy = seen(Phase.READY, service=SERVICE, prompt_tokens=100.0, output_tokens=20.0, cold_start_s=10.0)
    calm = decide(AUTO, busy, forecast, 20.0)
    assert calm.desired == 1
    assert calm.ask_again_s == pytest.approx(50.0), "when a start would reach into the next step"
    before = decide(AUTO, busy, forecast, 51.0)
    assert before.reason is Reason.FORECAST_FLOOR and before.desired > 1
    there = decide(AUTO, seen(*(Phase.READY,) * before.desired, service=SERVICE, prompt_tokens=100.0,
                              output_tokens=20.0, cold_start_s=10.0), forecast, 52.0)  # fmt: skip
    assert (there.desired, there.reason) == (before.desired, Reason.FORECAST_FLOOR), "and held for it"


def test_a_rate_holds_the_last_replica_only_where_that_costs_less_than_starts() -> None:
    """A start of 2 s costs 2 * 31 device-seconds and some: worth holding above about one call in a minute."""
    often = dataclasses.replace(WINDOWS, warm=None, rate=(0.03,) * 90)
    seldom = dataclasses.replace(WINDOWS, warm=None, rate=(0.01,) * 90)
    assert after(500.0, Phase.READY, forecast=often).desired == 1
    assert after(500.0, Phase.READY, forecast=seldom).desired == 0


def test_a_schedule_is_kept_a_start_ahead() -> None:
    schedule = Forecast("schedule", made_s=0.0, step_s=60.0, floor=(0, 0, 3, 3, 0))
    assert decide(SPEC, seen(), schedule, 100.0).desired == 0
    on_time = decide(SPEC, seen(), schedule, 118.5)
    assert (on_time.desired, on_time.reason) == (3, Reason.SCHEDULE)
    assert decide(SPEC, seen(device_price=3.0), schedule, 118.5).desired == 3, "it is the user's word"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"valid_until_s": 900.0}, "expired"),
        ({"rate": (0.1, math.nan)}, "a rate"),
        ({"rate": (0.1, -0.1)}, "a rate"),
        ({"warm": ((9.0, 3.0),)}, "a window"),
        ({"warm": ((math.nan, 3.0),)}, "a window"),
        ({"made_s": 5000.0}, "future"),
    ],
)
def test_a_forecast_that_cannot_be_counts_for_nothing(change: dict[str, object], said: str) -> None:
    wrong = dataclasses.replace(WINDOWS, **change)  # type: ignore[arg-type]
    decision = after(53.0, forecast=wrong)
    assert decision.desired == 0
    assert said in decision.detail
    assert after(3.0, Phase.READY, forecast=wrong).kept_s == pytest.approx(62.0), "the break-even goes on"


def test_in_advisory_mode_it_only_says_what_it_would_do() -> None:
    spec = dataclasses.replace(SPEC, advisory=True)
    decision = decide(spec, seen(), WINDOWS, IDLE_SINCE_S + 53.0)
    assert (decision.desired, decision.advised) == (0, 1)
    assert decision.advice.startswith("prewarm")
    idle = decide(spec, seen(Phase.READY), WINDOWS, IDLE_SINCE_S + 6.0)
    assert (idle.desired, idle.advised) == (1, 0)
    waking = decide(spec, seen(waiting=1), WINDOWS, IDLE_SINCE_S + 53.0)
    assert waking.desired == 1, "what is observed acts"


def paired(times_s: list[float]) -> tuple[tuple[float, float], ...]:
    ordered = sorted(times_s)
    return tuple(zip(ordered[::2], ordered[1::2], strict=False))


@given(
    phases=st.lists(st.sampled_from(Phase), max_size=4),
    waiting=st.integers(0, 40),
    rates=st.lists(st.floats(0, 50), max_size=4),
    warm=st.none() | st.lists(st.floats(0, 500), max_size=6).map(paired),
    idle_s=st.floats(0, 600),
    price=st.sampled_from([1.0, 3.0]),
)
def test_it_only_raises_the_floor(
    phases: list[Phase],
    waiting: int,
    rates: list[float],
    warm: tuple[tuple[float, float], ...] | None,
    idle_s: float,
    price: float,
) -> None:
    forecast = Forecast("any", made_s=IDLE_SINCE_S, step_s=60.0, rate=tuple(rates), warm=warm)
    observed = seen(*phases, waiting=waiting, peak_demand=waiting, device_price=price)
    with_it = decide(AUTO, observed, forecast, IDLE_SINCE_S + idle_s)
    without = decide(AUTO, observed, None, IDLE_SINCE_S + idle_s)
    if waiting or warm is None or without.desired > 1:
        assert with_it.desired >= without.desired, (with_it, without)
    assert with_it.desired <= max(AUTO.max_replicas, without.desired)
    have = observed.count(Phase.READY) + observed.count(Phase.STARTING)
    assert with_it.desired >= min(observed.count(Phase.STARTING), have)
