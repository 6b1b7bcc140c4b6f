"""The slots of all gateways of one database: those of this machine, and those that the others' agents registered.

Each gateway starts the agents of its own slots and writes down where they are; it connects to every slot in the table.
A slot whose agent cannot be found any more goes when its owner is gone, too; while the owner lives, it is started
again. Whoever leads marks places as wanted or not (`SlotTable`), and the gateway of a place follows at its next look,
which it is told to take. Limits: agents listen on the loopback address, so gateways of one database share a machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from control_plane.backends.base import SlotClass, SlotListener, SlotRefused, SlotUnavailable
from control_plane.backends.home import LocalHome
from control_plane.backends.link import SlotLink, is_refused
from control_plane.backends.linked import LinkedSlots
from control_plane.backends.local import OwnSlots
from control_plane.errors import StokerError
from control_plane.gateways import Gateways
from control_plane.settings import ELASTIC_REPLICAS, Settings
from control_plane.slot_table import SlotPlace, SlotRow, SlotTable
from function_runtime.protocol import AgentInfo

logger = logging.getLogger(__name__)

VOID_SHARE: Final = 1.5
"""Of `orphan_s`: after so much silence an agent whose owner is gone has ended, and so have its replicas."""


def slot_name(data_dir: Path, number: int) -> str:
    """The same for a data directory at every start, and no other's."""
    place = f"{platform.node()}:{os.path.realpath(data_dir)}"
    return f"slot-{hashlib.sha256(place.encode()).hexdigest()[:6]}-{number}"


