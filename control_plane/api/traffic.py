"""`/api/v1/traffic`: what came for a tenant's functions, for `stoker simulate --from-journal`. Admins only.

Limits: times are unix seconds; a page is `traffic.PAGE` requests, in order of arrival.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web

from control_plane.api.bodies import whole_number
from control_plane.api.keys import tenant_of
from control_plane.errors import InvalidRequest
from control_plane.tenants import Role
from control_plane.traffic import Traffic

if TYPE_CHECKING:
    from control_plane.context import AppContext

_MAX_S: Final = 99_999_999_999
_AFTER: Final = re.compile(r"[0-9]{1,18}:[A-Za-z0-9_.-]{1,80}")


def routes(context: AppContext) -> list[web.RouteDef]:
    traffic = Traffic(context.db)

    def tenant(request: web.Request) -> str:
        by = context.keys.authenticate(request.headers.get("Authorization"))
        by.require(Role.ADMIN)
        return tenant_of(by, request.query.get("tenant"))

    async def functions(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": await traffic.functions(tenant(request))})

    async def requests(request: web.Request) -> web.Response:
        of = tenant(request)
        since_s = whole_number(request.query, "since", 0, 0, _MAX_S)
        until_s = whole_number(request.query, "until", int(time.time()) + 1, 0, _MAX_S)
        after = request.query.get("after")
        if after is not None and not _AFTER.fullmatch(after):
            raise InvalidRequest("after is not a `next` of this API", param="after")
        await context.dispatcher.outcomes_written()
        page = await traffic.requests(of, request.match_info["name"], since_s * 1_000_000, until_s * 1_000_000, after)
        return web.json_response({"object": "list", "data": page.rows, "next": page.following})

    return [
        web.get("/api/v1/traffic", functions),
        web.get("/api/v1/traffic/{name}", requests),
    ]
