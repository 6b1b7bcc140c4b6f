"""Measured start times by tier: means, quantiles, draws."""

from __future__ import annotations

import math

import pytest

from autoscaler.start_times import KEPT, TOTAL, StartTimes


def measured() -> StartTimes:
    times = StartTimes()
    for pool_s, disk_s in ((0.2, 2.0), (0.3, 4.0), (0.4, 3.0)):
        times.note("pool", "map", pool_s / 2)
        times.note("pool", TOTAL, pool_s)
        times.note("disk", TOTAL, disk_s)
    return times


def test_each_tier_has_its_own_times_and_without_one_the_mix_counts() -> None:
    times = measured()
    assert times.expected_s("pool") == pytest.approx(0.3)
    assert times.expected_s("disk") == pytest.approx(3.0)
    assert times.expected_s() == pytest.approx(9.9 / 6)
    assert times.expected_s("pool", "map") == pytest.approx(0.15)
    assert times.expected_s("store") is None
    assert times.tiers == ("pool", "disk")
    assert times.measured == 6


def test_quantiles_lie_between_the_measured() -> None:
    times = measured()
    assert times.quantile_s(0.0, "disk") == 2.0
    assert times.quantile_s(0.25, "disk") == 2.5
    assert times.quantile_s(1.0, "disk") == 4.0
    assert times.quantile_s(0.5, "store") is None


def test_draws_are_as_what_was_measured() -> None:
    times = StartTimes.of([1.0, 2.0, 10.0])
    drawn = [times.draw(n / 1000) for n in range(1000)]
    assert min(drawn) == 1.0
    assert 9.9 < max(drawn) <= 10.0
    assert sorted(drawn)[500] == pytest.approx(2.0, abs=0.1)
    with pytest.raises(ValueError, match="no start was measured"):
        StartTimes().draw(0.5)


def test_only_the_last_count() -> None:
    times = StartTimes()
    for n in range(KEPT + 10):
        times.note("pool", TOTAL, float(n))
    assert times.quantile_s(0.0, "pool") == 10.0
    assert times.measured == KEPT


def test_what_is_no_duration_is_not_noted() -> None:
    times = StartTimes()
    assert not any(times.note("pool", TOTAL, bad) for bad in (math.nan, math.inf, -0.1))
    assert times.expected_s() is None


def test_json_gives_back_the_same_times_and_damaged_text_none() -> None:
    times = measured()
    again = StartTimes.from_json(times.to_json())
    assert again.to_json() == times.to_json()
    assert again.quantile_s(0.7) == times.quantile_s(0.7)
    for bad in ("", "[]", "{}", '{"stages": [["pool", "total", [-1]]]}', '{"stages": [["pool", "total", ["x"]]]}'):
        with pytest.raises(ValueError, match="no record of start times"):
            StartTimes.from_json(bad)
