"""From zero: woken once, held with heartbeats, released as capacity comes, refused with the right status."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from control_plane.settings import QueueSettings, Settings
from function_runtime.protocol import ReplicaError
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import FakeSlot, token_text

ANSWER = "".join(token_text(7, 0, position) for position in range(5))


async def test_a_request_wakes_a_function_at_zero(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["choices"][0] == {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == 5
    assert response.headers["x-request-id"] == answer["id"]


async def test_however_many_wait_it_is_woken_once(plane: Plane) -> None:
    plane.slot.behaviour.start_s = 0.1
    await plane.deploy()
    responses = await asyncio.gather(*(plane.post(body()) for _ in range(20)))
    answers = [await response.json() for response in responses]
    assert [answer["choices"][0]["text"] for answer in answers] == [ANSWER] * 20
    assert len(plane.slot.started) == 1


async def test_a_waiting_stream_gets_heartbeats_and_then_its_answer(plane: Plane) -> None:
    plane.slot.behaviour.start_s = 0.4
    await plane.deploy()
    async with plane.post(body(stream=True)) as response:
        stream = Stream(response)
        events = await stream.all()
    assert len(stream.comments) >= 3
    assert all(comment.startswith("heartbeat: waiting") for comment in stream.comments[:3])
    assert text_of(events) == ANSWER
    assert [place for place, _ in events] == [1, 2, 3, 4, 5, 5]
    assert events[-1][1] == "[DONE]"


async def test_the_queue_is_released_at_the_replicas_capacity(plane: Plane) -> None:
    plane.slot.behaviour.max_requests = 2
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(scaling={"max_concurrency": 2, "target_concurrency": 2})
    tasks = [asyncio.ensure_future(plane.post(body())) for _ in range(6)]
    replica = await plane.replica()
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, sum(not task.done() for task in replica._running.values()))
        await asyncio.sleep(0.001)
    assert most == 2
    assert [(await task).status for task in tasks] == [200] * 6


async def test_not_waiting_gets_503_model_loading_and_wakes_all_the_same(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body(), x_stoker_no_wait="1") as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (503, "model_loading")
    assert 1 <= int(response.headers["Retry-After"]) <= 120
    await plane.replica()
    await until(lambda: any(lane.ready for lane in plane.context.dispatcher.lanes))
    async with plane.post(body(), x_stoker_no_wait="1") as response:
        assert response.status == 200


async def test_a_full_queue_gets_429(slot: FakeSlot, settings: Settings, checkpoint: tuple[str, str, str]) -> None:
    slot.behaviour.never_ready = True
    plane = Plane(dataclasses.replace(settings, queue=QueueSettings(max_requests=2)), slot, checkpoint)
    await plane.start()
    try:
        await plane.deploy()
        waiting = [asyncio.ensure_future(plane.post(body())) for _ in range(2)]
        lane = await until(
            lambda: next((each for each in plane.context.dispatcher.lanes if len(each.waiting) == 2), None)
        )
        async with plane.post(body()) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (429, "saturated")
        assert response.headers["x-should-retry"] == "true"
        for task in waiting:
            task.cancel()
        await until(lambda: not lane.waiting)
        assert lane.waiting_bytes == 0
    finally:
        await plane.stop()


async def test_a_bad_checkpoint_reaches_the_waiting_requests_and_is_not_tried_in_a_storm(plane: Plane) -> None:
    plane.slot.behaviour.start_s = 0.05
    plane.slot.behaviour.start_error = ReplicaError("integrity_error", "tensor lm_head is altered", False)
    await plane.deploy()
    responses = await asyncio.gather(*(plane.post(body()) for _ in range(5)))
    for response in responses:
        error = (await response.json())["error"]
        assert response.status == 503
        assert error["code"] == "model_unusable"
        assert "tensor lm_head is altered" in error["message"]
        assert response.headers["x-should-retry"] == "false"
    async with plane.post(body()) as response:
        assert response.status == 503
    plane.hold_headers()
    async with plane.post(body(stream=True)) as response:
        assert response.status == 503
    assert len(plane.slot.started) == 1
    async with plane.get("/api/v1/replicas") as response:
        replicas = (await response.json())["data"]
    assert replicas[0]["error"]["message"] == "tensor lm_head is altered"


async def test_a_start_that_may_succeed_later_is_repeated_while_requests_wait(plane: Plane) -> None:
    plane.slot.behaviour.start_error = ReplicaError("no_memory", "not now", True)
    plane.slot.behaviour.start_s = 0.1
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body()))
    await until(lambda: plane.context.loop.start_error(("default", "fn"), 1))
    plane.slot.behaviour.start_error = None
    assert (await task).status == 200
    assert len(plane.slot.started) == 2


async def test_idle_past_its_keep_alive_it_goes_to_zero_and_wakes_again(plane: Plane) -> None:
    await plane.deploy(scaling={"keep_alive": 0.1})
    for _ in range(2):
        async with plane.post(body()) as response:
            assert response.status == 200
        await until(lambda: not plane.slot.living and plane.context.fleet.living() == [])
    assert len(plane.slot.started) == 2


async def test_a_replica_with_work_outlives_its_keep_alive(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.05
    await plane.deploy(scaling={"keep_alive": 0})
    async with plane.post(body(stream=True)) as response:
        events = await Stream(response).all()
    assert text_of(events) == ANSWER
    assert len(plane.slot.started) == 1


async def test_more_load_starts_more_replicas(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy(scaling={"max_replicas": 3, "target_concurrency": 2, "max_concurrency": 2})
    responses = await asyncio.gather(*(plane.post(body()) for _ in range(6)))
    assert all(response.status == 200 for response in responses)
    assert len(plane.slot.started) == 3


async def test_a_burst_does_not_overrun_the_bound_of_the_queue(
    slot: FakeSlot, settings: Settings, checkpoint: tuple[str, str, str]
) -> None:
    slot.behaviour.never_ready = True
    plane = Plane(dataclasses.replace(settings, queue=QueueSettings(max_requests=3)), slot, checkpoint)
    await plane.start()
    try:
        await plane.deploy()
        tasks = [asyncio.ensure_future(plane.post(body())) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) == 17)
        assert {task.result().status for task in tasks if task.done()} == {429}
        for task in tasks:
            task.cancel()
        await until(lambda: all(lane.entering == 0 for lane in plane.context.dispatcher.lanes))
        await until(lambda: not plane.context.dispatcher.requests)
    finally:
        await plane.stop()


async def test_a_replica_that_stops_making_progress_is_ended_and_replaced(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.seating.STALLED_AFTER_S", 0.2)
    plane.slot.behaviour.stop_after = 3
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body(max_tokens=8)))
    first = await plane.replica()
    await until(lambda: plane.slot.ended)
    assert plane.slot.ended[0][0] == first.spec.replica_id
    assert "stalled" in plane.slot.ended[0][1]
    plane.slot.behaviour.stop_after = None
    response = await task
    answer = await response.json()
    assert answer["choices"][0]["text"] == "".join(token_text(7, 0, position) for position in range(8))


async def test_an_end_that_the_agent_did_not_hear_is_asked_for_again(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    plane.slot.go_out_of_sight()
    async with plane.client.delete("/api/v1/functions/fn", headers=plane.headers) as response:
        assert response.status < 300
    await asyncio.sleep(0)
    assert plane.slot.ended == []
    plane.slot.come_back()
    await until(lambda: plane.slot.ended)
    await until(lambda: not plane.slot.living)


async def test_a_replica_that_was_given_up_counts_for_nothing(plane: Plane) -> None:
    """Its slot is silent, too: whoever waits gets another one as soon as there is a place for it."""
    await plane.deploy(scaling={"max_replicas": 1})
    async with plane.post(body()) as response:
        assert response.status == 200
    first = await plane.replica()
    plane.slot.behaviour.silent = True
    stuck = asyncio.ensure_future(plane.post(body()))
    await until(lambda: len(first.works) == 2)
    plane.slot.go_out_of_sight()
    (seat,) = (seat for lane in plane.context.dispatcher.lanes for seat in lane.seats.values())
    seat.link._lose("no progress for 20.0 s with work in flight")
    await until(lambda: first.spec.replica_id in plane.context.fleet.given_up)
    plane.slot.behaviour.silent = False
    plane.slot.in_reach = True
    plane.slot.tell_state()
    await until(lambda: len(plane.slot.started) == 2)
    async with await stuck as response:
        assert (await response.json())["choices"][0]["text"] == ANSWER
    assert [replica_id for replica_id, _ in plane.slot.ended][:1] == [first.spec.replica_id]
