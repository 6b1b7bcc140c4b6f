"""Device quotas and weights of tenants: a row each in the database, the same at every gateway.

Who has no row holds as many devices as it can get, with weight 1. What the devices themselves are and who holds how
many is `control_plane.preempting`'s. Limits: another gateway's change is seen when it says so, or at the next
`refresh`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from autoscaler.shares import NO_QUOTA, Quota
from control_plane.changes import Changes
from control_plane.database import Connection, Database

_ALL: Final = "SELECT tenant, devices, weight FROM tenant_quotas"
_PUT: Final = """
INSERT INTO tenant_quotas (tenant, devices, weight, changed_us) VALUES (:tenant, :devices, :weight, :now)
ON CONFLICT (tenant) DO UPDATE SET devices = excluded.devices, weight = excluded.weight,
    changed_us = excluded.changed_us"""
_DROP: Final = "DELETE FROM tenant_quotas WHERE tenant = :tenant"


class Quotas:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._changes = Changes()
        self._known: dict[str, Quota] = {}
        self.on_change: Callable[[], None] = lambda: None

    async def refresh(self) -> None:
        def run(connection: Connection) -> dict[str, Quota]:
            rows = connection.execute(_ALL, {}).fetchall()
            return {str(tenant): Quota(devices, float(weight)) for tenant, devices, weight in rows}

        known = await self._changes.read(lambda: self._database.read(run))
        if known != self._known:
            self._known = known
            self.on_change()

    def of(self, tenant: str) -> Quota:
        return self._known.get(tenant, NO_QUOTA)

    @property
    def tenants(self) -> frozenset[str]:
        """Those with a quota or a weight of their own."""
        return frozenset(self._known)

    async def put(self, tenant: str, quota: Quota) -> None:
        now_us = time.time_ns() // 1000
        values = {"tenant": tenant, "devices": quota.devices, "weight": quota.weight, "now": now_us}
        await self._database.write(lambda connection: connection.execute(_PUT, values).rowcount)
        self._changes.note()
        await self.refresh()

    async def drop(self, tenant: str) -> bool:
        """False: it had none."""
        dropped = await self._database.write(lambda c: c.execute(_DROP, {"tenant": tenant}).rowcount)
        self._changes.note()
        await self.refresh()
        return dropped > 0
