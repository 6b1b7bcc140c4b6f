"""Which object each function is kept in step with, and the spec on which both last agreed: rows of the database.

Without them nobody could tell an object that was deleted while nobody watched from one that there never was. Limits:
read as a whole when the lead is taken, and written by the leader only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from control_plane.database import Connection, Database
from control_plane.lanes import FunctionKey

_PUT: Final = """
INSERT INTO function_objects (tenant, name, object, uid, generation, digest)
VALUES (:tenant, :name, :object, :uid, :generation, :digest)
ON CONFLICT (tenant, name) DO UPDATE SET object = excluded.object, uid = excluded.uid,
    generation = excluded.generation, digest = excluded.digest"""
_DROP: Final = "DELETE FROM function_objects WHERE tenant = :tenant AND name = :name"
_LIST: Final = "SELECT tenant, name, object, uid, generation, digest FROM function_objects"


@dataclass(frozen=True, slots=True)
class Bond:
    object: str
    """Its name."""
    uid: str
    generation: int
    digest: str
    """Of the function's spec."""


class Bonds:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._bonds: dict[FunctionKey, Bond] = {}

    async def refresh(self) -> None:
        def run(connection: Connection) -> dict[FunctionKey, Bond]:
            rows = connection.execute(_LIST).fetchall()
            return {(str(row[0]), str(row[1])): Bond(row[2], row[3], row[4], row[5]) for row in rows}

        self._bonds = await self._database.read(run)

    def of(self, key: FunctionKey) -> Bond | None:
        return self._bonds.get(key)

    def keys(self) -> list[FunctionKey]:
        return list(self._bonds)

    async def put(self, key: FunctionKey, bond: Bond) -> None:
        if self._bonds.get(key) == bond:
            return
        values = {
            "tenant": key[0],
            "name": key[1],
            "object": bond.object,
            "uid": bond.uid,
            "generation": bond.generation,
            "digest": bond.digest,
        }
        await self._database.write(lambda connection: connection.execute(_PUT, values).rowcount)
        self._bonds[key] = bond

    async def drop(self, key: FunctionKey) -> None:
        if key in self._bonds:
            values = {"tenant": key[0], "name": key[1]}
            await self._database.write(lambda connection: connection.execute(_DROP, values).rowcount)
            del self._bonds[key]
