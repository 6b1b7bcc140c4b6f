"""Every way a client may say what its answer must look like reaches the replica as one grammar; refusals come back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from control_plane.gateway.parsing import parse_chat, parse_completion
from function_runtime.protocol import DeviceTime, Failed, Grammar, GrammarKind
from tests.control_plane.gateway.conftest import Plane, Stream, body

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "é"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":"é"}}}'
LARK = 'start: "a" | "b"'

FORMS: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "text": ({"response_format": {"type": "text"}}, None),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        Grammar(GrammarKind.JSON_OBJECT, "", "response_format"),
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "response_format.json_schema.schema"),
    ),
    "guided_json": ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "guided_json")),
    "guided_json as text": (
        {"guided_json": json.dumps(SCHEMA)},
        Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "guided_json"),
    ),
    "guided_regex": ({"guided_regex": "[a-z]+"}, Grammar(GrammarKind.REGEX, "[a-z]+", "guided_regex")),
    "guided_choice": (
        {"guided_choice": ["yes", "no.", "é"]},
        Grammar(GrammarKind.REGEX, r"(yes|no\x{2E}|é)", "guided_choice"),
    ),
    "guided_grammar": ({"guided_grammar": LARK}, Grammar(GrammarKind.LARK, LARK, "guided_grammar")),
    "structured json": (
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "structured_outputs.json"),
    ),
    "structured json_object": (
        {"structured_outputs": {"json_object": True}},
        Grammar(GrammarKind.JSON_OBJECT, "", "structured_outputs.json_object"),
    ),
    "structured regex": (
        {"structured_outputs": {"regex": "a"}},
        Grammar(GrammarKind.REGEX, "a", "structured_outputs.regex"),
    ),
    "structured choice": (
        {"structured_outputs": {"choice": ["a", "b"]}},
        Grammar(GrammarKind.REGEX, "(a|b)", "structured_outputs.choice"),
    ),
    "structured grammar": (
        {"structured_outputs": {"grammar": LARK}},
        Grammar(GrammarKind.LARK, LARK, "structured_outputs.grammar"),
    ),
    "nothing": ({"guided_json": None, "response_format": None, "structured_outputs": None}, None),
}


@pytest.mark.parametrize(("fields", "grammar"), FORMS.values(), ids=FORMS.keys())
def test_both_endpoints_make_one_grammar_of_what_is_asked(fields: dict[str, Any], grammar: Grammar | None) -> None:
    text = json.dumps({"model": "fn", "prompt": "hi", **fields}).encode()
    chat = json.dumps({"model": "fn", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    assert parse_completion(text).sampling.grammar == grammar
    assert parse_chat(chat).sampling.grammar == grammar


def test_two_wishes_are_refused_naming_both_fields() -> None:
    both = json.dumps({"model": "fn", "prompt": "hi", "guided_regex": "a", "structured_outputs": {"regex": "a"}})
    with pytest.raises(Exception, match=r"guided_regex and structured_outputs\.regex"):
        parse_completion(both.encode())


def test_a_choice_is_the_texts_and_nothing_else() -> None:
    options = ["a.c", "(x|y)*", "line\nbreak", "^$[]{}\\", "é€😀"]
    parsed = parse_completion(json.dumps({"model": "fn", "prompt": "hi", "guided_choice": options}).encode())
    assert parsed.sampling.grammar is not None
    # The expression's \x{HEX} is Rust's; Python's is \xHH or \uHHHH.
    pattern = re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", parsed.sampling.grammar.text)
    for text in options:
        assert re.fullmatch(pattern, text)
    assert not re.fullmatch(pattern, "abc") and not re.fullmatch(pattern, "xyx")


async def test_the_grammar_reaches_whoever_carries_the_request_on(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy()
    response = await plane.post(body(stream=True, max_tokens=30, guided_regex="[a-z]+"))
    request_id = response.headers["x-request-id"]
    async for place, _ in Stream(response).events():
        if place >= 5:
            break
    await plane.die()
    await plane.slot.kill(plane.slot.living[0])
    await plane.start()
    async with plane.get(f"/v1/completions/{request_id}/stream") as again:
        await Stream(again).all()
    work = plane.slot.living[0].works[0]
    assert work.epoch == 2 and work.produced
    assert work.sampling.grammar == Grammar(GrammarKind.REGEX, "[a-z]+", "guided_regex")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_does_not_compile_is_a_400_that_names_the_field(plane: Plane, stream: bool) -> None:
    plane.slot.behaviour.fail = Failed("", 0, "invalid_grammar", "unclosed group", False, DeviceTime())
    await plane.deploy()
    async with plane.post(body(guided_regex="(", stream=stream)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_grammar", "guided_regex")
    assert "unclosed group" in error["message"]
    assert plane.context.dispatcher.requests == {}
