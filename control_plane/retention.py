"""What becomes of ended requests: their log is compacted, kept for a while, dropped; or deleted when they ask for it.

    ended -> log in one row -> (log_s) log and input gone -> (request_s) row gone; the ledger stays

Everything goes in small steps, beside the tokens of others. On PostgreSQL rows of the log are not deleted one by one:
they go with their partition (`control_plane.log_partitions`). Limits: what a killed gateway had not compacted stays as
it is until it is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from control_plane import statements as sql
from control_plane.appends import log_statements
from control_plane.database import Connection, Database
from control_plane.errors import Conflict, NotFound
from control_plane.log_partitions import LogPartitions
from control_plane.log_statements import ENDED_LOG, POINT_AT
from control_plane.records import RequestState
from control_plane.schema import Dialect
from control_plane.settings import RetentionSettings

WAITING_MAX: Final = 10_000
"""Ended requests that wait to be compacted; the oldest are left as they are."""
COMPACTED_BYTES: Final = 4 * 1024 * 1024
"""A longer log stays in its rows."""


class Retention:
    def __init__(self, database: Database, settings: RetentionSettings) -> None:
        self._database = database
        self._settings = settings
        self._ended: deque[str] = deque(maxlen=WAITING_MAX)
        dialect = database.driver.dialect
        self._partitions = LogPartitions(database, settings.partition_s) if dialect.by_log_id else None

    def ended(self, request_id: str) -> None:
        """It may be compacted."""
        self._ended.append(request_id)

    async def compact(self, limit: int = 8) -> int:
        """Bring the logs of ended requests into one row each; how many were looked at."""
        ids = [self._ended.popleft() for _ in range(min(limit, len(self._ended)))]
        if not ids:
            return 0
        dialect = self._database.driver.dialect

        def run(connection: Connection) -> None:
            for request_id in ids:
                _compact(connection, dialect, request_id)

        await self._database.write(run)
        return len(ids)

    async def prepare(self) -> None:
        """Before the first append."""
        if self._partitions is not None:
            await self._partitions.keep()

    async def sweep(self, limit: int = 200) -> int:
        """Drop what retention no longer keeps, a little at a time; how much there was to do. First the log and the
        input of an ended request go, later its row."""
        now = time.time_ns() // 1000
        keep_us = round(self._settings.request_s * 1e6)
        dialect = self._database.driver.dialect

        def run(connection: Connection) -> int:
            expired = connection.execute(sql.EXPIRED, {"now": now, "limit": limit}).fetchall()
            for request_id, finished_us, expires_us in expired:
                values = {"id": request_id, "expires_us": max(finished_us + keep_us, expires_us + 1)}
                _drop_log(connection, dialect, request_id)
                connection.execute(sql.DROP_INPUT, values)
                if values["expires_us"] > now:
                    connection.execute(sql.EXPIRE_LATER, values)
                else:
                    connection.execute(sql.DROP_ATTEMPTS, values)
                    connection.execute(sql.DROP_REQUEST, values)
            return len(expired)

        swept = await self._database.write(run)
        if swept < limit and self._partitions is not None:
            await self._partitions.keep()
        return swept

    async def delete(self, request_id: str, tenant: str) -> None:
        """Forget an ended request of a tenant: input, log, attempts, row. Its KV is nobody's from then on and goes
        with the next collection; the ledger stays. Raises `Conflict` while it runs."""
        values = {"id": request_id, "tenant": tenant}
        dialect = self._database.driver.dialect

        def run(connection: Connection) -> None:
            row = connection.execute(sql.STATE_OF_TENANT, values).fetchone()
            if row is None:
                raise NotFound(f"there is no request {request_id[:80]}", param="id")
            if not RequestState(row[0]).ended:
                raise Conflict(
                    f"{request_id} is {row[0]}: cancel it first (POST .../{request_id}/cancel), or wait for its end",
                    param="id",
                    code="request_running",
                )
            _drop_log(connection, dialect, request_id)
            for statement in (sql.DROP_INPUT, sql.DROP_ATTEMPTS, sql.DROP_REQUEST):
                connection.execute(statement, values)

        await self._database.write(run)


def _compact(connection: Connection, dialect: Dialect, request_id: str) -> None:
    row = connection.execute(ENDED_LOG, {"id": request_id}).fetchone()
    if row is None:
        return
    head, last_seq, epoch = row
    rows = connection.execute(sql.READ_LOG, {"id": request_id, "after": 0}).fetchall()
    payload = joined([payload for _, payload in rows])
    if payload is None or rows[0][0] != 1:
        return
    statements = log_statements(dialect)
    values: dict[str, Any] = {"id": request_id, "head": head, "last": last_seq, "epoch": epoch, "payload": payload}
    if statements.drop is not None:
        connection.execute(statements.drop, values)
    (values["to"],) = connection.execute(statements.compacted, values).fetchone()
    connection.execute(POINT_AT, values)


def _drop_log(connection: Connection, dialect: Dialect, request_id: str) -> None:
    statement = log_statements(dialect).drop
    if statement is not None:
        row = connection.execute(sql.LOG_HEAD, {"id": request_id}).fetchone()
        if row is not None and row[0] is not None:
            connection.execute(statement, {"head": row[0]})
    connection.execute(sql.DROP_LOG_HEAD, {"id": request_id})


def joined(payloads: Sequence[bytes]) -> bytes | None:
    """Several msgpack arrays as one, without looking at what is in them. None: they are not, or are too long."""
    if not payloads or sum(map(len, payloads)) > COMPACTED_BYTES:
        return None
    count, bodies = 0, list[bytes]()
    for payload in payloads:
        first = payload[0] if payload else 0
        if 0x90 <= first <= 0x9F:
            count, skip = count + (first & 0x0F), 1
        elif first in (0xDC, 0xDD):
            skip = 3 if first == 0xDC else 5
            count += int.from_bytes(payload[1:skip], "big")
        else:
            return None
        bodies.append(payload[skip:])
    if count < 16:
        head = bytes((0x90 | count,))
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return b"".join((head, *bodies))
