"""What becomes of ended requests: their log is compacted, kept for a while, dropped; or deleted when they ask for it.

    ended -> log in one row -> (log_s) log and input gone -> (request_s) row gone; the ledger stays

`log_s` and `request_s` are the installation's, or the tenant's own (`control_plane.tenant_rules`). Everything goes in
small steps, beside the tokens of others. On PostgreSQL rows of the log are not deleted one by one:
they go with their partition (`control_plane.log_partitions`). Limits: what a killed gateway had not compacted stays as
it is until it is dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane import statements as sql
from control_plane.appends import log_statements
from control_plane.database import Connection, Database
from control_plane.errors import Conflict, NotFound, StokerError
from control_plane.log_partitions import LogPartitions
from control_plane.log_statements import ENDED_LOG, POINT_AT
from control_plane.records import RequestState
from control_plane.schema import Dialect
from control_plane.sealing import RequestSeal
from control_plane.settings import RetentionSettings
from control_plane.tenant_rules import TenantRules

logger = logging.getLogger(__name__)

WAITING_MAX: Final = 10_000
"""Ended requests that wait to be compacted; the oldest are left as they are."""
COMPACTED_BYTES: Final = 4 * 1024 * 1024
"""A longer log stays in its rows."""


@dataclass(frozen=True, slots=True)
class _Compacted:
    """One row that may take the place of a chain, as long as that is as it was read."""

    request_id: str
    head: int
    last_seq: int
    epoch: int
    payload: bytes


class Retention:
    """`seal_of(tenant, key number, request)`: how what is sealed is opened, and sealed again."""

    def __init__(
        self,
        database: Database,
        settings: RetentionSettings,
        seal_of: Callable[[str, int, str], RequestSeal | None] = lambda tenant, number, request_id: None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._seal_of = seal_of
        self.rules = TenantRules(database, settings)
        self._ended: deque[str] = deque(maxlen=WAITING_MAX)
        dialect = database.driver.dialect
        self._partitions = LogPartitions(database, settings.partition_s) if dialect.by_log_id else None

    def ended(self, request_id: str) -> None:
        """It may be compacted."""
        self._ended.append(request_id)

    async def compact(self, limit: int = 8) -> int:
        """Bring the logs of ended requests into one row each; how many were looked at. Read, opened and joined beside
        the writer, who only puts the row in its place."""
        ids = [self._ended.popleft() for _ in range(min(limit, len(self._ended)))]
        if not ids:
            return 0
        dialect = self._database.driver.dialect
        found = await self._database.read(lambda connection: [self._joined(connection, each) for each in ids])
        compacted = [each for each in found if each is not None]

        def run(connection: Connection) -> None:
            for each in compacted:
                _put(connection, dialect, each)

        if compacted:
            await self._database.write(run)
        return len(ids)

    def _joined(self, connection: Connection, request_id: str) -> _Compacted | None:
        """None: it is one row already, too long, or cannot be opened (its key is gone, its bytes are altered)."""
        row = connection.execute(ENDED_LOG, {"id": request_id}).fetchone()
        if row is None:
            return None
        head, last_seq, epoch, tenant, sealed = row
        rows = connection.execute(sql.READ_LOG, {"id": request_id, "after": 0}).fetchall()
        if not rows or rows[0][0] != 1:
            return None
        try:
            seal = self._seal_of(tenant, sealed, request_id)
            payload = joined(
                [bytes(part) if seal is None else seal.open(f"log/{first}", bytes(part)) for first, part in rows]
            )
        except StokerError as error:
            logger.info("event=log_not_compacted request=%s error=%s", request_id, error)
            return None
        if payload is None:
            return None
        return _Compacted(request_id, head, last_seq, epoch, payload if seal is None else seal.seal("log/1", payload))

    async def prepare(self) -> None:
        """Before the first append."""
        if self._partitions is not None:
            await self._partitions.keep()

    async def sweep(self, limit: int = 200) -> int:
        """Drop what retention no longer keeps, a little at a time; how much there was to do. First the log and the
        input of an ended request go, later its row."""
        now = self._database.clock.now_us()
        request_us = round(self._settings.request_s * 1e6)
        dialect = self._database.driver.dialect

        def run(connection: Connection) -> int:
            sought = {"now": now, "limit": limit, "request_us": request_us}
            expired = connection.execute(sql.EXPIRED, sought).fetchall()
            for request_id, finished_us, expires_us, keep_us in expired:
                values = {"id": request_id, "expires_us": max(finished_us + keep_us, expires_us + 1)}
                _drop_log(connection, dialect, request_id)
                connection.execute(sql.DROP_INPUT, values)
                if values["expires_us"] > now:
                    connection.execute(sql.EXPIRE_LATER, values)
                else:
                    connection.execute(sql.DROP_ATTEMPTS, values)
                    connection.execute(sql.DROP_REQUEST, values)
            return len(expired)

        swept = await self.rules.apply() + await self._database.write(run)
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


def _put(connection: Connection, dialect: Dialect, row: _Compacted) -> None:
    found = connection.execute(ENDED_LOG, {"id": row.request_id}).fetchone()
    if found is None or found[0] != row.head:
        return  # deleted or dropped meanwhile
    statements = log_statements(dialect)
    values: dict[str, Any] = {
        "id": row.request_id, "head": row.head, "last": row.last_seq, "epoch": row.epoch, "payload": row.payload,
    }  # fmt: skip
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
