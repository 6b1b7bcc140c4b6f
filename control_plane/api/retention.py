"""`/api/v1/retention`: how long a tenant's ended requests are kept. Show, set, go back to the installation's rule.

Admins set it for their own tenant; those of the tenant `default`, who run the installation, for any (`?tenant=`).
Limits: a function's `retention_s` goes before it for that function's logs; the ledger is kept whatever is set here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.api.keys import tenant_of
from control_plane.errors import InvalidRequest
from control_plane.tenant_rules import Kept
from control_plane.tenants import Role

if TYPE_CHECKING:
    from control_plane.context import AppContext

MAX_S: Final = 10 * 366 * 86400.0


class RetentionBody(msgspec.Struct, forbid_unknown_fields=True):
    log_s: float | None = None
    request_s: float | None = None


def routes(context: AppContext) -> list[web.RouteDef]:
    rules = context.journal.rules
    installation = context.settings.retention

    def whose(request: web.Request) -> str:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(Role.ADMIN)
        return tenant_of(key, request.query.get("tenant"))

    def body_of(tenant: str, kept: Kept) -> dict[str, Any]:
        return {
            "object": "retention",
            "tenant": tenant,
            "log_s": installation.log_s if kept.log_s is None else kept.log_s,
            "request_s": installation.request_s if kept.request_s is None else kept.request_s,
            "own": {"log_s": kept.log_s, "request_s": kept.request_s},
        }

    async def show(request: web.Request) -> web.Response:
        tenant = whose(request)
        return web.json_response(body_of(tenant, await rules.kept(tenant)))

    async def put(request: web.Request) -> web.Response:
        tenant = whose(request)
        body = decode(await read_body(request), RetentionBody)
        for name, value in (("log_s", body.log_s), ("request_s", body.request_s)):
            if value is not None and not 0 <= value <= MAX_S:
                raise InvalidRequest(f"{name}: use 0 to {MAX_S:.0f} seconds", param=name)
        kept = Kept(body.log_s, body.request_s)
        answer = body_of(tenant, kept)
        if answer["request_s"] < answer["log_s"]:
            raise InvalidRequest(
                f"request_s ({answer['request_s']:g}) must not be less than log_s ({answer['log_s']:g}): a log is read "
                "by its request",
                param="request_s",
            )
        await rules.keep(tenant, kept)
        return web.json_response(answer)

    async def reset(request: web.Request) -> web.Response:
        tenant = whose(request)
        await rules.keep(tenant, Kept())
        return web.json_response(body_of(tenant, Kept()))

    return [
        web.get("/api/v1/retention", show),
        web.put("/api/v1/retention", put),
        web.delete("/api/v1/retention", reset),
    ]
