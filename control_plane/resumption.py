"""What a stream must remember to survive its connection. No input or output here.

Model: bytes -> server-sent events -> `StreamState`, which holds request id and cursor and says what to ask for next.
Before the request id is known the POST is repeated under its Idempotency-Key, which attaches to what is running.
Limits: text only; one sequence over all choices, as the service numbers its events.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
COME_BACK: Final = frozenset({"storage_unavailable", "taken_over", "with_another_gateway", "gateway_lapsed"})
"""Codes of errors inside a stream that are about the gateway or its database and not about the request: the rest is
there for a reader that comes back, here or elsewhere."""
RETRIED_STATUS: Final = frozenset({408, 429, 502, 503, 504})


class ClientError(Exception):
    """ClientError > Unreachable, Broken, HttpError, StreamLost."""


class Unreachable(ClientError):
    """Nothing answered at the address; `connected` says whether anything listened there at all."""

    def __init__(self, url: str, cause: BaseException | str, *, connected: bool) -> None:
        super().__init__(f"nothing answers at {url} ({_reason(cause)})")
        self.url = url
        self.connected = connected


class Broken(ClientError):
    """A connection broke while its answer was read."""

    def __init__(self, cause: BaseException | str) -> None:
        super().__init__(_reason(cause))


class StreamLost(ClientError):
    """A stream broke and could not be taken up again in time; what was read stands, `cursor` says how far."""

    def __init__(self, message: str, request_id: str | None, cursor: int) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.cursor = cursor


class HttpError(ClientError):
    """The service answered with an error in OpenAI's form, as a status or as an event inside a stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool = False,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s
        self.retryable = retryable
        self.request_id = request_id

    @classmethod
    def from_response(cls, status: int, headers: Mapping[str, str], body: bytes) -> HttpError:
        lowered = {name.lower(): value for name, value in headers.items()}
        try:
            error = json.loads(body)["error"]
            message, code = str(error["message"]), error.get("code")
            kind, param = error.get("type"), error.get("param")
        except (ValueError, KeyError, TypeError):
            text = body.decode("utf-8", "replace").strip()
            message, code, kind, param = text[:500] or f"HTTP {status}", None, None, None
        told = lowered.get("x-should-retry")
        return cls(
            status,
            message,
            code=code,
            kind=kind,
            param=param,
            retry_after_s=_seconds(lowered.get("retry-after")),
            retryable=told == "true" if told in ("true", "false") else status in RETRIED_STATUS,
            request_id=lowered.get("x-request-id"),
        )


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream. `seq` is the cursor after it: the place in the request's log of its last token."""

    seq: int
    body: dict[str, Any]

    def text(self, choice: int = 0) -> str:
        """What this event adds to a choice, in either endpoint's form."""
        parts: list[str] = []
        for item in self.body.get("choices", ()):
            if item.get("index", 0) == choice:
                delta = item.get("delta")
                parts.append((delta.get("content") if delta is not None else item.get("text")) or "")
        return "".join(parts)

    @property
    def carries_tokens(self) -> bool:
        return any(
            (item.get("delta") or {}).get("content") or item.get("text") or item.get("logprobs")
            for item in self.body.get("choices", ())
        )


@dataclass(frozen=True, slots=True)
class ServerEvent:
    data: str | None
    """None for a comment."""
    id: str | None = None
    comment: str = ""


class EventParser:
    """Cuts bytes into server-sent events (CR, LF or CRLF); comments are given too, since they tell what is awaited."""

    __slots__ = ("_buffer", "_data", "_id")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._id: str | None = None

    def feed(self, data: bytes) -> list[ServerEvent]:
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        events: list[ServerEvent] = []
        # A trailing CR may be half of a CRLF: it waits for the next byte.
        usable = self._buffer[:-1] if self._buffer.endswith(b"\r") else self._buffer
        lines = usable.replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines[-1] + self._buffer[len(usable) :]
        for raw in lines[:-1]:
            line = raw.decode("utf-8", "replace")
            if not line:
                if self._data:
                    events.append(ServerEvent("\n".join(self._data), self._id))
                self._data, self._id = [], None
            elif line.startswith(":"):
                events.append(ServerEvent(None, comment=line[1:].strip()))
            else:
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if name == "data":
                    self._data.append(value)
                elif name == "id":
                    self._id = value
        return events


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None


