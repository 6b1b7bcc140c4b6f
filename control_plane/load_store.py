"""Load and start times in the database: what a leader writes down, and what one that begins finds.

    load_windows    what happened to a function within 60 s (with its windows of 10 s) or 600 s; quiet ones take no row.
                    What ran on a slot: likewise, under no tenant and the slot's name
    load_observed   from when to when a leader watched all gateways
    start_times     the last measured stages of a function's starts

Limits: the last minute before a kill is not there; rows of 60 s are kept for `DAY_S`, those of 600 s for `KEPT_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from control_plane.database import Connection, Database
from control_plane.load_windows import SLOTS

FunctionKey: TypeAlias = tuple[str, str]
Values: TypeAlias = tuple[float, ...]

MINUTE_S: Final = 60
COARSE_S: Final = 600
DAY_S: Final = 86_400
KEPT_S: Final = 15 * DAY_S
SWEEP: Final = 1000
"""Rows of one deletion."""

_WRITE: Final = """
INSERT INTO load_windows (tenant, function, length_s, start_s, gateway, data)
VALUES (:tenant, :function, :length_s, :start_s, :gateway, :data)
ON CONFLICT (tenant, function, length_s, start_s, gateway) DO UPDATE SET data = excluded.data"""
_READ: Final = """
SELECT length_s, start_s, data FROM load_windows
WHERE tenant = :tenant AND function = :function AND start_s >= :since
AND (length_s = :minute AND start_s >= :boundary OR length_s = :coarse AND start_s < :boundary)
ORDER BY start_s, gateway"""
_SLOTS_READ: Final = "SELECT DISTINCT function FROM load_windows WHERE tenant = :tenant AND start_s >= :since"
_WRITE_SPAN: Final = """
INSERT INTO load_observed (gateway, since_s, until_s) VALUES (:gateway, :since_s, :until_s)
ON CONFLICT (gateway, since_s) DO UPDATE SET until_s = excluded.until_s"""
_SPANS: Final = "SELECT since_s, until_s FROM load_observed WHERE until_s > :since ORDER BY since_s"
_WRITE_STARTS: Final = """
INSERT INTO start_times (tenant, function, changed_s, data) VALUES (:tenant, :function, :changed_s, :data)
ON CONFLICT (tenant, function) DO UPDATE SET changed_s = excluded.changed_s, data = excluded.data"""
_SWEEP_WINDOWS: Final = """
DELETE FROM load_windows WHERE (tenant, function, length_s, start_s, gateway) IN (
SELECT tenant, function, length_s, start_s, gateway FROM load_windows
WHERE length_s = :length_s AND start_s < :before LIMIT :limit)"""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A row's data."""

    values: Values
    """By `load_windows.STORED`."""
    fine: tuple[tuple[int, Values], ...] = ()
    """(seconds after the start, values) of the windows of 10 s."""
    gaps: tuple[tuple[float, float], ...] = ()
    """(start, length) of the gaps that ended within it."""


@dataclass(frozen=True, slots=True)
class Row:
    length_s: int
    start_s: int
    kept: Kept


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Kept).decode


class LoadStore:
    def __init__(self, database: Database, gateway_id: str) -> None:
        self._database = database
        self._gateway = gateway_id

    async def write(self, rows: Sequence[tuple[FunctionKey, Row]]) -> None:
        values = [
            {
                "tenant": tenant, "function": function, "length_s": row.length_s, "start_s": row.start_s,
                "gateway": self._gateway, "data": _encode(row.kept),
            }
            for (tenant, function), row in rows
        ]  # fmt: skip
        if values:
            await self._database.write(lambda connection: connection.executemany(_WRITE, values).rowcount)

    async def write_span(self, since_s: float, until_s: float) -> None:
        values = {"gateway": self._gateway, "since_s": round(since_s), "until_s": round(until_s)}
        await self._database.write(lambda connection: connection.execute(_WRITE_SPAN, values).rowcount)

    async def read(self, key: FunctionKey, since_s: float, now_s: float) -> list[Row]:
        """Coarse rows up to a day ago, fine ones since; in order."""
        values = {
            "tenant": key[0], "function": key[1], "since": round(max(since_s, now_s - KEPT_S) - COARSE_S),
            "minute": MINUTE_S, "coarse": COARSE_S, "boundary": round((now_s - DAY_S) // COARSE_S * COARSE_S),
        }  # fmt: skip

        def run(connection: Connection) -> list[Any]:
            return connection.execute(_READ, values).fetchall()

        found: list[Row] = []
        for length_s, start_s, data in await self._database.read(run):
            try:
                found.append(Row(length_s, start_s, _decode(bytes(data))))
            except msgspec.MsgspecError:
                continue  # of a version to come, or damaged: that window was not seen
        return found

    async def slots(self, since_s: float) -> list[str]:
        """Those on which anything has run since."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute(_SLOTS_READ, {"tenant": SLOTS, "since": round(since_s)}).fetchall()

        return [slot_id for (slot_id,) in await self._database.read(run)]

    async def spans(self, since_s: float) -> list[tuple[float, float]]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(_SPANS, {"since": round(since_s)}).fetchall()

        return [(float(since), float(until)) for since, until in await self._database.read(run)]

    async def write_starts(self, key: FunctionKey, changed_s: float, data: str) -> None:
        values = {"tenant": key[0], "function": key[1], "changed_s": round(changed_s), "data": data}
        await self._database.write(lambda connection: connection.execute(_WRITE_STARTS, values).rowcount)

    async def starts(self) -> dict[FunctionKey, str]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute("SELECT tenant, function, data FROM start_times", {}).fetchall()

        return {(tenant, function): data for tenant, function, data in await self._database.read(run)}

    async def sweep(self, now_s: float) -> int:
        """Drop what is older than is kept, a little at a time."""

        def run(connection: Connection) -> int:
            gone = 0
            for length_s, kept_s in ((MINUTE_S, DAY_S + COARSE_S), (COARSE_S, KEPT_S)):
                values = {"length_s": length_s, "before": round(now_s - kept_s), "limit": SWEEP}
                gone += connection.execute(_SWEEP_WINDOWS, values).rowcount
            values = {"before": round(now_s - KEPT_S)}
            connection.execute("DELETE FROM load_observed WHERE until_s < :before", values)
            connection.execute("DELETE FROM start_times WHERE changed_s < :before", values)
            return gone

        return await self._database.write(run)
