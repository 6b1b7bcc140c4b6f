"""`/v1/responses` as the stock OpenAI client uses it: made, followed, left alone, come back to, cancelled, deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from function_runtime.protocol import Cancel, FinishReason, GrammarKind
from tests.control_plane.gateway.conftest import Plane, until
from tests.control_plane.gateway.fakes import token_text
from tests.support.patience import PATIENCE_S

SEED = {"seed": 7}
strict: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def answer_of(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


def connect(plane: Plane) -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{plane.client.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=plane.key, max_retries=0)


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[openai.AsyncOpenAI]:
    await plane.deploy()
    async with connect(plane) as client:
        yield client


async def create(client: openai.AsyncOpenAI, tokens: int = 5, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": "fn", "input": "hi", "max_output_tokens": tokens, "extra_body": SEED}
    return await client.responses.create(**(given | fields))


async def polled(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async with asyncio.timeout(PATIENCE_S):
        while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return found


async def follow(client: openai.AsyncOpenAI, response_id: str, after: int | None = None) -> list[Any]:
    given = {} if after is None else {"starting_after": after}
    stream = await client.responses.retrieve(response_id, stream=True, **given)
    return [event async for event in stream]


async def completed(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async for _ in await client.responses.retrieve(response_id, stream=True):
        pass
    return await client.responses.retrieve(response_id)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_a_response_is_made_and_found_again(plane: Plane, client: openai.AsyncOpenAI) -> None:
    plane.slot.behaviour.finish = FinishReason.STOP
    made = await create(client, instructions="be brief", metadata={"a": "b"}, temperature=0.5, top_p=0.9)
    assert (made.status, made.output_text, made.error) == ("completed", answer_of(5), None)
    assert (made.instructions, made.metadata, made.temperature) == ("be brief", {"a": "b"}, 0.5)
    assert made.usage.output_tokens == 5
    assert made.usage.total_tokens == made.usage.input_tokens + 5
    assert made.id.startswith("resp_") and made._request_id == made.id
    await until(lambda: not plane.context.dispatcher.requests)
    found = await client.responses.retrieve(made.id)
    assert found.output == made.output
    assert found.completed_at is not None
    async with plane.get(f"/v1/responses/{made.id}") as raw:
        Response.model_validate(await raw.json(), strict=True)


async def test_the_blocking_client_reads_the_same(plane: Plane, client: openai.AsyncOpenAI) -> None:
    def use() -> tuple[Any, list[Any], Any]:
        url = f"http://127.0.0.1:{plane.client.port}/v1"
        with openai.OpenAI(base_url=url, api_key=plane.key, max_retries=0) as blocking:
            made = blocking.responses.create(model="fn", input="hi", max_output_tokens=4, extra_body=SEED)
            events = list(
                blocking.responses.create(model="fn", input="hi", max_output_tokens=4, stream=True, extra_body=SEED)
            )
            again = list(blocking.responses.retrieve(made.id, stream=True, starting_after=5))
            blocking.responses.delete(made.id)
            return made, events, again

    made, events, again = await asyncio.to_thread(use)
    assert made.output_text == answer_of(4) == text_of(events)
    assert [event.sequence_number for event in again] == list(range(6, 12))


async def test_a_stream_has_every_event_once_in_order_and_in_the_clients_own_types(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    events = [event async for event in await create(client, 3, stream=True)]
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(11))
    assert text_of(events) == events[7].text == answer_of(3)
    last = events[-1].response
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert last.output[0].status == "incomplete"
    for event in events:
        strict.validate_python(event.model_dump(), strict=True)


@pytest.mark.parametrize("background", [False, True])
async def test_reading_from_every_cursor_gives_the_rest_and_only_the_rest(
    plane: Plane, client: openai.AsyncOpenAI, background: bool
) -> None:
    plane.slot.behaviour.finish = FinishReason.STOP
    live = [event async for event in await create(client, 4, stream=True, background=background)]
    response_id = live[0].response.id
    assert [event.sequence_number for event in live] == list(range(len(live)))
    assert live[-1].type == "response.completed"
    assert ("response.queued" in [event.type for event in live]) is background
    await until(lambda: not plane.context.dispatcher.requests)
    for after in range(-1, len(live)):
        rest = await follow(client, response_id, None if after < 0 else after)
        assert [event.model_dump() for event in rest] == [event.model_dump() for event in live[after + 1 :]], after


async def test_a_reader_of_a_background_response_comes_back_over_a_death_of_replica_and_gateway(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    plane.slot.behaviour.token_s = 0.01
    events = []
    stream = await create(client, 60, stream=True, background=True)
    async for event in stream:
        events.append(event)
        if event.sequence_number == 12:
            break
    await stream.close()
    await plane.slot.kill(plane.slot.living[0])
    rest = await client.responses.retrieve(events[0].response.id, stream=True, starting_after=12)
    async for event in rest:
        events.append(event)
        if event.sequence_number == 30:
            break
    await rest.close()
    await plane.restart()
    async with connect(plane) as again:
        events += await follow(again, events[0].response.id, 30)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert text_of(events) == answer_of(60)
        assert events[-1].response.output_text == answer_of(60)
        whole = await follow(again, events[0].response.id)
        assert [event.model_dump() for event in whole] == [event.model_dump() for event in events]


async def test_a_background_response_survives_its_client_and_is_polled(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    plane.slot.behaviour.token_s = 0.005
    plane.slot.behaviour.start_s = 0.05
    made = await create(client, 20, background=True)
    assert (made.status, made.output, made.background) == ("queued", [], True)
    found = await polled(client, made.id)
    assert (found.status, found.output_text) == ("incomplete", answer_of(20))


async def test_a_client_that_leaves_after_the_first_event_leaves_nothing_queued_for_ever(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    plane.slot.behaviour.start_s = 0.1
    stream = await create(client, 5, stream=True, background=True)
    async for event in stream:
        response_id = event.response.id
        break
    await stream.close()
    assert (await completed(client, response_id)).output_text == answer_of(5)


async def test_without_background_a_client_that_leaves_cancels(plane: Plane, client: openai.AsyncOpenAI) -> None:
    plane.slot.behaviour.token_s = 0.01
    stream = await create(client, 1000, stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await until(lambda: any(isinstance(word, Cancel) for word in plane.slot.living[0].words))


async def test_a_running_response_is_cancelled_and_stays_so(plane: Plane, client: openai.AsyncOpenAI) -> None:
    plane.slot.behaviour.token_s = 0.01
    made = await create(client, 1000, background=True)
    reading = asyncio.ensure_future(follow(client, made.id))
    await until(lambda: plane.slot.living and plane.context.dispatcher.requests[made.id].log.last_seq > 3)
    cancelled = await client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert answer_of(1000).startswith(cancelled.output_text)
    assert (await client.responses.cancel(made.id)).status == "cancelled"
    assert (await client.responses.retrieve(made.id)).output == cancelled.output
    events = await reading
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (await follow(client, made.id, events[-2].sequence_number))[0].model_dump() == events[-1].model_dump()


async def test_a_deleted_response_is_gone_but_its_account_is_not(plane: Plane, client: openai.AsyncOpenAI) -> None:
    made = await create(client)
    await until(lambda: not plane.context.dispatcher.requests)
    await client.responses.delete(made.id)
    for gone in (
        client.responses.retrieve(made.id),
        client.responses.delete(made.id),
        client.responses.cancel(made.id),
        client.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await gone
    assert await plane.context.journal.log(made.id) == []
    assert len(await plane.context.ledger.of_request(made.id)) > 0


async def test_deleting_a_running_response_stops_it(plane: Plane, client: openai.AsyncOpenAI) -> None:
    plane.slot.behaviour.token_s = 0.01
    made = await create(client, 1000, background=True)
    await until(lambda: plane.slot.living and plane.slot.living[0].works)
    await client.responses.delete(made.id)
    assert any(isinstance(word, Cancel) for word in plane.slot.living[0].words)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_what_fails_says_so_with_the_reason(plane: Plane, client: openai.AsyncOpenAI) -> None:
    plane.slot.behaviour.never_ready = True
    await plane.deploy("slow", timeouts={"cold_start_s": 0.05})
    made = await create(client, model="slow", background=True)
    events = await follow(client, made.id)
    assert [event.type for event in events] == ["response.created", "response.queued", "response.failed"]
    assert events[-1].response.status == "failed"
    assert "timeouts.cold_start_s" in events[-1].response.error.message
    assert (await completed(client, made.id)).error == events[-1].response.error
    with pytest.raises(openai.InternalServerError) as refused:
        await create(client, model="slow")
    assert refused.value.code == "model_loading"


async def test_the_input_is_listed(client: openai.AsyncOpenAI) -> None:
    made = await create(
        client,
        input=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": []}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "three"}]},
        ],
    )
    page = await client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in page.data] == ["one", "two"]
    assert page.has_more
    texts = [item.content[0].text async for item in client.responses.input_items.list(made.id, limit=2)]
    assert texts == ["three", "two", "one"]


async def test_a_conversation_goes_on_from_an_earlier_response(plane: Plane, client: openai.AsyncOpenAI) -> None:
    first = await create(client, 2)
    await until(lambda: not plane.context.dispatcher.requests)
    second = await create(client, 2, input="more", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.total_tokens
    listed = [item.content[0].text async for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed == ["hi", first.output_text, "more"]
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, previous_response_id="resp_" + "0" * 32)
    assert refused.value.code == "previous_response_not_found"


async def test_what_is_not_to_be_stored_cannot_be_come_back_to(client: openai.AsyncOpenAI) -> None:
    made = await create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="store"):
        await create(client, store=False, background=True)


async def test_another_tenant_finds_nothing(plane: Plane, client: openai.AsyncOpenAI) -> None:
    made = await create(client)
    _, other = await plane.context.keys.create("other", "a stranger")
    url = f"http://127.0.0.1:{plane.client.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=other, max_retries=0) as stranger:
        for call in (stranger.responses.retrieve(made.id), stranger.responses.cancel(made.id)):
            with pytest.raises(openai.NotFoundError):
                await call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_served_is_named(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("query", ["starting_after=99&stream=true", "starting_after=x&stream=true", "starting_after=1"])
async def test_a_cursor_that_cannot_be_is_refused(plane: Plane, client: openai.AsyncOpenAI, query: str) -> None:
    plane.slot.behaviour.silent = True
    made = await create(client, background=True)
    async with plane.get(f"/v1/responses/{made.id}?{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "starting_after"


async def test_the_form_of_the_text_goes_to_the_engine_and_is_told(plane: Plane, client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    made = await create(client, text={"format": form})
    assert made.text.format.model_dump(by_alias=True, exclude_none=True) == form
    grammar = plane.slot.living[0].works[-1].sampling.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text) == schema
    assert grammar.field == "text.format.schema"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, text={"format": {**form, "name": ""}})
    assert refused.value.param == "text.format.name"


async def test_log_probabilities_are_given_where_they_are_asked_for(client: openai.AsyncOpenAI) -> None:
    made = await create(client, 2, top_logprobs=0, include=["message.output_text.logprobs"])
    assert made.output[0].content[0].logprobs is not None


async def test_the_clients_own_accumulating_stream_comes_to_the_same_response(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    plane.slot.behaviour.finish = FinishReason.STOP
    seen: list[str] = []
    async with client.responses.stream(model="fn", input="hi", max_output_tokens=4, extra_body=SEED) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                seen.append(event.snapshot)
        final = await stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", seen[-1])
    assert len(seen) == 4 and all(later.startswith(earlier) for earlier, later in pairwise(seen))
    # One that was made in the background, followed by its id from the third event on.
    made = await client.responses.create(model="fn", input="hi", max_output_tokens=4, background=True, extra_body=SEED)
    async with client.responses.stream(response_id=made.id, starting_after=2) as stream:
        numbers = [event.sequence_number async for event in stream]
        assert (await stream.get_final_response()).output_text == final.output_text
    assert numbers == list(range(3, numbers[-1] + 1))
