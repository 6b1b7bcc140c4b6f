"""`/api/v1/functions`: deploy, list, show, roll back, delete. JSON, or YAML where the content type says so.

Deploying is a PUT and idempotent: the same spec is the same revision. Admins only; each tenant has its own functions.
Limits: what a function is doing right now (replicas, progress of an import) is `/status`, beside this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.errors import InvalidRequest
from control_plane.functions import Function, Revision
from control_plane.tenants import ApiKey, Role

if TYPE_CHECKING:
    from control_plane.context import AppContext
    from control_plane.spec import FunctionSpec


class RollbackBody(msgspec.Struct, forbid_unknown_fields=True):
    to: int | None = None


def routes(context: AppContext) -> list[web.RouteDef]:
    store = context.functions

    def principal(request: web.Request, role: Role = Role.ADMIN) -> ApiKey:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(role)
        return key

    async def show_all(request: web.Request) -> web.Response:
        tenant = principal(request, Role.USER).tenant
        return web.json_response({"object": "list", "data": [function_body(each) for each in store.list(tenant)]})

    async def show(request: web.Request) -> web.Response:
        tenant = principal(request, Role.USER).tenant
        return web.json_response(function_body(store.get(request.match_info["name"], tenant)))

    async def show_revisions(request: web.Request) -> web.Response:
        tenant = principal(request).tenant
        found = await store.revisions(request.match_info["name"], tenant)
        return web.json_response({"object": "list", "data": [revision_body(each) for each in found]})

    async def deploy(request: web.Request) -> web.Response:
        tenant = principal(request).tenant
        spec = _spec(await read_body(request), request.content_type)
        name = request.match_info.get("name", spec.name)
        if name != spec.name:
            raise InvalidRequest(f"name: the spec says {spec.name!r}, the path {name[:60]!r}", param="name")
        before = store.find(spec.name, tenant)
        store.check(spec, tenant)
        function = await store.put(spec, tenant)
        return web.json_response(function_body(function), status=201 if before is None else 200)

    async def roll_back(request: web.Request) -> web.Response:
        tenant = principal(request).tenant
        body = decode(await read_body(request), RollbackBody)
        return web.json_response(function_body(await store.rollback(request.match_info["name"], tenant, body.to)))

    async def delete(request: web.Request) -> web.Response:
        tenant = principal(request).tenant
        function = await store.delete(request.match_info["name"], tenant)
        return web.json_response({"object": "function.deleted", "name": function.name, "deleted": True})

    return [
        web.get("/api/v1/functions", show_all),
        web.post("/api/v1/functions", deploy),
        web.get("/api/v1/functions/{name}", show),
        web.put("/api/v1/functions/{name}", deploy),
        web.delete("/api/v1/functions/{name}", delete),
        web.get("/api/v1/functions/{name}/revisions", show_revisions),
        web.post("/api/v1/functions/{name}/rollback", roll_back),
    ]


def function_body(function: Function) -> dict[str, Any]:
    """A function as the API shows it; `/status` adds to this."""
    return {
        "object": "function",
        "name": function.name,
        "tenant": function.tenant,
        "revision": function.revision,
        "created_us": function.created_us,
        "updated_us": function.updated_us,
        "import": import_body(function.current),
        "spec": function.spec.model_dump(mode="json"),
    }


def revision_body(revision: Revision) -> dict[str, Any]:
    return {
        "object": "function.revision",
        "name": revision.function,
        "revision": revision.revision,
        "created_us": revision.created_us,
        "import": import_body(revision),
        "spec": revision.spec.model_dump(mode="json"),
    }


def import_body(revision: Revision) -> dict[str, Any]:
    error = revision.error
    return {
        "state": revision.state.value,
        "identity": revision.identity,
        "error": None if error is None else {"code": error.code, "message": error.message},
    }


def _spec(body: bytes, content_type: str) -> FunctionSpec:
    from control_plane.spec import parse_json, parse_yaml

    if not content_type.endswith("yaml"):
        return parse_json(body)
    try:
        return parse_yaml(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8 at byte {error.start}") from None
