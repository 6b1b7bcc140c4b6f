"""POST /v1/chat/completions and /v1/completions: parse, prepare, accept, then read like any other reader.

Limits: several prompts in one completion are several requests whose answers are joined; such an answer cannot be
streamed or attached to.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Elsewhere, InvalidRequest, StokerError
from control_plane.gateway.acceptance import accept, reading
from control_plane.gateway.access import authenticate
from control_plane.gateway.admission import (
    Prepared,
    admit,
    attached,
    idempotency_key,
    prepare,
    read_body,
)
from control_plane.gateway.parsing import Endpoint, parse_chat, parse_completion
from control_plane.gateway.reading import STREAM_WRITER, Answer, EventWriter, first_failure, send_stream, send_whole
from control_plane.gateway.rendering import Usage, choices_of
from control_plane.live_request import LiveRequest


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    context = request.app[CONTEXT]
    principal = authenticate(context, request)
    body = await read_body(context, request)
    parsed = parse_chat(body) if endpoint is Endpoint.CHAT else parse_completion(body)
    key = idempotency_key(request)
    writer = EventWriter(request, context.settings.http.heartbeat_s) if parsed.options.stream else None
    request[STREAM_WRITER] = writer
    try:
        earlier = await attached(request, context, principal, endpoint, key, body)
        if earlier is not None:
            return await _answer(context, *earlier, writer)
        prepared = await prepare(request, context, principal, parsed, writer)
        return await _serve(request, context, prepared, key, body, writer)
    except Elsewhere:
        raise
    except StokerError as error:
        if writer is None or not writer.open:
            raise
        return await writer.fail(error)


async def _serve(
    request: web.Request,
    context: AppContext,
    prepared: Prepared,
    key: str | None,
    body: bytes,
    writer: EventWriter | None,
) -> web.StreamResponse:
    if len(prepared.prompts) > 1:
        if key is not None:
            raise InvalidRequest("an Idempotency-Key needs a single prompt", param="prompt")
        return await _several(request, context, prepared)
    return await _answer(context, *await admit(request, context, prepared, key, body), writer)


async def _answer(
    context: AppContext, live: LiveRequest | None, answer: Answer, writer: EventWriter | None
) -> web.StreamResponse:
    with reading(context, live):
        if writer is not None:
            return await send_stream(writer, answer, 0)
        return await send_whole(answer)


async def _several(request: web.Request, context: AppContext, prepared: Prepared) -> web.Response:
    """Several prompts in one completion: a request each, answered together."""
    origins = [prepared.origin(prompt, context.db.clock.now_us()) for prompt in prepared.prompts]
    answers: list[Answer] = []
    with ExitStack() as readings:
        for origin in origins:
            live, answer = await accept(context, origin, prepared.servable, None, b"")
            readings.enter_context(reading(context, live))
            answers.append(answer)
        failed = await first_failure(answers)
        if failed is not None:
            raise failed
    choices: list[object] = []
    prompt_tokens = completion_tokens = cached_tokens = 0
    for answer in answers:
        choices += choices_of(answer.options, answer.log.events, answer.n, len(choices))
        prompt_tokens += answer.prompt_tokens
        completion_tokens += answer.log.last_seq
        cached_tokens += answer.log.end.cached_tokens if answer.log.end is not None else 0
    head = answers[0].head
    request["request_id"] = head.request_id
    body = {
        "id": head.request_id,
        "object": "text_completion",
        "created": head.created_s,
        "model": head.model,
        "system_fingerprint": None,
        "choices": choices,
        "usage": Usage(prompt_tokens, completion_tokens, cached_tokens).as_json(),
    }
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers={"x-request-id": head.request_id}
    )
