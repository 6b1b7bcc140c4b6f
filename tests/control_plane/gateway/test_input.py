"""Bad input is a 400 in OpenAI's form that names the field; it costs no replica and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.control_plane.gateway.conftest import Plane

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fn", "messages": MESSAGES, "max_tokens": 3, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "fn", "prompt": "hi", "max_tokens": 3, **fields}


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **fields}}


BAD: list[tuple[str, Any, str | None]] = [
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b"[]", None),
    (CHAT, b"null", None),
    (CHAT, b'{"model":"fn","messages":[{"role":"user","content":"\xff"}]}', None),
    (CHAT, b'{"model":"fn","messages":[{"role":"user","content":"\\ud800"}]}', None),
    (CHAT, b'{"model":"fn","messages":[{"role":"user","content":"a"}],"temperature":NaN}', None),
    (CHAT, b'{"model":"fn","messages":[{"role":"user","content":"a"}],"temperature":1e999}', "temperature"),
    (CHAT, b"[" * 100_000, None),
    (CHAT, {"messages": MESSAGES}, "model"),
    (CHAT, {"model": "fn"}, "messages"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "robot", "content": "hi"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
    (CHAT, chat(model=""), "model"),
    (CHAT, chat(model=7), "model"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=2.5), "temperature"),
    (CHAT, chat(temperature=-1), "temperature"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=1000), "n"),
    (CHAT, chat(n=1.5), "n"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-5), "max_tokens"),
    (CHAT, chat(max_tokens=10**30), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_tokens=4, max_completion_tokens=5), "max_completion_tokens"),
    (CHAT, chat(min_tokens=4), "min_tokens"),
    (CHAT, chat(seed=2**70), "seed"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(stop=["a"] * 17), "stop"),
    (CHAT, chat(stop=[""]), "stop"),
    (CHAT, chat(stop=[1]), "stop[0]"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"99999999": 1}), "logit_bias"),
    (CHAT, chat(stop_token_ids=[99999999]), "stop_token_ids"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    (CHAT, chat(response_format="json"), "response_format"),
    (CHAT, chat(response_format={}), "response_format"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, chat(response_format=schema_format(name="")), "response_format.json_schema.name"),
    (CHAT, chat(response_format=schema_format(strict="yes")), "response_format.json_schema.strict"),
    (CHAT, chat(response_format=schema_format(schema=None)), "response_format.json_schema.schema"),
    (CHAT, chat(response_format=schema_format(schema=[1])), "response_format.json_schema.schema"),
    (TEXT, text(response_format=schema_format(schema={"x": "y" * 300_000})), "response_format.json_schema.schema"),
    (TEXT, text(guided_json="{"), "guided_json"),
    (TEXT, text(guided_json="[" * 100_000), "guided_json"),
    (TEXT, text(guided_json=7), "guided_json"),
    (TEXT, text(guided_regex=""), "guided_regex"),
    (TEXT, text(guided_regex=["a"]), "guided_regex"),
    (TEXT, text(guided_choice=[]), "guided_choice"),
    (TEXT, text(guided_choice=["a", ""]), "guided_choice"),
    (TEXT, text(guided_grammar={}), "guided_grammar"),
    (TEXT, text(guided_whitespace_pattern=" "), "guided_whitespace_pattern"),
    (TEXT, text(structured_outputs=[]), "structured_outputs"),
    (TEXT, text(structured_outputs={}), "structured_outputs"),
    (TEXT, text(structured_outputs={"structural_tag": "x"}), "structured_outputs.structural_tag"),
    (TEXT, text(structured_outputs={"regex": 1}), "structured_outputs.regex"),
    (TEXT, text(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs.choice"),
    (TEXT, text(structured_outputs={"regex": "a"}, guided_regex="a"), "structured_outputs.regex"),
    (TEXT, text(response_format={"type": "json_object"}, guided_json={}), "guided_json"),
    (TEXT, text(prompt_cache_key="k" * 257), "prompt_cache_key"),
    (TEXT, text(prompt_logprobs=1), "prompt_logprobs"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=7), "prompt"),
    (TEXT, text(prompt=["a", 1]), "prompt"),
    (TEXT, text(prompt=[1, -1]), "prompt"),
    (TEXT, text(prompt=[99999999]), "prompt"),
    (TEXT, text(prompt=[True]), "prompt"),
    (TEXT, text(prompt=["a"] * 129), "prompt"),
    (TEXT, text(prompt=["a", "b"], stream=True), "prompt"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(best_of=3), "best_of"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(logprobs=1, echo=True), "echo"),
    (TEXT, text(stream="yes"), "stream"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{i}-{case[2]}" for i, case in enumerate(BAD)])
async def test_bad_input_is_a_400_that_names_the_field(shared: Plane, path: str, body: Any, param: str | None) -> None:
    async with shared.post(body, path) as response:
        answer = json.loads(await response.text())
    assert response.status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param, error
    assert "x-request-id" in response.headers
    assert shared.slot.started == []
    assert shared.context.dispatcher.requests == {}


async def test_a_prompt_that_is_too_long_is_told_both_numbers(shared: Plane) -> None:
    limit = (await shared.context.prompts.get(shared.checkpoint[2])).manifest.context_length
    async with shared.post(text(prompt=[5] * (limit + 1))) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert str(limit) in error["message"]
    assert str(limit + 1) in error["message"]
    async with shared.post(text(prompt="word " * limit * 20)) as response:
        assert response.status == 400
    async with shared.post(text(max_tokens=limit)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "max_tokens")


async def test_a_body_above_the_cap_is_refused(shared: Plane) -> None:
    async with shared.post(b"x" * (shared.settings.http.body_bytes + 1)) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_missing_or_wrong_key_is_a_401(shared: Plane) -> None:
    for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic abc"}):
        for path in ("/v1/completions", CHAT):
            async with shared.client.post(path, json=text(), headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["type"] == "authentication_error"


async def test_an_unknown_model_is_a_404_that_says_which_there_are(shared: Plane) -> None:
    async with shared.post(text(model="nothing")) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "fn" in error["message"]


async def test_unknown_paths_and_methods_are_in_openais_form(shared: Plane) -> None:
    async with shared.get("/v1/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with shared.get("/v1/completions") as response:
        assert response.status == 405
    async with shared.get("/v1/completions/cmpl-nothing/stream") as response:
        assert response.status == 404
