"""What a reader of one request gets, from its cursor to the end: a stream of events, or the whole answer.

A reader holds nothing but its cursor; the log is shared. While nothing comes it gets heartbeats. An error that is
known before anything was sent becomes a plain HTTP error. Limits: usage is told at the end, or in every chunk if asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from control_plane.errors import StokerError
from control_plane.gateway.failures import failure_of
from control_plane.gateway.parsing import RenderOptions
from control_plane.gateway.rendering import DONE, EventStream, Head, Usage, comment, error_event, whole_answer
from control_plane.request_log import End, RequestLog

HOLD_HEADERS_S: Final = 1.0
"""For this long a failure can still be told by the status; then the headers go out, so that the reader knows the id."""
BATCH_TOKENS: Final = 256
"""Most tokens rendered before the reader's socket is looked at again."""

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


async def send_stream(
    request: web.Request, answer: Answer, after_seq: int, heartbeat_s: float, headers: dict[str, str]
) -> web.StreamResponse:
    log = answer.log
    events = EventStream(answer.head, answer.options, answer.prompt_tokens, log.events[:after_seq])
    cursor = after_seq
    response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
    prepared = False
    wait_s = min(HOLD_HEADERS_S, heartbeat_s)
    while True:
        moved = await log.changed(cursor, wait_s)
        if not prepared:
            if log.end is not None and log.last_seq <= cursor and (error := failure_of(log.end)) is not None:
                raise error
            await response.prepare(request)
            prepared = True
        wait_s = heartbeat_s
        if not moved:
            await response.write(comment(f"heartbeat: {log.note}"))
            continue
        end = log.end
        batch: Sequence[object] = log.events[cursor : cursor + BATCH_TOKENS]
        data = events.render(log.events[cursor : cursor + BATCH_TOKENS], cursor + 1)
        cursor += len(batch)
        if end is not None and cursor >= log.last_seq:
            error = failure_of(end)
            if error is None:
                data += events.end(answer.usage(end), log.last_seq)
            else:
                data += error_event(error.body()) + DONE
            await response.write_eof(data)
            return response
        if data:
            await response.write(data)


async def send_whole(answer: Answer, headers: dict[str, str]) -> web.Response:
    end = await answer.log.ended()
    error = failure_of(end)
    if error is not None:
        raise error
    body = whole_answer(answer.head, answer.options, answer.log.events, answer.usage(end), answer.n)
    return web.Response(body=body, content_type="application/json", headers=headers)


async def first_failure(answers: Sequence[Answer]) -> StokerError | None:
    """Waits for all; the first error in their order."""
    ends = await asyncio.gather(*(answer.log.ended() for answer in answers))
    return next((error for end in ends if (error := failure_of(end)) is not None), None)