class RemoteHome:
    """A slot that another gateway registered."""

    shares_files = True

    def __init__(
        self, row: SlotRow, missing: Callable[[SlotRow], Awaitable[bool]], void_after_s: float = float("inf")
    ) -> None:
        self.row = row
        self._missing = missing
        """Told of an agent that is gone; whether nobody will start it again."""
        self._void_after_s = void_after_s
        self._heard_s = time.monotonic()
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
        """A refused connection: nobody listens there any more. Silence says nothing until it has lasted for longer than
        an agent and its replicas outlive their last reader: then whatever was leased there is void, unless its owner
        lives, which sees to it."""
        row = self.row
        if await is_refused(row.info.host, row.info.port):
            await self._missing(row)
            return True
        return time.monotonic() - self._heard_s > self._void_after_s and await self._missing(row)

    async def connected(self, info: AgentInfo) -> None:
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        self._heard_s = time.monotonic()

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
        self._settings = settings
        self._table = table
        self._gateways = gateways
        self._listener: SlotListener | None = None
        self._own = OwnSlots(self._links)
        self._remote: dict[str, RemoteHome] = {}
        self._unwritten: dict[str, AgentInfo] = {}
        """Agents of ours that the table does not have yet."""
        self._places: dict[str, SlotPlace] = {}
        """As last read, of gateways that live."""
        self._asked_s: dict[str, float] = {}
        """Since when slots are coming."""
        self._closed = False
        self._looking = asyncio.Lock()
        self.on_registered: Callable[[], None] = lambda: None
        """Told when the table has news: an agent of ours, or a place that is wanted or not."""
        self._attach(settings)
        for number in range(settings.slot.range.most):
            home = self._home(number)
            if number < settings.slot.range.least or home.lives():
                self._own.open(slot_name(settings.data_dir, number), home)

    def _home(self, number: int) -> LocalHome:
        return LocalHome(self._settings, number, partial(self._register, slot_name(self._settings.data_dir, number)))

    # --- how many ---

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        places = self._places.values()
        least, slots = sum(place.least for place in places), self._settings.slot
        bound = slots.most_replicas or (ELASTIC_REPLICAS if len(self._places) > least else 0)
        attached = len(self._attached)
        return (SlotClass(least=least + attached, most=len(self._places) + attached, most_replicas=bound),)

    @property
    def any_elsewhere(self) -> bool:
        return bool(self._attached)

    @property
    def coming(self) -> Mapping[str, float]:
        now_s = time.monotonic()
        return {**{slot_id: now_s - since_s for slot_id, since_s in self._asked_s.items()}, **self._own.coming}

    @property
    def leaving(self) -> frozenset[str]:
        unwanted = (slot_id for slot_id, place in self._places.items() if not place.wanted and slot_id in self._links)
        return frozenset(unwanted) | self._own.leaving

    async def add_slots(self, class_name: str, count: int) -> int:
        """Here first, then at the others in turn."""
        await self.look()
        free = [place for place in self._places.values() if not place.wanted and place.slot_id not in self._links]
        free.sort(key=lambda place: (place.owner != self._gateways.id, place.slot_id.rpartition("-")[2], place.owner))
        added = 0
        try:
            for place in free[: max(count, 0)]:
                added += await self._table.want(place.slot_id, True)
        except StokerError as error:
            raise SlotUnavailable(f"the table of slots cannot be written: {error}") from error
        finally:
            if added:
                self.on_registered()
        await self.look()
        return added

    async def remove_slot(self, slot_id: str) -> None:
        self._refuse_attached(slot_id)
        if slot_id not in self._places or slot_id not in self._links:
            raise SlotUnavailable(f"there is no slot {slot_id} any more, or its gateway is gone")
        try:
            await self._table.want(slot_id, False)
        except StokerError as error:
            raise SlotUnavailable(f"the table of slots cannot be written: {error}") from error
        self.on_registered()
        await self.look()
        if slot_id in self._own:
            raise SlotRefused("slot_busy", f"something runs on {slot_id} now")

    # --- what there is ---

    async def start(self, listener: SlotListener) -> None:
        self._listener = listener
        self._own.start(listener)
        self._start_attached(listener)
        await self._claim_places()
        await self.look()

    async def _claim_places(self) -> None:
        slots, prefix = self._settings.slot, slot_name(self._settings.data_dir, 0).rpartition("-")[0]
        ids = [slot_name(self._settings.data_dir, number) for number in range(slots.range.most)]
        mine = [
            SlotPlace(slot_id, self._gateways.id, number < slots.range.least, slot_id in self._own)
            for number, slot_id in enumerate(ids)
        ]
        known = [place.slot_id for place in await self._table.places() if place.slot_id.rpartition("-")[0] == prefix]
        await self._table.put_places(mine, [slot_id for slot_id in known if slot_id not in ids])

    async def look(self) -> None:
        async with self._looking:
            listener = self._listener
            if listener is None or self._closed:
                return
            for slot_id, info in list(self._unwritten.items()):
                await self._register(slot_id, info)
            await self._follow_places()
            rows = {row.slot_id: row for row in await self._table.list()}
            for slot_id, row in rows.items():
                self._asked_s.pop(slot_id, None)
                known = self._remote.get(slot_id)
                if known is not None:
                    known.moved(row)
                elif slot_id not in self._links:
                    void_after_s = VOID_SHARE * self._settings.slot.orphan_s
                    home = self._remote[slot_id] = RemoteHome(row, self._agent_missing, void_after_s)
                    link = self._links[slot_id] = SlotLink(slot_id, home)
                    link.start(listener)
            for slot_id in [known for known in self._remote if known not in rows]:
                del self._remote[slot_id]
                await self._links.pop(slot_id).close()
                listener.slot_lost(slot_id, "its gateway and its agent are gone", agent_gone=True)

    async def _follow_places(self) -> None:
        """Places at this gateway become slots, or cease to be some; those of others are only known."""
        mine = self._gateways.id
        places = await self._table.places()
        living = {mine, *self._gateways.peers}
        self._places = {place.slot_id: place for place in places if place.owner in living}
        now_s = time.monotonic()
        self._asked_s = {
            place.slot_id: self._asked_s.get(place.slot_id, now_s)
            for place in self._places.values()
            if place.wanted and place.owner != mine and place.slot_id not in self._links
        }
        for number in range(self._settings.slot.range.most):
            slot_id = slot_name(self._settings.data_dir, number)
            place = self._places.get(slot_id)
            if place is None or place.owner != mine:
                continue
            if place.wanted and slot_id not in self._own:
                self._own.open(slot_id, self._home(number))
            elif not place.wanted and slot_id in self._own:
                await self._retire(slot_id)

    async def _retire(self, slot_id: str) -> None:
        """What runs on it was placed before the leader knew: then it stays."""
        try:
            await self._own.retire(slot_id)
        except SlotUnavailable as error:
            logger.info("event=slot_kept slot=%s error=%s", slot_id, error)
            await self._table.want(slot_id, True)
            self._places.pop(slot_id, None)
        else:
            for row in await self._table.list():
                if row.slot_id == slot_id:
                    await self._table.drop(row)
        self.on_registered()

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

    async def _agent_missing(self, row: SlotRow) -> bool:
        """Whether nobody will start it again: the slot is no more."""
        if row.owner == self._gateways.id or self._gateways.url_of(row.owner):
            return False
        try:
            await self._table.drop(row)
        except StokerError as error:
            logger.warning("event=slot_not_dropped slot=%s error=%s", row.slot_id, error)
        return True

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        self._closed = True
        await self._close_attached()
        await asyncio.gather(*(link.close() for slot_id, link in self._links.items() if slot_id in self._remote))
        await self._own.close(end_agents=end_agents, grace_s=grace_s)
