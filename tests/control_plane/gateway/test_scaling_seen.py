"""What scaling by forecast does to a live control plane, and how it is told: why, causes, metrics, refusals."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from autoscaler.decision import Observed
from autoscaler.forecast import Forecast
from autoscaler.service import ServiceModel
from control_plane.errors import InvalidRequest
from control_plane.forecasting import _Fitted
from tests.control_plane.gateway.conftest import Plane, body, until

KEY = ("default", "fn")


def expect(plane: Plane, *warm: tuple[float, float]) -> None:
    """As if the back-tests had chosen this."""
    fitted = _Fitted()
    fitted.forecast = Forecast("test", time.monotonic(), warm=warm)
    plane.context.loop.forecasting._fitted[KEY] = fitted
    plane.context.loop.poke(KEY)


async def why(plane: Plane) -> dict[str, Any]:
    async with plane.get("/api/v1/why/fn") as response:
        told: dict[str, Any] = await response.json()
    return told


async def metrics(plane: Plane) -> str:
    async with plane.get("/metrics") as response:
        return await response.text()


async def ask(plane: Plane) -> None:
    async with plane.post(body()) as response:
        assert response.status == 200, await response.text()


async def lead(plane: Plane) -> None:
    """As the upkeep does when a gateway comes to lead."""
    await plane.context.loop.observations.restore()


async def test_a_replica_is_started_ahead_of_a_call_gone_after_it_and_told_of(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"keep_alive": 0})
    await ask(plane)
    await until(lambda: not plane.slot.living)
    expect(plane, (0.2, 60.0))
    await until(lambda: plane.slot.living)
    assert len(plane.slot.started) == 2
    # Held from here on: behind the call a window that opens later would end it and start it once more.
    expect(plane, (0.0, 60.0))
    await ask(plane)
    assert len(plane.slot.started) == 2
    told = (await why(plane))["scaling"]
    assert [start["cause"] for start in told["starts"]] == ["from_zero", "prewarm"]
    assert [start["restart"] for start in told["starts"]] == [False, True]
    assert told["forecast"]["warm_s"] == [[0.0, 60.0]]
    assert told["restarts_in_hour"] == 1
    await plane.context.loop.starting.restore()
    assert plane.context.loop.starting.restarts_of(KEY, time.monotonic())[0] == 1
    text = await metrics(plane)
    assert 'stoker_starts_total{cause="prewarm",function="fn"} 1.0' in text
    assert 'stoker_restarts_total{function="fn"} 1.0' in text


async def test_a_replica_started_ahead_for_nothing_is_counted_as_wasted(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"keep_alive": 0})
    await ask(plane)
    await until(lambda: not plane.slot.living)
    expect(plane, (0.1, 0.3))
    await until(lambda: len(plane.slot.started) == 2)
    await until(lambda: not plane.slot.living)
    await until(lambda: plane.context.loop.starting.ahead["fn", "wasted"] == 1)
    assert 'stoker_started_ahead_total{function="fn",outcome="wasted"} 1.0' in await metrics(plane)


async def test_a_decision_knows_since_when_somebody_waits_and_how_many_starts_keep_waiting(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"keep_alive": 60, "max_replicas": 1})
    plane.slot.behaviour.start_s = 0.3
    seen: list[Observed] = []
    plane.context.loop.on_decided = lambda key, revision, decision: seen.append(decision.observed)
    began_s = time.monotonic()
    await asyncio.gather(*(ask(plane) for _ in range(6)))
    waiting = [each for each in seen if each.waiting]
    assert waiting and all(began_s <= each.waiting_since_s <= time.monotonic() for each in waiting)
    await until(lambda: plane.context.loop.observation.cold_waiters(KEY) > 1.0)
    plane.context.loop.poke(KEY)
    await until(lambda: seen[-1].waiting == 0)
    assert seen[-1].waiting_since_s is None
    assert seen[-1].cold_waiters == plane.context.loop.observation.cold_waiters(KEY)


async def test_in_advisory_mode_the_forecast_only_says_what_it_would_do(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"keep_alive": 0, "mode": "advisory"})
    await ask(plane)
    await until(lambda: not plane.slot.living)
    expect(plane, (0.0, 60.0))

    async def advised() -> bool:
        events = (await why(plane))["timeline"]
        return any(event.get("inputs", {}).get("advised") == 1 for event in events)

    while not await advised():
        pass
    assert len(plane.slot.started) == 1


async def test_more_start_where_the_waiting_they_save_is_worth_more_by_measured_speeds(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"max_replicas": 4, "target_concurrency": 8, "max_concurrency": 8})
    slow = ServiceModel(prefill_tokens_per_s=10.0, step_base_s=0.5, step_per_request_s=0.1, max_requests=8)
    plane.context.loop.observation.service = lambda key, identity: slow
    fitted = _Fitted()
    fitted.forecast = Forecast("test", time.monotonic(), prompt_tokens=500.0, output_tokens=200.0)
    plane.context.loop.forecasting._fitted[KEY] = fitted
    # Within the target of one replica, which would take a minute to read each prompt, one after the other.
    await asyncio.gather(*(ask(plane) for _ in range(6)))
    assert len(plane.slot.started) > 1
    starts = [event for event in (await why(plane))["timeline"] if event["what"] == "start"]
    assert any("device-seconds" in start["detail"] for start in starts)


async def test_a_start_after_a_death_is_put_down_to_it(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"min_replicas": 1})
    replica = await plane.replica()
    await until(lambda: plane.context.fleet.living(KEY)[0].ready_us)
    await plane.slot.kill(replica)
    await until(lambda: len(plane.slot.started) == 2)
    assert [start["cause"] for start in (await why(plane))["scaling"]["starts"]] == ["from_zero", "death"]


async def test_a_start_after_a_replica_had_to_go_is_put_down_to_that(plane: Plane) -> None:
    await lead(plane)
    await plane.deploy(scaling={"min_replicas": 1})
    status = await until(lambda: next((s for s in plane.context.fleet.living(KEY) if s.ready_us), None))
    assert plane.context.loop.end_replica(status.replica_id, "an operator asked for it")
    await until(lambda: len(plane.slot.started) == 2)
    assert [start["cause"] for start in (await why(plane))["scaling"]["starts"]] == ["from_zero", "eviction"]


async def test_an_objective_below_what_a_ready_replica_was_measured_to_do_is_refused(plane: Plane) -> None:
    await plane.deploy()
    plane.context.loop.observation.service = lambda key, identity: ServiceModel(1000.0, 0.05, 0.01)
    uri = plane.checkpoint[0]
    for objectives, param in (
        ({"token_s": 0.02}, "scaling.objectives.token_s"),
        ({"first_token_s": 0.05}, "scaling.objectives.first_token_s"),
    ):
        spec = {"name": "fn", "model": uri, "engine": "stub", "scaling": {"objectives": objectives}}
        async with plane.client.put("/api/v1/functions/fn", json=spec, headers=plane.headers) as response:
            answer = await response.json()
        assert response.status == InvalidRequest.http_status
        assert answer["error"]["param"] == param
        assert "was measured to take" in answer["error"]["message"]


async def test_what_was_measured_of_a_model_counts_for_the_next_function_that_is_deployed_with_it(plane: Plane) -> None:
    await plane.deploy()
    measured = {"fn": ServiceModel(1000.0, 0.05, 0.01)}
    plane.context.loop.observation.service = lambda key, identity: measured.get(key[1])
    spec = {
        "name": "other",
        "model": plane.checkpoint[0],
        "engine": "stub",
        "scaling": {"objectives": {"token_s": 0.02}},
    }
    async with plane.client.put("/api/v1/functions/other", json=spec, headers=plane.headers) as response:
        answer = await response.json()
    assert response.status == InvalidRequest.http_status
    assert "(by fn)" in answer["error"]["message"]
    differs = {**spec, "dtype": "bfloat16"}
    async with plane.client.put("/api/v1/functions/other", json=differs, headers=plane.headers) as response:
        assert response.status == 201, "nothing is known of it in that form"


async def test_a_control_plane_without_load_knows_nothing_and_says_so(plane: Plane) -> None:
    await plane.deploy()
    told = (await why(plane))["scaling"]
    assert told == {"mode": "active", "leads": True, "starts": [], "causes": {}}


@pytest.mark.parametrize("mode", ["active", "advisory"])
async def test_every_part_of_the_answer_can_be_printed(plane: Plane, mode: str) -> None:
    from control_plane.cli.why import paragraphs

    await lead(plane)
    await plane.deploy(scaling={"mode": mode})
    await ask(plane)
    expect(plane, (1.0, float("inf")))
    text = "\n".join(paragraphs(await why(plane)))
    assert "from_zero" in text
