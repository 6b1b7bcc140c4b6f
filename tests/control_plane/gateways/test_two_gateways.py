"""Two gateways share the work: each may be asked for anything, each may die, and what was accepted goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from control_plane.live_request import Phase
from function_runtime.protocol import Submit
from tests.control_plane.gateway.conftest import Stream, body, text_of, until
from tests.control_plane.gateway.fakes import FakeReplica, token_text
from tests.control_plane.gateways.conftest import Gateway, Town

LONG = 60


def answer_of(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


async def read_until(stream: Stream, places: int) -> list[tuple[int, Any]]:
    events = []
    async for event in stream.events():
        events.append(event)
        if len(events) == places:
            break
    return events


async def rest_of(gateway: Gateway, request_id: str, cursor: int) -> list[tuple[int, Any]]:
    async with gateway.get(f"/v1/completions/{request_id}/stream?starting_after={cursor}") as response:
        assert response.status == 200, await response.text()
        return await Stream(response).all()


def submits(replica: FakeReplica) -> list[tuple[str, int]]:
    return [(word.work.request_id, word.work.epoch) for word in replica.words if isinstance(word, Submit)]


# --- the control loop -------------------------------------------------------------------------------------------------


async def test_a_request_at_a_gateway_that_does_not_lead_wakes_the_function(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    async with other.post(body()) as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(5)
    assert len(other.slot.started) == 1
    async with leader.post(body()) as response:
        assert response.status == 200
    assert len(other.slot.started) == 1


async def test_requests_at_both_at_once_wake_it_once(pair: tuple[Gateway, Gateway]) -> None:
    pair[0].slot.behaviour.start_s = 0.2
    responses = await asyncio.gather(*(pair[number % 2].post(body()) for number in range(10)))
    assert [response.status for response in responses] == [200] * 10
    assert len(pair[0].slot.started) == 1


async def test_not_waiting_at_a_gateway_that_does_not_lead_wakes_it_all_the_same(
    pair: tuple[Gateway, Gateway],
) -> None:
    _, other = pair
    async with other.post(body(), x_stoker_no_wait="1") as response:
        assert response.status == 503
    await other.replica()
    await until(lambda: any(lane.ready for lane in other.context.dispatcher.lanes))
    async with other.post(body(), x_stoker_no_wait="1") as response:
        assert response.status == 200


async def test_a_replica_that_only_another_gateway_uses_is_not_ended(town: Town) -> None:
    leader, other = await town.open(), await town.open()
    await leader.deploy(scaling={"keep_alive": 0.05})
    leader.context.peers.tell("functions")
    await until(lambda: other.context.functions.find("fn", "default"))
    town.slot.behaviour.token_s = 0.03
    async with other.post(body(stream=True, max_tokens=LONG)) as response:
        events = await Stream(response).all()
    assert text_of(events) == answer_of(LONG)
    assert len(town.slot.started) == 1
    # Once nobody uses it, it goes.
    await until(lambda: town.slot.ended, 20.0)


@pytest.mark.deaths
async def test_when_the_leader_dies_another_leads_and_holds(pair: tuple[Gateway, Gateway], town: Town) -> None:
    leader, other = pair
    await leader.deploy(scaling={"keep_alive": 60})
    leader.context.peers.tell("functions")
    await until(lambda: other.context.functions.get("fn", "default").revision == 2)
    async with other.post(body()) as response:
        assert response.status == 200
    await leader.die()
    await town.agreed()
    assert other.leads
    assert town.slot.ended == []
    async with other.post(body()) as response:
        assert response.status == 200
    assert len(town.slot.started) == 1


async def test_a_start_that_fails_for_good_is_told_to_what_waits_elsewhere(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.in_reach = False
    refused: list[str] = []

    async def refuse(slot_id: str, spec: Any) -> Any:
        from control_plane.backends.base import SlotRefused

        refused.append(spec.replica_id)
        raise SlotRefused("integrity_error", "tensor lm_head is altered")

    leader.slot.start_replica = refuse  # type: ignore[method-assign]
    async with other.post(body()) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (503, "model_unusable")
    assert "lm_head" in answer["error"]["message"]
    assert len(refused) == 1


async def test_a_new_revision_reaches_every_gateway(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    await other.deploy(scaling={"keep_alive": 5})
    other.context.peers.tell("functions")

    def revision() -> bool:
        return leader.context.functions.get("fn", "default").revision == 2

    await until(revision)


# --- places and bounds ------------------------------------------------------------------------------------------------


async def test_a_replicas_places_are_not_sold_twice(town: Town) -> None:
    leader, other = await town.open(), await town.open()
    town.slot.behaviour.max_requests = 4
    town.slot.behaviour.token_s = 0.02
    await leader.deploy(scaling={"max_concurrency": 4, "target_concurrency": 4})
    leader.context.peers.tell("functions")
    await until(lambda: other.context.functions.find("fn", "default"))
    async with leader.post(body()) as response:
        assert response.status == 200
    replica = await leader.replica()
    await until(lambda: all(any(lane.ready for lane in g.context.dispatcher.lanes) for g in (leader, other)))
    first = [asyncio.ensure_future(leader.post(body(max_tokens=20))) for _ in range(3)]
    await until(lambda: len(submits(replica)) == 4)
    await until(
        lambda: any(seat.others == 3 for lane in other.context.dispatcher.lanes for seat in lane.seats.values())
    )
    second = [asyncio.ensure_future(other.post(body(max_tokens=20))) for _ in range(4)]
    most = 0
    while not all(task.done() for task in (*first, *second)):
        most = max(most, sum(not task.done() for task in replica._running.values()))
        await asyncio.sleep(0.001)
    assert most == 4
    assert [(await task).status for task in (*first, *second)] == [200] * 7


# --- reading elsewhere ------------------------------------------------------------------------------------------------


async def test_a_request_is_read_through_any_gateway(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    response = await leader.post(body(stream=True, max_tokens=LONG))
    request_id = response.headers["x-request-id"]
    mine = asyncio.ensure_future(Stream(response).all())
    theirs = await rest_of(other, request_id, 0)
    assert theirs == await mine
    assert text_of(theirs) == answer_of(LONG)
    assert await rest_of(other, request_id, 57) == theirs[57:]
    async with other.get(f"/v1/completions/{request_id}") as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(LONG)


async def test_its_state_is_told_and_it_is_cancelled_through_any_gateway(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.silent = True
    task = asyncio.ensure_future(leader.post(body(stream=True, max_tokens=LONG)))
    live = await until(lambda: next(iter(leader.context.dispatcher.requests.values()), None))
    await until(lambda: live.phase is Phase.RUNNING)
    async with other.get(f"/v1/completions/{live.request_id}") as response:
        assert (response.status, (await response.json())["status"]) == (202, "running")
    async with other.client.post(f"/v1/completions/{live.request_id}/cancel", headers=other.headers) as response:
        assert (response.status, (await response.json())["cancelled"]) == (200, True)
    await (await task).read()


async def test_an_idempotency_key_attaches_across_gateways(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    asked = asyncio.ensure_future(leader.post(body(stream=True), Idempotency_Key="k"))
    replica = await leader.replica()
    await until(lambda: replica.works)
    streamed = await other.post(body(stream=True), Idempotency_Key="k")
    events = [await Stream(response).all() for response in (await asked, streamed)]
    assert events[0] == events[1]
    async with other.post(body(stream=True), Idempotency_Key="k") as response:
        assert await Stream(response).all() == events[0]
    async with other.post(body(max_tokens=3), Idempotency_Key="k") as response:
        assert response.status == 422
    assert len(replica.works) == 1


async def test_a_whole_answer_is_waited_for_across_gateways(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    asked = asyncio.ensure_future(leader.post(body(max_tokens=20), Idempotency_Key="k"))
    replica = await leader.replica()
    await until(lambda: replica.works)
    async with other.post(body(max_tokens=20), Idempotency_Key="k") as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(20)
    assert (await asked).status == 200
    assert len(replica.works) == 1


async def test_a_tenant_does_not_reach_anothers_request_through_another_gateway(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.silent = True
    task = asyncio.ensure_future(leader.post(body(stream=True)))
    live = await until(lambda: next(iter(leader.context.dispatcher.requests.values()), None))
    _, secret = await other.context.keys.create("other", "theirs")
    for headers in (
        {"Authorization": f"Bearer {secret}"},
        {"Authorization": f"Bearer {secret}", "x-stoker-forwarded-for": "key_1 admin default"},
    ):
        async with other.client.get(f"/v1/completions/{live.request_id}", headers=headers) as response:
            assert response.status == 404
    task.cancel()


async def test_the_internal_calls_need_the_internal_token(pair: tuple[Gateway, Gateway]) -> None:
    _, other = pair
    for path in ("/internal/v1/changed", "/internal/v1/demand"):
        for headers in ({}, other.headers, {"Authorization": "Bearer x"}):
            async with other.client.post(path, data=b"", headers=headers) as response:
                assert response.status == 401


# --- death and adoption -----------------------------------------------------------------------------------------------


async def noted(gateway: Gateway, request_id: str) -> str:
    """What the journal says of the one attempt's stored KV, once it says something."""
    async with asyncio.timeout(20):
        while True:
            (attempt,) = await gateway.context.journal.attempts(request_id)
            if attempt.detail is not None:
                return attempt.detail
            await asyncio.sleep(0.01)


