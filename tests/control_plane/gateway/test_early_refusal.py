"""Early refusal: who would come too late is told so and when to come back; at zero nobody is; it hides no demand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from autoscaler.shares import Quota
from control_plane.lanes import Lane, Seat
from control_plane.settings import Settings
from control_plane.spec import parse_mapping
from function_runtime.protocol import Progress, ReplicaTime
from tests.control_plane.gateway.conftest import Plane, body, until
from tests.control_plane.gateway.fakes import FakeSlot

OBJECTIVE_S = 1.0
STEP_S = 0.1
SCALING = {
    "max_replicas": 1,
    "max_concurrency": 2,
    "target_concurrency": 2,
    "keep_alive": 60,
    "objectives": {"first_token_s": OBJECTIVE_S},
}


def lane_of(plane: Plane) -> Lane:
    (lane,) = plane.context.dispatcher.lanes.of_function(("default", "fn"))
    return lane


def seat_of(plane: Plane) -> Seat:
    (seat,) = lane_of(plane).seats.values()
    return seat


async def ask(plane: Plane, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    async with plane.post(body(**fields)) as response:
        return response.status, await response.json(), dict(response.headers)


def report_steps(plane: Plane, count: int = 12) -> None:
    """What a replica with two requests says of its steps: each takes `STEP_S`."""
    seat, times = seat_of(plane), plane.context.dispatcher.service_times
    held, seat.in_flight = seat.in_flight, {}  # their prompts are read
    for number in range(count):
        told = ReplicaTime(attributed_us=round(number * STEP_S * 1e6))
        times.beat(seat, Progress(number, 2, 0, 0, 1, told))
    seat.in_flight = held


async def overloaded(plane: Plane, waiting: int = 4) -> list[asyncio.Task[Any]]:
    """Two requests hold both places after three of five tokens, and four wait: the first tokens of the next two that
    wait are due in 0.2 s, of two more every half second."""
    for _ in range(4):
        assert (await ask(plane))[0] == 200
    report_steps(plane)
    plane.slot.behaviour.stop_after = 3
    tasks = [asyncio.create_task(ask(plane)) for _ in range(2)]
    await until(lambda: [live.received for live in seat_of(plane).in_flight.values()] == [3, 3])
    tasks += [asyncio.create_task(ask(plane)) for _ in range(waiting)]
    await until(lambda: len(lane_of(plane).waiting) == waiting)
    return tasks


async def test_who_would_come_too_late_is_refused_with_the_prediction_and_when_to_come_back(plane: Plane) -> None:
    await plane.deploy(scaling=SCALING)
    tasks = await overloaded(plane)
    status, error, headers = await ask(plane)
    assert (status, error["error"]["code"]) == (429, "first_token_objective")
    predicted_s = float(headers["x-stoker-first-token-s"])
    assert OBJECTIVE_S < predicted_s < 2 * OBJECTIVE_S
    assert headers["x-should-retry"] == "true"
    assert int(headers["retry-after-ms"]) == pytest.approx((predicted_s - OBJECTIVE_S) * 1000, abs=2)
    # The next one is told to come after those that were told before it.
    await ask(plane)
    _, _, later = await ask(plane)
    assert int(later["retry-after-ms"]) > int(headers["retry-after-ms"])
    plane.slot.behaviour.stop_after = None
    assert [(await task)[0] for task in tasks] == [200] * 6
    assert (await ask(plane))[0] == 200


async def test_refusals_are_seen_in_why_and_in_metrics_and_count_as_demand(plane: Plane) -> None:
    await plane.deploy(scaling=SCALING)
    tasks = await overloaded(plane)
    for _ in range(3):
        assert (await ask(plane))[0] == 429
    lane = lane_of(plane)
    assert (lane.refused, lane.deferred()) == (3, 3)
    report = plane.context.loop.demand.report()
    assert [told.deferred for told in report.lanes] == [3]
    async with plane.get("/api/v1/why/fn") as asked:
        why = await asked.json()
    (told,) = [event for event in why["timeline"] if event["what"] == "refuse"]
    assert "its objective is 1 s" in told["detail"] and told["inputs"]["ahead"] == 4
    async with plane.get("/metrics") as asked:
        assert 'stoker_refused_early_total{function="fn"} 3.0' in await asked.text()
    plane.slot.behaviour.stop_after = None
    await asyncio.gather(*tasks)


async def test_at_zero_and_while_a_replica_starts_nobody_is_refused_whatever_the_objective(plane: Plane) -> None:
    await plane.deploy(scaling=SCALING)
    for task in await overloaded(plane):
        task.cancel()
    await until(lambda: not plane.context.dispatcher.requests)
    await plane.slot.kill(plane.slot.living[0])
    await until(lambda: not lane_of(plane).seats)
    plane.slot.behaviour.stop_after = None
    plane.slot.behaviour.start_s = 0.2
    answers = await asyncio.gather(*(ask(plane) for _ in range(20)))
    assert [status for status, _, _ in answers] == [200] * 20


async def test_what_nobody_waits_for_is_not_refused(plane: Plane) -> None:
    await plane.deploy(scaling=SCALING)
    tasks = await overloaded(plane)
    wanted = {"model": "fn", "input": "hello", "background": True, "max_output_tokens": 5}
    async with plane.post(wanted, "/v1/responses") as response:
        assert response.status == 200
    plane.slot.behaviour.stop_after = None
    await asyncio.gather(*tasks)


async def test_a_tenant_above_its_share_is_refused_while_one_below_lacks_devices(plane: Plane) -> None:
    await plane.deploy(scaling=SCALING)
    tasks = await overloaded(plane)
    context = plane.context
    tasks.pop().cancel()
    await until(lambda: len(lane_of(plane).waiting) == 3)
    verdict = context.objectives.verdict(("default", "fn"), lane_of(plane).identity, 4)
    assert verdict is not None and not verdict.refused
    # Another tenant needs devices, has none, and weighs as much; this one's load needs half of what it holds.
    await context.quotas.put("other", Quota(weight=1000.0))
    context.standings.wants(("default", "fn"), 1)
    context.standings.wants(("other", "gn"), 1)
    context.standings.lacking()
    verdict = context.objectives.verdict(("default", "fn"), lane_of(plane).identity, 4)
    assert verdict is not None and verdict.refused
    plane.slot.behaviour.stop_after = None
    await asyncio.gather(*tasks)


async def test_who_finds_the_queue_full_is_told_when_it_moves(
    small_queue: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]
) -> None:
    plane = Plane(small_queue, slot, checkpoint)
    await plane.start()
    await plane.deploy(scaling={**SCALING, "objectives": {}})
    tasks = await overloaded(plane, waiting=2)
    status, error, headers = await ask(plane)
    assert (status, error["error"]["code"]) == (429, "saturated")
    # Both that run have two of five tokens to make, 0.1 s each; who comes next waits for the second of them.
    assert float(headers["retry-after-ms"]) == pytest.approx(200, abs=5)
    for _ in range(2):
        _, _, headers = await ask(plane)
    assert float(headers["retry-after-ms"]) == pytest.approx(700, abs=5)
    slot.behaviour.stop_after = None
    await asyncio.gather(*tasks)
    await plane.stop()


def test_an_objective_and_a_priority_are_part_of_a_spec() -> None:
    spec = parse_mapping({"name": "fn", "model": "file:///x", "scaling": {**SCALING, "priority": 3}})
    assert (spec.scaling.objectives.first_token_s, spec.scaling.priority) == (OBJECTIVE_S, 3)
