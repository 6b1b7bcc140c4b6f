"""What scaling, placement and resumption chose, and why: the raw material of `stoker why`.

Recording never waits and never fails: decisions gather in memory and go to the database with the next flush. Limits:
a kill loses those of the last `FLUSH_S`; when the database cannot be written, the newest `BUFFERED_MAX` wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from control_plane.errors import StokerError

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
BUFFERED_MAX: Final = 5000


@dataclass(frozen=True, slots=True)
class Decision:
    id: int
    at_us: int
    kind: str
    tenant: str | None
    function: str | None
    replica_id: str | None
    request_id: str | None
    reason: str
    inputs: dict[str, Any]


_INSERT: Final = """
INSERT INTO decisions (at_us, kind, tenant, function, replica_id, request_id, reason, inputs)
VALUES (:at_us, :kind, :tenant, :function, :replica_id, :request_id, :reason, :inputs)"""
_SELECT: Final = """
SELECT id, at_us, kind, tenant, function, replica_id, request_id, reason, inputs FROM decisions"""


class Decisions:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[dict[str, Any]] = deque(maxlen=BUFFERED_MAX)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def record(
        self,
        kind: str,
        function: str | None = None,
        replica_id: str | None = None,
        request_id: str | None = None,
        reason: str = "",
        inputs: Mapping[str, Any] | None = None,
        tenant: str | None = None,
    ) -> None:
        self._waiting.append(
            {
                "at_us": self._database.clock.now_us(),
                "kind": kind,
                "tenant": tenant,
                "function": function,
                "replica_id": replica_id,
                "request_id": request_id,
                "reason": reason,
                "inputs": inputs or {},
            }
        )
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        batch = list(self._waiting)
        self._waiting.clear()
        rows = [{**row, "inputs": json.dumps(row["inputs"], default=str)} for row in batch]
        try:
            await self._database.write(lambda connection: connection.executemany(_INSERT, rows).rowcount)
        except StokerError as error:
            logger.warning("event=decisions_kept count=%d error=%s", len(batch), error)
            self._waiting.extendleft(reversed(batch[: BUFFERED_MAX - len(self._waiting)]))
        finally:
            self._writing = None
            if self._waiting and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._begin)

    async def flush(self) -> None:
        """Write what waits now: before a query, and at the end."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._writing = asyncio.get_running_loop().create_task(self._write())
            await asyncio.wait({self._writing})

    async def close(self) -> None:
        await self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def of_function(self, function: str, limit: int = 100) -> list[Decision]:
        return await self._query("function", function, limit)

    async def of_replica(self, replica_id: str, limit: int = 100) -> list[Decision]:
        return await self._query("replica_id", replica_id, limit)

    async def of_request(self, request_id: str, limit: int = 100) -> list[Decision]:
        return await self._query("request_id", request_id, limit)

    async def _query(self, column: str, value: str, limit: int) -> list[Decision]:
        """The newest `limit`, oldest first."""
        await self.flush()

        def run(connection: Connection) -> list[Any]:
            return connection.execute(
                f"{_SELECT} WHERE {column} = :value ORDER BY id DESC LIMIT :limit", {"value": value, "limit": limit}
            ).fetchall()

        rows = await self._database.read(run)
        return [_decision(row) for row in reversed(rows)]

    async def restarts(self, since_us: int) -> list[tuple[str, str, int]]:
        """(tenant, function, when) of the starts since then that followed a stop, oldest first."""
        await self.flush()

        def run(connection: Connection) -> list[Any]:
            return connection.execute(
                "SELECT tenant, function, at_us, inputs FROM decisions WHERE at_us >= :since AND kind = 'start' "
                "ORDER BY id", {"since": since_us},
            ).fetchall()  # fmt: skip

        rows = await self._database.read(run)
        return [(row[0], row[1], row[2]) for row in rows if json.loads(row[3]).get("restart")]

    async def sweep(self, keep_s: float, limit: int = 1000) -> int:
        """Drop decisions older than `keep_s`, a little at a time."""
        values = {"before": self._database.clock.now_us() - round(keep_s * 1e6), "limit": limit}
        return await self._database.write(
            lambda connection: (
                connection.execute(
                    "DELETE FROM decisions WHERE id IN "
                    "(SELECT id FROM decisions WHERE at_us < :before ORDER BY at_us LIMIT :limit)",
                    values,
                ).rowcount
            )
        )


def _decision(row: Sequence[Any]) -> Decision:
    fixed = list(row)
    fixed[8] = json.loads(row[8])
    return Decision(*fixed)
