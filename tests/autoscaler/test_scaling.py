"""Behaviour of `decide`: tables for the named cases, properties for what must always hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.decision import Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.scaling import choose_victims, decide, keep_alive_s, warm_workers

SPEC = ScalingSpec(min_replicas=0, max_replicas=4, target_concurrency=8, keep_alive_s=10.0, scale_in_window_s=15.0)


def replica(name: str, phase: Phase = Phase.READY, in_flight: int = 0, since_s: float = 0.0, current: bool = True):
    return ReplicaView(name, phase, in_flight, since_s, current)


def seen(*replicas: ReplicaView, waiting: int = 0, peak: int | None = None, **more: object) -> Observed:
    running = sum(r.in_flight for r in replicas)
    values: dict[str, object] = {
        "waiting": waiting,
        "replicas": replicas,
        "peak_demand": waiting + running if peak is None else peak,
        "window_covered_s": 100.0,
        "last_activity_s": 100.0,
    }
    values.update(more)
    return Observed(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("observed", "desired", "reason"),
    [
        pytest.param(seen(waiting=1), 1, Reason.FROM_ZERO, id="one request wakes one replica"),
        pytest.param(seen(waiting=17), 3, Reason.FROM_ZERO, id="a burst wakes as many as it needs"),
        pytest.param(seen(waiting=1000), 4, Reason.FROM_ZERO, id="bounded by max_replicas"),
        pytest.param(
            seen(replica("a", in_flight=8), waiting=1), 2, Reason.SCALE_OUT, id="full replica, one more waits"
        ),
        pytest.param(
            seen(replica("a", Phase.STARTING), waiting=5),
            1,
            Reason.AT_TARGET,
            id="what is starting counts as capacity",
        ),
        pytest.param(
            seen(replica("a", Phase.STARTING)),
            1,
            Reason.HOLD_STARTING,
            id="a starting replica is never useless",
        ),
        pytest.param(seen(replica("a"), last_activity_s=195.0), 1, Reason.KEEP_ALIVE, id="within the keep-alive"),
        pytest.param(seen(replica("a"), last_activity_s=190.0), 0, Reason.TO_ZERO, id="past the keep-alive"),
        pytest.param(seen(replica("a"), replica("b")), 1, Reason.SCALE_IN, id="two idle: first to one, not to zero"),
        pytest.param(
            seen(replica("a"), replica("b"), peak=9), 2, Reason.HOLD_WINDOW, id="the window's peak needs both"
        ),
        pytest.param(
            seen(replica("a"), replica("b"), window_covered_s=3.0),
            2,
            Reason.HOLD_WINDOW,
            id="after a restart: hold",
        ),
        pytest.param(
            seen(replica("a"), complete=False, last_activity_s=0.0),
            1,
            Reason.HOLD_NO_DATA,
            id="no data: hold",
        ),
        pytest.param(
            seen(waiting=3, unusable="truncated file"), 0, Reason.HOLD_UNUSABLE, id="bad checkpoint: no storm"
        ),
    ],
)
def test_decides(observed: Observed, desired: int, reason: Reason) -> None:
    decision = decide(SPEC, observed, None, now_s=200.0)
    assert (decision.desired, decision.reason) == (desired, reason), decision


def test_a_minimum_is_started_without_any_request_and_never_left() -> None:
    spec = dataclasses.replace(SPEC, min_replicas=1)
    assert decide(spec, seen(), None, 200.0).desired == 1
    assert decide(spec, seen(replica("a"), last_activity_s=0.0), None, 1e6).desired == 1


def test_keep_alive_decision_says_when_it_ends() -> None:
    decision = decide(SPEC, seen(replica("a"), last_activity_s=195.0, generation=7), None, 200.0)
    assert decision.ask_again_s == 205.0
    assert decision.generation == 7


def test_keep_alive_is_the_break_even_of_a_start() -> None:
    spec = ScalingSpec(keep_alive_s=None, waiting_weight=30.0)
    assert keep_alive_s(spec, 0.25, ()) == pytest.approx(7.75)


def test_known_gaps_shorten_the_keep_alive_but_never_lengthen_it() -> None:
    spec = ScalingSpec(keep_alive_s=None, waiting_weight=30.0)
    long_gaps = tuple([500.0] * 30)
    assert keep_alive_s(spec, 0.25, long_gaps) == 1.0
    short_gaps = tuple([3.0] * 30)
    assert 3.0 <= keep_alive_s(spec, 0.25, short_gaps) <= 7.75


def test_victims_are_old_revisions_then_the_least_loaded_and_never_starting_ones() -> None:
    replicas = (
        replica("busy", in_flight=5),
        replica("idle", since_s=5.0),
        replica("younger", since_s=9.0),
        replica("old", in_flight=7, current=False),
        replica("starting", Phase.STARTING),
    )
    assert choose_victims(replicas, 9) == ("old", "younger", "idle", "busy")
    assert choose_victims(replicas, 1) == ("old",)


def test_no_worker_waits_where_nothing_can_start() -> None:
    assert warm_workers(0, 2) == 0
    assert warm_workers(3, 2) == 2


views = st.lists(
    st.builds(
        ReplicaView,
        replica_id=st.uuids().map(str),
        phase=st.sampled_from(Phase),
        in_flight=st.integers(0, 20),
        since_s=st.floats(0, 100),
    ),
    max_size=6,
).map(tuple)


@given(
    replicas=views,
    waiting=st.integers(0, 100),
    peak=st.integers(0, 100),
    last=st.floats(0, 200),
    covered=st.floats(0, 30),
    complete=st.booleans(),
    low=st.integers(0, 2),
    high=st.integers(2, 5),
)
def test_always_holds(
    replicas: tuple[ReplicaView, ...],
    waiting: int,
    peak: int,
    last: float,
    covered: float,
    complete: bool,
    low: int,
    high: int,
) -> None:
    spec = dataclasses.replace(SPEC, min_replicas=low, max_replicas=high)
    observed = seen(
        *replicas,
        waiting=waiting,
        peak=peak,
        last_activity_s=last,
        window_covered_s=covered,
        complete=complete,
    )
    decision = decide(spec, observed, None, 200.0)
    ready, starting = observed.count(Phase.READY), observed.count(Phase.STARTING)
    current = ready + starting
    demand = observed.waiting + observed.running
    if demand:
        assert decision.desired >= 1 or high == 0
    if decision.desired > current:
        assert decision.desired <= high
    if decision.desired == 0:
        assert demand == 0 and low == 0
    if current > 1:
        assert decision.desired >= 1, "never N -> 0 in one stage"
    if not complete:
        assert decision.desired >= current, "missing data means hold"
    if starting and decision.desired < current:
        assert ready >= decision.desired, "only ready replicas can be drained"
    assert decision.detail and decision.inputs
