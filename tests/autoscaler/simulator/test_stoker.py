"""Stoker in its own simulator: forecasts learned from what was before, decisions as they are live."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autoscaler.forecast import Costs
from autoscaler.forecasting.credit import SHARE, STARTS
from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.memory import Memory
from autoscaler.simulator.policy import Fixed, View, Wish
from autoscaler.simulator.result import Prices
from autoscaler.simulator.stoker import Stoker
from tests.autoscaler.simulator.support import SERVICE, make_function, make_workload

HOUR_S = 3600.0
ONE = Cluster(slots=1, devices_per_slot=4)


def every(period_s: float, until_s: float, function: int = 0) -> list[tuple[float, int, int, int]]:
    return [(at_s, function, 100, 10) for at_s in np.arange(period_s, until_s, period_s).tolist()]


def test_a_function_called_every_minute_is_warm_before_its_call_and_away_in_between() -> None:
    workload = make_workload(every(60.0, 4 * HOUR_S))
    result = simulate(workload, ONE, Stoker(), 0, Prices(10.0), begin_s=2 * HOUR_S, since_s=3 * HOUR_S)
    function = result.functions[0]
    assert function.cold_requests <= 0.1 * function.requests
    assert function.held_device_s < 0.5 * HOUR_S
    kept = simulate(workload, ONE, Stoker(forecasts=False), 0, Prices(10.0), begin_s=2 * HOUR_S, since_s=3 * HOUR_S)
    assert kept.functions[0].cold_requests == kept.functions[0].requests
    assert result.objective(10.0) < kept.objective(10.0)


@pytest.mark.parametrize("forecasts", [False, True])
def test_every_request_is_answered_and_no_start_is_given_up(forecasts: bool) -> None:
    chance = random.Random(4)
    functions = [make_function(f"f{each}", max_replicas=3) for each in range(3)]
    at_s, requests = 0.0, []
    while at_s < 2 * HOUR_S:
        at_s += chance.expovariate(chance.choice([0.02, 2.0]))
        requests.append((at_s, chance.randrange(3), chance.randint(1, 200), chance.randint(1, 60)))
    result = simulate(
        make_workload(requests, functions), ONE, Stoker(forecasts=forecasts), 0, Prices(10.0), drain_s=1e5
    )
    assert not np.isnan(result.first_token_s).any()
    assert result.total("stopped_before_ready") == 0
    assert result.total("requests") == len(requests)


@pytest.mark.parametrize("weight", [1.0, 10.0, 100.0])
def test_a_wall_clock_that_is_set_forth_and_back_costs_no_more_than_the_stated_credit(weight: float) -> None:
    calls = [each for each in every(60.0, 11 * HOUR_S) if each[0] % HOUR_S < HOUR_S / 2]
    by_s = (600.0, -600.0, HOUR_S, -HOUR_S, -2 * HOUR_S, 10.0, -10.0, 24 * HOUR_S, -24 * HOUR_S, 2 * HOUR_S)
    steps = tuple((HOUR_S * hour + 1234.0, each) for hour, each in enumerate(by_s))
    misled, reactive = Stoker(clock_steps=steps), Stoker(forecasts=False)
    ours, without = (
        simulate(make_workload(calls), ONE, policy, 0, Prices(weight)).objective(weight)
        for policy in (misled, reactive)
    )
    assert misled._known[0].clock_set == len(steps) and misled._known[0].epoch_s == 0.0
    start = Costs(misled._known[0].start_s, 1, weight).of_start()
    assert ours - without <= STARTS * start + SHARE * max(without, 0.0)


def test_what_was_seen_before_the_clock_was_set_is_where_it_was() -> None:
    policy = Stoker(clock_steps=((2 * HOUR_S, HOUR_S), (3 * HOUR_S, -2 * HOUR_S)))
    simulate(make_workload(every(60.0, 3.9 * HOUR_S)), ONE, policy, 0, Prices(10.0))
    history = policy._known[0].memory.history
    starts_s, arrivals = history.arrivals(600, 0.0, 5 * HOUR_S)
    seen = {start_s / HOUR_S: count for start_s, count in zip(starts_s.tolist(), arrivals.tolist(), strict=True)}
    assert seen[1.0] == 10
    assert all(np.isnan(count) for hour, count in seen.items() if hour > 3.0), "it was never so late"
    gaps = dict(history.gaps_after(0.0))
    assert gaps and max(gaps.values()) < 60.0, "no gap reaches over a clock that was set"


def test_a_queue_that_costs_more_than_a_replica_gets_one() -> None:
    requests = sorted((float(at_s) / 4, 0, 50, 60) for at_s in range(4 * 400))
    result = simulate(
        make_workload(requests), ONE, Stoker(forecasts=False), 0, Prices(30.0), until_s=400.0, sample_s=10.0
    )
    assert result.series[:, 2].max() >= 2
    assert result.quantile_s(0.5) < 1.0


def test_who_would_come_too_late_is_refused_at_ready_replicas_and_never_at_zero() -> None:
    requests = [(0.0, 0, 50, 60)] * 6 + [(20.0, 0, 50, 60)] * 60
    patient, strict = (
        simulate(
            make_workload(requests, [make_function(objective_s=objective_s, max_replicas=1)]), ONE,
            Stoker(forecasts=False), 0, Prices(10.0), until_s=30.0, drain_s=1e4,
        )
        for objective_s in (1000.0, 5.0)
    )  # fmt: skip
    assert patient.functions[0].refused == 0
    refused = strict.functions[0].refused
    assert 0 < refused < 60
    assert not np.isnan(strict.first_token_s[:6]).any()
    answered = strict.first_token_s[6:][~np.isnan(strict.first_token_s[6:])]
    assert answered.max() < 10.0 < patient.first_token_s.max()


def test_an_idle_function_makes_room_for_one_that_is_called() -> None:
    functions = [make_function("a"), make_function("b")]
    workload = make_workload([(0.0, 0, 10, 10), (30.0, 1, 10, 10)], functions)
    stoker = Stoker(forecasts=False)
    result = simulate(workload, Cluster(slots=1, devices_per_slot=1), stoker, 0, Prices(100.0), until_s=200.0)
    assert result.first_token_s[1] < 11.0
    assert result.no_room == 0


def test_what_is_fed_bit_by_bit_is_remembered_as_what_is_learned_at_once() -> None:
    chance = random.Random(9)
    at_s, requests = 0.0, []
    while at_s < 8000.0:
        at_s += chance.expovariate(chance.choice([0.01, 1.0]))
        requests.append((at_s, 0, 100, 20))
    workload = make_workload(requests)

    class Fed(Fixed):
        def begin(self, workload, cluster, prices, now_s) -> None:  # type: ignore[no-untyped-def]
            self.memory = Memory(SERVICE, 0.0)

        def on_timer(self, view: View, now_s: float) -> Wish:
            self.memory.feed(view, now_s)
            return Wish(1, now_s + 137.0, float("inf"))

    policy = Fed(1)
    simulate(workload, ONE, policy, until_s=9000.0)
    learned = Memory(SERVICE, 0.0)
    learned.learn(workload, 0, 8400.0)
    for name in ("arrivals", "prompt_tokens"):
        fed = policy.memory.history.series(name, 600, 0.0, 8400.0)[1]
        assert np.allclose(fed, learned.history.series(name, 600, 0.0, 8400.0)[1], rtol=0.01)
    assert policy.memory.prompt_tokens == pytest.approx(100.0, rel=0.01)
    assert len(policy.memory.history.gaps_s) > 10
