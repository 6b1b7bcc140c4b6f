"""What was delivered stands and is delivered once: over lost replicas, lost gateways and lost readers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from control_plane.attempts import FRUITLESS_MAX
from control_plane.errors import StorageUnavailable
from control_plane.records import RequestState
from function_runtime.protocol import DeviceTime, Failed, Finished, KvChunk, KvSealed, Settled, Submit
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until, until_read
from tests.control_plane.gateway.fakes import token_text

LONG = 40


def answer_of(tokens: int, choice: int = 0) -> str:
    return "".join(token_text(7, choice, position) for position in range(tokens))


async def read_until(stream: Stream, place: int) -> list[tuple[int, Any]]:
    events = []
    async for event in stream.events():
        events.append(event)
        if event[0] >= place:
            break
    return events


async def test_a_lost_replica_is_carried_on_at_the_next_token(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 10)
        await plane.slot.kill(plane.slot.living[0])
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]
    work = plane.slot.living[0].works[0]
    assert work.epoch == 2
    assert [event.text for event in work.produced] == [token_text(7, 0, p) for p in range(len(work.produced))]
    assert work.prefill_ends == (0, len(work.prompt))
    assert len(plane.slot.started) == 2


@pytest.mark.parametrize("gateway_dies", [False, True])
async def test_a_whole_log_needs_no_further_attempt(plane: Plane, gateway_dies: bool) -> None:
    """Every token came, and then the replica (and the gateway) died before it could say that this was all."""
    plane.slot.behaviour.withhold_end = True
    await plane.deploy()
    response = await plane.post(body(stream=True, n=2))
    request_id = response.headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests[request_id].complete)
    replica = plane.slot.living[0]
    if gateway_dies:
        await plane.die()
        await replica.die()
        await plane.start()
    else:
        await plane.slot.kill(replica)
    async with plane.get(f"/v1/completions/{request_id}/stream") as again:
        events = await Stream(again).all()
    assert text_of(events, 1) == answer_of(5, 1)
    assert events[-1][1] == "[DONE]"
    assert len(plane.slot.started) == 1
    await until(lambda: not plane.context.dispatcher.requests)
    record = await plane.context.journal.get(request_id)
    assert record is not None and record.state is RequestState.DONE


async def test_two_choices_are_carried_on_in_one_sequence(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=10, n=2)) as response:
        stream = Stream(response)
        events = await read_until(stream, 7)
        await plane.slot.kill(plane.slot.living[0])
        events += await stream.all()
    assert text_of(events, 0) == answer_of(10, 0)
    assert text_of(events, 1) == answer_of(10, 1)
    assert [place for place, _ in events] == [*range(1, 21), 20]


async def test_a_broken_connection_to_a_living_replica_loses_nothing(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events = await read_until(stream, 10)
        await plane.slot.living[0].cut_connections()
        events += await stream.all()
    assert text_of(events) == answer_of(LONG)
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]


async def test_a_replica_that_fails_and_says_retry_is_replaced(plane: Plane) -> None:
    plane.slot.behaviour.fail = Failed("", 0, "draining", "this replica is going", True, DeviceTime())
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body()))
    replica = await plane.replica()
    await until(lambda: replica.works)
    plane.slot.behaviour.fail = None
    response = await task
    assert response.status == 200
    assert (await response.json())["choices"][0]["text"] == answer_of(5)


async def test_a_replica_that_can_never_do_it_is_an_error_with_its_reason(plane: Plane) -> None:
    plane.slot.behaviour.fail = Failed("", 0, "engine_numeric_error", "logits are NaN", False, DeviceTime())
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 500, "its replica is there"
    plane.hold_headers()
    async with plane.post(body(stream=True)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["message"]) == (500, "engine_numeric_error", "logits are NaN")
    assert plane.context.dispatcher.requests == {}


async def test_a_request_that_takes_down_every_replica_ends(plane: Plane) -> None:
    await plane.deploy()
    plane.slot.behaviour.silent = True
    task = asyncio.ensure_future(plane.post(body()))
    killed = 0
    while not task.done():
        if plane.slot.living and plane.slot.living[0].works:
            await plane.slot.kill(plane.slot.living[0])
            killed += 1
        await asyncio.sleep(0.002)
    response = await task
    assert response.status == 500
    assert (await response.json())["error"]["code"] == "attempts_exhausted"
    assert killed == FRUITLESS_MAX


async def test_after_a_gateways_death_a_reader_gets_the_rest_and_only_the_rest(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=LONG))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 10)
    cursor = before[-1][0]
    await plane.restart()
    async with plane.get(f"/v1/completions/{request_id}/stream", Last_Event_ID=str(cursor)) as response:
        assert response.status == 200, await response.text()
        after = await Stream(response).all()
    assert text_of(before + after) == answer_of(LONG)
    assert [place for place, _ in before + after] == [*range(1, LONG + 1), LONG]
    # The replica lived on: it was attached to, and nothing was computed twice.
    assert await plane.context.decisions.of_request(request_id) == []
    assert len(plane.slot.started) == 1
    assert len(plane.slot.living[0].works) == 1


async def test_after_the_death_of_gateway_and_replica_the_request_goes_on_from_the_journal(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=LONG))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 10)
    await plane.die()
    await plane.slot.kill(plane.slot.living[0])
    await plane.start()
    path = f"/v1/completions/{request_id}/stream?starting_after={before[-1][0]}"
    async with plane.get(path) as response:
        after = await Stream(response).all()
    assert text_of(before + after) == answer_of(LONG)
    assert [place for place, _ in before + after] == [*range(1, LONG + 1), LONG]
    assert plane.slot.living[0].works[0].epoch == 2


async def test_a_request_that_waited_when_the_gateway_died_is_served_by_the_next(plane: Plane) -> None:
    plane.slot.behaviour.never_ready = True
    await plane.deploy()
    task = asyncio.ensure_future(plane.post(body(), Idempotency_Key="once"))
    await until(lambda: plane.slot.started)
    await plane.die()
    await asyncio.gather(task, return_exceptions=True)
    plane.slot.behaviour.never_ready = False
    plane.slot.statuses.clear()
    await plane.start()
    async with plane.post(body(), Idempotency_Key="once") as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(5)
    async with plane.get("/api/v1/why/fn") as response:
        assert len((await response.json())["requests"]) == 1


async def test_a_finished_stream_can_be_read_again_from_any_place(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body(stream=True, stream_options={"include_usage": True})) as response:
        events = await Stream(response).all()
    request_id = response.headers["x-request-id"]
    for cursor in (0, 3, 5):
        async with plane.get(f"/v1/completions/{request_id}/stream?starting_after={cursor}") as response:
            again = await Stream(response).all()
        assert [event for event in again if "choices" in event[1]] == [
            event for event in events if event[0] > cursor or event[1] == "[DONE]" or not event[1]["choices"]
        ][: len(again) - 1]
    async with plane.get(f"/v1/completions/{request_id}") as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(5)


async def test_chat_roles_are_not_repeated_to_a_reader_that_had_them(plane: Plane) -> None:
    await plane.deploy()
    chat = {"model": "fn", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 7, "stream": True}
    async with plane.post(chat, "/v1/chat/completions") as response:
        events = await Stream(response).all()
    request_id = response.headers["x-request-id"]
    assert events[0][1]["choices"][0]["delta"]["role"] == "assistant"
    async with plane.get(f"/v1/chat/completions/{request_id}/stream", Last_Event_ID="1") as response:
        again = await Stream(response).all()
    assert again == events[1:]
    assert all("role" not in event["choices"][0]["delta"] for _, event in again if event != "[DONE]")


async def test_a_cursor_that_has_not_happened_is_refused(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        request_id = (await response.json())["id"]
    for cursor in ("6", "-1", "x", "1.5"):
        async with plane.get(f"/v1/completions/{request_id}/stream?starting_after={cursor}") as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "starting_after"


async def test_an_idempotency_key_attaches_to_the_running_and_to_the_finished_request(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy()
    first = asyncio.ensure_future(plane.post(body(stream=True), Idempotency_Key="k1"))
    replica = await plane.replica()
    await until(lambda: replica.works)
    second = await plane.post(body(stream=True), Idempotency_Key="k1")
    events = [await Stream(response).all() for response in (await first, second)]
    assert events[0] == events[1]
    async with plane.post(body(stream=True), Idempotency_Key="k1") as response:
        assert await Stream(response).all() == events[0]
    assert len(replica.works) == 1
    async with plane.post(body(max_tokens=3), Idempotency_Key="k1") as response:
        assert response.status == 422


async def test_outcomes_are_settled_with_the_replica(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    replica = plane.slot.living[0]
    await until(lambda: any(isinstance(word, Settled) for word in replica.words))
    assert sum(isinstance(word, Submit) for word in replica.words) == 1


async def test_requests_of_other_tenants_do_not_exist(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        request_id = (await response.json())["id"]
    _, secret = await plane.context.keys.create("other", "theirs")
    headers = {"Authorization": f"Bearer {secret}"}
    for path in (f"/v1/completions/{request_id}", f"/v1/completions/{request_id}/stream", f"/api/v1/why/{request_id}"):
        async with plane.client.get(path, headers=headers) as response:
            assert response.status == 404
    async with plane.client.post("/v1/completions", json=body(), headers=headers) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def settled_of(replica: Any, request_id: str, epoch: int) -> Settled:
    def look() -> Settled | None:
        return next(
            (w for w in replica.words if isinstance(w, Settled) and (w.request_id, w.epoch) == (request_id, epoch)),
            None,
        )

    found: Settled = await until(look)
    return found


def settlements(replica: Any) -> int:
    return sum(isinstance(word, Settled) for word in replica.words)


async def test_an_attempt_that_is_over_is_settled_as_one_whose_request_goes_on(plane: Plane) -> None:
    """What it stored is what the next attempt resumes from: only the end of the request lets that go."""
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(scaling={"min_replicas": 2, "max_replicas": 2})
    await until(lambda: len(plane.slot.living) == 2)
    async with plane.post(body(stream=True, max_tokens=150)) as response:
        stream = Stream(response)
        events = await read_until(stream, 5)
        # However slow this machine is, the answer is not over before what follows.
        plane.slot.behaviour.token_s = 0.2
        request_id = response.headers["x-request-id"]
        first, second = sorted(plane.slot.living, key=lambda replica: len(replica.works), reverse=True)
        await first.cut_connections()
        await until(lambda: second.works)
        # The first one is connected to again, and tells what it still holds.
        assert (await settled_of(first, request_id, 1)).goes_on
        # One that ends late with what another carries on hears the same.
        before = settlements(first)
        first._say(Finished(request_id, 1, 9, True, DeviceTime()), first._writers[-1])
        await until(lambda: settlements(first) > before)
        assert all(word.goes_on for word in first.words if isinstance(word, Settled))
        plane.slot.behaviour.token_s = 0.0
        events += await stream.all()
    assert text_of(events) == answer_of(150)
    assert not (await settled_of(second, request_id, 2)).goes_on


async def test_the_same_bytes_are_known_for_every_choice_and_every_pack_that_has_them(plane: Plane) -> None:
    plane.slot.behaviour.silent = True
    await plane.deploy()
    response = await plane.post(body(stream=True, n=2))
    request_id = response.headers["x-request-id"]
    replica = await plane.replica()
    await until(lambda: replica.works)
    one = KvChunk(0, 0, 32, "kv/packs/one", 0, 9, "d" * 64, "c" * 64)
    other, anew = msgspec.structs.replace(one, choice=1), msgspec.structs.replace(one, pack="kv/packs/two")
    live = plane.context.dispatcher.requests[request_id]
    for chunk, known in ((one, [one]), (other, [one, other]), (anew, [anew, other]), (anew, [anew, other])):
        replica._tell(replica.works[0], KvSealed(request_id, 1, (chunk,)))
        await until(lambda known=known: live.kv == known)
    await until_read(lambda: plane.context.journal.kv(request_id), lambda found: found == [anew, other])
    response.close()


async def test_an_attempt_that_left_its_stored_kv_out_says_why_before_its_first_token_too(plane: Plane) -> None:
    """Else nobody could tell whether what the next one loads had been computed again."""
    behaviour = plane.slot.behaviour
    behaviour.silent, behaviour.left_out = True, "[0, 32) of choice 0: the object is gone"
    await plane.deploy()
    response = await plane.post(body(stream=True))
    request_id = response.headers["x-request-id"]
    journal = plane.context.journal

    async def details() -> list[str | None]:
        return [attempt.detail for attempt in await journal.attempts(request_id)]

    await until_read(details, lambda found: found == [behaviour.left_out])
    (attempt,) = await journal.attempts(request_id)
    assert (attempt.after_seq, attempt.loaded_tokens) == (0, 0)
    response.close()


async def test_stored_kv_is_named_in_the_journal_although_the_storage_refused_at_first(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.slot.behaviour.silent = True
    await plane.deploy()
    response = await plane.post(body(stream=True))
    request_id = response.headers["x-request-id"]
    replica = await plane.replica()
    await until(lambda: replica.works)
    journal, refusals = plane.context.journal, [StorageUnavailable("away"), StorageUnavailable("away")]
    seal_kv = journal.seal_kv

    async def refusing(*given: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return await seal_kv(*given)

    monkeypatch.setattr(journal, "seal_kv", refusing)
    chunk = KvChunk(0, 0, 32, "kv/packs/one", 0, 9, "d" * 64, "c" * 64)
    replica._tell(replica.works[0], KvSealed(request_id, 1, (chunk,)))
    await until_read(lambda: journal.kv(request_id), lambda found: found == [chunk])
    assert not refusals
    response.close()
