"""`/api/v1/quotas`: how many devices a tenant may hold at once, its weight where they are short, how much of its KV is
kept.

A tenant's admins see its own; who runs the installation (admins of `default`) sees, sets and takes away all. Limits:
a quota of 0 lets nothing start; what is held above a new quota is not ended, it only takes nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from autoscaler.shares import Quota
from control_plane.api.bodies import decode, read_body
from control_plane.api.keys import tenant_of
from control_plane.errors import Forbidden, InvalidRequest, NotFound
from control_plane.tenants import DEFAULT_TENANT, ApiKey, Role

if TYPE_CHECKING:
    from control_plane.context import AppContext

DEVICES_MAX: Final = 1_000_000
WEIGHT_MIN: Final = 0.001
WEIGHT_MAX: Final = 1000.0
KV_BYTES_MAX: Final = 1 << 60


class QuotaBody(msgspec.Struct, forbid_unknown_fields=True):
    devices: int | None = None
    weight: float = 1.0
    kv_bytes: int | None = None
    """Most KV of ended requests that is kept for it; None: the installation's bound."""


def routes(context: AppContext) -> list[web.RouteDef]:
    def admin(request: web.Request) -> ApiKey:
        by = context.keys.authenticate(request.headers.get("Authorization"))
        by.require(Role.ADMIN)
        return by

    def asked(request: web.Request) -> str:
        by = admin(request)
        if by.tenant != DEFAULT_TENANT:
            raise Forbidden("a tenant's quota is set by who runs the installation", param="tenant")
        return tenant_of(by, request.query.get("tenant"))

    async def body(tenant: str) -> dict[str, Any]:
        quota, standings = context.quotas.of(tenant), context.standings
        kv = await context.quotas.kv_of(tenant)
        leads = context.gateways.leads
        wanted = next((each.wanted for each in standings.all() if each.tenant == tenant), 0)
        shares = standings.shares() if leads else None
        return {
            "object": "quota",
            "tenant": tenant,
            "devices": quota.devices,
            "weight": quota.weight,
            "held": standings.held().get(tenant, 0),
            "wanted": wanted if leads else None,
            "share": None if shares is None else shares.get(tenant, 0),
            "kv_bytes": kv.most_bytes,
            "kv_held_bytes": kv.held_bytes,
        }

    async def show(request: web.Request) -> web.Response:
        by = admin(request)
        wanted = request.query.get("tenant")
        await context.quotas.refresh()
        if by.tenant == DEFAULT_TENANT and wanted is None:
            tenants = {each.tenant for each in context.standings.all()} | {DEFAULT_TENANT}
        else:
            tenants = {tenant_of(by, wanted)}
        return web.json_response({"object": "list", "data": [await body(tenant) for tenant in sorted(tenants)]})

    async def put(request: web.Request) -> web.Response:
        tenant = asked(request)
        given = decode(await read_body(request), QuotaBody)
        if given.devices is not None and not 0 <= given.devices <= DEVICES_MAX:
            raise InvalidRequest(f"devices: use 0 to {DEVICES_MAX}, or null for no bound", param="devices")
        if not WEIGHT_MIN <= given.weight <= WEIGHT_MAX:
            raise InvalidRequest(f"weight: use {WEIGHT_MIN:g} to {WEIGHT_MAX:g}", param="weight")
        if given.kv_bytes is not None and not 1 <= given.kv_bytes <= KV_BYTES_MAX:
            raise InvalidRequest(
                f"kv_bytes: use 1 to {KV_BYTES_MAX}, or null for the installation's bound (a function that is to keep "
                "nothing says share_prefixes: none)",
                param="kv_bytes",
            )
        await context.quotas.put(tenant, Quota(given.devices, given.weight), given.kv_bytes)
        return web.json_response(await body(tenant))

    async def delete(request: web.Request) -> web.Response:
        tenant = asked(request)
        if not await context.quotas.drop(tenant):
            raise NotFound(f"tenant {tenant} has no quota", param="tenant")
        return web.json_response({**await body(tenant), "deleted": True})

    return [
        web.get("/api/v1/quotas", show),
        web.put("/api/v1/quotas", put),
        web.delete("/api/v1/quotas", delete),
    ]