@pytest.mark.deaths
async def test_the_adopter_attaches_to_the_replica_and_a_reader_gets_the_rest_and_only_the_rest(
    pair: tuple[Gateway, Gateway],
) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    leader.slot.behaviour.left_out = "[0, 32) of choice 0: the object is gone"
    response = await leader.post(body(stream=True, max_tokens=200))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 10)
    await noted(leader, request_id)
    # As if it had died before it wrote down what the replica said when it took the request.
    await leader.context.db.write(lambda c: c.execute("UPDATE attempts SET loaded_tokens = NULL, detail = NULL"))
    await leader.die()
    after = await rest_of(other, request_id, before[-1][0])
    assert await noted(other, request_id) == leader.slot.behaviour.left_out
    assert text_of(before + after) == answer_of(200)
    assert [place for place, _ in before + after] == [*range(1, 201), 200]
    replica = leader.slot.living[0]
    assert submits(replica) == [(request_id, 1)]
    assert other.context.adopting.adopted == 1


@pytest.mark.deaths
async def test_a_reader_of_another_gateway_sees_no_break_when_the_owner_dies(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    response = await leader.post(body(stream=True, max_tokens=200))
    request_id = response.headers["x-request-id"]
    await read_until(Stream(response), 5)
    reading = asyncio.ensure_future(rest_of(other, request_id, 0))
    live = leader.context.dispatcher.requests[request_id]
    await until(lambda: live.readers.count > 0 and live.log.last_seq > 20)
    await leader.die()
    events = await reading
    assert text_of(events) == answer_of(200)
    assert [place for place, _ in events] == [*range(1, 201), 200]


@pytest.mark.deaths
async def test_of_three_each_request_of_the_dead_is_adopted_by_exactly_one(town: Town) -> None:
    first, second, third = [await town.open() for _ in range(3)]
    town.slot.behaviour.token_s = 0.02
    await first.deploy()
    first.context.peers.tell("functions")
    for gateway in (second, third):
        await until(lambda gateway=gateway: gateway.context.functions.find("fn", "default"))
    responses = await asyncio.gather(*(first.post(body(stream=True, max_tokens=200, seed=7)) for _ in range(8)))
    ids = [response.headers["x-request-id"] for response in responses]
    await first.die()
    heirs = (second, third)
    await until(lambda: sum(gateway.context.adopting.adopted for gateway in heirs) == 8, 20.0)
    texts = await asyncio.gather(*(rest_of(heirs[place % 2], known, 0) for place, known in enumerate(ids)))
    assert {text_of(events) for events in texts} == {answer_of(200)}
    assert sum(gateway.context.adopting.adopted for gateway in heirs) == 8
    async with second.get("/metrics") as response:
        assert "stoker_gateways 2.0" in await response.text()
    assert len(submits(town.slot.living[0])) == 8


@pytest.mark.deaths
async def test_a_request_that_waited_at_the_dead_gateway_is_served(pair: tuple[Gateway, Gateway], town: Town) -> None:
    leader, other = pair
    leader.slot.behaviour.never_ready = True
    task = asyncio.ensure_future(leader.post(body(), Idempotency_Key="once"))
    await until(lambda: leader.slot.started)
    await leader.die()
    await asyncio.gather(task, return_exceptions=True)
    leader.slot.behaviour.never_ready = False
    leader.slot.statuses.clear()
    leader.slot.tell_state()
    async with other.post(body(), Idempotency_Key="once") as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(5)


@pytest.mark.deaths
async def test_an_adopters_clock_that_is_hours_off_does_not_end_what_it_adopts(
    pair: tuple[Gateway, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = pair
    if leader.context.db.driver.dialect.name == "sqlite":
        pytest.skip("one machine, one clock")
    leader.slot.behaviour.token_s = 0.02
    response = await leader.post(body(stream=True, max_tokens=LONG))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 10)
    right_ns = time.time_ns
    monkeypatch.setattr("control_plane.database.clock.time.time_ns", lambda: right_ns() + 10 * 3600 * 10**9)
    await leader.die()
    after = await rest_of(other, request_id, before[-1][0])
    assert text_of(before + after) == answer_of(LONG)
    await until(lambda: not other.context.dispatcher.requests)
    (created_us, finished_us) = await other.context.db.read(
        lambda c: c.execute("SELECT created_us, finished_us FROM requests").fetchone()
    )
    assert 0 < finished_us - created_us < 60_000_000


@pytest.mark.deaths
async def test_death_of_gateway_and_replica_at_once(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    response = await leader.post(body(stream=True, max_tokens=LONG))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 10)
    await leader.die()
    await leader.slot.kill(leader.slot.living[0])
    after = await rest_of(other, request_id, before[-1][0])
    assert text_of(before + after) == answer_of(LONG)
    assert leader.slot.living[0].works[0].epoch == 2


async def test_a_clean_end_hands_over_at_once(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.silent = True
    task = asyncio.ensure_future(leader.post(body(stream=True)))
    live = await until(lambda: next(iter(leader.context.dispatcher.requests.values()), None))
    await until(lambda: live.phase is Phase.RUNNING)
    await leader.stop()
    await until(lambda: live.request_id in other.context.dispatcher.requests, 1.0)
    assert other.context.gateways.leader == other.id
    leader.slot.behaviour.silent = False
    assert text_of(await rest_of(other, live.request_id, 0)) == answer_of(5)
    task.cancel()


# --- a gateway that was only asleep -----------------------------------------------------------------------------------


def fall_asleep(gateway: Gateway) -> Callable[[], None]:
    """It renews nothing and believes what a stopped process would find when it goes on: that its lease is over."""
    gateways = gateway.context.gateways
    look = gateways.look

    async def nothing() -> None:
        gateways._held_until_s = 1.0

    gateways.look = nothing  # type: ignore[method-assign]
    gateways._held_until_s = 1.0

    def wake() -> None:
        gateways.look = look  # type: ignore[method-assign]
        gateways.look_soon()

    return wake


@pytest.mark.deaths
async def test_a_gateway_without_its_lease_accepts_and_commits_nothing(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.01
    response = await other.post(body(stream=True, max_tokens=200))
    stream = Stream(response)
    await read_until(stream, 3)
    wake = fall_asleep(other)
    live = next(iter(other.context.dispatcher.requests.values()))
    length = live.log.last_seq + len(live.committing_events)
    async with other.post(body()) as refused:
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "gateway_lapsed")
    await until(lambda: live.received > length + 10)
    assert live.log.last_seq <= length
    wake()
    assert leader.lives
    events = [event async for event in stream.events()]
    assert events[-1][1] == "[DONE]"


@pytest.mark.deaths
async def test_a_gateway_that_slept_lets_go_and_its_readers_read_on_elsewhere(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    response = await other.post(body(stream=True, max_tokens=200))
    request_id = response.headers["x-request-id"]
    reading = asyncio.ensure_future(Stream(response).all())
    await until(lambda: other.context.dispatcher.requests[request_id].log.last_seq > 5)
    wake = fall_asleep(other)
    await until(lambda: request_id in leader.context.dispatcher.requests, 20.0)
    wake()
    events = await reading
    assert text_of(events) == answer_of(200)
    assert [place for place, _ in events] == [*range(1, 201), 200]
    assert request_id not in other.context.dispatcher.requests
    print(
        "STARTED",
        len(leader.slot.started),
        "ENDED",
        leader.slot.ended,
        [submits(r) for r in leader.slot.replicas.values()],
    )
    assert submits(leader.slot.living[0]) == [(request_id, 1)]


@pytest.mark.deaths
async def test_a_connection_of_a_gateway_that_was_taken_over_cannot_end_what_goes_on(
    pair: tuple[Gateway, Gateway],
) -> None:
    leader, other = pair
    leader.slot.behaviour.token_s = 0.02
    response = await other.post(body(stream=True, max_tokens=200))
    request_id = response.headers["x-request-id"]
    await until(lambda: other.context.dispatcher.requests[request_id].log.last_seq > 5)
    fall_asleep(other)
    await until(lambda: request_id in leader.context.dispatcher.requests, 20.0)
    # Its client leaves, and it still believes that the request is its own to cancel.
    response.close()
    await until(lambda: other.context.dispatcher.requests[request_id].cancelling is not None)
    assert text_of(await rest_of(leader, request_id, 0)) == answer_of(200)
    assert submits(leader.slot.living[0]) == [(request_id, 1)]


@pytest.mark.deaths
async def test_a_gateway_that_cannot_be_reached_is_not_asked_forever(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    async with aiohttp.ClientSession() as session, session.get(str(other.client.make_url("/health"))) as response:
        assert response.status == 200
    leader.slot.behaviour.silent = True
    task = asyncio.ensure_future(leader.post(body(stream=True)))
    live = await until(lambda: next(iter(leader.context.dispatcher.requests.values()), None))
    await until(lambda: live.phase is Phase.RUNNING)
    await leader.die()
    leader.slot.behaviour.silent = False
    async with other.get(f"/v1/completions/{live.request_id}") as response:
        assert response.status in (200, 202)
    task.cancel()
