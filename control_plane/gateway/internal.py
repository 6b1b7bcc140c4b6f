"""What other gateways of the same database may ask of this one, under the internal token.

Limits: the token is the same for all of them; who asks is taken at its word.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import InvalidRequest, Unauthenticated
from control_plane.gateway.acceptance import nobody_reads
from control_plane.peers import CHANGED_PATH, DEMAND_PATH, LEFT_PATH, DemandReport, Left, News
from control_plane.tenants import ApiKey, Role

logger = logging.getLogger(__name__)

FORWARDED_FOR: Final = "x-stoker-forwarded-for"
"""Tenant, key and role of the client whose request a gateway forwards: it has authenticated it."""
READER: Final = "x-stoker-reader"
"""The name that the forwarding gateway gives its reader, to say later that it has left."""
_news: Final = msgspec.msgpack.Decoder(News).decode
_left: Final = msgspec.msgpack.Decoder(Left).decode
_report: Final = msgspec.msgpack.Decoder(DemandReport).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def is_internal(context: AppContext, request: web.Request) -> bool:
    given = request.headers.get("Authorization", "").encode("utf-8", "replace")
    return hmac.compare_digest(given, f"Bearer {context.peers.token}".encode())


def forwarded_key(context: AppContext, request: web.Request) -> ApiKey | None:
    """Whose request another gateway forwards; None: nobody's."""
    told = request.headers.get(FORWARDED_FOR)
    if told is None or not is_internal(context, request):
        return None
    try:
        key_id, role, tenant = told.split(" ", 2)
        return ApiKey(key_id, tenant, "forwarded", Role(role), "", 0)
    except ValueError:
        raise InvalidRequest(f"{FORWARDED_FOR} must say key, role and tenant") from None


def forwarding(key: ApiKey) -> str:
    return f"{key.id} {key.role.value} {key.tenant}"


def reader_of(request: web.Request) -> str | None:
    """None: it reads here itself."""
    return request.headers.get(READER, "unnamed") if FORWARDED_FOR in request.headers else None


async def left(request: web.Request) -> web.Response:
    """A client that another gateway read for has gone away."""
    context = request.app[CONTEXT]
    _require(context, request)
    try:
        told = _left(await request.read())
    except msgspec.MsgspecError as error:
        raise InvalidRequest(str(error)) from None
    live = context.dispatcher.requests.get(told.request_id)
    if live is not None and live.readers.said_to_have_left(told.reader):
        nobody_reads(context, live)
    return web.Response(status=204)


async def changed(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    _require(context, request)
    try:
        news = _news(await request.read())
    except msgspec.MsgspecError as error:
        raise InvalidRequest(str(error)) from None
    await context.look_again(news.what)
    return web.Response(status=204)


async def demand(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    _require(context, request)
    try:
        report = _report(await request.read())
    except msgspec.MsgspecError as error:
        raise InvalidRequest(str(error)) from None
    answer = context.loop.take_demand(report)
    if answer.leads:
        answer = msgspec.structs.replace(answer, strict=context.standings.strict())
    return web.Response(body=_encode(answer))


def _require(context: AppContext, request: web.Request) -> None:
    if not is_internal(context, request):
        raise Unauthenticated("this is for the gateways of this installation")


@web.middleware
async def news_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What was changed here is worth a look for the others."""
    response = await handler(request)
    if request.method not in ("GET", "HEAD") and request.path.startswith("/api/v1/") and response.status < 400:
        request.app[CONTEXT].peers.tell("functions", "keys", "drains")
    return response


def routes(context: AppContext) -> list[web.RouteDef]:
    return [web.post(CHANGED_PATH, changed), web.post(DEMAND_PATH, demand), web.post(LEFT_PATH, left)]
