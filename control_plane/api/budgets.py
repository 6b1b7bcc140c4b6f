"""`/api/v1/budgets`: what a tenant or one of its keys may spend in a minute, hour, day or month. List, set, take away.

A tenant's admins set those of its keys; those of the tenant as a whole, and of any other tenant (`?tenant=`), only who
runs the installation (admins of `default`). Limits: an amount of 0 refuses everything; no budget is no bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, one_of, read_body
from control_plane.api.keys import tenant_of
from control_plane.budgets import Budget, Kind, Period
from control_plane.errors import Forbidden, InvalidRequest, NotFound
from control_plane.tenants import DEFAULT_TENANT, ApiKey, Role

if TYPE_CHECKING:
    from control_plane.context import AppContext

AMOUNT_MAX = 1 << 53


class BudgetBody(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    period: Period
    amount: int
    key: str = ""


def routes(context: AppContext) -> list[web.RouteDef]:
    def asked(request: web.Request) -> tuple[ApiKey, str]:
        by = context.keys.authenticate(request.headers.get("Authorization"))
        by.require(Role.ADMIN)
        return by, tenant_of(by, request.query.get("tenant"))

    async def may_set(by: ApiKey, budget: Budget) -> None:
        if not budget.key_id:
            if by.tenant != DEFAULT_TENANT:
                raise Forbidden("a tenant's own budget is set by who runs the installation; name a key", param="key")
        elif budget.key_id not in {key.id for key in await context.keys.list(budget.tenant)}:
            raise NotFound(f"tenant {budget.tenant} has no API key {budget.key_id[:60]}", param="key")

    async def show(request: web.Request) -> web.Response:
        _, tenant = asked(request)
        data = [_body(*each) for each in await context.budgets.of(tenant)]
        return web.json_response({"object": "list", "data": data})

    async def put(request: web.Request) -> web.Response:
        by, tenant = asked(request)
        body = decode(await read_body(request), BudgetBody)
        if not 0 <= body.amount <= AMOUNT_MAX:
            raise InvalidRequest(f"amount: use 0 to {AMOUNT_MAX}", param="amount")
        budget = Budget(tenant, body.key, body.kind, body.period, body.amount)
        await may_set(by, budget)
        await context.budgets.put(budget)
        (told,) = [each for each in await context.budgets.of(tenant) if each[0] == budget]
        return web.json_response(_body(*told))

    async def delete(request: web.Request) -> web.Response:
        by, tenant = asked(request)
        kind = Kind(one_of(request.query, "kind", "", tuple(Kind)))
        period = Period(one_of(request.query, "period", "", tuple(Period)))
        budget = Budget(tenant, request.query.get("key", ""), kind, period, 0)
        if not budget.key_id and by.tenant != DEFAULT_TENANT:
            await may_set(by, budget)
        if not await context.budgets.drop(budget):
            raise NotFound(f"{budget.whose} has no budget of {kind} for a {period}", param="kind")
        return web.json_response({"object": "budget", "tenant": tenant, "deleted": True})

    return [
        web.get("/api/v1/budgets", show),
        web.put("/api/v1/budgets", put),
        web.delete("/api/v1/budgets", delete),
    ]


def _body(budget: Budget, spent: int, end_us: int) -> dict[str, Any]:
    return {
        "object": "budget",
        "tenant": budget.tenant,
        "key": budget.key_id or None,
        "kind": budget.kind.value,
        "period": budget.period.value,
        "amount": budget.amount,
        "spent": spent,
        "period_ends_us": end_us,
    }
