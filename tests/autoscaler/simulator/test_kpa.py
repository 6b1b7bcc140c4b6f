"""Knative's autoscaler against the numbers that Knative tests itself with.

The cases are those of knative/serving's `pkg/autoscaler/scaling/autoscaler_test.go` and
`pkg/autoscaler/aggregation/{bucketing,max/timewindow}_test.go` (Apache-2.0), in this project's words.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoscaler.simulator.peers.kpa import INVALID, Kpa, KpaSpec, MaxWindow, Scale, WindowAverage

UTILISATION = 0.75


def spec_of(target: float, burst: float = 100.0) -> KpaSpec:
    return KpaSpec(
        target=target,
        total=target / UTILISATION,
        target_burst_capacity=burst,
        max_scale_up_rate=10.0,
        max_scale_down_rate=10.0,
    )


def excess(target: float, burst: float, panic: float, pods: int) -> int:
    return math.floor(target / UTILISATION * pods - burst - panic)


def test_the_defaults_are_knatives() -> None:
    spec = KpaSpec()
    assert (spec.target, spec.total, spec.stable_window_s, spec.panic_window_s) == (70.0, 100.0, 60.0, 6.0)
    assert (spec.max_scale_up_rate, spec.max_scale_down_rate, spec.panic_threshold) == (1000.0, 2.0, 2.0)
    assert (spec.target_burst_capacity, spec.scale_to_zero_grace_s, spec.pod_retention_s) == (211.0, 30.0, 0.0)


@pytest.mark.parametrize(
    ("target", "burst", "stable", "panic", "ready", "changed", "wanted", "wanted_excess"),
    [
        (10, 100, 0, 0, 1, {}, 0, excess(10, 100, 0, 1)),
        (181, -1, 21, 26, 1, {}, 1, -1),
        (10, 0, 50, 49, 1, {}, 5, 0),
        (10, 100, 50, 50, 1, {}, 5, excess(10, 100, 50, 1)),
        (10, 100, 50, 50, 5, {}, 5, excess(10, 100, 50, 5)),
        (1, 1982, 3, 3.1, 2, {"max_scale_up_rate": 1.1}, 3, excess(1, 1982, 3.1, 2)),
        (10, 1982, 1, 1, 100, {"max_scale_down_rate": 1.1}, 90, excess(10, 1982, 1, 100)),
        (10, 1982, 1, 1, 100, {"max_scale_down_rate": 1.1, "reachable": False}, 1, excess(10, 1982, 1, 100)),
        (10, 84, 50, 100, 1, {}, 10, excess(10, 84, 100, 1)),
        (10, 101, 50, 10, 1, {}, 5, excess(10, 101, 10, 1)),
        (10, 101, 100, 10, 1, {}, 10, excess(10, 101, 10, 1)),
        (10, 75, 1, 0, 1, {}, 1, excess(10, 75, 0, 1)),
        (10, 75, 0, 0, 1, {"activation_scale": 2}, 0, excess(10, 75, 0, 1)),
        (10, 75, 1, 0, 1, {"activation_scale": 2}, 2, excess(10, 75, 0, 1)),
        (10, 61, 1000, 1001, 1, {}, 10, excess(10, 61, 1001, 1)),
        (10, 61, 1000, 1001, 10, {}, 100, excess(10, 61, 1001, 10)),
        (10, 61, 1, 1, 100, {}, 10, excess(10, 61, 1, 100)),
        (10, 61, 1, 1, 10, {}, 1, excess(10, 61, 1, 10)),
        (10, 81, 1000, 888, 0, {}, 10, excess(10, 81, 888, 0)),
    ],
)
def test_one_decision(
    target: float,
    burst: float,
    stable: float,
    panic: float,
    ready: int,
    changed: dict[str, float],
    wanted: int,
    wanted_excess: int,
) -> None:
    kpa = Kpa(replace(spec_of(target, burst), **changed))
    told = kpa.scale(stable, panic, ready, 100.0)
    assert told.valid
    assert told.desired == wanted
    # Knative compares this one to within 1 as well: the capacity of all pods is rounded differently.
    assert abs(told.excess_burst_capacity - wanted_excess) <= 1


def test_no_data_decides_nothing() -> None:
    assert Kpa(spec_of(10)).scale(None, 1.0, 3, 0.0) == INVALID == Scale(0, 0, valid=False)


def in_panic(max_panic_pods: int) -> Kpa:
    kpa = Kpa(spec_of(1))
    kpa.panic_s = 95.0
    kpa.max_panic_pods = max_panic_pods
    return kpa


def test_panic_takes_the_larger_of_both_windows() -> None:
    assert in_panic(5).scale(50, 30, 5, 100.0).desired == 50
    assert in_panic(5).scale(20, 30, 5, 100.0).desired == 30


def test_panic_tracks_an_exponential_increase_and_each_step_extends_it() -> None:
    kpa = Kpa(spec_of(1, 101))
    assert kpa.scale(6, 6, 1, 0.0).desired == 6
    assert kpa.scale(36, 36, 6, 1.0).desired == 36
    assert kpa.panic_s == 1.0
    assert kpa.scale(216, 216, 36, 2.0).desired == 216
    assert kpa.panic_s == 2.0
    assert kpa.scale(1296, 1296, 216, 2.0).desired == 1296
    assert kpa.scale(1296, 1296, 1296, 3.0).desired == 1296
    assert kpa.panic_s == 2.0


def test_panic_never_scales_in_and_ends_a_stable_window_after_the_surge() -> None:
    kpa = Kpa(spec_of(10, 93))
    assert kpa.scale(100, 100, 1, 0.0).desired == 10
    assert kpa.scale(100, 1000, 10, 1.0).desired == 100
    assert kpa.scale(1, 1, 10, 31.0).desired == 100
    assert kpa.scale(1, 1, 10, 61.0).desired == 100, "exactly a window after the surge it is still in panic"
    assert kpa.scale(1, 1, 10, 62.0).desired == 1
    assert kpa.panic_s is None


def test_panic_ends_after_a_slow_increase() -> None:
    kpa = Kpa(spec_of(1, 98))
    assert kpa.scale(11, 25, 10, 0.0).desired == 25
    assert kpa.scale(30, 41, 40, 30.0).desired == 41
    assert kpa.panic_s == 0.0
    assert kpa.scale(50, 56, 55, 62.0).desired == 50
    assert kpa.panic_s is None


def test_panic_is_extended_while_the_surge_lasts() -> None:
    kpa = Kpa(spec_of(1, 98))
    assert kpa.scale(11, 25, 10, 0.0).desired == 25
    assert kpa.scale(30, 80, 40, 30.0).desired == 80
    assert kpa.panic_s == 30.0


def test_out_of_panic_it_scales_in_at_once() -> None:
    kpa = Kpa(spec_of(10, 98))
    assert kpa.scale(100, 100, 8, 0.0).desired == 10
    assert kpa.scale(50, 50, 8, 0.0).desired == 5


def test_a_restarted_autoscaler_with_several_pods_holds_them_in_panic() -> None:
    for ready in (0, 1):
        started = Kpa(spec_of(100), ready, 50.0)
        assert (started.panic_s, started.max_panic_pods) == (None, ready)
    restarted = Kpa(spec_of(100), 2, 50.0)
    assert (restarted.panic_s, restarted.max_panic_pods) == (50.0, 2)
    assert restarted.scale(0, 0, 2, 52.0).desired == 2
    assert restarted.scale(0, 0, 2, 112.0).desired == 0


def test_scale_down_delay_holds_the_most_of_its_window() -> None:
    delayed = replace(spec_of(10), scale_down_delay_s=300.0, panic_threshold=100.0)
    kpa = Kpa(delayed)
    assert kpa.scale(40, 40, 0, 2.0).desired == 4
    assert kpa.scale(0, 0, 0, 300.0).desired == 4
    assert kpa.scale(0, 0, 0, 302.0).desired == 0
    assert kpa.scale(40, 40, 0, 540.0).desired == 4
    assert kpa.scale(30, 30, 0, 600.0).desired == 4
    assert kpa.scale(0, 0, 0, 660.0).desired == 4
    assert kpa.scale(0, 0, 0, 840.0).desired == 3
    assert kpa.scale(0, 0, 0, 900.0).desired == 0


def test_an_unreachable_revision_is_not_delayed() -> None:
    delayed = replace(spec_of(10), scale_down_delay_s=300.0, panic_threshold=100.0)
    kpa = Kpa(delayed)
    assert kpa.scale(40, 40, 0, 2.0).desired == 4
    kpa.spec = replace(delayed, reachable=False)
    assert kpa.scale(0, 0, 0, 4.0).desired == 0


def test_window_average_counts_seconds_from_the_first_record_on() -> None:
    window = WindowAverage(5.0)
    now = 1000.3
    assert window.average(now) == 0.0
    assert window.is_empty(now)
    window.record(now, 1)
    assert window.average(now) == 1.0
    for second in range(1, 5):
        window.record(now + second, second + 1)
    assert window.average(now + 4) == 15 / 5
    assert window.average(now + 3.6) == 15 / 5, "a clock that lags behind the last record"
    assert window.average(now + 6) == (15 - 1 - 2) / (5 - 2)
    assert window.average(now + 10) == 0.0
    window.record(now + 6, 91)
    assert window.average(now + 6) == (15 - 1 - 2 + 91) / 5


def test_window_average_with_late_records_and_long_holes() -> None:
    window = WindowAverage(5.0)
    now = 1000.3
    window.record(now - 60, 7)
    window.record(now, 1984)
    assert window.average(now) == 1984.0
    window.record(now - 3, 4)
    assert window.average(now) == (4 + 1984) / 4
    now += 1
    window.record(now, 5)
    assert window.average(now) == (4 + 1984 + 5) / 5 - 0.0
    window.record(now - 3, 10)
    assert window.average(now) == pytest.approx((4 + 10 + 1984 + 5) / 5)
    window.record(now - 6, 10)
    window.record(now - 5, 10)
    assert window.average(now) == pytest.approx((4 + 10 + 1984 + 5) / 5), "too old"
    window.record(now + 5, 10)
    assert window.average(now + 5) == 10.0
    assert not window.is_empty(now + 10)
    assert window.is_empty(now + 11)


def test_what_is_left_of_rounding_is_no_load() -> None:
    window = WindowAverage(3.0)
    for second in range(20):
        window.record(float(second), 0.1 if second < 15 else 0.0)
    assert window.average(19.0) <= 0.0
    assert math.ceil(window.average(19.0) / 10) == 0


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([(0.0, 5)], 5),
        ([(0.0, 6), (0.5, 5)], 6),
        ([(0.0, 5), (1.0, 8)], 8),
        ([(0.0, 5), (6.0, 4)], 4),
    ],
)
def test_max_window(records: list[tuple[float, int]], expected: int) -> None:
    window = MaxWindow(5.0, 1.0)
    for at_s, value in records:
        window.record(at_s, value)
    assert window.current() == expected
