"""The slots of this machine: `stoker up --slots N` makes N, each with an agent, a directory and a pool of its own;
with `--slots MIN..MAX` they come and go, and one whose agent still lives is taken over at a start.

Limits: slots share the machine's cores and memory; nothing keeps their replicas apart but the processes themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from control_plane.backends.base import SlotClass, SlotListener, SlotUnavailable
from control_plane.backends.home import LocalHome
from control_plane.backends.link import SlotLink
from control_plane.backends.linked import LinkedSlots, machine_free_bytes
from control_plane.settings import Settings

__all__ = ["LinkedSlots", "LocalBackend", "OwnSlots", "machine_free_bytes"]

logger = logging.getLogger(__name__)

END_S = 5.0
"""An agent without replicas that takes longer than this to end is killed."""


class OwnSlots:
    """Those whose agents this process starts: opened, and given back when nothing runs there."""

    def __init__(self, links: dict[str, SlotLink]) -> None:
        self._links = links
        self._homes: dict[str, LocalHome] = {}
        self.leaving: set[str] = set()
        self.listener: SlotListener | None = None

    def __contains__(self, slot_id: str) -> bool:
        return slot_id in self._homes

    def open(self, slot_id: str, home: LocalHome) -> None:
        """Begins at once where there is a listener, else with `start`."""
        self._homes[slot_id] = home
        self._links[slot_id] = link = SlotLink(slot_id, home)
        if self.listener is not None:
            self._begin(link, home)

    def start(self, listener: SlotListener) -> None:
        self.listener = listener
        for slot_id, home in self._homes.items():
            self._begin(self._links[slot_id], home, expected=True)

    def _begin(self, link: SlotLink, home: LocalHome, *, expected: bool = False) -> None:
        if self.listener is None:
            raise RuntimeError("nobody listens to the slots yet")
        if not expected and not home.lives():
            # Nothing runs on a slot that is only coming up: nobody has to wait for it to know what does.
            self.listener.slot_lost(link.slot_id, "it is coming up", agent_gone=True)
        link.start(self.listener)

    @property
    def coming(self) -> dict[str, float]:
        now_s = time.monotonic()
        own = ((slot_id, self._links[slot_id]) for slot_id in self._homes)
        return {slot_id: now_s - link.since_s for slot_id, link in own if not link.heard}

    async def retire(self, slot_id: str) -> None:
        """Raises SlotRefused where something runs there, SlotUnavailable where that cannot be told."""
        link, home = self._links[slot_id], self._homes[slot_id]
        self.leaving.add(slot_id)
        try:
            await link.retire()
            await link.close()
            await home.wait_gone(END_S)
            del self._homes[slot_id], self._links[slot_id]
            if self.listener is not None:
                self.listener.slot_lost(slot_id, "it was given back", agent_gone=True)
        finally:
            self.leaving.discard(slot_id)
        logger.info("event=slot_given_back slot=%s", slot_id)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        links = [self._links[slot_id] for slot_id in self._homes]
        if end_agents:
            await asyncio.gather(*(link.shutdown_agent(grace_s) for link in links))
        await asyncio.gather(*(link.close() for link in links))
        if end_agents:
            await asyncio.gather(*(home.wait_ended(grace_s + 5.0) for home in self._homes.values()))


class LocalBackend(LinkedSlots):
    """Slots `slot-0` to `slot-N`, and those of other machines that it was told of."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._own = OwnSlots(self._links)
        slots = settings.slot
        self.classes = (
            SlotClass(
                least=slots.range.least + len(slots.agents),
                most=slots.range.most + len(slots.agents),
                most_replicas=slots.replicas_at_most,
            ),
        )
        self._attach(settings)
        for number in range(slots.range.most):
            home = LocalHome(settings, number)
            if number < slots.range.least or home.lives():
                self._own.open(f"slot-{number}", home)

    @property
    def any_elsewhere(self) -> bool:
        return bool(self._attached)

    @property
    def coming(self) -> Mapping[str, float]:
        return self._own.coming

    @property
    def leaving(self) -> frozenset[str]:
        return frozenset(self._own.leaving)

    async def start(self, listener: SlotListener) -> None:
        self._own.start(listener)
        self._start_attached(listener)

    async def look(self) -> None:
        """All its slots are here: there is nothing to look for."""

    async def add_slots(self, class_name: str, count: int) -> int:
        free = [number for number in range(self._settings.slot.range.most) if f"slot-{number}" not in self._own]
        for number in free[:count]:
            self._own.open(f"slot-{number}", LocalHome(self._settings, number))
        return min(len(free), max(count, 0))

    async def remove_slot(self, slot_id: str) -> None:
        self._refuse_attached(slot_id)
        if slot_id not in self._own:
            raise SlotUnavailable(f"there is no slot {slot_id} any more")
        if slot_id not in self._own.leaving:
            await self._own.retire(slot_id)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        await self._close_attached()
        await self._own.close(end_agents=end_agents, grace_s=grace_s)
