"""Whether the process lives, whether it can take requests, and its numbers for Prometheus."""

from __future__ import annotations

import os

from aiohttp import web

from control_plane.context import CONTEXT
from control_plane.required import is_attended


async def live(request: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


async def ready(request: web.Request) -> web.Response:
    context = request.app.get(CONTEXT)
    if context is None or not context.ready:
        return not_ready("starting", "it reads its database", retry_after_s=1)
    if context.draining:
        return not_ready("draining", "it is being ended", retry_after_s=2)
    if context.db.fault is not None:
        return not_ready("storage_unavailable", context.db.fault)
    store = context.store
    if not store.usable and is_attended(os.environ) and not context.functions.list():
        # A new installation says what it lacks. One that serves something goes on: its requests run without stored KV.
        why = f"the object store {store.uri} cannot be used ({store.problem}): {store.reason}"
        return not_ready("object_store_unavailable", why, retry_after_s=15)
    seen = {"state": store.state.value, "problem": store.problem or None, "reason": store.reason or None}
    return web.json_response({"status": "ready", "gateway": context.gateway_id, "object_store": seen})


def not_ready(status: str, reason: str, retry_after_s: int | None = None) -> web.Response:
    """For probes, which look at the status alone, for people, and for clients that expect an error of OpenAI's form."""
    error = {"message": reason, "type": "server_error", "param": None, "code": status}
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.json_response({"status": status, "reason": reason, "error": error}, status=503, headers=headers)


async def metrics(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return web.Response(body=context.metrics.render(context), headers={"Content-Type": "text/plain; version=0.0.4"})
