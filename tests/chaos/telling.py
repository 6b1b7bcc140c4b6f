"""Clients of every manner, carrying out what was drawn against a service that may be dying.

`Teller` takes an `Ask` and gives a `Told`. `Progress` counts the tokens that all clients have been given: it is the
clock of whoever disturbs the service. Limits: a client gives up after `GIVE_UP_S` without progress; that is a lost
request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.client import Client, HttpError, Stream, StreamEvent, StreamLost, Unreachable
from control_plane.resumption import Call, ClientError, StreamState
from tests.chaos.background import POLL_S, RESPONSES, Followed, answer, delta_of
from tests.chaos.load import CHAT, PROMPTS, Answer, Ask, Kind, Told

GIVE_UP_S = 90.0
LOOK_S = 0.05


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


@dataclass(slots=True)
class Alone:
    """What undisturbed runs gave: of one function, whichever service it ran on."""

    stops: dict[tuple[str, int], str] = field(default_factory=dict)
    """(kind, prompt) -> the string at which it is to stop."""
    answers: dict[bytes, Answer] = field(default_factory=dict)
    """By body, whatever the manner."""


class Teller:
    """`client(number)` is a reader of its own: of several gateways, each begins with another one."""

    def __init__(
        self,
        client: Callable[[int], Client],
        model: str,
        max_tokens: int,
        progress: Progress,
        alone: Alone | None = None,
    ) -> None:
        self._client_of = client
        self._model = model
        self._max_tokens = max_tokens
        self._progress = progress
        self._known = Alone() if alone is None else alone
        self.stops = self._known.stops

    def body(self, ask: Ask) -> dict[str, Any]:
        kind, prompt = ask.kind, PROMPTS[ask.prompt]
        body: dict[str, Any] = {"model": self._model, "max_tokens": self._max_tokens, "ignore_eos": True}
        body |= kind.fields
        if kind.path == RESPONSES:
            body["max_output_tokens"] = body.pop("max_tokens")
            return body | {"input": prompt, "include": ["message.output_text.logprobs"]}
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
            getattr(self, f"_{ask.kind.manner}")(self._client_of(ask.number), ask, told)
        except HttpError as error:
            told.error_code, told.error = error.code or str(error.status), str(error)
        except (StreamLost, Unreachable, OSError) as error:
            told.error_code, told.error = "lost", str(error)
        except Exception as error:
            told.error_code, told.error = "client", f"{type(error).__name__}: {error}"
        return told

    def again(self, told: Told) -> Answer:
        """The same request's log from its beginning, as a reader without a cursor gets it."""
        repeated, client = Told.nothing(told.ask), self._client_of(told.ask.number + 1)
        try:
            if told.ask.kind.path == RESPONSES:
                repeated.take_response(self.response(client, told.request_id))
            else:
                for event in client.resume(told.ask.kind.path, told.request_id):
                    repeated.take(event)
        except ClientError as error:
            repeated.texts[0] = f"({error})"
        # A stream has its usage where it was asked for; an answer that was collected whole was not asked for it.
        return replace(repeated.answer, tokens=told.tokens)

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
        if key not in self._known.answers:
            told = Told.nothing(ask)
            (self._whole if ask.kind.manner == "whole" else self._stream)(self._client_of(0), ask, told)
            if not told.ended:
                raise RuntimeError(f"the undisturbed run of {ask.kind.name} failed: {told.error}")
            self._known.answers[key] = told.answer
        return self._known.answers[key]

    # --- manners --------------------------------------------------------------------------------------------------

    def _stream(self, client: Client, ask: Ask, told: Told) -> None:
        if ask.kind.path == RESPONSES:
            return self._response(client, ask, told)
        self._read(lambda: client.stream(ask.kind.path, self.body(ask)), told)

    def _plain(self, client: Client, ask: Ask, told: Told) -> None:
        self._read(lambda: Stream(client, _Plain(ask.kind.path, self.body(ask), ""), None), told)

    def _reconnecting(self, client: Client, ask: Ask, told: Told) -> None:
        every, path = max(4, ask.cut_tokens // 4), ask.kind.path
        stream = self._read(lambda: client.stream(path, self.body(ask)), told, leave_after=every)
        while not told.ended:
            request_id, cursor = told.request_id, stream.cursor
            stream = self._read(lambda: client.resume(path, request_id, cursor), told, leave_after=every)  # noqa: B023

    def _detached(self, client: Client, ask: Ask, told: Told) -> None:
        self._read(lambda: client.stream(ask.kind.path, self.body(ask)), told, leave_after=ask.cut_tokens)
        told.delivered_first = tuple(told.texts)
        if not told.ended:
            self._collect(client, ask, told)

    def _twice(self, client: Client, ask: Ask, told: Told) -> None:
        """A client that lost its way asks again under the same key: the same request, told from its beginning."""
        key, body, path = uuid.uuid4().hex, self.body(ask), ask.kind.path
        first = Told.nothing(ask)
        start = lambda: client.stream(path, body, idempotency_key=key)  # noqa: E731
        self._read(start, first, leave_after=ask.cut_tokens)
        told.delivered_first = tuple(first.texts)
        self._read(start, told)
        if first.request_id != told.request_id:
            raise RuntimeError(f"one key, two requests: {first.request_id} and {told.request_id}")

    def _cancelled(self, client: Client, ask: Ask, told: Told) -> None:
        self._read(
            lambda: Stream(client, _Plain(ask.kind.path, self.body(ask), ""), None),
            told,
            leave_after=ask.cut_tokens,
        )
        if not told.ended:
            told.left = True
            self._patiently(lambda: client.cancel(ask.kind.path, told.request_id))

    def _whole(self, client: Client, ask: Ask, told: Told) -> None:
        key, body = uuid.uuid4().hex, self.body(ask)
        call = Call("POST", ask.kind.path, {"Idempotency-Key": key, "Content-Type": "application/json"}, _json(body))
        told.take_whole(self._patiently(lambda: answer(client, call, GIVE_UP_S)))
        self._progress.advance(told.tokens)

    def _response(self, client: Client, ask: Ask, told: Told) -> None:
        """With a client that waits for the whole."""
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
        call = Call("POST", RESPONSES, headers, _json(self.body(ask)))
        told.take_response(self._patiently(lambda: answer(client, call, GIVE_UP_S)))
        self._progress.advance(told.tokens)

    def _polled(self, client: Client, ask: Ask, told: Told) -> None:
        followed = Followed(client, self.body(ask), GIVE_UP_S)
        followed.make(self._patiently)
        told.request_id = followed.id
        self._until_final(client, told)
        self._progress.advance(told.tokens)

    def _until_final(self, client: Client, told: Told) -> None:
        deadline_s = time.monotonic() + GIVE_UP_S
        while not told.ended:
            if time.monotonic() > deadline_s:
                raise StreamLost("not done in time", told.request_id, 0)
            time.sleep(POLL_S)
            told.take_response(self.response(client, told.request_id))

    def response(self, client: Client, response_id: str) -> dict[str, Any]:
        call = Call("GET", f"{RESPONSES}/{response_id}", {}, None)
        return dict(self._patiently(lambda: answer(client, call, GIVE_UP_S)))

    def _followed(self, client: Client, ask: Ask, told: Told) -> None:
        """By streams that each end after a part of it; every other one begins with the POST itself."""
        followed = Followed(client, self.body(ask), GIVE_UP_S)
        if ask.cut_tokens % 2:
            followed.make(self._patiently)
        while followed.final is None:
            self._events_of(followed, told, max(4, ask.cut_tokens // 3))
        told.take_response(followed.final)

    def _called_off(self, client: Client, ask: Ask, told: Told) -> None:
        followed = Followed(client, self.body(ask), GIVE_UP_S)
        if ask.cut_tokens % 2:
            followed.make(self._patiently)
        self._events_of(followed, told, ask.cut_tokens)
        if followed.final is not None:
            return told.take_response(followed.final)
        told.left = True
        call = Call("POST", f"{RESPONSES}/{followed.id}/cancel", {}, None)
        self._patiently(lambda: answer(client, call, GIVE_UP_S))
        self._until_final(client, told)
        told.ended = bool(told.finishes)  # it may have come to its own end before
        told.left = not told.ended

    def _events_of(self, followed: Followed, told: Told, leave_after: int) -> None:
        try:
            for event in followed.events(leave_after):
                if (delta := delta_of(event)) is not None:
                    text, logprobs = delta
                    told.texts[0] += text
                    told.logprobs[0] += logprobs
                    told.seqs.append(event["sequence_number"])
                    self._progress.advance(1)
        finally:
            told.request_id, told.resumes = followed.id, followed.resumes

    def _collect(self, client: Client, ask: Ask, told: Told) -> None:
        """The whole answer of a request that goes on without a reader."""
        path = f"{ask.kind.path}/{told.request_id}"
        deadline_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline_s:
            body = self._patiently(lambda: client.request("GET", path))
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
            except (Unreachable, OSError, http.client.HTTPException):
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(LOOK_S)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def late_piece(text: str, length: int = 3) -> str:
    """A piece of plain text from the second half that does not come before it."""
    for at in range(len(text) // 2, len(text) - length):
        piece = text[at : at + length]
        if piece.isascii() and piece.isprintable() and text.find(piece) == at:
            return piece
    return text[-1:]


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