@dataclass(slots=True)
class StreamState:
    """What a stream must remember to go on from where it was read to."""

    path: str
    """`/v1/chat/completions` or `/v1/completions`."""
    body: dict[str, Any]
    idempotency_key: str
    request_id: str | None = None
    cursor: int = 0
    connections: int = 0
    asked: bool = False
    """The service may have heard of the request: from now on a refused connection is waited out."""
    done: bool = False
    statuses: list[str] = field(default_factory=list)

    @property
    def resumes(self) -> int:
        return max(0, self.connections - 1)

    def call(self) -> Call:
        if self.request_id is None:
            return Call(
                "POST",
                self.path,
                {"Idempotency-Key": self.idempotency_key, "Content-Type": "application/json"},
                json.dumps({**self.body, "stream": True}).encode(),
            )
        path = f"{self.path}/{urllib.parse.quote(self.request_id)}/stream?starting_after={self.cursor}"
        return Call("GET", path, {"Last-Event-ID": str(self.cursor)}, None)

    def opened(self, headers: Mapping[str, str]) -> None:
        self.connections += 1
        told = next((value for name, value in headers.items() if name.lower() == "x-request-id"), "")
        if self.request_id is None and told.startswith(("chatcmpl-", "cmpl-")):
            self.request_id = told

    def take(self, event: ServerEvent) -> StreamEvent | None:
        """The event for the reader, or None for what is not news to it; `done` is set by the end mark."""
        if event.data is None:
            self.statuses.append(event.comment)
            return None
        if event.data == "[DONE]":
            self.done = True
            return None
        body = json.loads(event.data)
        if "error" in body:
            error = body["error"]
            raise HttpError(
                200,
                str(error.get("message")),
                code=error.get("code"),
                kind=error.get("type"),
                param=error.get("param"),
                request_id=self.request_id,
                retryable=error.get("code") in COME_BACK,
            )
        if self.request_id is None and isinstance(body.get("id"), str):
            self.request_id = body["id"]
        seq = int(event.id) if event.id and event.id.isdigit() else self.cursor
        found = StreamEvent(seq, body)
        # The wire is at-least-once: tokens at or before the cursor were read already.
        if event.id is not None and seq <= self.cursor and found.carries_tokens:
            return None
        self.cursor = max(self.cursor, seq)
        return found


class Patience:
    """What becomes of a stream whose connection ended before it did: the error, where another connection would not
    help, or a pause. Pauses double, and end with StreamLost once nothing has moved for `give_up_s`."""

    def __init__(self, state: StreamState, give_up_s: float, move_on: Callable[[], bool] = lambda: False) -> None:
        """`move_on` turns to another address; False: there is none that was not tried."""
        self._state = state
        self._move_on = move_on
        self._give_up_s = give_up_s
        self._pause_s = FIRST_PAUSE_S
        self._seen = (0, 0)
        self._since_s = time.monotonic()

    def next_pause_s(self, cause: ClientError | None) -> float:
        """None: the connection ended in order, but without the end of the stream. Raises what is not to be retried."""
        if isinstance(cause, HttpError) and not cause.retryable:
            raise cause
        if isinstance(cause, Unreachable) and not (cause.connected or self._state.asked):
            if not self._move_on():
                raise cause
            return 0.0
        self._state.asked = True
        self._move_on()
        return self._pause_after(cause or "the connection ended before the stream did")

    def _pause_after(self, cause: BaseException | str) -> float:
        now_s = time.monotonic()
        seen = (self._state.cursor, len(self._state.statuses))
        if seen != self._seen:
            self._seen, self._since_s, self._pause_s = seen, now_s, FIRST_PAUSE_S
        if now_s - self._since_s > self._give_up_s:
            raise StreamLost(
                f"the stream of request {self._state.request_id or '(not yet known)'} broke after event "
                f"{self._state.cursor} and could not be resumed within {self._give_up_s:g} s: {_reason(cause)}",
                self._state.request_id,
                self._state.cursor,
            )
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        told_s = cause.retry_after_s if isinstance(cause, HttpError) else None
        return max(pause_s, min(told_s or 0.0, 5.0))


def _reason(cause: BaseException | str) -> str:
    if isinstance(cause, str):
        return cause
    return str(cause) or type(cause).__name__


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
