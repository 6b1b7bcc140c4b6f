"""Drains carried out: functions are paused, requests put back to wait, replicas ended once they are empty.

Every gateway parks what it owns (`apply`); replicas are ended by whoever decides about them (`tend`, from the control
loop). A drained function's requests wait until it is resumed, none of their limits running; those of a drained slot go
on at another slot and wait for it like any other. A slot that terminates is closed likewise; its own agent drains it,
by the grace that only it knows. Limits: a request that its replica does not park in time counts as lost and is carried
on all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from control_plane.decisions import Decisions
from control_plane.dispatch import Dispatcher
from control_plane.drains import Drain, Drains
from control_plane.fleet import Fleet
from control_plane.lanes import FunctionKey, Seat
from control_plane.seating import Seating
from function_runtime.protocol import ReplicaState, ReplicaStatus

PARK_S: Final = 15.0
"""How long a replica may take to store what it has of its requests."""


class Parking:
    def __init__(
        self, drains: Drains, dispatcher: Dispatcher, fleet: Fleet, seating: Seating, decisions: Decisions
    ) -> None:
        self._drains = drains
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._seating = seating
        self._decisions = decisions
        self._paused: frozenset[FunctionKey] = frozenset()
        self._slots: frozenset[str] = frozenset()
        self.preempted: Counter[str] = Counter()
        """Replicas that made room for others, by function."""
        self.poke: Callable[[FunctionKey], None] = lambda key: None
        """Look at a function anew."""
        drains.on_change = self.apply
        fleet.is_closed = self.is_closed
        fleet.on_victim = self.make_room

    def is_closed(self, slot_id: str) -> bool:
        """Whether a slot takes no new replica."""
        return slot_id in self._slots or self._fleet.is_terminating(slot_id)

    def apply(self) -> None:
        """Bring what this gateway does in line with the drains that are on."""
        functions, slots = self._drains.functions(), self._drains.slots()
        changed = self._paused ^ functions.keys()
        for key in changed:
            drain = functions.get(key)
            self._dispatcher.pause(key, "" if drain is None else _reason(drain))
        self._paused = frozenset(functions)
        resumed = self._slots - slots.keys()
        self._slots = frozenset(slots)
        for seat in self._seats():
            self._park(seat)
        for key in changed:
            self.poke(key)
        for status in self._fleet.living():
            if self._fleet.slot_of.get(status.replica_id) in self._slots:
                self.poke((status.spec.tenant, status.function))
        if resumed:
            for lane in self._dispatcher.lanes:
                self.poke(lane.key)

    def _seats(self) -> list[Seat]:
        return [seat for lane in self._dispatcher.lanes for seat in lane.seats.values()]

    def _why(self, key: FunctionKey, slot_id: str | None) -> Drain | None:
        found = self._drains.functions().get(key)
        return found or self._drains.slots().get(slot_id or "")

    def _park(self, seat: Seat) -> None:
        drain = self._why(seat.key, seat.slot_id)
        if drain is not None:
            self._dispatcher.park_seat(seat, _reason(drain), PARK_S)

    def make_room(self, replica_id: str, reason: str) -> None:
        """Somebody else needs its place more: what it runs is parked and goes on elsewhere, or later."""
        status = self._fleet.replicas.get(replica_id)
        if status is None or status.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            return
        seat = self._seating.seat(replica_id)
        if seat is not None:
            self._dispatcher.park_seat(seat, reason, PARK_S)
        if status.state is ReplicaState.DRAINING:
            return
        self.preempted[status.function] += 1
        self._decisions.record("preempt", status.function, replica_id, None, reason, {}, tenant=status.spec.tenant)
        self._fleet.end_replica(replica_id, PARK_S, reason)

    def tend(self, key: FunctionKey, living: Iterable[ReplicaStatus]) -> bool:
        """End the replicas that a drain is about; True: the function is drained, there is nothing else to decide."""
        for status in living:
            drain = self._why(key, self._fleet.slot_of.get(status.replica_id))
            if drain is None:
                continue
            seat = self._seating.seat(status.replica_id)
            if seat is not None:
                self._park(seat)
            if status.state is not ReplicaState.DRAINING:
                self._decisions.record(
                    "drain", key[1], status.replica_id, None, _reason(drain), {"kind": drain.kind}, tenant=key[0]
                )
                self._fleet.end_replica(status.replica_id, PARK_S, _reason(drain))
        return key in self._paused


def _reason(drain: Drain) -> str:
    return f"the {drain.kind} {drain.name} is drained" + (f" ({drain.reason})" if drain.reason else "")
