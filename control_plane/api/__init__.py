"""HTTP handlers over the stores: functions, keys, usage and costs, and the middleware that maps errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from control_plane.api import (
    budgets,
    doctor,
    encryption,
    functions,
    keys,
    kv,
    models,
    organization,
    quotas,
    retention,
    traffic,
)

if TYPE_CHECKING:
    from aiohttp import web

    from control_plane.context import AppContext


def routes(context: AppContext) -> list[web.RouteDef]:
    """Every route of this package."""
    return [
        *functions.routes(context),
        *keys.routes(context),
        *encryption.routes(context),
        *retention.routes(context),
        *budgets.routes(context),
        *quotas.routes(context),
        *kv.routes(context),
        *models.routes(context),
        *organization.routes(context),
        *traffic.routes(context),
        *doctor.routes(context),
    ]
