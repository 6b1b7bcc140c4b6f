"""Events and answers as bytes: what is sent, what is held back, and what a cursor changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control_plane.gateway.parsing import Endpoint, RenderOptions
from control_plane.gateway.rendering import EventStream, Head, Usage, comment, whole_answer
from function_runtime.protocol import FinishReason, TokenEvent, TokenLogprob

HEAD = Head("cmpl-1", 'a "model"', 1700000000)


def parse(data: bytes) -> list[tuple[int | None, Any]]:
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        place = None
        for line in block.split("\n"):
            if line.startswith("id: "):
                place = int(line[4:])
            elif line.startswith("data: ") and line != "data: [DONE]":
                events.append((place, json.loads(line[6:])))
    return events


def stream(options: RenderOptions, events: list[TokenEvent], before: int = 0) -> list[tuple[int | None, Any]]:
    return parse(EventStream(HEAD, options, 4, events[:before]).render(events[before:], before + 1))


def test_text_is_json_whatever_it_holds() -> None:
    text = '"\\\n\r\t\u2028 ünï 🙂 \x00'
    ((_, event),) = stream(RenderOptions(Endpoint.COMPLETIONS), [TokenEvent(0, 1, text)])
    assert event["choices"][0]["text"] == text
    assert event["model"] == HEAD.model


def test_a_token_without_text_is_covered_by_the_next_event() -> None:
    events = [
        TokenEvent(0, 1, "a"),
        TokenEvent(0, 2, ""),
        TokenEvent(0, 3, "🙂"),
        TokenEvent(0, 4, "", FinishReason.STOP),
    ]
    seen = stream(RenderOptions(Endpoint.COMPLETIONS), events)
    assert [place for place, _ in seen] == [1, 3, 4]
    assert seen[-1][1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


def test_the_first_chat_event_of_a_choice_names_the_role_even_without_text() -> None:
    events = [TokenEvent(0, 1, ""), TokenEvent(1, 1, "b"), TokenEvent(0, 2, "c")]
    seen = stream(RenderOptions(Endpoint.CHAT), events)
    assert [event["choices"][0]["delta"] for _, event in seen] == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "b"},
        {"content": "c"},
    ]


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("before", range(7))
def test_a_stream_from_any_cursor_is_the_rest_of_the_whole_stream(endpoint: Endpoint, before: int) -> None:
    top = (TokenLogprob(5, "x", -0.5), TokenLogprob(6, "ÿ", -1.5))
    events = [
        TokenEvent(index % 2, index, f"t{index}", None, None, -0.1 * index, top, f"tok{index}") for index in range(6)
    ]
    options = RenderOptions(endpoint, stream=True, logprobs=True, top_logprobs=2, echo="E" * 3)
    assert stream(options, events, before) == stream(options, events)[before:]


def test_stop_reasons_are_told() -> None:
    event = TokenEvent(0, 1, "x", FinishReason.STOP, "END")
    ((_, seen),) = stream(RenderOptions(Endpoint.COMPLETIONS), [event])
    assert seen["choices"][0]["stop_reason"] == "END"


def test_usage_comes_in_its_own_event_before_the_end() -> None:
    options = RenderOptions(Endpoint.CHAT, stream=True, include_usage=True)
    renderer = EventStream(HEAD, options, 4)
    assert parse(renderer.render([TokenEvent(0, 1, "a")], 1))[0][1]["usage"] is None
    end = renderer.end(Usage(4, 1, 2), 1)
    assert end.endswith(b"data: [DONE]\n\n")
    ((_, usage),) = parse(end)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert EventStream(HEAD, RenderOptions(Endpoint.CHAT), 4).end(Usage(4, 1, 2), 1) == b"data: [DONE]\n\n"


def test_a_heartbeat_is_one_comment_whatever_its_text() -> None:
    assert comment("two\nlines") == b": two lines\n"


def test_whole_answers_hold_what_the_stream_held() -> None:
    options = RenderOptions(Endpoint.CHAT, logprobs=True)
    events = [
        TokenEvent(0, 1, "He", None, None, -0.1, (), "He"),
        TokenEvent(1, 1, "Yo", FinishReason.STOP, None, -0.2, (), "Yo"),
        TokenEvent(0, 2, "y", FinishReason.LENGTH, None, -0.3, (), "y"),
    ]
    answer = json.loads(whole_answer(HEAD, options, events, Usage(4, 3, 0), 2))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hey", "Yo"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert answer["choices"][0]["logprobs"]["content"][1]["bytes"] == [121]
