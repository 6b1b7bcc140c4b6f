"""GET /v1/models: the functions of a tenant, under every name a client may send."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from control_plane.context import CONTEXT
from control_plane.functions import Function
from control_plane.gateway.access import authenticate


def _body(function: Function, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": function.created_us // 1_000_000,
        "owned_by": function.tenant,
        "root": function.name,
    }


async def models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    data = [_body(each, name) for each in context.functions.list(tenant) for name in each.spec.names()]
    return web.json_response({"object": "list", "data": data})


async def model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    name = request.match_info["id"]
    return web.json_response(_body(context.functions.resolve(name, tenant), name))
