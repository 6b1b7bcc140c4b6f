"""Draining a function or a slot, and resuming it: `POST` and `DELETE` of its `drain`.

A function is its tenant's admins' to drain; a slot, on which all tenants' replicas run, is the operator's.
Limits: answered at once; `in_flight` says what is still being parked.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.drains import FUNCTION, SLOT
from control_plane.errors import InvalidRequest, NotFound
from control_plane.gateway.access import authenticate
from control_plane.tenants import Role

MAX_REASON_CHARS = 200


async def _reason(request: web.Request) -> str:
    if not request.can_read_body:
        return ""
    try:
        body: Any = await request.json()
    except ValueError:
        raise InvalidRequest("the body is no JSON") from None
    reason = body.get("reason", "") if isinstance(body, dict) else None
    if not isinstance(reason, str) or len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(f"reason must be a text of at most {MAX_REASON_CHARS} characters", param="reason")
    return reason


def _function(context: AppContext, name: str, tenant: str) -> dict[str, Any]:
    key = (tenant, name)
    lanes = context.dispatcher.lanes.of_function(key)
    return {
        "object": "drain",
        "kind": FUNCTION,
        "name": name,
        "drained": key in context.drains.functions(),
        "in_flight": sum(lane.in_flight for lane in lanes),
        "waiting": sum(len(lane.waiting) for lane in lanes),
        "replicas": len(context.fleet.living(key)),
    }


def _slot(context: AppContext, slot_id: str) -> dict[str, Any]:
    seats = [s for lane in context.dispatcher.lanes for s in lane.seats.values() if s.slot_id == slot_id]
    living = [s for s in context.fleet.living() if context.fleet.slot_of.get(s.replica_id) == slot_id]
    return {
        "object": "drain",
        "kind": SLOT,
        "name": slot_id,
        "drained": slot_id in context.drains.slots(),
        "in_flight": sum(len(seat.in_flight) for seat in seats),
        "replicas": len(living),
    }


async def function_drain(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    tenant = authenticate(context, request, Role.ADMIN).tenant
    name = context.functions.get(request.match_info["name"], tenant).name
    if request.method == "POST":
        await context.drains.begin(FUNCTION, tenant, name, await _reason(request))
    elif request.method == "DELETE":
        await context.drains.end(FUNCTION, tenant, name)
    return web.json_response(_function(context, name, tenant))


async def slot_drain(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    authenticate(context, request).require_operator()
    slot_id = request.match_info["id"]
    if slot_id not in context.fleet.slots and slot_id not in context.drains.slots():
        raise NotFound(f"there is no slot {slot_id[:80]}", param="id")
    if request.method == "POST":
        await context.drains.begin(SLOT, "", slot_id, await _reason(request))
    elif request.method == "DELETE":
        await context.drains.end(SLOT, "", slot_id)
    return web.json_response(_slot(context, slot_id))


def routes() -> list[web.RouteDef]:
    table: list[web.RouteDef] = []
    for path, handler in (
        ("/api/v1/functions/{name}/drain", function_drain),
        ("/api/v1/slots/{id}/drain", slot_drain),
    ):
        table += [web.post(path, handler), web.delete(path, handler), web.get(path, handler)]
    return table
