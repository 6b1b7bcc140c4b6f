"""Clients that go away: the work stops within a step, streaming or not, unless it is detached."""

from __future__ import annotations

import asyncio

from control_plane.records import RequestState
from function_runtime.protocol import Cancel
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import FakeReplica, token_text


def cancels(replica: FakeReplica) -> int:
    return sum(isinstance(word, Cancel) for word in replica.words)


async def only_record(plane: Plane):  # type: ignore[no-untyped-def]
    records = await plane.context.journal.recent("fn")
    assert len(records) == 1
    return records[0]


async def test_leaving_a_stream_cancels_the_work(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=1000))
    async for place, _ in Stream(response).events():
        if place == 3:
            break
    response.close()
    replica = plane.slot.living[0]
    await until(lambda: cancels(replica) == 1)
    await until(lambda: not plane.context.dispatcher.requests)
    record = await only_record(plane)
    assert record.state is RequestState.CANCELLED
    assert record.outcome.output_tokens == record.last_seq >= 3


async def test_leaving_a_whole_answer_cancels_the_work(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body(max_tokens=1000)))
    replica = await plane.replica()
    await until(lambda: replica.works)
    task.cancel()
    await until(lambda: cancels(replica) == 1)
    await until(lambda: not plane.context.dispatcher.requests)
    assert (await only_record(plane)).state is RequestState.CANCELLED


async def test_leaving_while_it_waits_takes_it_out_of_the_queue(plane: Plane) -> None:
    plane.slot.behaviour.never_ready = True
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body()))
    await until(lambda: plane.slot.started)
    task.cancel()
    await until(lambda: not plane.context.dispatcher.requests)
    assert (await only_record(plane)).state is RequestState.CANCELLED


async def test_the_work_goes_on_while_one_of_two_readers_stays(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    first = await plane.post(body(stream=True, max_tokens=30))
    request_id = first.headers["x-request-id"]
    second = await plane.get(f"/v1/completions/{request_id}/stream")
    async for place, _ in Stream(first).events():
        if place == 3:
            break
    first.close()
    assert text_of(await Stream(second).all()) == "".join(token_text(7, 0, position) for position in range(30))
    assert cancels(plane.slot.living[0]) == 0


async def test_detached_work_goes_on_and_can_be_read_later(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(on_disconnect="detach")
    response = await plane.post(body(stream=True, max_tokens=20))
    request_id = response.headers["x-request-id"]
    response.close()
    await until(lambda: not plane.context.dispatcher.requests)
    assert cancels(plane.slot.living[0]) == 0
    async with plane.get(f"/v1/completions/{request_id}") as response:
        assert (await response.json())["usage"]["completion_tokens"] == 20


async def test_an_idempotency_key_detaches(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body(max_tokens=20), Idempotency_Key="mine"))
    replica = await plane.replica()
    await until(lambda: replica.works)
    task.cancel()
    await until(lambda: not plane.context.dispatcher.requests)
    assert (await only_record(plane)).state is RequestState.DONE


async def test_a_request_is_cancelled_by_its_id(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=1000))
    request_id = response.headers["x-request-id"]
    async with plane.client.delete(f"/v1/completions/{request_id}", headers=plane.headers) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (409, "request_running")
    async with plane.client.post(f"/v1/completions/{request_id}/cancel", headers=plane.headers) as answer:
        assert (await answer.json())["cancelled"] is True
    events = await Stream(response).all()
    assert events[-2][1]["error"]["code"] == "request_cancelled"
    assert events[-1][1] == "[DONE]"
    async with plane.client.post(f"/v1/completions/{request_id}/cancel", headers=plane.headers) as answer:
        assert answer.status == 200


async def test_an_ended_request_is_forgotten_when_its_tenant_says_so(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        request_id = response.headers["x-request-id"]
        await response.read()
    path = f"/v1/completions/{request_id}"
    async with plane.client.delete(path, headers=plane.headers) as answer:
        assert (answer.status, (await answer.json())["deleted"]) == (200, True)
    async with plane.get(path) as answer:
        assert answer.status == 404
    async with plane.client.delete(path, headers=plane.headers) as answer:
        assert answer.status == 404
    async with plane.get("/v1/organization/usage/completions?start_time=1&bucket_width=1d&limit=1") as answer:
        assert answer.status == 200


async def test_no_counter_leaks_however_requests_end(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.002
    await plane.deploy(scaling={"keep_alive": 0.05})

    async def one(number: int) -> None:
        task = asyncio.ensure_future(plane.post(body(max_tokens=1 + number % 7, stream=number % 2 == 0)))
        if number % 3 == 0:
            await asyncio.sleep(0.003 * (number % 11))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            response = await task
            if number % 5 == 0:
                response.close()
            else:
                await response.read()

    await asyncio.gather(*(one(number) for number in range(60)))
    await until(lambda: not plane.context.dispatcher.requests)
    for lane in plane.context.dispatcher.lanes:
        assert (lane.demand, lane.waiting_bytes) == (0, 0)
    await until(lambda: not plane.context.fleet.living())
