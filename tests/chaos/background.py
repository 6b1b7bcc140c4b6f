"""Readers of `/v1/responses` that were made with `background: true`: by polling, by streams that end and go on.

    POST (under a key) -> id    GET id ... until it has ended | GET id?stream&starting_after=N ... | POST id/cancel

Every event has a number that follows from the log alone, so what comes over several connections, from several gateways,
has to be 0, 1, 2 ... without a gap. Limits: knows nothing of what else a `Told` is good for.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from control_plane.client import Client, HttpError, StreamLost, Unreachable
from control_plane.resumption import COME_BACK, Call, EventParser, ServerEvent

RESPONSES: Final = "/v1/responses"
POLL_S: Final = 0.1
SILENT_S: Final = 45.0
FINAL: Final = frozenset({"completed", "incomplete", "failed", "cancelled"})
Json = dict[str, Any]


def send(client: Client, call: Call, within_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """The open answer, from whichever gateway listens. Raises HttpError, Unreachable."""
    while True:
        try:
            connection, response = client._send(call, within_s)
        except Unreachable as error:
            if not client.places.move_on() or error.connected:
                raise
            continue
        if response.status >= 400:
            with contextlib.closing(connection):
                try:
                    content = response.read()
                except (OSError, http.client.HTTPException) as error:
                    raise Unreachable(client.endpoint.url, error, connected=True) from error
            raise HttpError.from_response(response.status, dict(response.getheaders()), content)
        return connection, response


def answer(client: Client, call: Call, within_s: float) -> Json:
    connection, response = send(client, call, within_s)
    with contextlib.closing(connection):
        try:
            return dict(json.loads(response.read()))
        except (OSError, http.client.HTTPException) as error:
            client.places.move_on()
            raise Unreachable(client.endpoint.url, error, connected=True) from error


class Followed:
    """One response's events, over as many connections as it takes."""

    def __init__(self, client: Client, body: Json, give_up_s: float) -> None:
        self._client = client
        self._body = body
        self._key = uuid.uuid4().hex
        self._give_up_s = give_up_s
        self.id = ""
        self.number = -1
        """Of the last event that was read."""
        self.resumes = 0
        self.final: Json | None = None

    def make(self, patiently: Callable[[Callable[[], Json]], Json]) -> None:
        """Asks for it and does not stay."""
        call = self._post(stream=False)
        self.id = patiently(lambda: answer(self._client, call, self._give_up_s))["id"]

    def _post(self, *, stream: bool) -> Call:
        body = self._body | {"background": True} | ({"stream": True} if stream else {})
        headers = {"Idempotency-Key": self._key, "Content-Type": "application/json"}
        return Call("POST", RESPONSES, headers, json.dumps(body).encode())

    def events(self, leave_after: int = 0) -> Iterator[Json]:
        """Those behind the last one, in order, to the end or until so many came. Raises what cannot be waited out."""
        deadline_s, read = time.monotonic() + self._give_up_s, 0
        while True:
            try:
                for event in self._connection():
                    deadline_s = time.monotonic() + self._give_up_s
                    yield event
                    read += 1
                    if self.final is not None or (leave_after and read >= leave_after):
                        return
                cause: Exception | str = "the connection ended before the response did"
            except HttpError as error:
                if not error.retryable:
                    raise
                cause = error
            except (Unreachable, OSError, http.client.HTTPException) as error:
                cause = error
            if time.monotonic() > deadline_s:
                raise StreamLost(f"not resumed: {cause}", self.id or None, self.number)
            self._client.places.move_on()
            self.resumes += 1
            time.sleep(POLL_S / 2)

    def _connection(self) -> Iterator[Json]:
        # A stream that is asked for again under its key begins anew, unless it is asked for by its id.
        call = self._post(stream=True)
        if self.id:
            after = f"&starting_after={self.number}" if self.number >= 0 else ""
            call = Call("GET", f"{RESPONSES}/{self.id}?stream=true{after}", {}, None)
        connection, response = send(self._client, call, SILENT_S)
        parser = EventParser()
        with contextlib.closing(connection):
            while data := response.read1(65536):
                for event in parser.feed(data):
                    if (found := self._take(event)) is not None:
                        yield found
                if self.final is not None:
                    return

    def _take(self, event: ServerEvent) -> Json | None:
        if event.data is None:
            return None
        body: Json = json.loads(event.data)
        if body["type"] == "error":
            code = body.get("code")
            raise HttpError(200, str(body.get("message")), code=code, retryable=code in COME_BACK)
        number = body["sequence_number"]
        if number != self.number + 1:
            raise RuntimeError(f"event {number} of {self.id or 'a new response'} came after {self.number}")
        self.number = number
        whole = body.get("response")
        if whole is not None:
            self.id = whole["id"]
            if whole["status"] in FINAL:
                self.final = whole
        return body


def delta_of(event: Json) -> tuple[str, list[float]] | None:
    """What an event adds to the text, and the log-probabilities of it."""
    if event["type"] != "response.output_text.delta":
        return None
    return event["delta"], [each["logprob"] for each in event.get("logprobs") or ()]


def text_of(body: Json) -> tuple[str, list[float]]:
    """The same of a whole response."""
    parts = [part for item in body["output"] for part in item["content"]]
    logprobs = [each["logprob"] for part in parts for each in part.get("logprobs") or ()]
    return "".join(part["text"] for part in parts), logprobs
