"""What operators have drained: functions and slots that take no work until they are resumed.

A drain is a row with a beginning and, once resumed, an end; the rows are what every gateway goes by, and those that
are over still say for how long a request's limits stood still. `on_change` is told whatever changed. Limits: another
gateway's change is seen at the next `refresh`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from control_plane.changes import Changes
from control_plane.database import Connection, Database
from control_plane.lanes import FunctionKey

FUNCTION: Final = "function"
SLOT: Final = "slot"

_READ: Final = "SELECT kind, tenant, name, since_us, until_us, reason FROM drains ORDER BY since_us"
_BEGIN: Final = """
INSERT INTO drains (kind, tenant, name, since_us, reason)
SELECT :kind, :tenant, :name, :now, :reason WHERE NOT EXISTS
    (SELECT 1 FROM drains WHERE kind = :kind AND tenant = :tenant AND name = :name AND until_us IS NULL)"""
_END: Final = """
UPDATE drains SET until_us = :now WHERE kind = :kind AND tenant = :tenant AND name = :name AND until_us IS NULL"""
_SWEEP: Final = "DELETE FROM drains WHERE until_us < :before"


@dataclass(frozen=True, slots=True)
class Drain:
    kind: str
    """function | slot"""
    tenant: str
    """Empty for a slot."""
    name: str
    since_us: int
    until_us: int | None
    reason: str

    @property
    def is_on(self) -> bool:
        return self.until_us is None


class Drains:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: tuple[Drain, ...] = ()
        self._changes = Changes()
        self.on_change: Callable[[], None] = lambda: None

    async def refresh(self) -> None:
        def run(connection: Connection) -> tuple[Drain, ...]:
            return tuple(Drain(*row) for row in connection.execute(_READ, {}).fetchall())

        known = await self._changes.read(lambda: self._db.read(run))
        if known != self._known:
            self._known = known
            self.on_change()

    async def begin(self, kind: str, tenant: str, name: str, reason: str) -> None:
        """Idempotent: one that is on stays as it is."""
        await self._change(_BEGIN, kind, tenant, name, reason)

    async def end(self, kind: str, tenant: str, name: str) -> None:
        await self._change(_END, kind, tenant, name, "")

    async def _change(self, text: str, kind: str, tenant: str, name: str, reason: str) -> None:
        values = {"kind": kind, "tenant": tenant, "name": name, "now": self._db.clock.now_us(), "reason": reason}
        await self._db.write(lambda connection: connection.execute(text, values).rowcount)
        self._changes.note()
        await self.refresh()

    async def sweep(self, kept_s: float) -> None:
        """Forget those that were over before any request that is still there began."""
        before = self._db.clock.now_us() - round(kept_s * 1e6)
        if any(drain.until_us is not None and drain.until_us < before for drain in self._known):
            await self._db.write(lambda connection: connection.execute(_SWEEP, {"before": before}).rowcount)
            await self.refresh()

    # --- what is on ---

    def functions(self) -> dict[FunctionKey, Drain]:
        return {(d.tenant, d.name): d for d in self._known if d.is_on and d.kind == FUNCTION}

    def slots(self) -> dict[str, Drain]:
        return {d.name: d for d in self._known if d.is_on and d.kind == SLOT}

    def paused_us(self, key: FunctionKey, since_us: int, now_us: int) -> int:
        """For how much of this time the function was drained."""
        total = 0
        for drain in self._known:
            if (drain.kind, drain.tenant, drain.name) == (FUNCTION, *key):
                until_us = now_us if drain.until_us is None else drain.until_us
                total += max(0, min(until_us, now_us) - max(drain.since_us, since_us))
        return total
