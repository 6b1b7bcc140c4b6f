"""Coming back to a request by its id: the rest of its stream, its whole answer, its cancellation, its deletion.

The cursor is `Last-Event-ID` or `?starting_after=N`: a reader gets what lies behind it and only that. Limits: a log is
kept for `RetentionSettings.log_s` after the end.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Elsewhere, InvalidRequest, NotFound
from control_plane.gateway.acceptance import find, reading
from control_plane.gateway.access import authenticate
from control_plane.gateway.internal import FORWARDED_FOR, reader_of
from control_plane.gateway.reading import STREAM_WRITER, Answer, EventWriter, send_stream, send_whole
from control_plane.live_request import LiveRequest
from control_plane.records import RequestState

_ID: Final = re.compile(r"(chatcmpl|cmpl)-[0-9a-f]{32}\Z")


async def _locate(context: AppContext, request: web.Request) -> tuple[LiveRequest | None, Answer]:
    key = authenticate(context, request)
    request_id = request.match_info["id"]
    missing = NotFound(f"there is no request {request_id[:80]}", param="id")
    if _ID.match(request_id) is None:
        raise missing
    live = context.dispatcher.requests.get(request_id)
    if live is not None and live.origin.tenant != key.tenant:
        raise missing
    record = await context.journal.get(request_id, key.tenant)
    if record is None:
        raise missing
    request["request_id"] = request_id
    return await find(context, record)


def cursor_of(request: web.Request) -> int:
    """Places start at 1; 0 (or nothing) is the whole stream."""
    text = request.query.get("starting_after")
    name = "starting_after"
    if text is None:
        text, name = request.headers.get("Last-Event-ID", "0"), "Last-Event-ID"
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it must be the id of an event of this stream", param=name)
    return int(text)


async def stream(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    live, answer = await _locate(context, request)
    cursor = cursor_of(request)
    if cursor > (live.received if live is not None else answer.log.last_seq):
        raise InvalidRequest(
            f"event {cursor} has not happened: the log of {answer.head.request_id} ends at {answer.log.last_seq}",
            param="starting_after",
        )
    writer = request[STREAM_WRITER] = EventWriter(request, context.settings.http.heartbeat_s)
    with reading(context, live, reader_of(request)):
        return await send_stream(writer, answer, cursor)


async def retrieve(request: web.Request) -> web.Response:
    """The whole answer once there is one; until then what is known (202). A gateway that forwards may wait for it."""
    context = request.app[CONTEXT]
    live, answer = await _locate(context, request)
    headers = {"x-request-id": answer.head.request_id}
    if FORWARDED_FOR in request.headers and "wait" in request.query:
        with reading(context, live, reader_of(request)):
            return await send_whole(answer)
    if answer.log.end is None:
        body = {
            "id": answer.head.request_id,
            "object": "request",
            "status": live.phase.value if live is not None else "running",
            "tokens": answer.log.last_seq,
        }
        return web.json_response(body, status=202, headers=headers)
    return await send_whole(answer)


async def cancel(request: web.Request) -> web.Response:
    """Stop the work, whoever reads. Idempotent; an ended request stays as it is."""
    context = request.app[CONTEXT]
    live, answer = await _locate(context, request)
    if live is not None:
        context.dispatcher.cancel(live)
        await answer.log.ended()
    end = answer.log.end
    if end is not None and end.taken_over:
        raise Elsewhere.of(answer.head.request_id)
    body = {
        "id": answer.head.request_id,
        "object": "request",
        "status": end.state.value if end is not None else "running",
        "cancelled": end is not None and end.state is RequestState.CANCELLED,
    }
    return web.json_response(body, headers={"x-request-id": answer.head.request_id})


async def delete(request: web.Request) -> web.Response:
    """Forget an ended request: input, log, row; its KV goes with the next collection, its ledger rows stay."""
    context = request.app[CONTEXT]
    key = authenticate(context, request)
    request_id = request.match_info["id"]
    if _ID.match(request_id) is None:
        raise NotFound(f"there is no request {request_id[:80]}", param="id")
    live = context.dispatcher.requests.get(request_id)
    if live is not None and live.log.end is not None:
        await context.dispatcher.outcomes_written()  # its reader saw the end already
    await context.journal.delete(request_id, key.tenant)
    kind = "chat.completion.deleted" if request_id.startswith("chatcmpl-") else "text_completion.deleted"
    return web.json_response({"id": request_id, "object": kind, "deleted": True})
