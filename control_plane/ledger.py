"""Who used which device for how long, and what that costs: rows that are only ever added.

Attributed time is charged to requests (stages prefill and decode of each attempt, by the journal), the rest to the
replica (cold_start, idle, overhead, unreported); `control_plane.accounts` keeps the sums exact. A request's other
stages and its `total` say how long it waited and how many tokens it had, and cost nothing. What comes late moves by a
correction row. Limits: rows carry the price that held when the replica began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.accounts import Charged, nobody_charged, settle_replica
from control_plane.database import Connection, Database
from function_runtime.protocol import ReplicaStatus


@dataclass(frozen=True, slots=True)
class LedgerRow:
    id: int
    at_us: int
    kind: str
    tenant: str
    key_id: str | None
    function: str
    revision: int
    model: str | None
    request_id: str | None
    epoch: int | None
    replica_id: str | None
    stage: str
    wall_us: int
    device_us: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    price_microusd_per_hour: int
    cost_microusd: int


_COLUMNS: Final = (
    "id, at_us, kind, tenant, key_id, function, revision, model, request_id, epoch, replica_id, stage, wall_us, "
    "device_us, input_tokens, cached_tokens, output_tokens, price_microusd_per_hour, cost_microusd"
)


class Ledger:
    """The ledger's own writes and what `stoker why` reads of it. Requests are charged by the journal, in the
    transaction of their outcome."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.on_charged: Charged = nobody_charged

    async def report_replica(self, status: ReplicaStatus) -> None:
        """Charge a living replica's time so far; once a minute is often enough, and when it becomes ready."""
        await self._settle(status, final=False)

    async def report_replicas(self, statuses: Sequence[ReplicaStatus]) -> None:
        """The same of several, in one transaction: all or none, and none is lost, as each report holds everything."""
        at_us = self._database.clock.now_us()

        def run(connection: Connection) -> list[int]:
            return [settle_replica(connection, status, at_us, final=False) for status in statuses]

        for status, microusd in zip(statuses, await self._database.write(run), strict=True):
            self.on_charged(status.spec.tenant, None, microusd)

    async def close_replica(self, status: ReplicaStatus) -> None:
        """A replica has ended: account for all the time it was held. Idempotent."""
        await self._settle(status, final=True)

    async def _settle(self, status: ReplicaStatus, *, final: bool) -> None:
        at_us = self._database.clock.now_us()
        microusd = await self._database.write(lambda c: settle_replica(c, status, at_us, final=final))
        self.on_charged(status.spec.tenant, None, microusd)

    async def open_replicas(self) -> list[str]:
        """Replicas whose account is still open: after a restart, those that are gone must be closed."""

        def run(connection: Connection) -> list[str]:
            rows = connection.execute("SELECT replica_id FROM replica_accounts WHERE closed_us IS NULL").fetchall()
            return [str(row[0]) for row in rows]

        return await self._database.read(run)

    async def of_request(self, request_id: str) -> list[LedgerRow]:
        return await self._rows("request_id", request_id)

    async def of_replica(self, replica_id: str) -> list[LedgerRow]:
        return await self._rows("replica_id", replica_id)

    async def _rows(self, column: str, value: str) -> list[LedgerRow]:
        def run(connection: Connection) -> list[LedgerRow]:
            rows: list[Any] = connection.execute(
                f"SELECT {_COLUMNS} FROM ledger WHERE {column} = :value ORDER BY id", {"value": value}
            ).fetchall()
            return [LedgerRow(*row) for row in rows]

        return await self._database.read(run)
