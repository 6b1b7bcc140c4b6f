"""The second level: how many slots there are, by what the replicas need. The leader looks every second, and at once
when a replica has found no room.

More are asked for by `Backend.add_slots`; given back is only a slot on which nothing runs, and the slot itself has the
last word on that. Limits: what is coming counts as there; a slot that does not come within `LOST_S` is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from control_plane.backends.base import Backend, SlotClass, SlotUnavailable
from control_plane.decisions import Decisions
from control_plane.fleet import Fleet

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
LOST_S: Final = 600.0
AGAIN_S: Final = 5.0
"""Pause after a slot could not be had, or not be given back."""
WAITING_WEIGHT: Final = 30.0
HOLD_MIN_S: Final = 10.0
HOLD_MAX_S: Final = 900.0
ASSUMED_PROVISION_S: Final = 2.0


class SlotScaling:
    def __init__(
        self, fleet: Fleet, backend: Backend, decisions: Decisions, hold_s: float, leads: Callable[[], bool]
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._decisions = decisions
        self._leads = leads
        self._hold_s = hold_s
        self._idle_since_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._came_s: dict[str, float] = {}
        """Seconds that slots of a class took to come."""
        self._pause_until_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        fleet.placing.on_no_room = self.poke

    def poke(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self.look())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def look(self) -> None:
        now_s = time.monotonic()
        self._note(now_s)
        if not self._leads() or now_s < self._pause_until_s:
            return
        for slots in self._backend.classes:
            if slots.elastic:
                await self._scale(slots, now_s)

    # --- what is seen ---

    def _note(self, now_s: float) -> None:
        """Since when slots are idle, and how long those that came took."""
        fleet, busy = self._fleet, self._busy()
        self._idle_since_s = {
            slot_id: self._idle_since_s.get(slot_id, now_s) for slot_id in fleet.slots if not busy[slot_id]
        }
        coming = self._backend.coming
        for slot_id, asked_s in list(self._asked_s.items()):
            if slot_id not in coming:
                del self._asked_s[slot_id]
                if slot_id in fleet.slots:
                    self._came_s[self._backend.class_of(slot_id)] = now_s - asked_s
        for slot_id, since_s in coming.items():
            self._asked_s.setdefault(slot_id, now_s - since_s)

    def _busy(self) -> Counter[str]:
        return Counter(self._fleet.slot_of[status.replica_id] for status in self._fleet.living())

    def provision_s(self, class_name: str) -> float:
        return self._came_s.get(class_name, ASSUMED_PROVISION_S)

    def hold_s(self, class_name: str) -> float:
        """An idle slot is held for what getting it again would cost: its own time, and that of who waits."""
        if self._hold_s:
            return self._hold_s
        return min(max(self.provision_s(class_name) * (1 + WAITING_WEIGHT), HOLD_MIN_S), HOLD_MAX_S)

    # --- what is done ---

    async def _scale(self, slots: SlotClass, now_s: float) -> None:
        backend, fleet = self._backend, self._fleet
        leaving, busy = backend.leaving, self._busy()
        there = [s for s in fleet.slots if backend.class_of(s) == slots.name and s not in leaving]
        coming = sum(since_s < LOST_S for since_s in backend.coming.values())
        unplaced = sum(
            wish.count for wish in fleet.placing.still_unplaced(now_s).values() if wish.work.kind == slots.name
        )
        missing = math.ceil(unplaced / (slots.most_replicas or slots.devices)) - coming
        missing = min(max(missing, slots.least - len(there) - coming), slots.most - len(there) - coming)
        if missing > 0:
            await self._add(slots, missing, unplaced, len(there), coming, now_s)
        elif not unplaced and not coming and fleet.in_sight and len(there) > slots.least:
            hold_s = self.hold_s(slots.name)
            idle = [s for s in there if not busy[s] and now_s - self._idle_since_s.get(s, now_s) >= hold_s]
            if idle:
                await self._remove(slots, min(idle, key=self._loss), hold_s, len(there), now_s)

    def _loss(self, slot_id: str) -> tuple[float, str]:
        """What its pool would save, and then the one that came last."""
        pool = self._fleet.slots[slot_id].pool
        worth_s = sum(e.reload_s * (0.1 if e.chance is None else e.chance) for e in pool if e.state == "ready")
        return (worth_s, "".join(chr(0x10FFFF - ord(letter)) for letter in slot_id))

    async def _add(self, slots: SlotClass, count: int, unplaced: int, there: int, coming: int, now_s: float) -> None:
        try:
            added = await self._backend.add_slots(slots.name, count)
        except SlotUnavailable as error:
            logger.warning("event=slots_refused class=%s error=%s", slots.name, error)
            self._pause_until_s = now_s + AGAIN_S
            return
        if not added:
            self._pause_until_s = now_s + AGAIN_S
            return
        logger.info("event=slots_asked_for class=%s count=%d unplaced=%d", slots.name, added, unplaced)
        self._decisions.record(
            "slots", None, None, None, f"{unplaced} replicas find no room on {there} slots: {added} more",
            {"class": slots.name, "slots": there, "coming": coming, "most": slots.most, "unplaced": unplaced},
        )  # fmt: skip

    async def _remove(self, slots: SlotClass, slot_id: str, hold_s: float, there: int, now_s: float) -> None:
        idle_s = now_s - self._idle_since_s.get(slot_id, now_s)
        try:
            await self._backend.remove_slot(slot_id)
        except SlotUnavailable as error:
            logger.info("event=slot_stays slot=%s error=%s", slot_id, error)
            self._pause_until_s = now_s + AGAIN_S
            return
        self._decisions.record(
            "slots", None, None, None, f"{slot_id} was idle for {idle_s:.0f} s, held {hold_s:.0f} s: given back",
            {"class": slots.name, "slots": there, "least": slots.least, "provision_s": self.provision_s(slots.name)},
        )  # fmt: skip
