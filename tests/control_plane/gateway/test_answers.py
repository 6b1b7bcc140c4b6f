"""What clients read: the stock OpenAI client over HTTP, and the shapes it does not check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of
from tests.control_plane.gateway.fakes import token_text

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fn", "messages": MESSAGES, "max_tokens": 3, **fields}


def answer_of(tokens: int, choice: int = 0) -> str:
    return "".join(token_text(7, choice, position) for position in range(tokens))


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[openai.AsyncOpenAI]:
    await plane.deploy()
    url = f"http://127.0.0.1:{plane.client.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=plane.key, max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fn", messages=MESSAGES, max_tokens=5, seed=7)
    assert answer.choices[0].message.content == answer_of(5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id == answer.id


async def test_heartbeats_in_the_middle_of_a_stream_are_nothing_to_a_stock_client(
    plane: Plane, client: openai.AsyncOpenAI
) -> None:
    plane.slot.behaviour.stop_after = 2
    chunks = []
    stream = await client.chat.completions.create(model="fn", messages=MESSAGES, max_tokens=4, seed=7, stream=True)
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 2:
            await asyncio.sleep(3 * plane.settings.http.heartbeat_s)
            plane.slot.behaviour.stop_after = None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer_of(4)


async def test_a_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fn", messages=MESSAGES, max_tokens=5, seed=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer_of(5)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None] * 4 + ["length"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * 5 + [True]
    assert chunks[-1].choices == []


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fn", messages=MESSAGES, max_tokens=4, seed=7, n=2)
    assert [choice.message.content for choice in answer.choices] == [answer_of(4, 0), answer_of(4, 1)]
    stream = await client.chat.completions.create(model="fn", messages=MESSAGES, max_tokens=4, seed=7, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [answer_of(4, 0), answer_of(4, 1)]


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fn", prompt="hello", max_tokens=5, seed=7)
    assert answer.choices[0].text == answer_of(5)
    stream = await client.completions.create(model="fn", prompt="hello", max_tokens=5, seed=7, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer_of(5)


async def test_several_prompts_are_answered_together_in_their_order(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fn", prompt=["a", "b", "c"], max_tokens=2, seed=7, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.choices[0].text == "".join(token_text(7, 0, position) for position in range(2))
    assert answer.choices[5].text == "".join(token_text(7, 1, position) for position in range(2))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_an_echoed_prompt_comes_first(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body(prompt="hello there", echo=True)) as response:
        assert (await response.json())["choices"][0]["text"] == "hello there" + answer_of(5)
    async with plane.post(body(prompt="hello there", echo=True, stream=True)) as response:
        events = await Stream(response).all()
    assert text_of(events) == "hello there" + answer_of(5)
    async with plane.get(f"/v1/completions/{response.headers['x-request-id']}/stream?starting_after=2") as response:
        assert text_of(await Stream(response).all()) == "".join(token_text(7, 0, p) for p in range(2, 5))


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fn", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nothing", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(model="fn", messages=MESSAGES)


async def test_models_are_listed_with_their_aliases(plane: Plane) -> None:
    await plane.deploy(aliases=["gpt-x", "org/model"])
    async with plane.get("/v1/models") as response:
        listed = await response.json()
    assert [model["id"] for model in listed["data"]] == ["fn", "gpt-x", "org/model"]
    async with plane.get("/v1/models/org/model") as response:
        assert (await response.json())["id"] == "org/model"
    async with plane.get("/v1/models/none") as response:
        assert response.status == 404


async def test_operators_see_what_runs_and_why(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        request_id = (await response.json())["id"]
    async with plane.get("/api/v1/replicas") as response:
        (replica,) = (await response.json())["data"]
    assert replica["state"] == "ready"
    assert "token" not in json.dumps(replica).replace("tokens", "")
    async with plane.get("/api/v1/functions/fn/status") as response:
        status = await response.json()
    assert status["import"]["state"] == "ready"
    assert status["status"]["ready"] == 1
    for what in (request_id, replica["replica_id"], "fn"):
        async with plane.get(f"/api/v1/why/{what}") as response:
            why = await response.json()
        assert response.status == 200
        assert why["timeline"]
        assert [event["at_us"] for event in why["timeline"]] == sorted(event["at_us"] for event in why["timeline"])
    async with plane.get(f"/api/v1/replicas/{replica['replica_id']}/log") as response:
        assert await response.text() == "a line\n"
    async with plane.get("/api/v1/slots") as response:
        assert (await response.json())["data"][0]["slot_id"] == "slot-0"
    async with plane.get("/metrics") as response:
        metrics = await response.text()
    assert 'stoker_requests_total{function="fn",outcome="done"} 1.0' in metrics
    async with plane.get("/health/ready") as response:
        assert response.status == 200


async def test_harmless_extras_are_ignored(plane: Plane) -> None:
    await plane.deploy(aliases=["gpt-x"])
    extras = chat(
        model="gpt-x",
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        reasoning_effort="low",
        prompt_cache_key="k",
        unheard_of=1,
    )
    async with plane.post(extras, CHAT) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["model"] == "gpt-x"
