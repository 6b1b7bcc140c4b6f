"""Peers carried out by the simulator: when they start, hold and let go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from autoscaler.service import ServiceModel
from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.peers.histogram import Histogram, HistogramSpec, next_of_series
from autoscaler.simulator.peers.keepalive import KeepAlive, Reactive
from autoscaler.simulator.peers.knative import Areas, Knative
from autoscaler.simulator.peers.kpa import KpaSpec, WindowAverage
from autoscaler.simulator.peers.named import peer
from autoscaler.simulator.peers.oracle import Oracle, strongest
from autoscaler.simulator.policy import Policy
from autoscaler.simulator.result import Prices, Result
from autoscaler.simulator.workload import SimFunction, Workload
from autoscaler.start_times import StartTimes

START_S = 10.0


def function(room: int = 4, devices: int = 1, start_s: float = START_S) -> SimFunction:
    starts = StartTimes()
    for _ in range(8):
        starts.note("pool", "total", start_s)
    return SimFunction("f", "t", 10**9, ServiceModel(1000.0, 0.01, 0.0, 0.0, room, 0, devices), starts, devices)


def load(arrivals_s: Sequence[float], of: SimFunction | None = None, output_tokens: int = 100) -> Workload:
    count = len(arrivals_s)
    return Workload(
        (of or function(),),
        np.asarray(sorted(arrivals_s), np.float64),
        np.zeros(count, np.int32),
        np.full(count, 10, np.int32),
        np.full(count, output_tokens, np.int32),
    )


def run(policy: Policy, workload: Workload, weight: float = 10.0, until_s: float = 5000.0) -> Result:
    return simulate(workload, Cluster(2, 4), policy, 0, Prices(weight), begin_s=0.0, until_s=until_s, sample_s=10.0)


def ready_at(result: Result, at_s: float) -> int:
    return int(result.series[int(at_s / 10.0), 2])


def test_a_fixed_keep_alive_holds_for_just_that_long() -> None:
    result = run(KeepAlive(100.0), load([1000.0]))
    # Started at 1000, ready at 1010, busy for a second, kept for 100.
    assert result.total("held_device_s") == pytest.approx(10 + 1.0 + 100.0, abs=0.2)
    assert (ready_at(result, 1100.0), ready_at(result, 1130.0)) == (1, 0)


def test_reactive_keeps_a_function_as_long_as_a_start_costs() -> None:
    result = run(Reactive(), load([1000.0]), weight=9.0)
    assert result.total("held_device_s") == pytest.approx(10 + 1.0 + START_S * (1 + 9.0), abs=0.2)


def test_load_is_met_at_once_and_let_go_after_a_window() -> None:
    result = run(KeepAlive(1000.0, scale_in_s=60.0), load([100.0 + 0.01 * at for at in range(12)]))
    assert result.total("starts") == 3
    assert ready_at(result, 300.0) == 1


def test_a_utilisation_below_one_starts_before_it_is_full() -> None:
    steady = [100.0 + 0.3 * at for at in range(100)]
    full = run(KeepAlive(1000.0), load(steady, function(room=8)))
    early = run(KeepAlive(1000.0, utilisation=0.25), load(steady, function(room=8)))
    assert early.total("starts") > full.total("starts")


def test_knative_pokes_at_zero_and_goes_to_zero_after_its_stable_window() -> None:
    result = run(Knative(), load([1000.0]))
    assert result.total("starts") == 1
    assert result.first_token_s[0] == pytest.approx(START_S, abs=0.1), "no tick is waited for"
    # The activator never left the path of so small a revision, so that no grace period remains to be waited for.
    assert result.total("held_device_s") == pytest.approx(START_S + 60.0, abs=4.1)


def test_knative_waits_the_grace_period_when_the_activator_had_left_the_path() -> None:
    prompt = run(Knative(spec=KpaSpec(target_burst_capacity=211.0)), load([1000.0]))
    late = run(Knative(spec=KpaSpec(target_burst_capacity=0.0)), load([1000.0]))
    assert late.total("held_device_s") - prompt.total("held_device_s") == pytest.approx(30.0, abs=2.1)


def test_knative_panics_on_a_burst_and_holds_it_for_a_window() -> None:
    burst = [1000.0] + [1040.0 + 0.05 * at for at in range(40)]
    result = run(Knative(), load(burst, output_tokens=1000))
    assert max(result.series[:, 2]) >= 4
    assert result.total("stopped_before_ready") == 0


def test_knatives_averages_by_area_are_those_of_its_buckets() -> None:
    rng = np.random.default_rng(0)
    areas, window = Areas(60.0), WindowAverage(60.0)
    areas.begin(0.0)
    area_s = 0.0
    for tick in range(1, 120):
        for second in (2 * tick - 1, 2 * tick):
            value = float(rng.integers(0, 5)) if tick % 50 < 30 else 0.0
            area_s += value
            window.record(float(second), value)
        areas.add(area_s, 1)
        assert areas.average(30) == pytest.approx(window.average(2.0 * tick), abs=2e-6)


def test_the_histogram_lets_go_at_once_and_is_back_before_the_next_call() -> None:
    calls = [1800.0 * at for at in range(1, 30)]
    result = run(Histogram(HistogramSpec(gaps_least=5)), load(calls), until_s=1800.0 * 30)
    cold_before, cold_after = result.first_token_s[:5], result.first_token_s[8:]
    assert cold_before[0] > START_S
    assert (cold_after < 1.0).all()
    # Gaps of 30 minutes: away for 90 % of the head, back until the tail and a tenth.
    late = [row for row in result.series if row[0] > 1800.0 * 10]
    assert np.mean([row[2] for row in late]) < 0.25


def test_the_histogram_keeps_what_it_does_not_know_for_its_whole_range() -> None:
    result = run(Histogram(), load([1000.0]), until_s=30_000.0)
    assert result.total("held_device_s") == pytest.approx(START_S + 1.0 + 4 * 3600.0, abs=1.0)


def test_idle_times_beyond_the_range_are_predicted_as_a_series() -> None:
    assert next_of_series([600.0] * 20) == pytest.approx(600.0)
    assert next_of_series([100.0 * at for at in range(1, 21)]) == pytest.approx(2100.0, rel=0.02)
    alternating = [100.0, 900.0] * 12
    assert next_of_series(alternating) == pytest.approx(100.0, abs=5.0)
    spec = HistogramSpec(range_s=600.0, gaps_least=5)
    result = run(Histogram(spec), load([1800.0 * at for at in range(1, 30)]), until_s=1800.0 * 30)
    assert (result.first_token_s[12:] < 1.0).all()


def test_the_oracle_is_ready_when_called_and_away_in_long_gaps() -> None:
    result = run(Oracle(load([500.0, 503.0, 1500.0])), load([500.0, 503.0, 1500.0]))
    assert (result.first_token_s < 0.1).all()
    assert result.total("starts") == 2
    assert result.total("held_device_s") == pytest.approx(2 * START_S + 4.0 + 1.0, abs=0.5)


def test_the_oracle_starts_more_replicas_ahead_of_a_burst_where_waiting_is_dear() -> None:
    burst = load([1000.0 + 0.001 * at for at in range(32)])
    cheap, dear = (run(Oracle(burst), burst, weight) for weight in (0.01, 100.0))
    assert cheap.total("starts") == 1
    assert dear.total("starts") > 4
    assert dear.total("waited_s") < 0.5 * cheap.total("waited_s")


@pytest.mark.parametrize("weight", [1.0, 30.0])
def test_no_peer_beats_the_oracle(weight: float) -> None:
    rng = np.random.default_rng(1)
    calls = np.cumsum(rng.exponential(40.0, 60)).tolist() + (2600.0 + rng.random(40)).tolist()
    workload = load(calls)
    _, best = strongest(workload, Cluster(2, 4), Prices(weight), begin_s=0.0, until_s=5000.0)
    for told in ("knative", "keepalive:20", "keepalive:600", "reactive", "histogram"):
        other = run(peer(told, workload), workload, weight)
        assert best.objective(weight) < other.objective(weight), told


def test_peers_are_named_with_their_parameters() -> None:
    workload = load([1.0])
    assert isinstance(peer("knative:utilisation=0.8,stable_window_s=120", workload), Knative)
    assert peer("keepalive:60", workload).name == "keepalive:60"
    for told, reason in (
        ("fastest", "no policy 'fastest'"),
        ("keepalive:forever", "'forever' instead of a number"),
        ("keepalive:-1", "below 0"),
        ("oracle:seconds=1", "no parameter 'seconds'"),
        ("knative:utilisation=1.5", "not above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            peer(told, workload)
