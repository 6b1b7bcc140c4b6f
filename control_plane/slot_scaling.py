"""The second level: how many slots there are, by what the replicas need. The leader looks every second, and at once
when a replica has found no room.

What is seen goes to `autoscaler.decide_slots`; more are asked for by `Backend.add_slots`, empty ones are given back by
`remove_slot`, of which the slot itself has the last word. A slot is counted in places for replicas: as many as it takes
at most, or its devices. Limits: what is coming counts as there; a slot that does not come within `LOST_S` is asked for
again; a new leader watches anew before it gives anything back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from autoscaler.peaks import Peaks
from autoscaler.slot_scaling import (
    SlotClass,
    SlotDecision,
    SlotDemand,
    SlotPhase,
    SlotReason,
    SlotView,
    decide_slots,
)
from control_plane.backends import base
from control_plane.backends.base import Backend, SlotUnavailable
from control_plane.decisions import Decisions
from control_plane.errors import StokerError
from control_plane.fleet import Fleet
from control_plane.placing import ROOM_WAIT_S, Unplaced

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
LOST_S: Final = 600.0
AGAIN_S: Final = 5.0
"""Pause after a slot could not be had, or not be given back, where nobody says how long."""
REFUSED_OFTEN: Final = 2
"""Refusals in a row; one may have been a call that got lost."""
COUNTED_S: Final = 0.1
"""How old the count of slots may be by which it is guessed when there will be room."""
NEW: Final = 0.3
LAST_KEPT: Final = 20
_QUIET: Final = frozenset({SlotReason.ENOUGH, SlotReason.HOLD_EMPTY, SlotReason.HOLD_PROVISIONING, SlotReason.BOUND})
"""Reasons for leaving everything as it is that are not worth a record."""


class SlotScaling:
    def __init__(
        self, fleet: Fleet, backend: Backend, decisions: Decisions, hold_s: float, leads: Callable[[], bool]
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._decisions = decisions
        self._hold_s = hold_s
        """0: as long as getting a slot again is worth."""
        self._leads = leads
        self._led_since_s: float | None = None
        self._since_s: dict[str, float] = {}
        self._empty_since_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._provision_s: dict[str, float] = {}
        """Seconds that slots of a class take to come."""
        self._count: tuple[float, Counter[str], dict[str, base.SlotClass]] | None = None
        self._peaks: dict[str, Peaks] = {}
        self._told: dict[str, str] = {}
        self._pause_until_s: dict[str, float] = {}
        """By class: what cannot be had of one says nothing of another."""
        self._refused: dict[str, int] = {}
        """How often in a row, by class, until one comes."""
        self.last: deque[dict[str, Any]] = deque(maxlen=LAST_KEPT)
        """Decisions of this gateway that changed something or held it for a new reason."""
        self._looking: asyncio.Task[None] | None = None
        self._poked = False
        self._one_at_a_time = asyncio.Lock()
        self.expected: Callable[[str], tuple[tuple[float, float], ...]] = lambda class_name: ()
        """(from when on, replicas that are then expected to run), of the functions that need a class."""
        self.is_stuck: Callable[[str], bool] = lambda class_name: False
        """Whether a slot of a class is coming for which there is no room now, and perhaps never."""
        fleet.placing.on_no_room = self.poke
        fleet.placing.room_wait_s = self.room_wait_s

    def poke(self) -> None:
        """Look soon, and after a look that is under way: it may have been past what there is to see now."""
        self._poked = True
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_while_poked())

    async def _look_while_poked(self) -> None:
        while self._poked:
            self._poked = False
            await self.look()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def room_wait_s(self, class_name: str) -> float:
        """Until a new slot would be there; where there can be none, a guess."""
        there, classes = self._counted()
        known = classes.get(class_name)
        if known is None or there[class_name] >= known.most:
            return ROOM_WAIT_S
        return self._provision_s.get(class_name, known.assumed_s)

    def _counted(self) -> tuple[Counter[str], dict[str, base.SlotClass]]:
        """Slots by class, those that are coming too, and the classes, from one look: every start asks for them."""
        now_s = time.monotonic()
        if self._count is None or now_s - self._count[0] >= COUNTED_S:
            fleet, backend = self._fleet, self._backend
            there = Counter(backend.class_of(slot_id) for slot_id in {*fleet.slots, *backend.coming})
            self._count = (now_s, there, {each.name: each for each in backend.classes})
        return self._count[1:]

    def may_grow(self, class_name: str) -> bool:
        """Whether more slots of a class may be had, as far as is known: it has not as many as it may, they are not
        refused again and again, and none of those that are coming finds no room."""
        fleet, backend = self._fleet, self._backend
        known = next((each for each in backend.classes if each.name == class_name and each.elastic), None)
        if known is None or self._refused.get(class_name, 0) >= REFUSED_OFTEN:
            return False
        there = sum(backend.class_of(each) == class_name for each in {*fleet.slots, *backend.coming})
        return there < known.most and not self.is_stuck(class_name)

    def has_slots(self, class_name: str) -> bool:
        """Whether any slot of a class is in sight."""
        return any(self._backend.class_of(slot_id) == class_name for slot_id in self._fleet.slots)

    async def look(self) -> None:
        """One at a time: what one has asked for has to be seen by the next."""
        async with self._one_at_a_time:
            await self._look()

    async def _look(self) -> None:
        now_s, classes = time.monotonic(), self._backend.classes
        if not self._leads():
            self._led_since_s = None
            return
        if self._led_since_s is None:
            self._led_since_s = now_s
            self._peaks.clear()
        self._note(classes, now_s)
        elastic = [each for each in classes if each.elastic and now_s >= self._pause_until_s.get(each.name, 0.0)]
        if not elastic:
            return
        kinds = [self._kind(each) for each in elastic]
        demand = self._demands(elastic, now_s)
        for name, decision in decide_slots(kinds, demand, now_s).items():
            current = sum(slot.phase in (SlotPhase.PROVISIONING, SlotPhase.READY) for slot in demand[name].slots)
            await self._do(name, decision, current)

    # --- what is seen ---

    def _note(self, classes: tuple[base.SlotClass, ...], now_s: float) -> None:
        fleet, backend = self._fleet, self._backend
        for slot_id in fleet.slots.keys() - self._since_s.keys():
            self._refused.pop(backend.class_of(slot_id), None)
        self._since_s = {slot_id: self._since_s.get(slot_id, now_s) for slot_id in fleet.slots}
        self._empty_since_s = {
            slot_id: self._empty_since_s.get(slot_id, now_s) for slot_id in fleet.slots if not fleet.count_on(slot_id)
        }
        coming = backend.coming
        for slot_id, asked_s in list(self._asked_s.items()):
            if slot_id not in coming:
                del self._asked_s[slot_id]
                if slot_id in fleet.slots:
                    self._came(backend.class_of(slot_id), now_s - asked_s)
        for slot_id, since_s in coming.items():
            self._asked_s.setdefault(slot_id, now_s - since_s)
        used: Counter[str] = Counter()
        for slot_id in fleet.slots:
            used[backend.class_of(slot_id)] += fleet.count_on(slot_id)
        for each in classes:
            self._peaks.setdefault(each.name, Peaks()).note(now_s, used[each.name])

    def _came(self, class_name: str, seconds: float) -> None:
        known = self._provision_s.get(class_name)
        self._provision_s[class_name] = seconds if known is None else known + NEW * (seconds - known)

    def _kind(self, slots: base.SlotClass) -> SlotClass:
        return SlotClass(
            name=slots.name,
            devices=slots.most_replicas or slots.devices,
            min_slots=slots.least,
            max_slots=slots.most,
            provision_s=self._provision_s.get(slots.name, slots.assumed_s),
            keep_empty_s=self._hold_s or None,
        )

    def _demands(self, classes: Iterable[base.SlotClass], now_s: float) -> dict[str, SlotDemand]:
        """Of every class, from one look at the slots: there may be a class a function."""
        fleet, views = self._fleet, self._views(now_s)
        wishes: defaultdict[str, list[Unplaced]] = defaultdict(list)
        came_s: defaultdict[str, float] = defaultdict(float)
        for slot_id, since_s in self._since_s.items():
            name = self._backend.class_of(slot_id)
            came_s[name] = max(came_s[name], since_s)
        for wish in fleet.placing.still_unplaced(now_s).values():
            # NOTE: a wish from before a slot came has not been tried on that slot: it finds room there and is over, or
            # is repeated. Counted as it stands it would have one slot more made than anybody needs.
            if wish.at_s > came_s[wish.work.kind]:
                wishes[wish.work.kind].append(wish)
        in_sight = fleet.in_sight
        return {
            each.name: SlotDemand(
                slots=tuple(views[each.name]),
                unplaced=tuple(wish.work.devices for wish in wishes[each.name] for _ in range(wish.count)),
                waiting=sum(wish.work.waiting for wish in wishes[each.name]),
                peaks=self._peaks[each.name].steps(),
                watched_s=now_s - (self._led_since_s or now_s),
                expected=self.expected(each.name),
                complete=in_sight,
                seen_s=now_s,
            )
            for each in classes
        }

    def _views(self, now_s: float) -> defaultdict[str, list[SlotView]]:
        """Slots by class, those that are coming behind those that are there."""
        fleet, backend = self._fleet, self._backend
        leaving = backend.leaving
        views: defaultdict[str, list[SlotView]] = defaultdict(list)
        for slot_id, state in fleet.slots.items():
            view = SlotView(
                slot_id,
                SlotPhase.DRAINING if slot_id in leaving or fleet.is_closed(slot_id) else SlotPhase.READY,
                self._since_s.get(slot_id, now_s),
                fleet.count_on(slot_id),
                self._empty_since_s.get(slot_id),
                state.pool_used_bytes,
            )
            views[backend.class_of(slot_id)].append(view)
        for slot_id, since_s in backend.coming.items():
            if since_s < LOST_S and slot_id not in fleet.slots:
                views[backend.class_of(slot_id)].append(SlotView(slot_id, SlotPhase.PROVISIONING, now_s - since_s))
        return views

    # --- what is done ---

    async def _do(self, name: str, decision: SlotDecision, current: int) -> None:
        self._tell(name, decision, current)
        try:
            missing = decision.desired - current
            if missing > 0 and not await self._backend.add_slots(name, missing):
                self._pause(name, f"no slot of class {name!r} can be had")
            for slot_id in decision.victims:
                if not self._fleet.on(slot_id):
                    await self._backend.remove_slot(slot_id)
        except SlotUnavailable as error:
            self._pause(name, str(error), error.again_s)
        except StokerError as error:
            self._pause(name, str(error))

    def _pause(self, name: str, why: str, again_s: float | None = None) -> None:
        logger.warning("event=slots_refused class=%s error=%s", name, why)
        self._told.pop(name, None)
        self._refused[name] = self._refused.get(name, 0) + 1
        self._pause_until_s[name] = time.monotonic() + (AGAIN_S if again_s is None else again_s)

    def _tell(self, name: str, decision: SlotDecision, current: int) -> None:
        told = f"{decision.reason}:{current}:{decision.desired}"
        if self._told.get(name) == told:
            return
        self._told[name] = told
        if decision.desired == current and decision.reason in _QUIET:
            return
        logger.info(
            "event=slots class=%s have=%d desired=%d reason=%s detail=%s",
            name, current, decision.desired, decision.reason, decision.detail,
        )  # fmt: skip
        inputs = {**decision.inputs, "class": name, "have": current, "desired": decision.desired}
        if decision.victims:
            inputs["victims"] = ",".join(decision.victims)
        reason = f"{decision.reason}: {decision.detail}"
        self.last.append({"at_us": time.time_ns() // 1000, "reason": reason, "inputs": inputs})
        self._decisions.record("slots", None, None, None, reason, inputs)
