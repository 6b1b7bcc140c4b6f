"""The events of a response's stream, each with its fixed `sequence_number`.

    created (queued) in_progress  output_item.added content_part.added  delta ...  text/part/item done  completed

Numbers are counted over the log from its first token on, whatever the reader's cursor: the same log gives the same
numbers, so that a reader who comes back, to whichever gateway, gets what is behind its cursor and only that. Which
events there are depends on the log and the end alone: `in_progress` of a background response comes with its first
token, a token without text has no event. A cancelled response ends with `response.incomplete` whose status is
`cancelled`, for there is no event of that name. Limits: an `error` event is about the connection, not the response; it
repeats the last number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from control_plane.errors import StokerError
from control_plane.gateway.rendering import chat_logprob
from control_plane.gateway.responses_object import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    ResponseView,
    status_of,
)
from control_plane.request_log import End
from function_runtime.protocol import TokenEvent

_json: Final = msgspec.json.encode
_DELTA: Final = (
    b'id: %d\nevent: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%d'
)


class ResponseEvents:
    """Feed it the log in order, from the first token: it gives what lies behind `after` (-1: everything)."""

    def __init__(self, view: ResponseView, after: int = -1) -> None:
        self._view = view
        self._after = after
        self._next = 0
        self._begun = False
        self._started = False
        self._place: dict[str, Any] = {"item_id": view.item_id, "output_index": 0, "content_index": 0}
        self._delta = b',"output_index":0,"content_index":0,"item_id":' + _json(view.item_id) + b',"delta":'

    @property
    def last_number(self) -> int:
        """Of the last event there is so far."""
        return self._next - 1

    def opening(self) -> bytes:
        """What there is before anything is computed."""
        if self._begun:
            return b""
        self._begun = True
        background = self._view.traits.background
        status = QUEUED if background else IN_PROGRESS
        parts = [self._response("response.created", status)]
        parts.append(self._response("response.queued" if background else "response.in_progress", status))
        return b"".join(parts)

    def render(self, events: Sequence[TokenEvent], first_seq: int = 0) -> bytes:
        parts = [self.opening()]
        if events and not self._started:
            parts.append(self._start())
        for event in events:
            if event.text or self._view.traits.logprobs:
                parts.append(self._one_delta(event))
        return b"".join(parts)

    def _start(self) -> bytes:
        self._started = True
        view = self._view
        parts = [self._response("response.in_progress", IN_PROGRESS)] if view.traits.background else []
        item = view.message(IN_PROGRESS, ())
        parts.append(self._event("response.output_item.added", {"output_index": 0, "item": item}))
        parts.append(self._event("response.content_part.added", {**self._place, "part": view.part("")}))
        return b"".join(parts)

    def ending(self, end: End) -> bytes:
        """Everything after the last token; the log is whole."""
        view, events = self._view, self._view.answer.log.events
        status = status_of(end, events)
        parts = [self.opening()]
        if status != FAILED:
            if not self._started and status != CANCELLED:
                parts.append(self._start())
            if self._started:
                parts += self._close(COMPLETED if status == COMPLETED else INCOMPLETE)
        name = {COMPLETED: "response.completed", FAILED: "response.failed"}.get(status, "response.incomplete")
        parts.append(self._event(name, {"response": view.at_end(end)}))
        return b"".join(parts)

    def _close(self, status: str) -> list[bytes]:
        view, events = self._view, self._view.answer.log.events
        text, logprobs = "".join([event.text for event in events]), view.logprobs(events)
        part = view.part(text, logprobs)
        return [
            self._event("response.output_text.done", {**self._place, "text": text, "logprobs": logprobs}),
            self._event("response.content_part.done", {**self._place, "part": part}),
            self._event("response.output_item.done", {"output_index": 0, "item": view.message(status, (part,))}),
        ]

    def failing(self, error: StokerError) -> bytes:
        """The connection ends, the response does not."""
        body = error.body()["error"]
        number = max(self._next - 1, self._after, 0)
        told = {
            "type": "error",
            "sequence_number": number,
            "code": body["code"],
            "message": body["message"],
            "param": body["param"],
        }
        return b"event: error\ndata: " + _json(told) + b"\n\n"

    def place(self, cursor: int) -> int:
        return max(self._next - 1, self._after)

    # --- one event ---

    def _response(self, name: str, status: str) -> bytes:
        return self._event(name, {"response": self._view.body(status)})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number = self._number()
        if number <= self._after:
            return b""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (
            number,
            name.encode(),
            _json({"type": name, "sequence_number": number, **fields}),
        )

    def _one_delta(self, event: TokenEvent) -> bytes:
        number = self._number()
        if number <= self._after:
            return b""
        logprobs = _json([chat_logprob(event)]) if self._view.traits.logprobs else b"[]"
        return _DELTA % (number, number) + self._delta + _json(event.text) + b',"logprobs":' + logprobs + b"}\n\n"

    def _number(self) -> int:
        number = self._next
        self._next += 1
        return number
