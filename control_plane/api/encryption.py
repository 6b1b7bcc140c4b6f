"""`/api/v1/encryption`: a tenant's own key for what is stored of its requests. Set it, see if there is one, delete it.

Admins manage the key of their own tenant. Deleting is for good: what was sealed is unreadable from then on, here at
once and on other gateways within their next refresh. Limits: what was stored before a first key was set is not sealed
later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.kv_index import drop
from control_plane.kv_rebuild import scopes_of
from control_plane.sealing import TenantKey, key_of
from control_plane.tenants import Role

if TYPE_CHECKING:
    from control_plane.context import AppContext


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True):
    key: str | None = None
    """32 bytes in base64; without it a random one is made."""


def routes(context: AppContext) -> list[web.RouteDef]:
    def tenant_of(request: web.Request) -> str:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(Role.ADMIN)
        return key.tenant

    async def show(request: web.Request) -> web.Response:
        tenant = tenant_of(request)
        return web.json_response(_body(tenant, context.tenant_keys.current(tenant)))

    async def put(request: web.Request) -> web.Response:
        tenant = tenant_of(request)
        given = decode(await read_body(request) or b"{}", NewKeyBody).key
        material = None if given is None else key_of(given, "key")
        return web.json_response(_body(tenant, await context.tenant_keys.set(tenant, material)))

    async def delete(request: web.Request) -> web.Response:
        tenant = tenant_of(request)
        await context.tenant_keys.refresh()  # a key that was set through another gateway a moment ago
        scopes = await scopes_of(context, tenant, context.tenant_keys.sealed_under(tenant))
        places = await context.kv_index.places(tenant, scopes)
        now_us = context.db.clock.now_us()
        erased = await context.tenant_keys.delete(
            tenant, lambda connection: drop(connection, places, tenant, "its key was deleted", now_us)
        )
        return web.json_response({**_body(tenant, None), "deleted_keys": erased})

    return [
        web.get("/api/v1/encryption", show),
        web.put("/api/v1/encryption", put),
        web.delete("/api/v1/encryption", delete),
    ]


def _body(tenant: str, key: TenantKey | None) -> dict[str, Any]:
    return {
        "object": "encryption",
        "tenant": tenant,
        "sealed": key is not None,
        "number": None if key is None else key.number,
        "fingerprint": None if key is None else key.fingerprint,
        "created_us": None if key is None else key.created_us,
    }
