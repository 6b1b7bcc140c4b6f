"""Responses in the background made at one gateway and used at another; drains that hold for all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from control_plane.settings import Settings
from function_runtime.protocol import Cancel, Park
from tests.control_plane.gateway.conftest import Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text
from tests.control_plane.gateways.conftest import Gateway
from tests.support.patience import PATIENCE_S

LONG = 60
LEAD_S = 4.0
"""Nobody is to lose the lead here because a machine is busy."""
Clients = tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]


def answer_of(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(
        settings, gateway=replace(settings.gateway, lease_s=max(settings.gateway.lease_s, LEAD_S), lead_cap_s=LEAD_S)
    )


@pytest.fixture
async def clients(pair: tuple[Gateway, Gateway]) -> AsyncIterator[Clients]:
    """Of the gateway that leads, and of the other."""
    pair[0].slot.behaviour.token_s = 0.01
    made = [
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{each.client.port}/v1", api_key=each.key, max_retries=0)
        for each in pair
    ]
    yield made[0], made[1]
    for client in made:
        await client.close()


async def create(client: openai.AsyncOpenAI, tokens: int = LONG, **fields: Any) -> Any:
    return await client.responses.create(
        model="fn", input="hi", max_output_tokens=tokens, background=True, extra_body={"seed": 7}, **fields
    )


async def follow(client: openai.AsyncOpenAI, response_id: str, after: int | None = None, most: int = 0) -> list[Any]:
    given = {} if after is None else {"starting_after": after}
    events = []
    async with await client.responses.retrieve(response_id, stream=True, **given) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == most:
                break
    return events


def told(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def test_a_response_made_here_is_polled_there(clients: Clients) -> None:
    here, there = clients
    made = await create(here)
    assert made.status in ("queued", "in_progress")
    found = await ended(there, made.id)
    assert (found.status, found.output_text) == ("incomplete", answer_of(LONG))
    assert found.usage.output_tokens == LONG
    assert (await here.responses.retrieve(made.id)).output == found.output
    items = await there.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["hi"]


async def test_a_stream_goes_on_at_the_other_gateway_where_it_was_left(clients: Clients) -> None:
    here, there = clients
    stream = await create(here, stream=True)
    first = []
    async for event in stream:
        first.append(event)
        if len(first) == 12:
            break
    await stream.close()
    response_id = first[0].response.id
    second = await follow(there, response_id, first[-1].sequence_number, most=15)
    third = await follow(here, response_id, second[-1].sequence_number)
    events = first + second + third
    assert numbers(events) == list(range(len(events)))
    assert told(events) == answer_of(LONG)
    assert events[-1].type == "response.incomplete"
    assert numbers(await follow(there, response_id)) == numbers(events)


async def test_a_response_is_cancelled_at_the_other_gateway(clients: Clients, pair: tuple[Gateway, Gateway]) -> None:
    here, there = clients
    made = await create(here, tokens=2000)
    begun = await follow(there, made.id, most=10)
    cancelled = await there.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    (replica,) = pair[0].slot.living
    await until(lambda: any(isinstance(word, Cancel) for word in replica.words))
    found = await here.responses.retrieve(made.id)
    assert found.status == "cancelled"
    assert found.output_text.startswith(told(begun))
    assert found.output_text == (await there.responses.retrieve(made.id)).output_text
    assert (await there.responses.cancel(made.id)).status == "cancelled"


async def test_a_conversation_goes_on_at_the_other_gateway_and_is_never_answered_with_the_earlier_response(
    clients: Clients, pair: tuple[Gateway, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = clients
    running = await create(here, tokens=2000)
    await follow(here, running.id, most=8)
    for fields in ({}, {"stream": True}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="no whole answer"):
            await there.responses.create(model="fn", input="more", previous_response_id=running.id, **fields)
    await here.responses.cancel(running.id)
    # Its answer is whole, and its outcome is not written: the other gateway finds it unfinished, and elsewhere.
    journal = pair[0].context.journal
    finish, written = journal.finish, asyncio.Event()

    async def finish_late(*given: Any) -> bool:
        await written.wait()
        return await finish(*given)

    monkeypatch.setattr(journal, "finish", finish_late)
    first = await here.responses.create(model="fn", input="hi", max_output_tokens=3, extra_body={"seed": 7})
    second = await there.responses.create(
        model="fn", input="more", max_output_tokens=2, extra_body={"seed": 7}, previous_response_id=first.id
    )
    written.set()
    assert (first.output_text, second.output_text) == (answer_of(3), answer_of(2))
    assert (second.previous_response_id, second.id != first.id) == (first.id, True)
    listed = [item.content[0].text async for item in there.responses.input_items.list(second.id, order="asc")]
    assert listed == ["hi", answer_of(3), "more"]


@pytest.mark.parametrize("under_way", [True, False])
async def test_a_response_is_deleted_at_the_other_gateway(clients: Clients, under_way: bool) -> None:
    here, there = clients
    made = await create(here, tokens=2000 if under_way else 5)
    if under_way:
        await follow(here, made.id, most=8)
    else:
        await ended(here, made.id)
    await there.responses.delete(made.id)
    for client in clients:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


@pytest.mark.deaths
@pytest.mark.parametrize("asked", [0, 1])
async def test_a_reader_at_either_gateway_loses_nothing_when_the_owner_dies(
    clients: Clients, pair: tuple[Gateway, Gateway], asked: int
) -> None:
    """The leader made it; a reader at the other reads on, one at the leader comes to the other."""
    made = await create(clients[0], tokens=200)
    first = await follow(clients[asked], made.id, most=20)
    rest = asyncio.ensure_future(follow(clients[1], made.id, first[-1].sequence_number))
    await until(lambda: pair[0].slot.living)
    await pair[0].die()
    events = first + await asyncio.wait_for(rest, 30)
    assert numbers(events) == list(range(len(events)))
    assert told(events) == answer_of(200)
    assert (await clients[1].responses.retrieve(made.id)).output_text == answer_of(200)


async def drained(gateway: Gateway, path: str, method: str = "POST") -> Any:
    async with gateway.client.request(method, path, headers=gateway.headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize("path", ["/api/v1/functions/fn/drain", "/api/v1/slots/slot-0/drain"])
@pytest.mark.parametrize("asked", [0, 1])
async def test_a_drain_parks_what_every_gateway_owns_and_its_end_carries_all_on(
    clients: Clients, pair: tuple[Gateway, Gateway], path: str, asked: int
) -> None:
    slot = pair[0].slot
    responses = [await gateway.post(body(stream=True, max_tokens=LONG)) for gateway in pair]
    streams = [Stream(response) for response in responses]
    made = [await create(client) for client in clients]
    await until(lambda: slot.living and len(slot.living[0].works) == 4)
    (replica,) = slot.living
    assert (await drained(pair[asked], path))["drained"]
    await until(lambda: not slot.living)
    assert sum(isinstance(word, Park) for word in replica.words) == 4
    started = len(slot.started)
    for gateway in pair:
        answer = await drained(gateway, path, "GET")
        assert (answer["drained"], answer["in_flight"], answer["replicas"]) == (True, 0, 0)
        if "functions" in path:
            async with gateway.post(body()) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "function_drained")
    assert len(slot.started) == started
    assert not (await drained(pair[1 - asked], path, "DELETE"))["drained"]
    for stream in streams:
        events = await stream.all()
        assert text_of(events) == answer_of(LONG)
        assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]
    for client, response in zip(reversed(clients), made, strict=True):
        assert (await ended(client, response.id)).output_text == answer_of(LONG)
    assert {work.epoch for other in slot.replicas.values() if other is not replica for work in other.works} == {2}
