"""Every kind of request there is, as sampling parameters for the tiny model, and what its answer must be like.

The model is random, so nothing here may depend on what it likes: grammars bound their answers, and kinds that need an
event in the middle of something (a stop string, a character) make it happen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from function_runtime.protocol import FinishReason, Grammar, GrammarKind
from tests.function_runtime.engine.support import Checkpoint, Transcript, make_work, run_one

PROMPT_TOKENS = 21
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["hot", "cold"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model would fill every blank to its bound
}
EXPRESSION = r"[a-z]{3,8}(-[0-9]{1,3}){2}"
CHARACTERS = "[éß€😀ы]{6,8}"
LARK = """
start: item ("," item){1,3} "."
item: WORD "=" NUMBER | "(" start ")"
WORD: /[a-z]{2,4}/
NUMBER: /[0-9]{1,2}/
"""


@dataclass(frozen=True, slots=True)
class Kind:
    sampling: Callable[[Checkpoint], dict[str, Any]]
    check: Callable[[Checkpoint, Transcript], None] = lambda checkpoint, transcript: None


def fixed(check: Callable[[Checkpoint, Transcript], None] = lambda c, t: None, **sampling: Any) -> Kind:
    return Kind(lambda checkpoint: sampling, check)


def grammar(kind: GrammarKind, text: str | dict[str, Any] = "") -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text))


def _ended(transcript: Transcript, choice: int = 0) -> bool:
    return any(e.choice == choice and e.finish is FinishReason.STOP for e in transcript.events)


def _stop_across_tokens(checkpoint: Checkpoint) -> dict[str, Any]:
    """A stop string that begins inside one token of the free run and ends inside one two further on."""
    sampling: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    free = run_one(checkpoint.engine(), make_work(checkpoint.prompt(PROMPT_TOKENS), **sampling))
    texts = [event.text for event in free.events]
    for first in range(8, 26):
        parts = texts[first : first + 3]
        stop = parts[0][-1:] + parts[1] + parts[2][:1]
        before = "".join(texts[:first]) + parts[0][:-1]
        if all(parts) and "�" not in stop and stop not in before + stop[:-1]:
            return sampling | {"stop": (stop, "no such text")}
    raise AssertionError(f"no stop string in {texts}")


def _check_stop_across_tokens(checkpoint: Checkpoint, transcript: Transcript) -> None:
    last = transcript.events[-1]
    assert last.finish is FinishReason.STOP and isinstance(last.stop_reason, str)
    assert last.stop_reason not in transcript.text()
    held = [e for e in transcript.events[-3:] if e.text != checkpoint.tokenizer.token_text(e.token_id)]
    assert len(held) >= 3, "the match lies within one token"


def _check_incomplete(checkpoint: Checkpoint, transcript: Transcript) -> None:
    assert sum(e.text == "" and e.finish is None for e in transcript.events) >= 4


def _check_characters(checkpoint: Checkpoint, transcript: Transcript) -> None:
    _check_incomplete(checkpoint, transcript)
    assert _ended(transcript) and re.fullmatch(CHARACTERS, transcript.text())


def _lead_bytes(checkpoint: Checkpoint) -> dict[str, Any]:
    """First and following bytes of characters that are tokens by themselves, favoured."""
    size = checkpoint.manifest.config.vocab_size
    pieces = [checkpoint.tokenizer.token_bytes(token) for token in range(size)]
    bias = {token: 6.0 for token, piece in enumerate(pieces) if len(piece) == 1 and piece[0] >= 0x80}
    return {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 5, "logit_bias": bias}


def _check_person(checkpoint: Checkpoint, transcript: Transcript) -> None:
    assert _ended(transcript)
    person = json.loads(transcript.text())
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 4 and 0 <= person["age"] <= 150 and isinstance(person["age"], int)
    assert 1 <= len(person["tags"]) <= 2 and set(person["tags"]) <= {"hot", "cold"}


def _check_object(checkpoint: Checkpoint, transcript: Transcript) -> None:
    text = transcript.text()
    assert text.startswith("{")
    if _ended(transcript):
        assert isinstance(json.loads(text), dict)


def _check_expression(checkpoint: Checkpoint, transcript: Transcript, choices: int = 1) -> None:
    for choice in range(choices):
        assert _ended(transcript, choice) and re.fullmatch(EXPRESSION, transcript.text(choice))


def sentence(text: str) -> bool:
    """Whether a text is one of `LARK`'s: innermost groups are items until there are none."""
    item, shrunk = r"[a-z]{2,4}=[0-9]{1,2}", text
    while (made := re.sub(rf"\({item}(,{item}){{1,3}}\.\)", "aa=0", shrunk)) != shrunk:
        shrunk = made
    return re.fullmatch(rf"{item}(,{item}){{1,3}}\.", shrunk) is not None


