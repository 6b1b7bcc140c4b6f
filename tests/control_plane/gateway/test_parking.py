"""Drains: what is in flight is parked at a token and goes on, elsewhere or later, as if nothing had been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane import parking
from control_plane.live_request import Phase
from control_plane.records import RequestState
from control_plane.tenants import Role
from function_runtime.protocol import Cancel, DeviceTime, Park, Parked, ReplicaState, Settled
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text

LONG = 40
FUNCTION = "/api/v1/functions/fn/drain"
SLOT = "/api/v1/slots/slot-0/drain"


def answer_of(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


async def drain(plane: Plane, path: str = FUNCTION, **fields: Any) -> Any:
    async with plane.client.post(path, json=fields, headers=plane.headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def resume(plane: Plane, path: str = FUNCTION) -> Any:
    async with plane.client.delete(path, headers=plane.headers) as response:
        assert response.status == 200
        return await response.json()


async def read_until(stream: Stream, place: int) -> list[tuple[int, Any]]:
    events = []
    async for event in stream.events():
        events.append(event)
        if event[0] >= place:
            break
    return events


async def parked(plane: Plane) -> None:
    await until(lambda: all(lane.in_flight == 0 for lane in plane.context.dispatcher.lanes))
    await until(lambda: not plane.context.fleet.living())
    # A replica that has ended may leave tokens behind that are still being committed.
    await until(lambda: all(live.phase is not Phase.RUNNING for live in plane.context.dispatcher.requests.values()))


async def test_a_drained_function_parks_its_stream_and_carries_it_on_when_it_is_resumed(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 10)
        told = await drain(plane, reason="new cable")
        assert told["drained"]
        await parked(plane)
        waiting = [request.log.note for request in plane.context.dispatcher.requests.values()]
        assert waiting == ["parked: the function fn is drained (new cable)"]
        started = len(plane.slot.started)
        await asyncio.sleep(3 * plane.settings.http.heartbeat_s)
        assert len(plane.slot.started) == started, "a drained function was woken"
        assert not (await resume(plane))["drained"]
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]
    assert any("the function fn is drained (new cable)" in comment for comment in stream.comments)
    request_id = response.headers["x-request-id"]
    async with plane.get(f"/api/v1/why/{request_id}") as asked:
        why = await asked.json()
    assert [attempt["epoch"] for attempt in why["attempts"]] == [1, 2]
    assert why["attempts"][0]["reason"].startswith("parked after token ")
    assert [event["what"] for event in why["timeline"] if event["what"] == "parked"] == ["parked"]


async def test_what_was_parked_may_be_forgotten_by_its_replica(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 5)
        replica = plane.slot.living[0]
        (seat,) = next(iter(plane.context.dispatcher.lanes)).seats.values()
        plane.context.dispatcher.park_seat(seat, "a test", 5.0)
        await until(lambda: any(isinstance(word, Settled) for word in replica.words))
        words = [type(word) for word in replica.words if isinstance(word, Park | Settled | Cancel)]
        assert words == [Park, Settled]
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert plane.slot.living[-1].works[0].epoch == 2


async def test_a_replica_that_gives_its_work_back_unasked_gets_no_more(plane: Plane) -> None:
    """It is about to end, and says so before its agent does."""
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 5)
        replica = plane.slot.living[0]
        (work,) = replica.works
        replica._running[work.request_id].cancel()
        last_seq = replica._last_seq(work.request_id)
        replica._say(Parked(work.request_id, 1, last_seq, DeviceTime(5, 5), "SIGTERM"), replica._writers[0])
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert replica.works == [work]
    assert len(plane.slot.started) == 2


async def test_new_requests_of_a_drained_function_are_told_to_come_back(plane: Plane) -> None:
    await plane.deploy()
    await drain(plane)
    async with plane.post(body()) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "function_drained")
        assert response.headers["x-should-retry"] == "true"
    await plane.deploy("other")
    async with plane.post(body(model="other")) as response:
        assert response.status == 200
    await resume(plane)
    async with plane.post(body()) as response:
        assert response.status == 200


async def test_no_limit_of_a_request_runs_while_its_function_is_drained(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    limits = {"cold_start_s": 0.3, "queue_s": 0.3, "total_s": 1.2}
    await plane.deploy(timeouts=limits)
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 3)
        await drain(plane)
        await parked(plane)
        await asyncio.sleep(1.3)
        await resume(plane)
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)


async def test_a_drain_and_what_it_parked_outlive_the_gateway(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(timeouts={"total_s": 1.2})
    response = await plane.post(body(stream=True, max_tokens=LONG), Idempotency_Key="stays")
    request_id = response.headers["x-request-id"]
    events = await read_until(Stream(response), 3)
    await drain(plane)
    await parked(plane)
    response.close()
    await asyncio.sleep(1.3)
    await plane.restart()
    live = plane.context.dispatcher.requests[request_id]
    assert live.log.note == "parked: the function fn is drained"
    started = len(plane.slot.started)
    await resume(plane)
    async with plane.get(f"/v1/completions/{request_id}/stream", Last_Event_ID=str(events[-1][0])) as again:
        events += await Stream(again).all()
    assert text_of(events) == answer_of(LONG)
    assert len(plane.slot.started) == started + 1


async def test_a_drained_slot_takes_nothing_and_gives_its_requests_back(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 5)
        assert (await drain(plane, SLOT))["kind"] == "slot"
        await parked(plane)
        states = [status.state for status in plane.context.fleet.replicas.values()]
        assert states == [ReplicaState.ENDED]
        assert len(plane.slot.started) == 1
        await resume(plane, SLOT)
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert len(plane.slot.started) == 2
    async with plane.client.post("/api/v1/slots/nowhere/drain", headers=plane.headers) as refused:
        assert refused.status == 404


async def test_a_replica_that_does_not_park_in_time_loses_the_request_and_nothing_else(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "PARK_S", 0.05)
    plane.slot.behaviour.token_s = 0.01
    plane.slot.behaviour.deaf = True
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 5)
        await drain(plane)
        await parked(plane)
        await resume(plane)
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]


async def test_parking_often_does_not_count_as_failing(plane: Plane) -> None:
    plane.slot.behaviour.silent = True
    await plane.deploy()
    async with plane.post(body(stream=True)) as response:
        for _ in range(10):
            await until(lambda: plane.slot.living and plane.slot.living[-1].works)
            await drain(plane)
            await parked(plane)
            await resume(plane)
        plane.slot.behaviour.silent = False
        assert text_of(await Stream(response).all()) == answer_of(5)


async def test_a_parked_request_can_be_cancelled(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=1000))
    request_id = response.headers["x-request-id"]
    await read_until(Stream(response), 3)
    await drain(plane)
    await parked(plane)
    async with plane.client.post(f"/v1/completions/{request_id}/cancel", headers=plane.headers) as answer:
        assert (await answer.json())["cancelled"] is True
    record = await plane.context.journal.get(request_id)
    assert record is not None and record.state is RequestState.CANCELLED
    assert plane.context.dispatcher.requests == {}


async def test_a_drain_needs_an_administrator_and_a_function(plane: Plane) -> None:
    await plane.deploy()
    _, user = await plane.context.keys.create("default", "user")
    async with plane.client.post(FUNCTION, headers={"Authorization": f"Bearer {user}"}) as refused:
        assert refused.status == 403
    async with plane.client.post("/api/v1/functions/nothing/drain", headers=plane.headers) as refused:
        assert refused.status == 404


async def test_a_known_idempotency_key_attaches_whatever_is_refused_to_new_requests(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    ended_body, running_body = body(max_tokens=3), body(max_tokens=LONG, stream=True)
    response_body = {"model": "fn", "input": "hello", "max_output_tokens": 3}
    async with plane.post(ended_body, Idempotency_Key="ended") as response:
        ended = (await response.json())["id"]
    async with plane.post(response_body, "/v1/responses", Idempotency_Key="answer") as response:
        made = (await response.json())["id"]
    running = (await plane.post(running_body, Idempotency_Key="running")).headers["x-request-id"]

    async def attach() -> None:
        async with plane.post(ended_body, Idempotency_Key="ended") as response:
            assert (response.status, (await response.json())["id"]) == (200, ended)
        async with plane.post(response_body, "/v1/responses", Idempotency_Key="answer") as response:
            assert (response.status, (await response.json())["id"]) == (200, made)
        again = await plane.post(running_body, Idempotency_Key="running")
        assert (again.status, again.headers["x-request-id"]) == (200, running)
        again.close()
        async with plane.post(body(max_tokens=4), Idempotency_Key="ended") as response:
            assert response.status == 422

    async def refused(code: str, key: str = "new") -> None:
        for path, new in (("/v1/completions", body()), ("/v1/responses", response_body)):
            async with plane.post(new, path, Idempotency_Key=key) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, code)

    await drain(plane)
    await refused("function_drained")
    await attach()
    await resume(plane)
    plane.context.draining = True
    await refused("draining")
    await attach()
    plane.context.draining = False
    monkeypatch.setattr(plane.context.dispatcher, "unusable", lambda key, identity: "a bad checkpoint")
    await refused("model_unusable")
    await attach()
    monkeypatch.undo()
    await plane.context.functions.delete("fn", "default")
    async with plane.post(body(), Idempotency_Key="new") as response:
        assert response.status == 404
    async with plane.post(ended_body, Idempotency_Key="ended") as response:
        assert (response.status, (await response.json())["id"]) == (200, ended)


async def test_a_body_is_not_read_to_be_refused(plane: Plane) -> None:
    await plane.deploy()
    plane.context.draining = True
    async with plane.post(b"no json at all") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")
    plane.context.draining = False


async def test_what_all_tenants_share_is_drained_by_who_runs_the_installation_only(plane: Plane) -> None:
    _, stranger = await plane.context.keys.create("acme", "its admin", Role.ADMIN)
    headers = {"Authorization": f"Bearer {stranger}"}
    for method, path in (("POST", SLOT), ("DELETE", SLOT), ("POST", "/api/v1/drain")):
        async with plane.client.request(method, path, headers=headers) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (403, "forbidden")
    assert not plane.context.stop.is_set() and not plane.context.drains.slots()
