"""Accepting a request, and finding one again: between what was parsed and what a reader reads.

A request is accepted (journalled) in a task of its own, so that a client's leaving in that very moment cannot leave it
half made; room in the queue is reserved before, so that a burst cannot overrun the bounds while it is written down.
Limits: a request that another gateway owns is only located here (`Elsewhere`); `gateway.relay` reads it there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from control_plane.context import AppContext
from control_plane.errors import Damaged, Elsewhere, InvalidRequest, NotFound, StokerError
from control_plane.gateway.parsing import Endpoint, GenerationRequest, RenderOptions
from control_plane.gateway.reading import Answer
from control_plane.gateway.rendering import Head
from control_plane.kv_desk import conversation_of, function_scope
from control_plane.lanes import Place
from control_plane.live_request import LiveRequest, Origin, TimeLimits
from control_plane.records import NewRequest, RequestRecord, pack_tokens, unpack_tokens
from control_plane.request_log import End, RequestLog
from control_plane.sealing import KvAccess
from control_plane.serving import Servable
from control_plane.tenants import ApiKey
from control_plane.trace_context import TraceSeed
from function_runtime.protocol import Sampling

randomness: Final = random.Random(secrets.randbits(256))
"""For ids and seeds: unlikely to meet, not secret. A system call each would cost more than the rest of the parsing."""
_encode: Final = msgspec.msgpack.Encoder().encode


class Params(msgspec.Struct, frozen=True, array_like=True):
    """What the journal keeps of a request beside its prompt."""

    sampling: Sampling
    options: RenderOptions
    identity: str
    conversation: str = ""
    trace: TraceSeed | None = None


_decode_params: Final = msgspec.msgpack.Decoder(Params).decode


def _params_of(record: RequestRecord) -> Params:
    try:
        return _decode_params(record.params)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the parameters of {record.id} cannot be read: {error}") from error


@contextmanager
def reading(context: AppContext, live: LiveRequest | None, relayed: str | None = None) -> Iterator[None]:
    """While it lasts somebody reads. When the last reader of a request that is not detached leaves, its work stops.
    `relayed`: the name of a reader that another gateway reads for; None: it is this one's own."""
    if live is None:
        yield
        return
    live.readers.come()
    try:
        yield
    finally:
        if live.readers.go(relayed):
            nobody_reads(context, live)


def nobody_reads(context: AppContext, live: LiveRequest) -> None:
    if live.live and not (live.detached or context.draining):
        context.dispatcher.cancel(live)


def new_origin(
    principal: ApiKey,
    parsed: GenerationRequest,
    servable: Servable,
    prompt: tuple[int, ...],
    sampling: Sampling,
    echo: str,
    kv: KvAccess,
    now_us: int,
    trace: TraceSeed | None = None,
) -> Origin:
    options = msgspec.structs.replace(parsed.options, echo=echo) if echo else parsed.options
    kv_scope = kv.scope
    if servable.share_prefixes == "function":
        kv_scope = function_scope(kv_scope, servable.function)
    return Origin(
        request_id=f"{options.endpoint.id_prefix}{randomness.getrandbits(128):032x}",
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
        kv_key=kv.key,
        kv_owner=kv.owner,
        write_kv=servable.durability != "off",
        durable=servable.durability != "off",
        created_us=now_us,
        share_prefix=servable.share_prefixes != "none",
        prefix_form=servable.shared_prefix_form,
        fast=servable.resume == "fast",
        conversation=conversation_of(kv_scope, parsed.prompt_cache_key),
        price_microusd_per_hour=servable.price_microusd_per_hour,
        trace=trace,
    )


async def accept(
    context: AppContext, origin: Origin, servable: Servable, key: str | None, body: bytes, *, detach: bool = False
) -> tuple[LiveRequest | None, Answer]:
    """`detach`: the work goes on when nobody reads, whatever the function says."""
    if servable.needs_store:
        await context.store.first_look()
        context.store.require(servable.function)
    detached = detach or key is not None or servable.on_disconnect == "detach"
    task = asyncio.get_running_loop().create_task(_accept(context, origin, servable, key, body, detached, detach))
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
    context: AppContext,
    origin: Origin,
    servable: Servable,
    key: str | None,
    body: bytes,
    detached: bool,
    background: bool,
) -> tuple[LiveRequest | None, Answer]:
    origin = dataclasses.replace(origin, reuse=context.kv_desk.reuse(origin))
    # Nobody waits for the first token of work in the background: no objective refuses it.
    judged_tokens = None if background else len(origin.prompt)
    try:
        return await _accept_judged(context, origin, servable, key, body, detached, judged_tokens)
    except StokerError as error:
        if context.traces is not None and not isinstance(error, Elsewhere):
            context.traces.refused(origin, error)
        raise


