"""A mixed load: every kind of request there is, as clients of every manner ask for it, and what each was told.

An `Ask` (kind, prompt, when its client leaves) is drawn from a seed and its number alone; `Teller` carries it out
against a service that may be dying, and gives a `Told`. `Progress` counts the tokens that all clients have been given:
it is the clock of whoever disturbs the service.
Limits: a client gives up after `GIVE_UP_S` without progress; that is a lost request.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from control_plane.client import Client, HttpError, Stream, StreamEvent, StreamLost, Unreachable
from control_plane.resumption import Call, StreamState

GIVE_UP_S = 90.0
LOOK_S = 0.05
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
    """stream | plain (no key, as stock clients) | whole | detached | reconnecting | twice | cancelled"""
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


class Progress:
    """Tokens delivered so far, over all clients: the clock that faults go by."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self.tokens = 0

    def advance(self, tokens: int) -> None:
        with self._moved:
            self.tokens += tokens
            self._moved.notify_all()

    def wait(self, until_tokens: int, within_s: float) -> bool:
        with self._moved:
            return self._moved.wait_for(lambda: self.tokens >= until_tokens, within_s)


class _Plain(StreamState):
    """A stream as stock clients ask for it: without a key; asked again before its id is known, it is another."""

    def call(self) -> Call:
        call = StreamState.call(self)
        call.headers.pop("Idempotency-Key", None)
        return call


