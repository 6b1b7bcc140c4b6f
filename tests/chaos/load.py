"""A mixed load: every kind of request there is, and what the client of each was told.

An `Ask` (kind, prompt, when its client leaves) is drawn from a seed and its number alone; what came of it is a `Told`,
and where it has its end an `Answer`, which can be compared. Limits: text only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from control_plane.client import HttpError, StreamEvent
from tests.chaos.background import FINAL, RESPONSES, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = (
    "The quick brown fox jumps over the lazy dog while the stoker feeds the fire with coal, day and night, and then",
    "Numbers such as 0, 1, 2, 10, 42, 1000 and 31415 are written with digits, and dates like 2024-05-06; count them: ",
    "Ein Heizer schaufelt Kohle, le chauffeur remplit la chaudière, el fogonero alimenta el fuego, and so it goes on: "
    "once upon a time there was a small model that knew very little, and it was content with that. Hello! How are you?",
)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
WORDS = {"type": "array", "items": {"enum": ["coal", "steam", "fire", "water"]}, "minItems": 24, "maxItems": 30}
LINE = "([a-z]{1,7} ){20,30}[.]"
SENTENCES = 'start: (SENTENCE " ")+\nSENTENCE: /[A-Z][a-z]{2,9}( [a-z]{2,9}){2,5}[.]/'


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked for (`fields` beside model and prompt) and in which manner a client reads it."""

    name: str
    fields: dict[str, Any]
    manner: str = "stream"
    """stream | plain (no key, as stock clients) | whole | detached | reconnecting | twice | cancelled; without a
    client: polled | followed | called_off"""
    path: str = COMPLETIONS
    exact: bool = True
    """Its answer is a function of the request: an undisturbed run gives the same."""
    logprobs: bool = True
    stops: bool = False
    """Ends at a stop string that is taken from its own undisturbed text."""

    @property
    def n(self) -> int:
        return int(self.fields.get("n", 1))


