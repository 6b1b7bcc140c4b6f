"""Where the agents of all slots are, and where slots may be: one row each, written by the gateway whose machine it is.

A *place* is a slot that a gateway could have; whoever leads the control loop marks it as wanted or not, and its gateway
follows. A slot's row is there while it has an agent.

A row with another incarnation is another agent. Tokens of agents lie here in clear: whoever reads the database may
start replicas, as whoever reads `agent.json` may. Limits: a row is a hint; whether the agent lives shows on connecting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from control_plane.database import Connection, Database
from function_runtime.protocol import AgentInfo

_PUT: Final = """
INSERT INTO slots (id, host, port, token, incarnation, owner, seen_us)
VALUES (:id, :host, :port, :token, :incarnation, :owner, :now)
ON CONFLICT (id) DO UPDATE SET host = excluded.host, port = excluded.port, token = excluded.token,
    incarnation = excluded.incarnation, owner = excluded.owner, seen_us = excluded.seen_us"""
_PUT_PLACE: Final = """
INSERT INTO slot_places (id, owner, least, wanted, changed_us) VALUES (:id, :owner, :least, :wanted, :now)
ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, least = excluded.least, wanted = excluded.wanted,
    changed_us = excluded.changed_us"""
_PLACES: Final = "SELECT id, owner, least, wanted FROM slot_places ORDER BY id"
_WANT: Final = "UPDATE slot_places SET wanted = :wanted, changed_us = :now WHERE id = :id AND wanted <> :wanted"
_DROP_PLACE: Final = "DELETE FROM slot_places WHERE id = :id"
_LIST: Final = "SELECT id, host, port, token, incarnation, owner FROM slots ORDER BY id"
_DROP: Final = "DELETE FROM slots WHERE id = :id AND incarnation = :incarnation"


@dataclass(frozen=True, slots=True)
class SlotRow:
    slot_id: str
    info: AgentInfo
    owner: str
    """The gateway that starts its agent again when it ends."""


@dataclass(frozen=True, slots=True)
class SlotPlace:
    slot_id: str
    owner: str
    least: bool
    """Its gateway always has it."""
    wanted: bool


class SlotTable:
    def __init__(self, database: Database, gateway_id: str) -> None:
        self._database = database
        self._gateway_id = gateway_id

    async def put(self, slot_id: str, info: AgentInfo) -> None:
        values = {
            "id": slot_id,
            "host": info.host,
            "port": info.port,
            "token": info.token,
            "incarnation": info.incarnation,
            "owner": self._gateway_id,
            "now": self._database.clock.now_us(),
        }
        await self._database.write(lambda connection: connection.execute(_PUT, values).rowcount)

    async def list(self) -> list[SlotRow]:
        def run(connection: Connection) -> list[SlotRow]:
            return [
                SlotRow(slot_id, AgentInfo(slot_id, 0, host, port, token, incarnation), owner)
                for slot_id, host, port, token, incarnation, owner in connection.execute(_LIST).fetchall()
            ]

        return await self._database.read(run)

    async def drop(self, row: SlotRow) -> None:
        """Unless it is another agent's by now."""
        values = {"id": row.slot_id, "incarnation": row.info.incarnation}
        await self._database.write(lambda connection: connection.execute(_DROP, values).rowcount)

    # --- places ---

    async def put_places(self, places: Sequence[SlotPlace], gone: Sequence[str] = ()) -> None:
        """What this gateway could have now, and what an earlier life of it could that it cannot."""
        now = self._database.clock.now_us()

        def run(connection: Connection) -> None:
            for place in places:
                values = {"id": place.slot_id, "owner": self._gateway_id, "now": now}
                connection.execute(_PUT_PLACE, {**values, "least": int(place.least), "wanted": int(place.wanted)})
            for slot_id in gone:
                connection.execute(_DROP_PLACE, {"id": slot_id})

        await self._database.write(run)

    async def places(self) -> Sequence[SlotPlace]:
        def run(connection: Connection) -> Sequence[SlotPlace]:
            return [
                SlotPlace(slot_id, owner, bool(least), bool(wanted))
                for slot_id, owner, least, wanted in connection.execute(_PLACES).fetchall()
            ]

        return await self._database.read(run)

    async def want(self, slot_id: str, wanted: bool) -> bool:
        """Whether that was news."""
        values = {"id": slot_id, "wanted": int(wanted), "now": self._database.clock.now_us()}
        return await self._database.write(lambda connection: connection.execute(_WANT, values).rowcount == 1)