async def _accept_judged(
    context: AppContext,
    origin: Origin,
    servable: Servable,
    key: str | None,
    body: bytes,
    detached: bool,
    judged_tokens: int | None,
) -> tuple[LiveRequest | None, Answer]:
    async with context.dispatcher.room(origin.key, origin.identity, origin.nbytes, judged_tokens) as place:
        spent = await context.budgets.take(origin.tenant, origin.key_id, len(origin.prompt))
        with spent.unless_refused():
            live, answer = await _accept_in_room(context, origin, servable, key, body, detached, place)
        if answer.head.request_id != origin.request_id:
            spent.put_back()  # it was another's, under the same idempotency key
        return live, answer


async def _accept_in_room(
    context: AppContext,
    origin: Origin,
    servable: Servable,
    key: str | None,
    body: bytes,
    detached: bool,
    place: Place,
) -> tuple[LiveRequest | None, Answer]:
    new = NewRequest(
        id=origin.request_id,
        tenant=origin.tenant,
        key_id=origin.key_id,
        function=origin.function,
        revision=origin.revision,
        endpoint=origin.options.endpoint.value,
        model=origin.model,
        params=_encode(Params(origin.sampling, origin.options, origin.identity, origin.conversation, origin.trace)),
        prompt=pack_tokens(origin.prompt),
        on_disconnect="detach" if detached else "cancel",
        stream=origin.options.stream,
        durability=servable.durability,
        created_us=origin.created_us,
        idempotency_key=key,
        body_hash=None if key is None else hash_of(origin.options.endpoint, body),
    )
    live = LiveRequest(origin, detached)
    if context.traces is not None:
        live.trace = context.traces.request(origin)
    if key is None:
        seat = context.dispatcher.take_seat(live)
        if seat is not None:
            place.leave()
            await context.dispatcher.accept_into(live, seat, new)
            if live.trace is not None:
                live.trace.accepted(waits=False)
            return live, answer_of(live)
    accepted = await context.journal.accept(new)
    if accepted.attached:
        return await find(context, accepted.record)
    if live.trace is not None:
        live.trace.accepted(waits=True)
    context.dispatcher.enter(live)
    return live, answer_of(live)


def hash_of(endpoint: Endpoint, body: bytes) -> bytes:
    """What a request under an idempotency key is recognised by."""
    return hashlib.sha256(endpoint.value.encode() + b"\0" + body).digest()


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
        await context.adopting.settled()
        fresh = await context.journal.get(record.id)
        live = context.dispatcher.requests.get(record.id)
        if live is not None:
            return live, answer_of(live)
        if fresh is None or not fresh.state.ended:
            raise Elsewhere.of(record.id, record.owner if fresh is None else fresh.owner)
        record = fresh
    outcome = record.outcome
    end = End(record.state, record.cached_tokens, outcome.error if outcome is not None else None)
    return None, await _from_journal(context, record, end)


async def as_logged(context: AppContext, request_id: str, tenant: str) -> Answer:
    """What the journal has of a request, whoever owns it and whether or not it has ended."""
    record = await context.journal.get(request_id, tenant)
    if record is None:
        raise NotFound(f"there is no request {request_id}", param="id")
    return await _from_journal(context, record, None)


async def _from_journal(context: AppContext, record: RequestRecord, end: End | None) -> Answer:
    if record.damaged:
        raise Damaged(f"{record.id}: {record.damaged}")
    if not record.params:
        context.tenant_keys.seal_of(record.tenant, record.sealed, record.id)  # says so where its key was deleted
        raise InvalidRequest(f"the log of {record.id} is no longer kept", code="log_expired")
    params = _params_of(record)
    log = RequestLog(await context.journal.log(record.id), end)
    head = Head(record.id, record.model, record.created_us // 1_000_000)
    return Answer(head, params.options, log, record.input_tokens, params.sampling.n)


def origin_of(
    record: RequestRecord, limits: TimeLimits, kv: KvAccess, share_prefixes: str = "tenant", price: int = 0
) -> Origin:
    """The origin of a request adopted from the journal."""
    params = _params_of(record)
    kv_scope = kv.scope
    if share_prefixes == "function":
        kv_scope = function_scope(kv_scope, record.function)
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
        kv_key=kv.key,
        kv_owner=kv.owner,
        write_kv=record.durability != "off",
        durable=record.durability != "off",
        created_us=record.created_us,
        share_prefix=share_prefixes != "none",
        conversation=params.conversation,
        price_microusd_per_hour=price,
        trace=params.trace,
    )