KINDS: tuple[Kind, ...] = (
    Kind("greedy", {"temperature": 0}),
    Kind("plain", {"temperature": 0}, manner="plain"),
    Kind("seeded", SEEDED),
    Kind("unseeded", {"temperature": 1.0}, exact=False),
    Kind("penalties", SEEDED | {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}),
    Kind("stop string", SEEDED, stops=True),
    Kind("two choices", {"temperature": 0.8, "seed": 99, "n": 2}),
    Kind("echo", {"temperature": 0, "echo": True}, logprobs=False),
    Kind("json object", SEEDED | {"response_format": {"type": "json_object"}}),
    Kind(
        "json schema",
        SEEDED | {"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}}},
    ),
    Kind("regex", SEEDED | {"guided_regex": LINE}),
    Kind("grammar", SEEDED | {"guided_grammar": SENTENCES}),
    Kind("whole", SEEDED, manner="whole"),
    Kind("chat", SEEDED, path=CHAT),
    Kind("chat whole", SEEDED, manner="whole", path=CHAT),
    Kind("detached", SEEDED, manner="detached"),
    Kind("reconnecting", SEEDED, manner="reconnecting"),
    Kind("twice", {"temperature": 0}, manner="twice"),
    Kind("cancelled", {"temperature": 0}, manner="cancelled"),
    Kind("background polled", SEEDED, manner="polled", path=RESPONSES),
    Kind("background followed", SEEDED, manner="followed", path=RESPONSES),
    Kind("background called off", {"temperature": 0}, manner="called_off", path=RESPONSES),
)


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    kind: Kind
    prompt: int
    cut_tokens: int
    """After so many tokens a client that leaves leaves."""

    @classmethod
    def drawn(cls, seed: int, number: int, kinds: tuple[Kind, ...], max_tokens: int) -> Ask:
        rng = random.Random(f"{seed}/ask/{number}")
        kind = kinds[number % len(kinds)] if number < len(kinds) else rng.choice(kinds)
        return cls(number, kind, rng.randrange(len(PROMPTS)), rng.randrange(1, max_tokens * 2 // 3))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to, whole."""

    texts: tuple[str, ...]
    tokens: int
    finishes: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(slots=True)
class Told:
    """What a client was told, up to the end or up to where it gave up."""

    ask: Ask
    texts: list[str]
    logprobs: list[list[float]]
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    seqs: list[int] = field(default_factory=list)
    request_id: str = ""
    ended: bool = False
    """It has the end of everything it asked for."""
    left: bool = False
    """The client took back what it asked for."""
    resumes: int = 0
    error_code: str = ""
    error: str = ""
    delivered_first: tuple[str, ...] = ()
    """What an earlier reader of the same request had been given before it left."""

    @classmethod
    def nothing(cls, ask: Ask) -> Told:
        return cls(ask, [""] * ask.kind.n, [[] for _ in range(ask.kind.n)])

    @property
    def answer(self) -> Answer:
        finishes = tuple(self.finishes[choice] for choice in sorted(self.finishes))
        return Answer(tuple(self.texts), self.tokens, finishes, tuple(map(tuple, self.logprobs)))

    def take(self, event: StreamEvent) -> None:
        if event.carries_tokens:
            self.seqs.append(event.seq)
        self._choices(event.body)

    def take_whole(self, body: dict[str, Any]) -> None:
        self.texts, self.logprobs = [""] * self.ask.kind.n, [[] for _ in range(self.ask.kind.n)]
        self._choices(body)
        self.request_id, self.ended = body["id"], True

    def take_response(self, body: dict[str, Any]) -> None:
        """A whole one of `/v1/responses`. Where its events were read, they have to add up to it."""
        text, logprobs = text_of(body)
        if self.texts[0] and not text.startswith(self.texts[0]):
            raise RuntimeError(f"the events of {body['id']} told {self.texts[0][-40:]!r}, the whole is {text[-40:]!r}")
        if body["status"] == "failed":
            error = body["error"]
            raise HttpError(200, error["message"], code=error.get("type"), retryable=False)
        self.request_id, self.ended = body["id"], body["status"] in FINAL
        if self.ended and body["status"] != "cancelled":
            self.texts, self.logprobs = [text], [logprobs]
            self.finishes, self.tokens = {0: body["status"]}, body["usage"]["output_tokens"]

    def _choices(self, body: dict[str, Any]) -> None:
        for item in body.get("choices", ()):
            choice = item["index"]
            said = item.get("delta") or item.get("message")
            self.texts[choice] += (said.get("content") if said is not None else item.get("text")) or ""
            found = item.get("logprobs") or {}
            self.logprobs[choice] += found.get("token_logprobs") or [t["logprob"] for t in found.get("content") or ()]
            if item.get("finish_reason"):
                self.finishes[choice] = item["finish_reason"]
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]


def first_difference(one: Answer, other: Answer, logprobs_within: float = 0.0) -> str:
    """Where two answers differ, in words; empty: nowhere."""
    for choice, (a, b) in enumerate(zip(one.texts, other.texts, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"choice {choice} at character {at} of {len(b)}: {a[at : at + 30]!r} instead of {b[at : at + 30]!r}"
    if one.tokens != other.tokens:
        return f"{one.tokens} tokens instead of {other.tokens}"
    if one.finishes != other.finishes:
        return f"ended {one.finishes} instead of {other.finishes}"
    for choice, (mine, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if len(mine) != len(theirs):
            return f"choice {choice}: {len(mine)} log-probabilities instead of {len(theirs)}"
        far = [i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if abs(x - y) > logprobs_within]
        if far:
            at = far[0]
            return f"choice {choice}: log-probability {at} is {mine[at]!r} instead of {theirs[at]!r}"
    return ""


def counts(tolds: Iterable[Told]) -> dict[str, int]:
    found: dict[str, int] = {}
    for told in tolds:
        found[told.ask.kind.name] = found.get(told.ask.kind.name, 0) + 1
    return found
