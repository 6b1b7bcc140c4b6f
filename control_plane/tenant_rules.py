"""How long a tenant's ended requests are kept, where that is not the installation's rule; a change of it carried out.

The rule stands in the database and is part of the statements that end and sweep requests, so every gateway goes by it
at once. What has ended before gets its new time in a walk over all that expires, a little with each sweep; what a
function keeps by its own `retention_s` stays as it is. Limits: what a shorter rule has dropped no longer one brings
back; a walk begins anew when the rules change or another gateway sweeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from control_plane.settings import RetentionSettings

LOG: Final = "log_us"
REQUEST: Final = "request_us"
WALK_ROWS: Final = 1000
"""Most rows that one step of a walk looks at."""

_SET: Final = """
INSERT INTO tenant_settings (tenant, name, value, changed_us, applied_us) VALUES (:tenant, :name, :value, :now, 0)
ON CONFLICT (tenant, name) DO UPDATE SET value = excluded.value,
    changed_us = CASE WHEN excluded.changed_us > tenant_settings.changed_us THEN excluded.changed_us
        ELSE tenant_settings.changed_us + 1 END"""
_READ: Final = "SELECT name, value FROM tenant_settings WHERE tenant = :tenant"
_CHANGED: Final = """
SELECT tenant, name, value, changed_us FROM tenant_settings
WHERE name IN ('log_us', 'request_us') AND tenant IN
    (SELECT tenant FROM tenant_settings WHERE name IN ('log_us', 'request_us') AND applied_us < changed_us)
ORDER BY tenant, name"""
_APPLIED: Final = """
UPDATE tenant_settings SET applied_us = :changed_us WHERE tenant = :tenant AND name = :name"""
_WALK: Final = """
SELECT r.id, r.tenant, r.finished_us, r.expires_us, r.kept_us,
    CASE WHEN EXISTS (SELECT 1 FROM request_inputs i WHERE i.request_id = r.id) THEN 1 ELSE 0 END
FROM requests r WHERE r.expires_us >= :at AND (r.expires_us > :at OR r.id > :id)
ORDER BY r.expires_us, r.id LIMIT :limit"""
_MOVE: Final = "UPDATE requests SET expires_us = :to WHERE id = :id AND expires_us = :expires_us"


@dataclass(frozen=True, slots=True)
class Kept:
    """Seconds from the end; None: the installation's."""

    log_s: float | None = None
    """Log and input."""
    request_s: float | None = None
    """The row: times, usage, outcome, idempotency key."""


class TenantRules:
    def __init__(self, database: Database, settings: RetentionSettings) -> None:
        self._database = database
        self._settings = settings
        self._walking: tuple[Any, ...] = ()
        """The rules that the walk carries out."""
        self._place: tuple[int, str] = (0, "")

    async def kept(self, tenant: str) -> Kept:
        rows = await self._database.read(lambda connection: connection.execute(_READ, {"tenant": tenant}).fetchall())
        known = {str(name): None if value is None else value / 1e6 for name, value in rows}
        return Kept(known.get(LOG), known.get(REQUEST))

    async def keep(self, tenant: str, kept: Kept) -> None:
        now = self._database.clock.now_us()
        rows = [
            {"tenant": tenant, "name": name, "value": None if value_s is None else round(value_s * 1e6), "now": now}
            for name, value_s in ((LOG, kept.log_s), (REQUEST, kept.request_s))
        ]
        await self._database.write(lambda connection: connection.executemany(_SET, rows).rowcount)

    async def apply(self) -> int:
        """One step of carrying out what was changed; how many requests were looked at."""
        changed = tuple(await self._database.read(lambda connection: connection.execute(_CHANGED).fetchall()))
        if not changed:
            return 0
        if changed != self._walking:
            self._walking, self._place = changed, (0, "")
        rules = {(row[0], row[1]): row[2] for row in changed}
        default = {LOG: round(self._settings.log_s * 1e6), REQUEST: round(self._settings.request_s * 1e6)}

        def rule(tenant: str, name: str) -> int:
            value = rules.get((tenant, name))
            return default[name] if value is None else int(value)

        tenants = {row[0] for row in changed}
        values = {"at": self._place[0], "id": self._place[1], "limit": WALK_ROWS}

        def run(connection: Connection) -> list[Any]:
            rows = connection.execute(_WALK, values).fetchall()
            moves = []
            for request_id, tenant, finished_us, expires_us, kept_us, has_log in rows:
                if tenant not in tenants:
                    continue
                if has_log and kept_us is not None:
                    continue
                to = finished_us + rule(tenant, LOG if has_log else REQUEST)
                if to != expires_us:
                    moves.append({"id": request_id, "expires_us": expires_us, "to": to})
            if moves:
                connection.executemany(_MOVE, moves)
            if len(rows) < WALK_ROWS:
                done = [{"tenant": row[0], "name": row[1], "changed_us": row[3]} for row in changed]
                connection.executemany(_APPLIED, done)
            return list(rows)

        rows = await self._database.write(run)
        if rows:
            self._place = (int(rows[-1][3]), str(rows[-1][0]))
        return len(rows)
