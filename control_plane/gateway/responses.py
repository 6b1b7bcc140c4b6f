"""`/v1/responses`: made, read, followed, cancelled and deleted, with or without a client that waits.

A response is a request like any other, whose reader sees other events (`responses_events`). With `background` it is
detached from its client: the answer to the POST is what there is at once, the rest is read by its id. Limits: kept as
long as the request's log is; a function without a log (`durability: off`) keeps nothing to come back to.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Elsewhere, InvalidRequest, NotFound, StokerError
from control_plane.gateway.acceptance import reading
from control_plane.gateway.access import authenticate
from control_plane.gateway.admission import admit, attached, idempotency_key, prepare, read_body
from control_plane.gateway.failures import failure_of
from control_plane.gateway.internal import reader_of
from control_plane.gateway.parsing import Endpoint
from control_plane.gateway.reading import STREAM_WRITER, Answer, EventWriter, ended, send_events
from control_plane.gateway.responses_body import InputItem, generation, parse_body
from control_plane.gateway.responses_events import ResponseEvents
from control_plane.gateway.responses_found import Found, locate, previous
from control_plane.gateway.responses_object import IN_PROGRESS, QUEUED, ResponseView
from control_plane.live_request import LiveRequest, Phase
from control_plane.records import RequestState
from control_plane.request_log import End

PAGE: Final = 20
PAGE_MAX: Final = 100


async def create(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    principal = authenticate(context, request)
    body = await read_body(context, request)
    wire = parse_body(body)
    key = idempotency_key(request)
    writer = EventWriter(request, context.settings.http.heartbeat_s) if wire.stream else None
    request[STREAM_WRITER] = writer
    try:
        earlier = await attached(request, context, principal, Endpoint.RESPONSES, key, body)
        if earlier is not None:
            return await _deliver(context, *earlier, writer, bool(wire.background))
        before: tuple[InputItem, ...] = ()
        if wire.previous_response_id is not None:
            before = await previous(context, wire.previous_response_id, principal.tenant)
        parsed, traits = generation(wire, before)
        prepared = await prepare(request, context, principal, parsed, writer)
        if traits.background and prepared.servable.durability == "off":
            raise InvalidRequest(
                f"{prepared.servable.function} keeps no log (durability: off): a background response would be lost",
                param="background",
            )
        live, answer = await admit(request, context, prepared, key, body, detach=traits.background)
    except Elsewhere:
        raise
    except StokerError as error:
        if writer is None or not writer.open:
            raise
        return await writer.fail(error)
    return await _deliver(context, live, answer, writer, traits.background)


async def _deliver(
    context: AppContext, live: LiveRequest | None, answer: Answer, writer: EventWriter | None, background: bool
) -> web.StreamResponse:
    if writer is None and background:
        return _answer(_now(Found(live, answer)))
    with reading(context, live):
        if writer is None:
            return await send_response(answer)
        return await send_events(writer, answer, ResponseEvents(ResponseView.of(answer)), 0)


async def send_response(answer: Answer) -> web.Response:
    """The whole of it, once it has ended."""
    end = await ended(answer)
    error = failure_of(end)
    if error is not None and end.state is not RequestState.CANCELLED:
        raise error
    return _answer(ResponseView.of(answer).at_end(end))


def wants_stream(request: web.Request) -> bool:
    return request.query.get("stream") in ("true", "1", "True")


async def retrieve(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    found = await locate(context, request)
    if wants_stream(request):
        return await follow(request, found, starting_after(request))
    if "starting_after" in request.query:
        raise InvalidRequest("starting_after needs stream to be true", param="starting_after")
    if "wait" in request.query:  # as another gateway asks in the name of a client that waits for the whole
        with reading(context, found.live, reader_of(request)):
            return await send_response(found.answer)
    return _answer(_now(found))


async def follow(
    request: web.Request, found: Found, after: int, writer: EventWriter | None = None
) -> web.StreamResponse:
    """What lies behind event `after`, to the end."""
    context, answer = request.app[CONTEXT], found.answer
    events = ResponseEvents(ResponseView.of(answer), after)
    # What the reader had is counted again, for that gives the numbers; what it lacks of this is sent at once.
    cursor = answer.log.last_seq
    lacking = events.opening() + events.render(answer.log.events[:cursor])
    if after > events.last_number and answer.log.end is None:
        raise InvalidRequest(
            f"event {after} has not happened: the last one of {answer.head.request_id} is {events.last_number}",
            param="starting_after",
        )
    writer = request[STREAM_WRITER] = writer or EventWriter(request, context.settings.http.heartbeat_s)
    with reading(context, found.live, reader_of(request)):
        await writer.begin(answer.head.request_id)
        try:
            if lacking:
                await writer.write(lacking)
            return await send_events(writer, answer, events, cursor, tell_failure=False)
        finally:
            writer.close()


def starting_after(request: web.Request) -> int:
    """The number of the last event the reader has; -1: none."""
    text = request.query.get("starting_after") or request.headers.get("Last-Event-ID")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidRequest(
            f"starting_after is {text[:40]!r}; it must be the sequence_number of an event", param="starting_after"
        )
    return int(text)


async def cancel(request: web.Request) -> web.Response:
    """Stop the work, whoever reads. Idempotent; a response that has ended stays as it is."""
    context = request.app[CONTEXT]
    found = await locate(context, request)
    if found.live is not None:
        await _stop(context, found.live)
    return _answer(_now(found))


async def _stop(context: AppContext, live: LiveRequest) -> None:
    context.dispatcher.cancel(live)
    if (await live.log.ended()).taken_over:
        raise Elsewhere.of(live.request_id)


async def delete(request: web.Request) -> web.Response:
    """Its input, log and row go at once; what it cost stays in the ledger."""
    context = request.app[CONTEXT]
    found = await locate(context, request)
    response_id = found.answer.head.request_id
    if found.live is not None:
        await _stop(context, found.live)
        await context.dispatcher.outcomes_written()
    await context.journal.delete(response_id, authenticate(context, request).tenant)
    return web.json_response({"id": response_id, "object": "response", "deleted": True})


async def input_items(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    found = await locate(context, request)
    items = ResponseView.of(found.answer).input_items()
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if order == "desc":
        items.reverse()
    limit = request.query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= PAGE_MAX):
        raise InvalidRequest(f"limit must be between 1 and {PAGE_MAX}", param="limit")
    after = request.query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise NotFound(f"there is no item {after[:80]}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return web.json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _now(found: Found) -> dict[str, Any]:
    """The response as it stands."""
    view, log = ResponseView.of(found.answer), found.answer.log
    end: End | None = log.end
    if end is None:
        return view.body(IN_PROGRESS if _is_under_way(found.live, log.last_seq) else QUEUED)
    return view.at_end(end, found.completed_at)


def _is_under_way(live: LiveRequest | None, tokens: int) -> bool:
    """What has tokens does not go back to queued when it has to wait for another replica."""
    return tokens > 0 or live is None or live.phase is Phase.RUNNING


def _answer(body: dict[str, Any]) -> web.Response:
    return web.json_response(body, headers={"x-request-id": body["id"]})
