"""`/api/v1/keys`: make, list and revoke API keys. A key's text is in the answer to its making and never again.

Admins manage the keys of their own tenant; those of the tenant `default`, who run the installation, of any.
Limits: tenants exist by having a key; they have no record of their own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.errors import Conflict, Forbidden, InvalidRequest
from control_plane.tenants import DEFAULT_TENANT, ApiKey, Role

if TYPE_CHECKING:
    from control_plane.context import AppContext

_TENANT: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    role: Role = Role.USER
    tenant: str | None = None


def routes(context: AppContext) -> list[web.RouteDef]:
    keys = context.keys

    def admin(request: web.Request) -> ApiKey:
        key = keys.authenticate(request.headers.get("Authorization"))
        key.require(Role.ADMIN)
        return key

    async def create(request: web.Request) -> web.Response:
        by = admin(request)
        body = decode(await read_body(request), NewKeyBody)
        if not 1 <= len(body.name.strip()) <= 100 or not body.name.isprintable():
            raise InvalidRequest("name: use 1 to 100 printable characters", param="name")
        key, secret = await keys.create(tenant_of(by, body.tenant), body.name.strip(), body.role)
        return web.json_response({**key_body(key), "key": secret}, status=201)

    async def show_all(request: web.Request) -> web.Response:
        tenant = tenant_of(admin(request), request.query.get("tenant"))
        return web.json_response({"object": "list", "data": [key_body(key) for key in await keys.list(tenant)]})

    async def revoke(request: web.Request) -> web.Response:
        by = admin(request)
        tenant = tenant_of(by, request.query.get("tenant"))
        if request.match_info["id"] == by.id:
            raise Conflict(f"{by.display} is the key of this very call: revoke it with another admin's key")
        key = await keys.revoke(request.match_info["id"], tenant)
        return web.json_response({**key_body(key), "revoked": True})

    return [
        web.post("/api/v1/keys", create),
        web.get("/api/v1/keys", show_all),
        web.delete("/api/v1/keys/{id}", revoke),
    ]


def key_body(key: ApiKey) -> dict[str, Any]:
    return {
        "object": "api_key",
        "id": key.id,
        "name": key.name,
        "role": key.role.value,
        "tenant": key.tenant,
        "prefix": key.display,
        "created_us": key.created_us,
        "revoked_us": key.revoked_us,
    }


def tenant_of(by: ApiKey, wanted: str | None) -> str:
    """Whose an admin asks for: its own tenant, or any where it runs the installation."""
    if wanted is None or wanted == by.tenant:
        return by.tenant
    if by.tenant != DEFAULT_TENANT:
        raise Forbidden("another tenant is not this key's to manage", param="tenant")
    if not _TENANT.fullmatch(wanted):
        raise InvalidRequest("tenant: use at most 40 of a-z, 0-9 and '-'", param="tenant")
    return wanted
