"""What runs and why: replicas, slots, a function's status, explanations, and an operator's interventions.

Read by `stoker ps`, `ls`, `why` and `logs`. Limits: the mirror of this control plane; a tenant sees its own only.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from control_plane.api.functions import function_body
from control_plane.context import CONTEXT, AppContext
from control_plane.errors import InvalidRequest, NotFound
from control_plane.fleet import STARTING
from control_plane.gateway.access import authenticate
from control_plane.slot_load import slot_load
from control_plane.tenants import DEFAULT_TENANT, Role
from control_plane.why import explain, replica_body
from function_runtime.protocol import ReplicaState


async def replicas(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    everything = request.query.get("all") in ("1", "true")
    found = [
        replica_body(context, status)
        for status in context.fleet.replicas.values()
        if status.spec.tenant == tenant and (everything or status.state is not ReplicaState.ENDED)
    ]
    body = {**context.store.body(), "functions": _lacking_store(context, tenant)}
    return web.json_response({"object": "list", "data": found, "object_store": body})


def _lacking_store(context: AppContext, tenant: str) -> dict[str, list[str]]:
    """Which of a tenant's functions are refused, and which run without storing KV, while the store cannot be used."""
    lacking: dict[str, list[str]] = {"refused": [], "without": []}
    if not context.store.usable:
        for function in context.functions.list(tenant):
            if function.spec.durability != "off":
                needs = function.spec.kv_store == "required"
                lacking["refused" if needs else "without"].append(function.name)
    return lacking


def _own_replica(context: AppContext, replica_id: str, tenant: str) -> None:
    status = context.fleet.replicas.get(replica_id)
    if status is None or status.spec.tenant != tenant:
        raise NotFound(f"there is no replica {replica_id[:80]}", param="id")


async def end_replica(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request, Role.ADMIN).tenant
    replica_id = request.match_info["id"]
    _own_replica(context, replica_id, tenant)
    draining = context.loop.end_replica(replica_id, "an operator asked for it")
    return web.json_response({"object": "replica", "replica_id": replica_id, "draining": draining})


async def replica_log(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request, Role.ADMIN).tenant
    replica_id = request.match_info["id"]
    _own_replica(context, replica_id, tenant)
    text = request.query.get("tail", "200")
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise InvalidRequest("tail must be a number of lines", param="tail")
    log = await context.fleet.replica_log(replica_id, int(text))
    if log is None:
        raise NotFound(f"the log of {replica_id} is not there any more", param="id")
    return web.Response(text=log, content_type="text/plain")


async def slots(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    operates = tenant == DEFAULT_TENANT
    own = {function.current.identity for function in context.functions.list(tenant)}
    data: list[dict[str, Any]] = []
    observations = context.loop.observations
    for slot_id, state in context.fleet.slots.items():
        told = (name for name in state.__struct_fields__ if name not in ("pool", "replicas"))
        fields = msgspec.to_builtins({name: getattr(state, name) for name in told})
        here = (s for s in context.fleet.living() if context.fleet.slot_of.get(s.replica_id) == slot_id)
        mine = [s for s in here if s.spec.tenant == tenant]
        data.append(
            {
                "object": "slot",
                **fields,
                "slot_id": slot_id,
                "pool": [
                    msgspec.to_builtins({name: getattr(entry, name) for name in entry.__struct_fields__})
                    for entry in state.pool
                    if operates or entry.identity in own
                ],
                "replicas": [status.replica_id for status in mine],
                **({"load": slot_load(observations, slot_id, time.time())} if operates else {}),
            }
        )
    scaling = list(context.slot_scaling.last) if operates else []
    body: dict[str, Any] = {"object": "list", "data": data, "scaling": scaling}
    if context.cluster is not None:
        body["coming"] = context.cluster.coming()
        body["cluster"] = context.cluster.body()
    return web.json_response(body)


async def function_status(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    function = context.functions.get(request.match_info["name"], tenant)
    key = (tenant, function.name)
    body = function_body(function)
    progress = context.importing.progress.get((key, function.revision))
    if progress is not None:
        body["import"]["progress"] = {
            "stage": progress.stage,
            "done_bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
        }
    living = context.fleet.living(key)
    lanes = context.dispatcher.lanes.of_function(key)
    target = context.serving.target(function)
    identity = function.current.identity
    body["status"] = {
        "waiting": sum(len(lane.waiting) for lane in lanes),
        "running": sum(lane.in_flight for lane in lanes),
        "replicas": len(living),
        "starting": sum(status.state in STARTING for status in living),
        "ready": sum(status.state is ReplicaState.READY for status in living),
        "draining": sum(status.state is ReplicaState.DRAINING for status in living),
        "serving_revision": None if target is None else target.revision,
        "start_error": context.loop.start_error(key, function.revision) or None,
        "cold_start_s": context.serving.cold_start_s(identity) if identity else None,
    }
    body["replicas"] = [replica_body(context, status) for status in living]
    return web.json_response(body)


async def why(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request).tenant
    await context.dispatcher.outcomes_written()
    return web.json_response(await explain(context, request.match_info["id"], tenant))


async def drain(request: web.Request) -> web.Response:
    """The process goes down as after a first SIGTERM."""
    context = request.app[CONTEXT]
    authenticate(context, request).require_operator()
    context.stop.set()
    return web.json_response({"object": "drain", "in_flight": len(context.dispatcher.requests)}, status=202)
