"""The simulator: what requests wait, what replicas cost, and that nothing is lost or counted twice."""

from __future__ import annotations

import math
import random
from array import array

import numpy as np
import pytest

from autoscaler.placement import ReplicaHome, place_request
from autoscaler.service import ServiceModel
from autoscaler.simulator.cluster import Cluster, Slots
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.policy import Fixed, View, Wish
from autoscaler.simulator.replica import SimReplica
from autoscaler.simulator.state import FunctionState
from autoscaler.simulator.workload import SimFunction
from tests.autoscaler.simulator.support import (
    SERVICE,
    Planned,
    make_function,
    make_workload,
    naive,
    start_times,
)

ONE = Cluster(slots=1, devices_per_slot=2)


def on_demand(kept_s: float) -> Planned:
    """One replica from the first request on, until it has been idle for `kept_s`."""

    def has(view: View, now_s: float) -> Wish:
        return Wish(1 if view.waiting or view.running or view.ready or view.starting else 0, None, kept_s)

    return Planned(has, lambda view, now_s: Wish(0, None, kept_s), has)


def test_a_request_at_zero_waits_for_the_start_and_its_prefill() -> None:
    result = simulate(make_workload([(5.0, 0, 100, 10)]), ONE, on_demand(3.0), until_s=100.0)
    assert result.first_token_s[0] == pytest.approx(10.0 + 0.1 + 0.025)
    function = result.functions[0]
    assert function.cold_requests == 1
    assert function.starts_by_tier == {"store": 1}
    # Held from the arrival: start, prefill, ten steps, three seconds idle.
    assert function.held_device_s == pytest.approx(10.0 + 0.1 + 10 * 0.025 + 3.0, abs=1e-4)
    assert function.starting_device_s == pytest.approx(10.0)
    assert function.busy_device_s == pytest.approx(0.1 + 10 * 0.025)


def test_the_objective_is_what_is_held_less_full_batches_plus_what_is_waited() -> None:
    workload = make_workload([(5.0, 0, 100, 10), (30.0, 0, 200, 20)])
    result = simulate(workload, ONE, Fixed(1), until_s=100.0)
    function = result.functions[0]
    least = sum(SERVICE.full_batch_device_s(p, o) for p, o in ((100, 10), (200, 20)))
    assert workload.full_batch_device_s()[0] == pytest.approx(least)
    assert function.held_device_s == pytest.approx(100.0)
    waited = float(result.first_token_s.sum())
    assert result.objective(10.0) == pytest.approx(100.0 - least + 10.0 * waited, rel=1e-6)


def test_full_batches_bounded_by_kv_add_up_as_the_service_model_says() -> None:
    service = ServiceModel(1000, 0.02, 0.005, 1e-6, 16, kv_tokens=1000, devices=2)
    workload = make_workload([(1.0, 0, 100, 11), (2.0, 0, 900, 300), (3.0, 0, 10, 0)], [make_function(
        service=service, devices=2)])  # fmt: skip
    least = sum(service.full_batch_device_s(p, o) for p, o in ((100, 11), (900, 300), (10, 0)))
    assert workload.full_batch_device_s()[0] == pytest.approx(least)


@pytest.mark.parametrize("seed", range(6))
def test_sharing_a_replica_is_as_a_naive_simulation_finds_it(seed: int) -> None:
    chance = random.Random(seed)
    service = ServiceModel(1000.0, 0.02, 0.005, chance.choice([0.0, 1e-5]), chance.choice([1, 4, 32]))
    at_s, requests = 0.0, []
    for _ in range(150):
        at_s += chance.expovariate(chance.choice([0.3, 3.0]))
        requests.append((at_s, 0, chance.randint(1, 400), chance.randint(1, 60)))
    workload = make_workload(requests, [make_function(service=service, max_replicas=1)])
    result = simulate(workload, ONE, Fixed(1), until_s=at_s + 1, drain_s=1e6)
    expected = naive(service, requests, 10.0) - workload.arrival_s
    assert np.allclose(result.first_token_s, expected, rtol=1e-4, atol=1e-4)


