"""Whether the process lives, whether it can take requests, and its numbers for Prometheus."""

from __future__ import annotations

from aiohttp import web

from control_plane.context import CONTEXT


async def live(request: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    context = request.app.get(CONTEXT)
    if context is None or not context.ready:
        return web.json_response({"status": "starting"}, status=503, headers={"Retry-After": "1"})
    if context.draining:
        return web.json_response({"status": "draining"}, status=503, headers={"Retry-After": "2"})
    if context.db.fault is not None:
        return web.json_response({"status": "storage_unavailable", "reason": context.db.fault}, status=503)
    store = context.store
    seen = {"state": store.state.value, "problem": store.problem or None, "reason": store.reason or None}
    # Ready all the same: requests run without stored KV.
    return web.json_response({"status": "ready", "gateway": context.gateway_id, "object_store": seen})


async def metrics(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return web.Response(body=context.metrics.render(context), headers={"Content-Type": "text/plain; version=0.0.4"})
