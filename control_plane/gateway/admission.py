"""From a request that was parsed to one that is accepted: resolve the function, make the tokens, draw the seed, accept.

While a model is still being imported there is nothing to accept yet; a stream that waits for it gets its heartbeats all
the same. Limits: one prompt a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiohttp import web

from control_plane.context import AppContext
from control_plane.errors import InvalidRequest, ModelLoading, Saturated, Unavailable
from control_plane.gateway.acceptance import accept, find, hash_of, new_origin, randomness
from control_plane.gateway.parsing import Endpoint, GenerationRequest
from control_plane.gateway.prompts import PromptMaker
from control_plane.gateway.reading import Answer, EventWriter
from control_plane.live_request import LiveRequest, Origin
from control_plane.sealing import KvAccess
from control_plane.serving import Servable
from control_plane.tenants import ApiKey
from control_plane.trace_context import TraceSeed

MAX_IDEMPOTENCY_CHARS: Final = 255
BEGAN: Final = "began_ns"
UNKNOWN_BODY_BYTES: Final = 1 << 20
"""What a body of unstated length is counted as while it is read."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose function can serve it, as tokens."""

    principal: ApiKey
    parsed: GenerationRequest
    servable: Servable
    maker: PromptMaker
    prompts: tuple[tuple[int, ...], ...]
    context_tokens: int
    kv: KvAccess
    trace: TraceSeed | None = None

    def origin(self, prompt: tuple[int, ...], now_us: int) -> Origin:
        """`now_us`: by the clock that gateways share."""
        maker = self.maker
        sampling = maker.sampling(self.parsed.sampling, len(prompt), self.context_tokens, randomness.getrandbits(63))
        echo = maker.text(prompt) if self.parsed.echo else ""
        return new_origin(
            self.principal, self.parsed, self.servable, prompt, sampling, echo, self.kv, now_us, self.trace
        )


def refuse_while_draining(context: AppContext) -> None:
    if context.draining:
        raise Unavailable("the service is going down; it will be back", code="draining", retry_after_s=2.0)
    context.gateways.require()


def idempotency_key(request: web.Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and (not key or len(key) > MAX_IDEMPOTENCY_CHARS):
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_CHARS} characters")
    return key


async def attached(
    request: web.Request, context: AppContext, principal: ApiKey, endpoint: Endpoint, key: str | None, body: bytes
) -> tuple[LiveRequest | None, Answer] | None:
    """The request that was accepted under this key before: it is there, whatever is refused to new ones now (a drained
    function, a full queue, a service that goes down). None: this one is new, and may be refused."""
    if key is not None:
        record = await context.journal.under_key(principal.tenant, key, hash_of(endpoint, body))
        if record is not None:
            live, answer = await find(context, record)
            request["request_id"] = answer.head.request_id
            return live, answer
    refuse_while_draining(context)
    return None


async def read_body(context: AppContext, request: web.Request) -> bytes:
    """Bodies being read share one bound, whatever each of them may have. Nobody's is read to be refused: only one that
    comes with an idempotency key may still be wanted while nothing new is."""
    if context.traces is not None:
        request[BEGAN] = context.traces.now_ns()
    if "Idempotency-Key" not in request.headers:
        refuse_while_draining(context)
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


def trace_of(request: web.Request, context: AppContext) -> TraceSeed | None:
    if context.traces is None:
        return None
    return context.traces.seed(request.headers.getall("traceparent", []), request[BEGAN])


async def prepare(
    request: web.Request,
    context: AppContext,
    principal: ApiKey,
    parsed: GenerationRequest,
    writer: EventWriter | None,
) -> Prepared:
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
        why = context.dispatcher.why_waiting(servable.key)
        raise ModelLoading(
            f"no replica of {servable.function} is ready; one is being started" + (f" ({why})" if why else ""),
            retry_after_s=context.serving.start_estimate_s(servable),
        )
    kv = await context.tenant_keys.kv_access(principal.tenant, shares=servable.share_prefixes)
    return Prepared(principal, parsed, servable, maker, prompts, context_tokens, kv, trace_of(request, context))


async def admit(
    request: web.Request, context: AppContext, prepared: Prepared, key: str | None, body: bytes, *, detach: bool = False
) -> tuple[LiveRequest | None, Answer]:
    """Accept the request; with a known key, the earlier one."""
    origin = prepared.origin(prepared.prompts[0], context.db.clock.now_us())
    live, answer = await accept(context, origin, prepared.servable, key, body, detach=detach)
    request["request_id"] = answer.head.request_id
    return live, answer
