"""The slots of all gateways of one database: those of this machine, and those that the others' agents registered.

Each gateway starts the agents of its own slots and writes down where they are; it connects to every slot in the table.
A slot whose agent cannot be found any more goes when its owner is gone, too; while the owner lives, it is started
again. Limits: agents listen on the loopback address, so gateways of one database share a machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from control_plane.backends.base import SlotListener
from control_plane.backends.home import LocalHome
from control_plane.backends.link import SlotLink
from control_plane.backends.local import LinkedSlots
from control_plane.errors import StokerError
from control_plane.gateways import Gateways
from control_plane.settings import Settings
from control_plane.slot_table import SlotRow, SlotTable
from function_runtime.protocol import AgentInfo

logger = logging.getLogger(__name__)

PROBE_S: Final = 2.0


def slot_name(data_dir: Path, number: int) -> str:
    """The same for a data directory at every start, and no other's."""
    place = f"{platform.node()}:{os.path.realpath(data_dir)}"
    return f"slot-{hashlib.sha256(place.encode()).hexdigest()[:6]}-{number}"


class RemoteHome:
    """A slot that another gateway registered."""

    def __init__(self, row: SlotRow, missing: Callable[[SlotRow], Awaitable[None]]) -> None:
        self.row = row
        self._missing = missing
        self._news = asyncio.Event()

    def moved(self, row: SlotRow) -> None:
        anew = row.info != self.row.info
        self.row = row
        if anew:
            self._news.set()

    async def find(self) -> AgentInfo:
        self._news.clear()
        return self.row.info

    async def is_gone(self) -> bool:
        """A refused connection: nobody listens there any more. Silence says nothing."""
        row = self.row
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(row.info.host, row.info.port)
            writer.close()
        except ConnectionRefusedError:
            await self._missing(row)
            return True
        except (OSError, TimeoutError):
            return False
        return False

    async def connected(self, info: AgentInfo) -> None:
        return

    def end_hung(self) -> None:
        return  # its owner, on its machine, sees to that

    async def news(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            pass


class SharedBackend(LinkedSlots):
    def __init__(self, settings: Settings, table: SlotTable, gateways: Gateways) -> None:
        super().__init__()
        self._table = table
        self._gateways = gateways
        self._listener: SlotListener | None = None
        self._homes: list[LocalHome] = []
        self._remote: dict[str, RemoteHome] = {}
        self._unwritten: dict[str, AgentInfo] = {}
        """Agents of ours that the table does not have yet."""
        self._closed = False
        self._looking = asyncio.Lock()
        self.on_registered: Callable[[], None] = lambda: None
        """Told when the table has a new agent of ours."""
        for number in range(settings.slot.count):
            slot_id = slot_name(settings.data_dir, number)
            home = LocalHome(settings, number, partial(self._register, slot_id))
            self._homes.append(home)
            self._links[slot_id] = SlotLink(slot_id, home)

    async def start(self, listener: SlotListener) -> None:
        self._listener = listener
        for link in list(self._links.values()):
            link.start(listener)
        await self.look()

    async def look(self) -> None:
        async with self._looking:
            listener = self._listener
            if listener is None or self._closed:
                return
            for slot_id, info in list(self._unwritten.items()):
                await self._register(slot_id, info)
            rows = {row.slot_id: row for row in await self._table.list()}
            for slot_id, row in rows.items():
                known = self._remote.get(slot_id)
                if known is not None:
                    known.moved(row)
                elif slot_id not in self._links:
                    home = self._remote[slot_id] = RemoteHome(row, self._agent_missing)
                    link = self._links[slot_id] = SlotLink(slot_id, home)
                    link.start(listener)
            for slot_id in [known for known in self._remote if known not in rows]:
                del self._remote[slot_id]
                await self._links.pop(slot_id).close()
                listener.slot_lost(slot_id, "its gateway and its agent are gone", agent_gone=True)

    async def _register(self, slot_id: str, info: AgentInfo) -> None:
        self._unwritten[slot_id] = info
        try:
            await self._table.put(slot_id, info)
        except StokerError as error:
            logger.warning("event=slot_not_registered slot=%s error=%s", slot_id, error)  # at the next look, then
            return
        if self._unwritten.get(slot_id) is info:
            del self._unwritten[slot_id]
        self.on_registered()

    async def _agent_missing(self, row: SlotRow) -> None:
        """Nobody will start it again: the slot is no more."""
        if row.owner == self._gateways.id or self._gateways.url_of(row.owner):
            return
        try:
            await self._table.drop(row)
        except StokerError as error:
            logger.warning("event=slot_not_dropped slot=%s error=%s", row.slot_id, error)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        self._closed = True
        mine = [link for slot_id, link in self._links.items() if slot_id not in self._remote]
        if end_agents:
            await asyncio.gather(*(link.shutdown_agent(grace_s) for link in mine))
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if end_agents:
            await asyncio.gather(*(home.wait_ended(grace_s + 5.0) for home in self._homes))
