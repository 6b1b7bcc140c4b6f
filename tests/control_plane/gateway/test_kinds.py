"""Requests of every kind whose replica dies: while they wait, in their prefill, and after any part of the answer.

The replicas have a real engine over a tiny random model, and nothing is streamed, so that what is compared is the whole
answer as a client gets it, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from function_runtime.protocol import Cancel
from tests.chaos.kinds import late_text
from tests.control_plane.gateway.conftest import Plane, Stream, text_of, until
from tests.control_plane.gateway.engine_replica import EngineReplica, replica_maker

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["coal", "wood"]}, "tons": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["kind", "tons"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 3},
    "unseeded": {"temperature": 1.0, "ignore_eos": True},  # each run is another: all are to have every token
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 4},
    "log-probabilities": {"logprobs": 3, "seed": 5},
    "stop": {"seed": 6},
    "three choices": {"n": 3, "seed": 7, "max_tokens": 8},
    "echo": {"echo": True, "seed": 8},
    "logit bias": {"logit_bias": {"77": 5, "80": -100}, "seed": 9},
    "min_tokens": {"min_tokens": 10, "logit_bias": {"2": 100}, "seed": 10},
    "stop tokens": {"stop_token_ids": list(range(20, 36)), "logit_bias": {"25": 9}, "min_tokens": 6, "seed": 11},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"2": 100}, "seed": 12},
    "json_object": {"response_format": {"type": "json_object"}, "seed": 13},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "fuel", "schema": SCHEMA}},
        "seed": 14,
        "max_tokens": 200,
    },
    "regex": {"guided_regex": "[a-f]{4,8}(-[0-9]{2}){2}", "seed": 15, "n": 2, "max_tokens": 60},
    "choice": {"guided_choice": ["a long answer.", "a longer answer!", "no"], "seed": 16, "max_tokens": 60},
    "lark": {"structured_outputs": {"grammar": 'start: "(" start ")" | /[0-9]{1,4}/'}, "seed": 17, "logprobs": 1},
}  # fmt: skip


def body_of(kind: str) -> dict[str, Any]:
    prompt = "The quick brown fox jumps over the lazy dog while the stoker feeds the fire"
    return {"model": "fn", "prompt": prompt, "max_tokens": 14, **KINDS[kind]}


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.fixture
async def engines(plane: Plane, checkpoint: tuple[str, str, str], tmp_path: Path) -> Plane:
    """A plane whose replicas compute."""
    plane.slot.make_replica = replica_maker(checkpoint[2], tmp_path)
    await plane.deploy()
    return plane


async def undisturbed(plane: Plane, body: dict[str, Any]) -> dict[str, Any]:
    async with plane.post(body) as response:
        assert response.status == 200, await response.text()
        return plain(await response.json())


async def killed_after(plane: Plane, body: dict[str, Any], tokens: int) -> tuple[dict[str, Any], int]:
    """The whole answer to a request whose replica was killed when the journal had that many tokens; and its seed."""
    behaviour = plane.slot.behaviour
    behaviour.stop_after = tokens
    task = asyncio.ensure_future(plane.post(body))
    replica = await until(lambda: next((r for r in plane.slot.living if r.works), None))
    assert isinstance(replica, EngineReplica)
    request_id = replica.works[-1].request_id
    live = plane.context.dispatcher.requests[request_id]
    await until(lambda: live.log.last_seq >= tokens)
    await plane.slot.kill(replica)
    behaviour.stop_after = None
    response = await task
    assert response.status == 200, await response.text()
    assert live.epoch == 2, "nothing was carried on"
    return plain(await response.json()), live.origin.sampling.seed


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_whose_replica_dies_anywhere_is_the_undisturbed_one(engines: Plane, kind: str) -> None:
    body = body_of(kind)
    expected = await undisturbed(engines, body)
    if kind == "stop":
        body["stop"] = [late_text(expected["choices"][0]["text"]), "no such text"]
        expected = await undisturbed(engines, body)
        assert expected["choices"][0]["finish_reason"] == "stop"
    await engines.slot.kill(engines.slot.living[0])
    tokens = expected["usage"]["completion_tokens"]
    for cut in sorted({1, tokens // 2, max(1, tokens - 1 - body.get("n", 1))}):
        answer, seed = await killed_after(engines, body, cut)
        await engines.slot.kill(engines.slot.living[0])
        if "seed" not in body and body.get("temperature"):
            expected = await undisturbed(engines, {**body, "seed": seed})
            await engines.slot.kill(engines.slot.living[0])
        assert answer == expected, f"killed after {cut} of {tokens} tokens"
    check(kind, expected)


def check(kind: str, answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        text = choice["text"]
        if kind == "json_schema":
            fuel = json.loads(text)
            assert fuel["kind"] in ("coal", "wood") and 1 <= fuel["tons"] <= 99 and len(fuel) == 2
        elif kind == "regex":
            assert re.fullmatch(KINDS[kind]["guided_regex"], text)
        elif kind == "choice":
            assert text in KINDS[kind]["guided_choice"]
        elif kind == "json_object":
            assert text.startswith("{")
        elif kind == "echo":
            assert text.startswith(body_of(kind)["prompt"])


@pytest.mark.parametrize("kind", ["greedy", "json_schema", "three choices", "unseeded"])
@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_replica_that_dies_in_prefill_leaves_no_trace(engines: Plane, kind: str, steps: int) -> None:
    body = {**body_of(kind), "prompt": [7, 80, 90] * 30, "seed": 21}
    expected = await undisturbed(engines, body)
    await engines.slot.kill(engines.slot.living[0])
    behaviour = engines.slot.behaviour
    behaviour.token_s = 0.03
    task = asyncio.ensure_future(engines.post(body))
    replica = await until(lambda: next((r for r in engines.slot.living if r.works and r.steps >= steps), None))
    live = engines.context.dispatcher.requests[replica.works[-1].request_id]
    assert live.log.last_seq == 0
    await engines.slot.kill(replica)
    behaviour.token_s = 0.0
    response = await task
    assert plain(await response.json()) == expected


@pytest.mark.parametrize("kind", ["seeded", "regex", "echo"])
async def test_requests_that_still_wait_when_gateway_and_replica_die_are_answered_as_ever(
    engines: Plane, kind: str
) -> None:
    body = body_of(kind)
    expected = await undisturbed(engines, body)
    await engines.slot.kill(engines.slot.living[0])
    engines.slot.behaviour.never_ready = True
    task = asyncio.ensure_future(engines.post(body, Idempotency_Key="once"))
    await until(lambda: any(live.seat is None for live in engines.context.dispatcher.requests.values()))
    await engines.die()
    await asyncio.gather(task, return_exceptions=True)
    engines.slot.behaviour.never_ready = False
    engines.slot.statuses.clear()
    await engines.start()
    async with engines.post(body, Idempotency_Key="once") as response:
        assert plain(await response.json()) == expected


async def test_a_stream_of_a_given_form_is_carried_on_at_the_next_token(engines: Plane) -> None:
    body = body_of("json_schema")
    expected = (await undisturbed(engines, body))["choices"][0]["text"]
    engines.slot.behaviour.stop_after = 6
    async with engines.post({**body, "stream": True}) as response:
        request_id = response.headers["x-request-id"]
        live = engines.context.dispatcher.requests[request_id]
        await until(lambda: live.log.last_seq >= 6)
        engines.slot.behaviour.stop_after = None
        await engines.slot.kill(engines.slot.living[0])
        events = await Stream(response).all()
    assert text_of(events) == expected


BAD_FORMS: dict[str, dict[str, Any]] = {
    "guided_regex": {"guided_regex": "(unclosed"},
    "guided_grammar": {"guided_grammar": "start: nowhere"},
    "guided_json": {"guided_json": {"type": "nothing of this kind"}},
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {"type": "null"}}}}
    },
    "structured_outputs.regex": {"structured_outputs": {"regex": "(?=look)ahead"}},
}


@pytest.mark.parametrize("field", BAD_FORMS)
async def test_a_form_that_does_not_compile_is_refused_with_the_compilers_reason(engines: Plane, field: str) -> None:
    async with engines.post({**body_of("greedy"), **BAD_FORMS[field]}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_grammar", field)
    assert len(error["message"]) > len(field) + 10
    assert not any(isinstance(word, Cancel) for word in engines.slot.living[0].words)
    async with engines.post(body_of("greedy")) as response:
        assert response.status == 200
