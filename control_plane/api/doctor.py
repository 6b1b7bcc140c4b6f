"""`/api/v1/doctor`: what this installation lacks, for admins of whoever runs it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from aiohttp import web

from control_plane.doctor import examine
from control_plane.errors import Forbidden
from control_plane.tenants import DEFAULT_TENANT, Role

if TYPE_CHECKING:
    from control_plane.context import AppContext


def routes(context: AppContext) -> list[web.RouteDef]:
    async def show(request: web.Request) -> web.Response:
        by = context.keys.authenticate(request.headers.get("Authorization"))
        by.require(Role.ADMIN)
        if by.tenant != DEFAULT_TENANT:
            raise Forbidden("an installation is examined by who runs it")
        checks = [dataclasses.asdict(check) for check in examine(context)]
        return web.json_response({"object": "list", "ok": all(check["ok"] for check in checks), "data": checks})

    return [web.get("/api/v1/doctor", show)]
