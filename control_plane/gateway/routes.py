"""All routes of the service, in one table."""

from __future__ import annotations

from aiohttp import web

from control_plane import api
from control_plane.api import drains
from control_plane.context import AppContext
from control_plane.gateway import generate, health, internal, models, operate, responses, resume, store_routes


def routes(context: AppContext) -> list[web.RouteDef]:
    table = [
        web.post("/v1/chat/completions", generate.chat_completions),
        web.post("/v1/completions", generate.completions),
    ]
    for endpoint in ("/v1/chat/completions", "/v1/completions"):
        table += [
            web.get(endpoint + "/{id}/stream", resume.stream),
            web.get(endpoint + "/{id}", resume.retrieve),
            web.post(endpoint + "/{id}/cancel", resume.cancel),
            web.delete(endpoint + "/{id}", resume.delete),
        ]
    return [
        *table,
        web.post("/v1/responses", responses.create),
        web.get("/v1/responses/{id}", responses.retrieve),
        web.delete("/v1/responses/{id}", responses.delete),
        web.post("/v1/responses/{id}/cancel", responses.cancel),
        web.get("/v1/responses/{id}/input_items", responses.input_items),
        web.get("/v1/models", models.models),
        web.get("/v1/models/{id:.+}", models.model),
        web.get("/health", health.ready),
        web.get("/health/live", health.live),
        web.get("/health/ready", health.ready),
        web.get("/metrics", health.metrics),
        web.get("/api/v1/replicas", operate.replicas),
        web.delete("/api/v1/replicas/{id}", operate.end_replica),
        web.get("/api/v1/replicas/{id}/log", operate.replica_log),
        web.get("/api/v1/slots", operate.slots),
        web.get("/api/v1/functions/{name}/status", operate.function_status),
        web.get("/api/v1/why/{id:.+}", operate.why),
        web.post("/api/v1/drain", operate.drain),
        *drains.routes(),
        *api.routes(context),
        *internal.routes(context),
        *store_routes.routes(context),
    ]
