"""POST /v1/chat/completions and /v1/completions: parse, resolve, tokenise, accept, then read like any other reader.

A request is accepted (journalled) in a task of its own, so that a client's leaving in that very moment cannot leave it
half made. Limits: several prompts in one completion are several requests whose answers are joined; such an answer
cannot be streamed or attached to.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import InvalidRequest, ModelLoading, Unavailable
from control_plane.gateway.access import authenticate
from control_plane.gateway.parsing import (
    Endpoint,
    GenerationRequest,
    RenderOptions,
    parse_chat,
    parse_completion,
)
from control_plane.gateway.reading import Answer, first_failure, send_stream, send_whole
from control_plane.gateway.rendering import Head, Usage, choices_of
from control_plane.live_request import LiveRequest, Origin, TimeLimits
from control_plane.records import NewRequest, RequestRecord, pack_tokens, unpack_tokens
from control_plane.request_log import End, RequestLog
from control_plane.serving import Servable
from control_plane.tenants import ApiKey
from function_runtime.protocol import Sampling

MAX_IDEMPOTENCY_CHARS: Final = 255
_random: Final = random.Random(secrets.randbits(256))
"""For ids and seeds: unlikely to meet, not secret. A system call each would cost more than the rest of the parsing."""
_encode: Final = msgspec.msgpack.Encoder().encode


class Params(msgspec.Struct, frozen=True, array_like=True):
    """What the journal keeps of a request beside its prompt."""

    sampling: Sampling
    options: RenderOptions
    identity: str


_decode_params: Final = msgspec.msgpack.Decoder(Params).decode


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.CHAT)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, Endpoint.COMPLETIONS)


async def _generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    context = request.app[CONTEXT]
    principal = authenticate(context, request)
    if context.draining:
        raise Unavailable("the service is going down; it will be back", code="draining", retry_after_s=2.0)
    body = await request.read()
    parsed = parse_chat(body) if endpoint is Endpoint.CHAT else parse_completion(body)
    key = request.headers.get("Idempotency-Key")
    if key is not None and (not key or len(key) > MAX_IDEMPOTENCY_CHARS):
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_CHARS} characters")
    no_wait = request.headers.get("x-stoker-no-wait", "0") not in ("", "0", "false")
    servable = await context.serving.servable(parsed.model, principal.tenant, no_wait=no_wait)
    maker = await context.prompts.get(servable.manifest_path)
    context_tokens = servable.context_tokens(maker.manifest.context_length)
    prompts = await maker.prompts(parsed, context_tokens)
    if no_wait and not context.dispatcher.has_ready(servable.key, servable.identity):
        context.serving.wake(servable)
        raise ModelLoading(
            f"no replica of {servable.function} is ready; one is being started",
            retry_after_s=context.serving.start_estimate_s(servable),
        )
    if len(prompts) > 1:
        if key is not None:
            raise InvalidRequest("an Idempotency-Key needs a single prompt", param="prompt")
        return await _several(request, context, principal, parsed, servable, prompts)
    sampling = maker.sampling(parsed.sampling, len(prompts[0]), context_tokens, _random.getrandbits(63))
    echo = maker.text(prompts[0]) if parsed.echo else ""
    kv_scope = await context.keys.kv_scope(principal.tenant)
    accepted = await _accept_shielded(
        context, _origin(principal, parsed, servable, prompts[0], sampling, echo, kv_scope), servable, key, body
    )
    live, answer = accepted
    headers = {"x-request-id": answer.head.request_id}
    request["request_id"] = answer.head.request_id
    with reading(context, live):
        if parsed.options.stream:
            return await send_stream(request, answer, 0, context.settings.http.heartbeat_s, headers)
        return await send_whole(answer, headers)


@contextmanager
def reading(context: AppContext, live: LiveRequest | None) -> Iterator[None]:
    """While it lasts somebody reads. When the last reader of a request that is not detached leaves, its work stops."""
    if live is None:
        yield
        return
    live.readers += 1
    try:
        yield
    finally:
        live.readers -= 1
        if live.readers == 0 and live.live and not live.detached and not context.draining:
            context.dispatcher.cancel(live)


def _origin(
    principal: ApiKey,
    parsed: GenerationRequest,
    servable: Servable,
    prompt: tuple[int, ...],
    sampling: Sampling,
    echo: str,
    kv_scope: str,
) -> Origin:
    options = msgspec.structs.replace(parsed.options, echo=echo) if echo else parsed.options
    return Origin(
        request_id=f"{options.endpoint.id_prefix}{_random.getrandbits(128):032x}",
        tenant=principal.tenant,
        key_id=principal.id,
        function=servable.function,
        revision=servable.revision,
        identity=servable.identity,
        model=parsed.model,
        prompt=prompt,
        sampling=sampling,
        options=options,
        limits=servable.limits,
        kv_scope=kv_scope,
        write_kv=servable.durability != "off",
        durable=servable.durability != "off",
        created_us=time.time_ns() // 1000,
    )


async def _accept_shielded(
    context: AppContext, origin: Origin, servable: Servable, key: str | None, body: bytes
) -> tuple[LiveRequest | None, Answer]:
    task = asyncio.get_running_loop().create_task(_accept(context, origin, servable, key, body))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: _left_at_once(context, done))
        raise


def _left_at_once(context: AppContext, done: asyncio.Task[tuple[LiveRequest | None, Answer]]) -> None:
    """The client went away while its request was being accepted: it is a reader that has come and gone."""
    if not done.cancelled() and done.exception() is None:
        with reading(context, done.result()[0]):
            pass


async def _accept(
    context: AppContext, origin: Origin, servable: Servable, key: str | None, body: bytes
) -> tuple[LiveRequest | None, Answer]:
    dispatcher = context.dispatcher
    dispatcher.check_room(origin.key, origin.identity, origin.nbytes)
    detached = key is not None or servable.on_disconnect == "detach"
    new = NewRequest(
        id=origin.request_id,
        tenant=origin.tenant,
        key_id=origin.key_id,
        function=origin.function,
        revision=origin.revision,
        endpoint=origin.options.endpoint.value,
        model=origin.model,
        params=_encode(Params(origin.sampling, origin.options, origin.identity)),
        prompt=pack_tokens(origin.prompt),
        on_disconnect="detach" if detached else "cancel",
        stream=origin.options.stream,
        durability=servable.durability,
        created_us=origin.created_us,
        idempotency_key=key,
        body_hash=None
        if key is None
        else hashlib.sha256(origin.options.endpoint.value.encode() + b"\0" + body).digest(),
    )
    accepted = await context.journal.accept(new)
    if accepted.attached:
        return await find(context, accepted.record)
    live = LiveRequest(origin, detached)
    dispatcher.enter(live)
    return live, answer_of(live)


def answer_of(live: LiveRequest) -> Answer:
    origin = live.origin
    head = Head(origin.request_id, origin.model, origin.created_us // 1_000_000)
    return Answer(head, origin.options, live.log, len(origin.prompt), origin.sampling.n)


async def find(context: AppContext, record: RequestRecord) -> tuple[LiveRequest | None, Answer]:
    """A known request: live here, or ended and read back from the journal."""
    live = context.dispatcher.requests.get(record.id)
    if live is not None:
        return live, answer_of(live)
    if not record.state.ended:
        fresh = await context.journal.get(record.id)
        if fresh is None or not fresh.state.ended:
            raise Unavailable(f"{record.id} is with another gateway; ask there or try again", retry_after_s=1.0)
        record = fresh
    if not record.params:
        raise InvalidRequest(f"the log of {record.id} is no longer kept", code="log_expired")
    params = _decode_params(record.params)
    events = await context.journal.log(record.id)
    outcome = record.outcome
    end = End(record.state, record.cached_tokens, outcome.error if outcome is not None else None)
    head = Head(record.id, record.model, record.created_us // 1_000_000)
    return None, Answer(head, params.options, RequestLog(events, end), record.input_tokens, params.sampling.n)


def origin_of(record: RequestRecord, limits: TimeLimits, kv_scope: str) -> Origin:
    """The origin of a request adopted from the journal."""
    params = _decode_params(record.params)
    return Origin(
        request_id=record.id,
        tenant=record.tenant,
        key_id=record.key_id,
        function=record.function,
        revision=record.revision,
        identity=params.identity,
        model=record.model,
        prompt=unpack_tokens(record.prompt),
        sampling=params.sampling,
        options=params.options,
        limits=limits,
        kv_scope=kv_scope,
        write_kv=record.durability != "off",
        durable=record.durability != "off",
        created_us=record.created_us,
    )


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
        sampling = maker.sampling(parsed.sampling, len(prompt), context_tokens, _random.getrandbits(63))
        echo = maker.text(prompt) if parsed.echo else ""
        origins.append(_origin(principal, parsed, servable, prompt, sampling, echo, kv_scope))
    lives: list[LiveRequest | None] = []
    answers: list[Answer] = []
    try:
        for origin in origins:
            live, answer = await _accept_shielded(context, origin, servable, None, b"")
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