def _check_lark(checkpoint: Checkpoint, transcript: Transcript) -> None:
    assert not _ended(transcript) or sentence(transcript.text())


def _favoured_end(checkpoint: Checkpoint) -> dict[int, float]:
    (eos,) = checkpoint.manifest.eos_token_ids
    return {eos: 1000.0}


def _check_length(count: int, finish: FinishReason) -> Callable[[Checkpoint, Transcript], None]:
    def check(checkpoint: Checkpoint, transcript: Transcript) -> None:
        assert len(transcript.events) == count and transcript.events[-1].finish is finish

    return check


def _check_stop_tokens(checkpoint: Checkpoint, transcript: Transcript) -> None:
    assert isinstance(transcript.events[-1].stop_reason, int)


JSON_OBJECT = grammar(GrammarKind.JSON_OBJECT)
JSON_SCHEMA = grammar(GrammarKind.JSON_SCHEMA, PERSON)
REGEX = grammar(GrammarKind.REGEX, EXPRESSION)

KINDS: dict[str, Kind] = {
    "greedy": fixed(max_tokens=18, temperature=0.0, ignore_eos=True),
    "seeded": fixed(max_tokens=18, temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, seed=77),
    "a seed that the gateway drew": fixed(max_tokens=18, temperature=1.1, seed=2**63 - 25),
    "penalties": fixed(
        max_tokens=18, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "log-probabilities": fixed(max_tokens=20, temperature=0.7, logprobs=5, ignore_eos=True),
    "stop string": Kind(_stop_across_tokens, _check_stop_across_tokens),
    "incomplete characters": Kind(_lead_bytes, _check_incomplete),
    "three choices": fixed(max_tokens=10, temperature=1.2, n=3, seed=5, frequency_penalty=0.3),
    "logit bias": fixed(max_tokens=18, temperature=0.9, logit_bias={7: 4.0, 80: -100.0, 300: 2.5}),
    "min_tokens": Kind(
        lambda c: {"max_tokens": 20, "min_tokens": 9, "logit_bias": _favoured_end(c)},
        _check_length(10, FinishReason.STOP),
    ),
    "stop tokens": fixed(
        _check_stop_tokens, max_tokens=60, temperature=1.5, seed=9, stop_token_ids=tuple(range(6, 40)), ignore_eos=True
    ),
    "ignore_eos": Kind(
        lambda c: {"max_tokens": 12, "ignore_eos": True, "logit_bias": _favoured_end(c)},
        _check_length(12, FinishReason.LENGTH),
    ),
    "json_object": fixed(_check_object, max_tokens=40, temperature=1.0, seed=2, grammar=JSON_OBJECT),
    "json_schema": fixed(_check_person, max_tokens=80, temperature=1.0, seed=4, grammar=JSON_SCHEMA),
    "json_schema, greedy": fixed(_check_person, max_tokens=80, grammar=JSON_SCHEMA),
    "regex": fixed(_check_expression, max_tokens=60, temperature=1.0, seed=8, grammar=REGEX),
    "regex of characters": fixed(
        _check_characters, max_tokens=60, temperature=1.0, seed=8, grammar=grammar(GrammarKind.REGEX, CHARACTERS)
    ),
    "lark": fixed(_check_lark, max_tokens=40, temperature=1.0, seed=6, grammar=grammar(GrammarKind.LARK, LARK)),
    "a grammar with everything else": fixed(
        lambda c, t: _check_expression(c, t, 2),
        max_tokens=80, temperature=0.9, top_p=0.9, seed=12, n=2, logprobs=3, grammar=REGEX, min_tokens=9,
        repetition_penalty=1.1, frequency_penalty=0.4, logit_bias={7: 3.0, 90: -5.0}, stop=("never there",),
    ),
    "a grammar and no end of text": fixed(
        _check_expression, max_tokens=60, temperature=1.0, seed=1, ignore_eos=True, grammar=REGEX
    ),
}  # fmt: skip