class Teller:
    def __init__(self, client: Client, model: str, max_tokens: int, progress: Progress) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._progress = progress
        self.stops: dict[tuple[str, int], str] = {}
        """(kind, prompt) -> the string at which it is to stop."""
        self._answers: dict[bytes, Answer] = {}
        """By body, whatever the manner: what was made alone."""

    def body(self, ask: Ask) -> dict[str, Any]:
        kind, prompt = ask.kind, PROMPTS[ask.prompt]
        body: dict[str, Any] = {"model": self._model, "max_tokens": self._max_tokens, "ignore_eos": True}
        body |= kind.fields
        if kind.path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if kind.logprobs:
            body["logprobs"] = True if kind.path == CHAT else 1
        if kind.stops and (stop := self.stops.get((kind.name, ask.prompt))):
            body["stop"] = [stop]
        if kind.manner != "whole":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def tell(self, ask: Ask) -> Told:
        """Never raises: what went wrong is in the answer."""
        told = Told.nothing(ask)
        try:
            getattr(self, f"_{ask.kind.manner}")(ask, told)
        except HttpError as error:
            told.error_code, told.error = error.code or str(error.status), str(error)
        except (StreamLost, Unreachable, OSError) as error:
            told.error_code, told.error = "lost", str(error)
        except Exception as error:
            told.error_code, told.error = "client", f"{type(error).__name__}: {error}"
        return told

    def undisturbed(self, kind: Kind, prompt: int) -> Answer:
        """The same, made alone and read in one go; a stop string is chosen on the way."""
        ask = Ask(-1, kind, prompt, 0)
        if kind.stops and (kind.name, prompt) not in self.stops:
            self.stops[kind.name, prompt] = late_piece(self._alone(ask).texts[0])
        return self._alone(ask)

    def _alone(self, ask: Ask) -> Answer:
        body = self.body(ask)
        for field_name in ("stream", "stream_options"):
            body.pop(field_name, None)
        key = _json(body)
        if key not in self._answers:
            told = Told.nothing(ask)
            (self._whole if ask.kind.manner == "whole" else self._stream)(ask, told)
            if not told.ended:
                raise RuntimeError(f"the undisturbed run of {ask.kind.name} failed: {told.error}")
            self._answers[key] = told.answer
        return self._answers[key]

    # --- manners --------------------------------------------------------------------------------------------------

    def _stream(self, ask: Ask, told: Told) -> None:
        self._read(lambda: self._client.stream(ask.kind.path, self.body(ask)), told)

    def _plain(self, ask: Ask, told: Told) -> None:
        self._read(lambda: Stream(self._client, _Plain(ask.kind.path, self.body(ask), ""), None), told)

    def _reconnecting(self, ask: Ask, told: Told) -> None:
        every, path = max(4, ask.cut_tokens // 4), ask.kind.path
        stream = self._read(lambda: self._client.stream(path, self.body(ask)), told, leave_after=every)
        while not told.ended:
            request_id, cursor = told.request_id, stream.cursor
            stream = self._read(lambda: self._client.resume(path, request_id, cursor), told, leave_after=every)  # noqa: B023

    def _detached(self, ask: Ask, told: Told) -> None:
        self._read(lambda: self._client.stream(ask.kind.path, self.body(ask)), told, leave_after=ask.cut_tokens)
        told.delivered_first = tuple(told.texts)
        if not told.ended:
            self._collect(ask, told)

    def _twice(self, ask: Ask, told: Told) -> None:
        """A client that lost its way asks again under the same key: the same request, told from its beginning."""
        key, body, path = uuid.uuid4().hex, self.body(ask), ask.kind.path
        first = Told.nothing(ask)
        start = lambda: self._client.stream(path, body, idempotency_key=key)  # noqa: E731
        self._read(start, first, leave_after=ask.cut_tokens)
        told.delivered_first = tuple(first.texts)
        self._read(start, told)
        if first.request_id != told.request_id:
            raise RuntimeError(f"one key, two requests: {first.request_id} and {told.request_id}")

    def _cancelled(self, ask: Ask, told: Told) -> None:
        self._read(
            lambda: Stream(self._client, _Plain(ask.kind.path, self.body(ask), ""), None),
            told,
            leave_after=ask.cut_tokens,
        )
        if not told.ended:
            told.left = True
            self._patiently(lambda: self._client.cancel(ask.kind.path, told.request_id))

    def _whole(self, ask: Ask, told: Told) -> None:
        key, body = uuid.uuid4().hex, self.body(ask)
        call = Call("POST", ask.kind.path, {"Idempotency-Key": key, "Content-Type": "application/json"}, _json(body))
        told.take_whole(self._patiently(lambda: _answer(self._client, call)))
        self._progress.advance(told.tokens)

    def _collect(self, ask: Ask, told: Told) -> None:
        """The whole answer of a request that goes on without a reader."""
        path = f"{ask.kind.path}/{told.request_id}"
        deadline_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline_s:
            body = self._patiently(lambda: self._client.request("GET", path))
            if body.get("object") != "request":
                told.take_whole(body)
                self._progress.advance(max(0, told.tokens - len(told.seqs)))
                return
            time.sleep(LOOK_S)
        raise StreamLost("not done in time", told.request_id, 0)

    # --- patience -------------------------------------------------------------------------------------------------

    def _read(self, start: Callable[[], Stream], told: Told, leave_after: int = 0) -> Stream:
        """Reads a stream, to its end or until `leave_after` events with tokens came; one that could not be begun,
        because nothing listens, is begun again: nothing had been asked yet."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            stream = start()
            try:
                self._events(stream, told, leave_after)
                return stream
            except Unreachable:
                if stream.request_id or time.monotonic() > deadline_s:
                    raise
                time.sleep(LOOK_S)

    def _events(self, stream: Stream, told: Told, leave_after: int) -> None:
        events: Iterator[StreamEvent] = iter(stream)
        read, seen = 0, stream.cursor
        try:
            for event in events:
                told.take(event)
                told.request_id = stream.request_id or told.request_id
                self._progress.advance(max(0, event.seq - seen))
                seen = max(seen, event.seq)
                read += event.carries_tokens
                if leave_after and read >= leave_after:
                    return
            told.ended = True
        finally:
            told.request_id = stream.request_id or told.request_id
            told.resumes += stream.resumes
            with contextlib.suppress(Exception):
                events.close()  # type: ignore[attr-defined]

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """Repeats what the service could not answer now."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return call()
            except HttpError as error:
                if not error.retryable or time.monotonic() > deadline_s:
                    raise
            except Unreachable:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(LOOK_S)


def _json(body: dict[str, Any]) -> bytes:
    import json

    return json.dumps(body).encode()


def _answer(client: Client, call: Call) -> dict[str, Any]:
    import http.client
    import json

    connection, response = client._send(call, GIVE_UP_S)
    try:
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(client.endpoint.url, error, connected=True) from error
    finally:
        connection.close()
    if response.status >= 400:
        raise HttpError.from_response(response.status, dict(response.getheaders()), content)
    return dict(json.loads(content))


def late_piece(text: str, length: int = 3) -> str:
    """A piece of plain text from the second half that does not come before it."""
    for at in range(len(text) // 2, len(text) - length):
        piece = text[at : at + length]
        if piece.isascii() and piece.isprintable() and text.find(piece) == at:
            return piece
    return text[-1:]


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


def run_lanes(
    lanes: int, tell: Callable[[Ask], Told], draw: Callable[[int], Ask], go_on: Callable[[], bool]
) -> tuple[list[threading.Thread], list[Told]]:
    """Threads that each carry out one ask after another, in the order of their numbers, while `go_on()`."""
    numbers, lock, tolds = iter(range(1_000_000)), threading.Lock(), list[Told]()

    def lane() -> None:
        while go_on():
            with lock:
                number = next(numbers)
            told = tell(draw(number))
            with lock:
                tolds.append(told)

    threads = [threading.Thread(target=lane, name=f"lane-{index}", daemon=True) for index in range(lanes)]
    for thread in threads:
        thread.start()
    return threads, tolds


def counts(tolds: Iterable[Told]) -> dict[str, int]:
    found: dict[str, int] = {}
    for told in tolds:
        found[told.ask.kind.name] = found.get(told.ask.kind.name, 0) + 1
    return found
