"""What a reader of one request gets, from its cursor to the end: a stream of events, or the whole answer.

A reader holds nothing but its cursor; the log is shared. While nothing comes it gets heartbeats. An error that is
known before anything was sent becomes a plain HTTP error. Limits: usage is told at the end, or in every chunk if asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web

from control_plane.errors import Elsewhere, StokerError
from control_plane.gateway.failures import failure_of, pause_of
from control_plane.gateway.parsing import RenderOptions
from control_plane.gateway.rendering import DONE, EventStream, Head, Usage, comment, error_event, whole_answer
from control_plane.request_log import End, RequestLog
from function_runtime.protocol import TokenEvent

HOLD_HEADERS_S: Final = 1.0
"""For this long a failure can still be told by the status; then the headers go out, so that the reader knows the id."""
BATCH_TOKENS: Final = 256
"""Most tokens rendered before the reader's socket is looked at again."""

STALLED_READER_S: Final = 120.0
"""A reader whose socket takes nothing for this long holds a handler and a connection for nothing."""
STREAM_WRITER: Final = "stoker.writer"
"""Where a handler leaves the stream it has begun, for the rest to be written to it."""
T = TypeVar("T")

_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as a reader sees it."""

    head: Head
    options: RenderOptions
    log: RequestLog
    prompt_tokens: int
    n: int

    def usage(self, end: End) -> Usage:
        return Usage(self.prompt_tokens, self.log.last_seq, end.cached_tokens)


class EventWriter:
    """One reader's SSE response: opened as late as possible, so that a failure can still be told by the status."""

    def __init__(self, request: web.Request, heartbeat_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_STREAM_HEADERS)
        self._writing_since_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self.heartbeat_s = heartbeat_s
        self.open = False

    async def begin(self, request_id: str) -> None:
        if not self.open:
            if request_id:
                self._response.headers["x-request-id"] = request_id
            await self._response.prepare(self._request)
            self.open = True
            self._watch_stall()

    async def write(self, data: bytes) -> None:
        self._writing_since_s = time.monotonic()
        await self._response.write(data)
        self._writing_since_s = 0.0

    async def end(self, data: bytes) -> web.StreamResponse:
        self._writing_since_s = time.monotonic()
        try:
            await self._response.write_eof(data)
        finally:
            self.close()
        return self._response

    async def fail(self, error: StokerError) -> web.StreamResponse:
        return await self.end(error_event(error.body()) + DONE)

    async def hold(self, work: Coroutine[Any, Any, T], note: str) -> T:
        """Heartbeats until `work` is done."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            wait_s = min(HOLD_HEADERS_S, self.heartbeat_s)
            while not (await asyncio.wait([task], timeout=wait_s))[0]:
                await self.begin("")
                await self.write(comment(f"heartbeat: {note}"))
                wait_s = self.heartbeat_s
            return task.result()
        finally:
            task.cancel()

    def _watch_stall(self) -> None:
        """A reader that takes nothing for `STALLED_READER_S` is cut off; it can come back with its cursor."""
        transport = self._request.transport
        if transport is None:
            return
        since_s = self._writing_since_s
        if since_s and time.monotonic() - since_s > STALLED_READER_S:
            transport.abort()
            return
        self._watch = asyncio.get_running_loop().call_later(STALLED_READER_S / 2, self._watch_stall)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class Renderer(Protocol):
    """What a reader's stream is made of; each gives bytes to send, or none."""

    def opening(self) -> bytes:
        """What there is to tell before the first token."""
        ...

    def render(self, events: Sequence[TokenEvent], first_seq: int) -> bytes: ...

    def ending(self, end: End) -> bytes:
        """After the last token; the log is whole."""
        ...

    def failing(self, error: StokerError) -> bytes:
        """The stream ends here, whatever becomes of the request."""
        ...

    def place(self, cursor: int) -> int:
        """The `id:` of the last event that was given, when the log has been read up to `cursor`."""
        ...


class _OpenAiStream:
    """Chunks of a chat or a completion."""

    def __init__(self, answer: Answer, after_seq: int) -> None:
        self._answer = answer
        self._events = EventStream(answer.head, answer.options, answer.prompt_tokens, answer.log.events[:after_seq])

    def opening(self) -> bytes:
        return b""

    def render(self, events: Sequence[TokenEvent], first_seq: int) -> bytes:
        return self._events.render(events, first_seq)

    def ending(self, end: End) -> bytes:
        error = failure_of(end)
        if error is not None:
            return self.failing(error)
        return self._events.end(self._answer.usage(end), self._answer.log.last_seq)

    def failing(self, error: StokerError) -> bytes:
        return error_event(error.body()) + DONE

    def place(self, cursor: int) -> int:
        return cursor


async def send_stream(writer: EventWriter, answer: Answer, after_seq: int) -> web.StreamResponse:
    return await send_events(writer, answer, _OpenAiStream(answer, after_seq), after_seq)


async def send_events(
    writer: EventWriter, answer: Answer, renderer: Renderer, cursor: int, *, tell_failure: bool = True
) -> web.StreamResponse:
    """Follow the log from `cursor` to its end. `tell_failure`: an end without an answer that is known before anything
    was sent is raised, so that the status can say so."""
    log = answer.log
    wait_s = min(HOLD_HEADERS_S, writer.heartbeat_s)
    try:
        while True:
            moved = await log.changed(cursor, wait_s)
            if (pause := pause_of(log, cursor)) is not None:
                if not writer.open:
                    raise pause
                return await writer.end(renderer.failing(pause))
            opening = b""
            if not writer.open:
                if log.end is not None and log.last_seq <= cursor and (error := failure_of(log.end)) is not None:
                    if log.end.taken_over:
                        raise Elsewhere.of(answer.head.request_id, cursor=renderer.place(cursor))
                    if tell_failure:
                        raise error
                await writer.begin(answer.head.request_id)
                opening = renderer.opening()
            wait_s = writer.heartbeat_s
            if not moved:
                await writer.write(opening + comment(f"heartbeat: {log.note}"))
                continue
            end = log.end
            if end is not None and end.taken_over and cursor >= log.last_seq:
                raise Elsewhere.of(answer.head.request_id, cursor=renderer.place(cursor))
            batch = log.events[cursor : cursor + BATCH_TOKENS]
            data = opening + renderer.render(batch, cursor + 1)
            cursor += len(batch)
            if end is not None and cursor >= log.last_seq:
                return await writer.end(data + renderer.ending(end))
            if data:
                await writer.write(data)
    finally:
        writer.close()


async def ended(answer: Answer) -> End:
    """The end, once it is there; raises where it cannot be waited for here."""
    log = answer.log
    while log.end is None:
        await log.changed(log.last_seq)
        if (pause := pause_of(log, log.last_seq)) is not None:
            raise pause
    if log.end.taken_over:
        raise Elsewhere.of(answer.head.request_id)
    return log.end


async def send_whole(answer: Answer) -> web.Response:
    end = await ended(answer)
    error = failure_of(end)
    if error is not None:
        raise error
    body = whole_answer(answer.head, answer.options, answer.log.events, answer.usage(end), answer.n)
    headers = {"x-request-id": answer.head.request_id}
    return web.Response(body=body, content_type="application/json", headers=headers)


async def first_failure(answers: Sequence[Answer]) -> StokerError | None:
    """Waits for all; the first error in their order."""
    ends = await asyncio.gather(*(answer.log.ended() for answer in answers))
    return next((error for end in ends if (error := failure_of(end)) is not None), None)
