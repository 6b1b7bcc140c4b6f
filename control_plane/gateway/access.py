"""Who is asking: the API key of a request, looked up in memory, or what a gateway that forwards it says."""

from __future__ import annotations

from aiohttp import web

from control_plane.context import AppContext
from control_plane.gateway.internal import forwarded_key
from control_plane.tenants import ApiKey, Role


def authenticate(context: AppContext, request: web.Request, role: Role = Role.USER) -> ApiKey:
    """The caller's key; raises `Unauthenticated`, or `Forbidden` where `role` is more than it has."""
    key = forwarded_key(context, request) or context.keys.authenticate(request.headers.get("Authorization"))
    key.require(role)
    return key
