"""Where the agents of all slots are: one row a slot, written by the gateway that started or found its agent.

A row with another incarnation is another agent. Tokens of agents lie here in clear: whoever reads the database may
start replicas, as whoever reads `agent.json` may. Limits: a row is a hint; whether the agent lives shows on connecting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from control_plane.database import Connection, Database
from function_runtime.protocol import AgentInfo

_PUT: Final = """
INSERT INTO slots (id, host, port, token, incarnation, owner, seen_us)
VALUES (:id, :host, :port, :token, :incarnation, :owner, :now)
ON CONFLICT (id) DO UPDATE SET host = excluded.host, port = excluded.port, token = excluded.token,
    incarnation = excluded.incarnation, owner = excluded.owner, seen_us = excluded.seen_us"""
_LIST: Final = "SELECT id, host, port, token, incarnation, owner FROM slots ORDER BY id"
_DROP: Final = "DELETE FROM slots WHERE id = :id AND incarnation = :incarnation"


@dataclass(frozen=True, slots=True)
class SlotRow:
    slot_id: str
    info: AgentInfo
    owner: str
    """The gateway that starts its agent again when it ends."""


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
            "now": time.time_ns() // 1000,
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
