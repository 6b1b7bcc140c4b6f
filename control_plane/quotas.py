"""Device quotas and weights of tenants: a row each in the database, the same at every gateway.

Who has no row holds as many devices as it can get, with weight 1. What the devices themselves are and who holds how
many is `control_plane.preempting`'s. Beside them stands how much KV of a tenant's ended requests is kept, where that is
not the installation's bound. Limits: another gateway's change is seen when it says so, or at the next `refresh`; that
of KV, which only the collection reads, at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
_KV: Final = "SELECT value FROM tenant_settings WHERE tenant = :tenant AND name = 'kv_bytes'"
_PUT_KV: Final = """
INSERT INTO tenant_settings (tenant, name, value, changed_us, applied_us) VALUES (:tenant, 'kv_bytes', :value, :now, 0)
ON CONFLICT (tenant, name) DO UPDATE SET value = excluded.value, changed_us = excluded.changed_us"""
_DROP_KV: Final = "DELETE FROM tenant_settings WHERE tenant = :tenant AND name = 'kv_bytes' AND value IS NOT NULL"
_HELD_KV: Final = "SELECT COALESCE(SUM(nbytes), 0) FROM kv_packs WHERE tenant = :tenant AND state = 'live'"


@dataclass(frozen=True, slots=True)
class KvQuota:
    most_bytes: int | None
    """None: the installation's (`STOKER_KV_QUOTA_BYTES`)."""
    held_bytes: int


def quota_of(connection: Connection, tenant: str) -> int | None:
    """Most bytes of KV kept for a tenant, where it has a bound of its own."""
    row = connection.execute(_KV, {"tenant": tenant}).fetchone()
    return None if row is None or row[0] is None else int(row[0])


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

    async def kv_of(self, tenant: str) -> KvQuota:
        def run(connection: Connection) -> KvQuota:
            (held,) = connection.execute(_HELD_KV, {"tenant": tenant}).fetchone()
            return KvQuota(quota_of(connection, tenant), int(held))

        return await self._database.read(run)

    async def put(self, tenant: str, quota: Quota, kv_bytes: int | None = None) -> None:
        """`kv_bytes`: most KV kept for it; None: the installation's bound."""
        now_us = self._database.clock.now_us()
        values = {"tenant": tenant, "devices": quota.devices, "weight": quota.weight, "now": now_us}

        def run(connection: Connection) -> None:
            connection.execute(_PUT, values)
            connection.execute(_PUT_KV, {"tenant": tenant, "value": kv_bytes, "now": now_us})

        await self._database.write(run)
        self._changes.note()
        await self.refresh()

    async def drop(self, tenant: str) -> bool:
        """False: it had none."""

        def run(connection: Connection) -> int:
            values = {"tenant": tenant}
            return connection.execute(_DROP, values).rowcount + connection.execute(_DROP_KV, values).rowcount

        dropped = await self._database.write(run)
        self._changes.note()
        await self.refresh()
        return dropped > 0
