"""`/v1/organization/usage/completions` and `/v1/organization/costs`, as OpenAI's clients call them.

Beyond OpenAI's: `group_by=function`, hours and minutes for costs, and `x_complete_until` (before that moment nothing
changes any more). A key sees its own tenant; an admin's is needed. Limits: one tenant per answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from aiohttp import web
from multidict import MultiMapping

from control_plane.api.bodies import one_of, values_of, whole_number
from control_plane.costs import COST_FIELDS, LINE_ITEM, Costs
from control_plane.errors import InvalidRequest
from control_plane.tenants import Role
from control_plane.usage import USAGE_FIELDS, WIDTHS_S, RangeQuery, Usage

if TYPE_CHECKING:
    from control_plane.context import AppContext

_MAX_S: Final = 99_999_999_999
_USAGE_LIMITS: Final = {"1d": (7, 31), "1h": (24, 168), "1m": (60, 1440)}
"""Buckets in a page: default and most."""
_COST_LIMITS: Final = {"1d": (7, 180), "1h": (24, 168), "1m": (60, 1440)}
_USAGE_FILTERS: Final = {
    "project_ids": "tenant",
    "user_ids": "NULL",
    "api_key_ids": "key_id",
    "models": "model",
    "functions": "function",
}
_COST_FILTERS: Final = {
    "project_ids": "tenant",
    "api_key_ids": "key_id",
    "line_items": LINE_ITEM,
    "functions": "function",
}


def routes(context: AppContext) -> list[web.RouteDef]:
    usage, costs = Usage(context.db), Costs(context.db)

    def tenant_of(request: web.Request) -> str:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(Role.ADMIN)
        return key.tenant

    async def get_usage(request: web.Request) -> web.Response:
        query = _range(tenant_of(request), request.query, _USAGE_LIMITS, USAGE_FIELDS, _USAGE_FILTERS)
        await context.dispatcher.outcomes_written()
        return web.json_response(await usage.completions(query))

    async def get_costs(request: web.Request) -> web.Response:
        query = _range(tenant_of(request), request.query, _COST_LIMITS, COST_FIELDS, _COST_FILTERS)
        await context.dispatcher.outcomes_written()
        return web.json_response(await costs.costs(query))

    return [
        web.get("/v1/organization/usage/completions", get_usage),
        web.get("/v1/organization/costs", get_costs),
    ]


def _range(
    tenant: str,
    query: MultiMapping[str],
    limits: Mapping[str, tuple[int, int]],
    fields: Mapping[str, str],
    filters: Mapping[str, str],
) -> RangeQuery:
    start_s = whole_number(query, "start_time", None, 0, _MAX_S)
    end_s = whole_number(query, "end_time", max(int(time.time()) + 1, start_s + 1), 0, _MAX_S)
    if end_s <= start_s:
        raise InvalidRequest(f"end_time ({end_s}) must lie after start_time ({start_s})", param="end_time")
    width = one_of(query, "bucket_width", "1d", limits)
    default, most = limits[width]
    group_by = values_of(query, "group_by") or ()
    for field in group_by:
        if field not in fields:
            raise InvalidRequest(f"group_by: {field[:40]!r} is not among {', '.join(fields)}", param="group_by")
    wanted = [(column, values_of(query, name)) for name, column in filters.items()]
    if query.get("batch") == "true":
        wanted.append(("NULL", ()))
    return RangeQuery(
        tenant=tenant,
        start_s=start_s,
        end_s=end_s,
        width_s=WIDTHS_S[width],
        limit=whole_number(query, "limit", default, 1, most),
        group_by=group_by,
        filters=tuple((column, values) for column, values in wanted if values is not None),
        page=query.get("page"),
    )
