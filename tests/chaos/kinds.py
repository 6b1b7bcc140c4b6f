"""The kinds of request of the mixed load, as bodies of `/v1/completions`, and what their answers must be like."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.chaos.readers import Answer

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a stoker who kept the fire of a steam engine alive, day and night, and",
    "List the first ten prime numbers, and explain why each of them is prime. 2 is prime because",
)
WORDS = ("coal", "steam", "fire", "water")
LIST = {"type": "array", "items": {"enum": list(WORDS)}, "minItems": 24, "maxItems": 30}
LINE = "([a-z]{1,7} ){20,30}[.]"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 1234},
    "two choices": {"temperature": 0.8, "seed": 99, "n": 2},
    "penalties": {
        "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "log-probabilities": {"temperature": 0.7, "seed": 6, "logprobs": 3},
    "stop": {"temperature": 0.9, "seed": 7},
    "echo": {"temperature": 0.9, "seed": 8, "echo": True},
    "json_schema": {
        "temperature": 1.0, "seed": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}},
    },
    "regex": {"temperature": 1.0, "seed": 10, "guided_regex": LINE},
    "whole": {"temperature": 0.9, "seed": 11, "n": 2, "stream": False},
}  # fmt: skip
"""Each has one prompt, so that the undisturbed runs are few."""


def body_of(kind: str, model: str, max_tokens: int, stop: str = "") -> dict[str, Any]:
    prompt = PROMPTS[list(KINDS).index(kind) % len(PROMPTS)]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **KINDS[kind]}
    if stop:
        body["stop"] = stop
    return body if body.get("stream") is False else body | {"stream_options": {"include_usage": True}}


def late_text(text: str) -> str:
    """A few characters of a text that occur first where half of it is over; empty where there are none."""
    for size in (3, 2, 1):
        for at in range(int(len(text) * 0.6), len(text) - size):
            found = text[at : at + size]
            if "\ufffd" not in found and text.find(found) == at:
                return found
    return ""


def fault_of(kind: str, answer: Answer) -> str:
    """What an answer lacks of the form it was asked for; one that was cut at its limit has none."""
    text, finish = answer.texts[0], answer.finishes[0]
    if kind == "json_schema" and finish == "stop":
        items = json.loads(text)
        return "" if 24 <= len(items) <= 30 and set(items) <= set(WORDS) else f"not of the schema: {text}"
    if kind == "regex" and finish == "stop":
        return "" if re.fullmatch(LINE, text) else f"not of the expression: {text}"
    if kind == "echo":
        return "" if text.startswith(str(body_of(kind, "", 1)["prompt"])) else f"no echo: {text[:60]}"
    if kind == "stop":
        return "" if finish == "stop" else "the stop string was not met"
    return ""
