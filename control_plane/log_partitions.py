"""The token log's partitions on PostgreSQL: made ahead of time, dropped when no request has a row in them.

A log id begins with the second it was made in, so that a range of ids is a range of time. Where no partition was made
in time, rows go to `token_log_rest` and are deleted there. Limits: a request that runs for days keeps the partitions
since its beginning; making and dropping one locks the log for the moment it takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from control_plane.database import Connection, Database
from control_plane.schema import LOG_SECOND_BITS

AHEAD: Final = 2
"""Partitions beyond the present one."""
REST_ROWS: Final = 5000
"""Most rows deleted from the rest at once."""
KEEP_LOCK: Final = 0x53746F6B6573
_NAME: Final = re.compile(r"token_log_(\d+)_(\d+)\Z")
_PARTITIONS: Final = """
SELECT CAST(c.relname AS TEXT) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('token_log' AS regclass)"""
_NOW: Final = "SELECT CAST(EXTRACT(EPOCH FROM now()) AS BIGINT)"
_OLDEST: Final = "SELECT MIN(log_tail) FROM requests WHERE log_tail IS NOT NULL"
_IN_REST: Final = "SELECT 1 FROM token_log_rest WHERE id >= :low AND id < :high LIMIT 1"
_CLEAR_REST: Final = """
DELETE FROM token_log_rest WHERE id IN (SELECT id FROM token_log_rest WHERE id < :below ORDER BY id LIMIT :limit)"""


@dataclass(frozen=True, slots=True)
class Partition:
    begin_s: int
    end_s: int

    @property
    def name(self) -> str:
        return f"token_log_{self.begin_s}_{self.end_s}"

    def overlaps(self, other: Partition) -> bool:
        return self.begin_s < other.end_s and other.begin_s < self.end_s


class LogPartitions:
    def __init__(self, database: Database, width_s: float) -> None:
        self._database = database
        self._width_s = max(int(width_s), 60)

    async def keep(self, now_s: int | None = None) -> None:
        """Make those that are due and drop those that are done; several gateways may do so at once."""
        await self._database.submit(lambda connection: keep(connection, now_s, self._width_s), guarded=False)


def keep(connection: Connection, now_s: int | None, width_s: int) -> None:
    """`now_s`: None for now, by the clock that ids are made with."""
    connection.execute("SET LOCAL lock_timeout = '500ms'")
    connection.execute("SELECT pg_advisory_xact_lock(:lock)", {"lock": KEEP_LOCK})
    if now_s is None:
        # NOTE: never a gateway's clock: one that is ahead would take what is being appended for long past.
        (now_s,) = connection.execute(_NOW).fetchone()
    there = [
        Partition(int(found[1]), int(found[2]))
        for (name,) in connection.execute(_PARTITIONS).fetchall()
        if (found := _NAME.match(name)) is not None
    ]
    begin_s = now_s - now_s % width_s
    for number in range(AHEAD + 1):
        wanted = Partition(begin_s + number * width_s, begin_s + (number + 1) * width_s)
        if not any(wanted.overlaps(each) for each in there) and _is_free(connection, wanted):
            low, high = _ids(wanted)
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {wanted.name} PARTITION OF token_log FOR VALUES FROM ({low}) TO ({high})"
            )
    (oldest,) = connection.execute(_OLDEST).fetchone()
    # Rows of appends that are not committed yet are of this moment: the last width is left alone.
    below = (now_s - width_s) << LOG_SECOND_BITS
    if oldest is not None:
        below = min(below, oldest)
    for partition in there:
        if _ids(partition)[1] <= below:
            connection.execute(f"DROP TABLE IF EXISTS {partition.name}")
    connection.execute(_CLEAR_REST, {"below": below, "limit": REST_ROWS})


def _is_free(connection: Connection, partition: Partition) -> bool:
    low, high = _ids(partition)
    return connection.execute(_IN_REST, {"low": low, "high": high}).fetchone() is None


def _ids(partition: Partition) -> tuple[int, int]:
    return partition.begin_s << LOG_SECOND_BITS, partition.end_s << LOG_SECOND_BITS