def test_several_replicas_lose_no_request_and_end_them_all() -> None:
    chance = random.Random(3)
    requests = sorted((chance.uniform(0, 60), 0, chance.randint(1, 50), chance.randint(1, 40)) for _ in range(800))

    def more(view: View, now_s: float) -> Wish:
        return Wish(min(1 + (view.waiting + view.running) // 4, 3), now_s + 1.0, 1.0, 3)

    policy = Planned(more, lambda view, now_s: Wish(0, None, 1.0), more)
    result = simulate(make_workload(requests), Cluster(1, 3), policy, until_s=200.0, drain_s=1e6)
    assert not np.isnan(result.first_token_s).any()
    function = result.functions[0]
    assert function.requests == 800
    assert function.waited_s == pytest.approx(float(result.first_token_s.sum()), rel=1e-5)
    assert function.starts == function.stops
    assert function.stopped_before_ready == 0
    busy, held = function.busy_device_s, function.held_device_s
    assert 0 < busy <= held - function.starting_device_s


def test_a_replica_that_is_told_to_stop_ends_what_it_runs_and_holds_its_device_until_then() -> None:
    told = Planned(lambda view, now_s: Wish(1, 11.0), on_timer=lambda view, now_s: Wish(0 if now_s >= 11.0 else 1, 11.0
        if now_s < 11.0 else None))  # fmt: skip
    result = simulate(make_workload([(0.0, 0, 100, 200)]), ONE, told, until_s=100.0)
    assert result.functions[0].held_device_s == pytest.approx(10.0 + 0.1 + 200 * 0.025, abs=1e-4)
    assert result.functions[0].stops == 1


def test_what_is_starting_is_not_stopped_unless_the_policy_gives_starts_up() -> None:
    def plan(view: View, now_s: float) -> Wish:
        return Wish(0 if now_s >= 3.0 else 1, 3.0 if now_s < 3.0 else None, float("inf"))

    policy = Planned(plan, plan, plan)
    held = simulate(make_workload([(0.0, 0, 1, 1)]), ONE, policy, until_s=50.0).functions[0]
    assert held.stopped_before_ready == 0
    assert held.starts == 1
    policy.stops_starting = True
    given_up = simulate(make_workload([(0.0, 0, 1, 1)]), ONE, policy, until_s=50.0, drain_s=0.0).functions[0]
    assert given_up.stopped_before_ready == 1
    assert given_up.held_device_s == pytest.approx(3.0)
    assert given_up.refused == 1  # nobody ever served it


def test_a_refusal_costs_the_objective_and_waits_for_nobody() -> None:
    class Strict(Fixed):
        def admits(self, view: View, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
            return view.waiting <= 2

    requests = [(20.0, 0, 1, 1000)] * 4 + [(21.0, 0, 1, 10)] * 5
    workload = make_workload(requests, [make_function(objective_s=7.0, max_replicas=1)])
    result = simulate(workload, ONE, Strict(1), until_s=30.0)
    function = result.functions[0]
    assert (function.refused, int(np.isnan(result.first_token_s).sum())) == (3, 3)
    assert function.objective(2.0) - function.objective(1.0) == pytest.approx(function.waited_s + 3 * 7.0)


def test_requests_at_zero_are_never_refused() -> None:
    class Never(Fixed):
        def admits(self, view: View, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
            return False

    result = simulate(make_workload([(0.0, 0, 10, 10)] * 3), ONE, Never(1), until_s=50.0)
    assert result.functions[0].refused == 0


def test_only_the_scored_time_is_scored() -> None:
    requests = [(float(at_s), 0, 10, 10) for at_s in range(0, 400, 10)]
    result = simulate(make_workload(requests), ONE, Fixed(1), since_s=100.0, until_s=300.0)
    function = result.functions[0]
    assert function.requests == len(result.first_token_s) == 20
    assert function.held_device_s == pytest.approx(200.0)
    assert function.starts == 0
    assert function.waited_s == pytest.approx(float(result.first_token_s.sum()), rel=1e-5)
    assert function.full_batch_device_s == pytest.approx(20 * SERVICE.full_batch_device_s(10, 10))


def test_the_policy_learns_from_what_came_before_it_begins() -> None:
    seen = []

    class Learning(Fixed):
        def begin(self, workload, cluster, prices, now_s) -> None:  # type: ignore[no-untyped-def]
            seen.append((len(workload), now_s))

    requests = [(float(at_s), 0, 10, 10) for at_s in range(0, 400, 10)]
    simulate(make_workload(requests), ONE, Learning(1), begin_s=90.0, since_s=100.0, until_s=300.0)
    assert seen == [(9, 90.0)]


def test_a_second_start_finds_the_weights_in_the_pool() -> None:
    result = simulate(make_workload([(0.0, 0, 10, 10), (100.0, 0, 10, 10)]), ONE, on_demand(3.0), until_s=200.0)
    assert result.functions[0].starts_by_tier == {"store": 1, "pool": 1}
    assert result.first_token_s[1] == pytest.approx(2.0 + 0.01 + 0.025)


def test_weights_that_the_pool_had_to_give_up_come_from_the_disk() -> None:
    functions = [make_function("a"), make_function("b")]
    requests = [(0.0, 0, 10, 10), (100.0, 1, 10, 10), (200.0, 0, 10, 10)]
    cluster = Cluster(slots=1, devices_per_slot=2, pool_bytes=10**9)
    result = simulate(make_workload(requests, functions), cluster, on_demand(3.0), until_s=300.0)
    assert result.functions[0].starts_by_tier == {"store": 1, "disk": 1}


def test_loads_that_run_at_once_share_the_link() -> None:
    functions = [make_function("a"), make_function("b")]
    workload = make_workload([(0.0, 0, 10, 10), (0.0, 1, 10, 10)], functions)
    result = simulate(workload, ONE, on_demand(3.0), until_s=300.0)
    # 2 s are a start's own, 8 s its load's; the second load has half of the link.
    assert result.first_token_s.tolist() == pytest.approx([10.035, 18.035])


def test_replicas_of_one_checkpoint_that_start_in_a_slot_at_once_load_it_once() -> None:
    workload = make_workload([(0.0, 0, 10, 10), (1.0, 0, 10, 10)])
    two = Planned(lambda view, now_s: Wish(2 if now_s >= 1.0 else 1, None, 1000.0))
    result = simulate(workload, Cluster(slots=1, devices_per_slot=2), two, until_s=20.0)
    assert result.functions[0].starts_by_tier == {"store": 1, "loading": 1}
    # Its weights are there after 8 s, for the second as for the first; 2 s are each start's own.
    assert result.functions[0].start_s_sum == pytest.approx(10.0 + 9.0)


def test_a_process_that_goes_holds_its_devices_and_the_way_to_it_is_waited_for() -> None:
    plain = simulate(make_workload([(5.0, 0, 100, 10)]), ONE, on_demand(3.0), until_s=100.0)
    slow = make_workload([(5.0, 0, 100, 10)], [make_function(ends_s=4.0, way_s=0.5)])
    result = simulate(slow, ONE, on_demand(3.0), until_s=100.0)
    assert result.total("held_device_s") == pytest.approx(plain.total("held_device_s") + 4.0, abs=1e-3)
    assert result.total("waited_s") == pytest.approx(plain.total("waited_s") + 0.5)
    assert result.first_token_s[0] == pytest.approx(plain.first_token_s[0] + 0.5)


def test_who_finds_no_room_starts_when_a_device_is_free() -> None:
    functions = [make_function("a"), make_function("b")]
    workload = make_workload([(0.0, 0, 10, 10), (1.0, 1, 10, 10)], functions)
    cluster = Cluster(slots=1, devices_per_slot=1)
    result = simulate(workload, cluster, on_demand(20.0), until_s=300.0)
    assert result.no_room == 1
    ended_s = 10.0 + 0.01 + 10 * 0.025 + 20.0
    assert result.first_token_s[1] == pytest.approx(ended_s - 1.0 + 10.035, abs=1e-3)


def test_the_policy_may_make_room() -> None:
    functions = [make_function("a"), make_function("b")]
    workload = make_workload([(0.0, 0, 10, 10), (50.0, 1, 10, 10)], functions)
    policy = on_demand(1000.0)
    policy.loss_s = lambda view, now_s: 1.0  # type: ignore[method-assign]
    result = simulate(workload, Cluster(slots=1, devices_per_slot=1), policy, until_s=300.0)
    assert result.first_token_s[1] == pytest.approx(10.035)
    assert result.functions[0].held_device_s == pytest.approx(50.0)


def test_devices_are_whole_or_shared_by_memory() -> None:
    slots = Slots(Cluster(slots=2, devices_per_slot=2))
    half, whole = make_function("half", device_share=0.5), make_function("whole", devices=2)

    def start(function: SimFunction) -> SimReplica:
        placed = slots.place(function, 0.0)
        assert placed is not None
        return slots.start(0, function, placed, 0.5, 0.0)

    both = start(whole)
    halves = [start(half) for _ in range(4)]
    assert {each.slot.slot_id for each in halves} == {"slot0000", "slot0001"} - {both.slot.slot_id}
    assert slots.held == pytest.approx(4.0)
    assert slots.place(half, 0.0) is None
    slots.free(halves[0])
    assert slots.place(half, 0.0) is not None
    assert slots.place(whole, 0.0) is None
    slots.free(both)
    assert slots.place(whole, 0.0) is not None


def test_the_short_way_to_a_slot_leads_where_placement_does() -> None:
    chance = random.Random(2)
    functions = [make_function(f"f{each}", devices=chance.choice([1, 1, 2, 4])) for each in range(6)]
    slots = Slots(Cluster(slots=3, devices_per_slot=4, pool_bytes=3 * 10**9))
    living: list[SimReplica] = []
    short = 0
    for number in range(400):
        function = chance.choice(functions)
        soonest = slots._soonest(function)
        slots._soonest = lambda function: None  # type: ignore[method-assign]
        placed = slots.place(function, 0.0)
        del slots._soonest
        if soonest is not None:
            assert placed is not None
            assert (soonest.choice, soonest.devices, soonest.tier) == (placed.choice, placed.devices, placed.tier)
            assert soonest.expected_s == pytest.approx(placed.expected_s)
            short += 1
        if placed is not None:
            living.append(slots.start(number, function, placed, 0.5, 0.0))
        for replica in [each for each in living if not each.is_ready and chance.random() < 0.8]:
            slots.started(replica, ready=True)
            replica.is_ready = True
        for replica in [each for each in living if each.is_ready and chance.random() < 0.3]:
            slots.free(replica)
            living.remove(replica)
    assert short > 30


def test_restarts_within_the_break_even_time_depend_on_what_waiting_is_worth() -> None:
    requests = [(0.0, 0, 10, 10), (60.0, 0, 10, 10), (500.0, 0, 10, 10)]
    function = simulate(make_workload(requests), ONE, on_demand(3.0), until_s=600.0).functions[0]
    assert len(function.away_s) == 2
    # A start from the pool takes 2 s: it breaks even after 4, 22 and 202 s away.
    assert [function.restarts(weight) for weight in (1.0, 10.0, 100.0)] == [0, 0, 1]
    assert function.restarts(300.0) == 2


def test_a_pool_of_replicas_is_chosen_from_as_placement_does() -> None:
    chance = random.Random(1)
    state = FunctionState(0, make_function(), 0.0, array("f"), 1 << 60)
    slots = Slots(ONE)
    for number in range(4):
        replica = SimReplica(number, state.function, slots.all["slot0000"], (), "pool", 0.0, 0.0)
        state.starting_replicas.append(replica)
        state.opened(replica, 0.0)
    for at in range(60):
        homes = [
            ReplicaHome(f"{each.number}", len(each.heap), SERVICE.max_requests, cached_tokens=0) for each in state.open
        ]
        chosen = place_request(10, None, homes)
        mine = state._choose(20)
        assert (None if chosen is None else chosen.choice) == (None if mine is None else str(mine.number))
        if chosen is None or chance.random() < 0.4:
            state.advance(at * 0.3)
        state.arrive(at * 0.3, 10, chance.randint(1, 60), at)


def test_runs_of_one_seed_are_the_same() -> None:
    chance = random.Random(5)
    spread = start_times()
    for _ in range(30):
        spread.note("pool", "total", chance.uniform(1, 5))
    requests = sorted((chance.uniform(0, 3000), 0, 10, 10) for _ in range(100))
    workload = make_workload(requests, [make_function(starts=spread)])
    first, second, other = (simulate(workload, ONE, on_demand(3.0), seed, until_s=3100.0) for seed in (1, 1, 2))
    assert first.objective(10.0) == second.objective(10.0) != other.objective(10.0)


def test_bad_workloads_are_refused() -> None:
    for requests in ([(2.0, 0, 1, 1), (1.0, 0, 1, 1)], [(1.0, 1, 1, 1)], [(math.nan, 0, 1, 1)], [(1.0, 0, -1, 1)]):
        with pytest.raises(ValueError):
            make_workload(requests)
