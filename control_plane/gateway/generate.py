"""POST /v1/chat/completions and /v1/completions: parse, resolve, tokenise, accept, then read like any other reader.

While a model is still being imported there is nothing to accept yet; a stream that waits for it gets its heartbeats all
the same. Limits: several prompts in one completion are several requests whose answers are joined; such an answer cannot
be streamed or attached to.
"""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Elsewhere, InvalidRequest, ModelLoading, Saturated, StokerError, Unavailable
from control_plane.gateway.acceptance import accept, new_origin, randomness, reading
from control_plane.gateway.access import authenticate
from control_plane.gateway.parsing import Endpoint, GenerationRequest, parse_chat, parse_completion
from control_plane.gateway.reading import STREAM_WRITER, Answer, EventWriter, first_failure, send_stream, send_whole
from control_plane.gateway.rendering import Usage, choices_of
from control_plane.live_request import LiveRequest, Origin
from control_plane.serving import Servable
from control_plane.tenants import ApiKey

MAX_IDEMPOTENCY_CHARS: Final = 255
UNKNOWN_BODY_BYTES: Final = 1 << 20
"""What a body of unstated length is counted as while it is read."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    context = request.app[CONTEXT]
    principal = authenticate(context, request)
    if context.draining:
        raise Unavailable("the service is going down; it will be back", code="draining", retry_after_s=2.0)
    context.gateways.require()
    body = await _read_body(context, request)
    parsed = parse_chat(body) if endpoint is Endpoint.CHAT else parse_completion(body)
    key = request.headers.get("Idempotency-Key")
    if key is not None and (not key or len(key) > MAX_IDEMPOTENCY_CHARS):
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_CHARS} characters")
    writer = EventWriter(request, context.settings.http.heartbeat_s) if parsed.options.stream else None
    request[STREAM_WRITER] = writer
    try:
        return await _serve(request, context, principal, parsed, key, body, writer)
    except Elsewhere:
        raise
    except StokerError as error:
        if writer is None or not writer.open:
            raise
        return await writer.fail(error)


async def _read_body(context: AppContext, request: web.Request) -> bytes:
    """Bodies being read share one bound, whatever each of them may have."""
    http = context.settings.http
    announced = min(request.content_length or UNKNOWN_BODY_BYTES, http.body_bytes)
    bound = max(context.settings.queue.max_bytes, http.body_bytes)
    if context.body_bytes + announced > bound:
        raise Saturated(f"request bodies of {context.body_bytes} bytes are being read already; at most {bound} may")
    context.body_bytes += announced
    try:
        return await request.read()
    finally:
        context.body_bytes -= announced


async def _serve(
    request: web.Request,
    context: AppContext,
    principal: ApiKey,
    parsed: GenerationRequest,
    key: str | None,
    body: bytes,
    writer: EventWriter | None,
) -> web.StreamResponse:
    no_wait = request.headers.get("x-stoker-no-wait", "0") not in ("", "0", "false")
    servable = context.serving.serves_now(parsed.model, principal.tenant)
    if servable is None:
        found = context.serving.wait_servable(parsed.model, principal.tenant, no_wait)
        servable = await (found if writer is None else writer.hold(found, "waiting for the model's import"))
    maker = await context.prompts.get(servable.manifest_path)
    context_tokens = servable.context_tokens(maker.manifest.context_length)
    prompts = await maker.prompts(parsed, context_tokens)
    if no_wait and not context.dispatcher.lanes.has_ready(servable.key, servable.identity):
        context.serving.wake(servable)
        raise ModelLoading(
            f"no replica of {servable.function} is ready; one is being started",
            retry_after_s=context.serving.start_estimate_s(servable),
        )
    if len(prompts) > 1:
        if key is not None:
            raise InvalidRequest("an Idempotency-Key needs a single prompt", param="prompt")
        return await _several(request, context, principal, parsed, servable, prompts)
    sampling = maker.sampling(parsed.sampling, len(prompts[0]), context_tokens, randomness.getrandbits(63))
    echo = maker.text(prompts[0]) if parsed.echo else ""
    kv_scope = await context.keys.kv_scope(principal.tenant)
    origin = new_origin(principal, parsed, servable, prompts[0], sampling, echo, kv_scope)
    live, answer = await accept(context, origin, servable, key, body)
    request["request_id"] = answer.head.request_id
    with reading(context, live):
        if writer is not None:
            return await send_stream(writer, answer, 0)
        return await send_whole(answer)


async def _several(
    request: web.Request,
    context: AppContext,
    principal: ApiKey,
    parsed: GenerationRequest,
    servable: Servable,
    prompts: tuple[tuple[int, ...], ...],
) -> web.Response:
    """Several prompts in one completion: a request each, answered together."""
    maker = await context.prompts.get(servable.manifest_path)
    context_tokens = servable.context_tokens(maker.manifest.context_length)
    kv_scope = await context.keys.kv_scope(principal.tenant)
    origins: list[Origin] = []
    for prompt in prompts:
        sampling = maker.sampling(parsed.sampling, len(prompt), context_tokens, randomness.getrandbits(63))
        echo = maker.text(prompt) if parsed.echo else ""
        origins.append(new_origin(principal, parsed, servable, prompt, sampling, echo, kv_scope))
    lives: list[LiveRequest | None] = []
    answers: list[Answer] = []
    try:
        for origin in origins:
            live, answer = await accept(context, origin, servable, None, b"")
            if live is not None:
                live.readers += 1
            lives.append(live)
            answers.append(answer)
        failed = await first_failure(answers)
        if failed is not None:
            raise failed
    finally:
        for live in lives:
            if live is not None:
                with reading(context, live):
                    live.readers -= 1
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
