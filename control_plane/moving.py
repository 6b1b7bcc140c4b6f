"""Idle replicas that stay anyway (`min_replicas`) are moved together: so that a slot becomes empty and is given back,
or something that waits finds room. What is not kept needs no move, as it ends by itself.

    plan -> a successor is started at its new place -> it is ready -> the idle one ends

Plans are `autoscaler.defragmenting`'s. Limits: one plan at a time; a move whose replica has got work meanwhile, or
whose successor fails, is left to the control loop, which ends what is too much.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from autoscaler.defragmenting import Move, Plan, to_empty, to_make_room
from autoscaler.placement import Placement
from autoscaler.work import Work
from control_plane.backends.base import Backend
from control_plane.decisions import Decisions
from control_plane.fleet import GONE, Fleet
from control_plane.placing import CPU, CUDA, place_of
from function_runtime.protocol import ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
IDLE_S: Final = 5.0
"""What was used more lately is not moved: where one request came, another may."""
HELD_S: Final = 600.0
"""For how long what stays anyway is taken to hold its slot."""
ANEW_S: Final = 60.0
"""After this long a fleet that has not changed is looked at all the same: memory and forecasts move without a word."""
GIVEN_UP_S: Final = 120.0
"""A move that takes longer has failed."""


class Moves:
    def __init__(
        self,
        fleet: Fleet,
        backend: Backend,
        decisions: Decisions,
        leads: Callable[[], bool],
        end: Callable[[str, str], bool],
    ) -> None:
        self._fleet = fleet
        self._backend = backend
        self._decisions = decisions
        self._leads = leads
        self._end = end
        """Drains a replica, by its id, for a reason."""
        self._under_way: dict[str, float] = {}
        """Successors, and since when they start (`Fleet.successors` has whose place they take)."""
        self._idle_since_s: dict[str, float] = {}
        self._in_vain: tuple[object, float] = (None, float("-inf"))
        """What was looked at when there was nothing to move, and when."""
        self._noted: object = None
        """What had changed how often when those that are idle were last looked for."""
        fleet.watchers.append(self._changed)

    async def look(self) -> None:
        now_s = time.monotonic()
        self._note(now_s)
        if not self._leads() or not self._fleet.in_sight or self._under_way:
            return
        placing = self._fleet.placing
        idle = [each for each, since_s in self._idle_since_s.items() if now_s - since_s >= IDLE_S]
        seen = (placing.changes, idle, list(placing.unplaced))
        if seen == self._in_vain[0] and now_s - self._in_vain[1] < ANEW_S:
            return
        for kind in (CPU, CUDA):
            plan = self._plan(kind, now_s)
            if plan is not None:
                self._begin(plan, kind, now_s)
                return
        self._in_vain = (seen, now_s)

    def _note(self, now_s: float) -> None:
        fleet, in_flight = self._fleet, self._fleet.placing.in_flight
        seen = (fleet.placing.changes, fleet.placing.turns())
        if seen != self._noted:
            self._noted = seen
            ready = (s.replica_id for s in fleet.living() if s.state is ReplicaState.READY)
            idle = [replica_id for replica_id in ready if not in_flight(replica_id)]
            self._idle_since_s = {replica_id: self._idle_since_s.get(replica_id, now_s) for replica_id in idle}
        for successor, since_s in list(self._under_way.items()):
            status = fleet.replicas.get(successor)
            if status is None or status.state in GONE or now_s - since_s > GIVEN_UP_S:
                self._take_out(successor)

    def _take_out(self, successor: str) -> str | None:
        """From now on it counts like any other."""
        self._under_way.pop(successor, None)
        return self._fleet.successors.pop(successor, None)

    def _movable(self, kind: str, now_s: float) -> dict[str, Work]:
        placing, found = self._fleet.placing, {}
        for replica_id, since_s in self._idle_since_s.items():
            status = self._fleet.replicas[replica_id]
            key = (status.spec.tenant, status.function)
            stays = len(self._fleet.living(key)) <= placing.kept(key)
            if stays and now_s - since_s >= IDLE_S and place_of(status.spec)[0] == kind:
                found[replica_id] = placing.work(status.spec)
        return found

    def _plan(self, kind: str, now_s: float) -> Plan | None:
        fleet = self._fleet
        wishes = list(fleet.placing.still_unplaced(now_s).values())
        there = Counter(map(self._backend.class_of, fleet.slots))
        spare = [each for each in self._backend.classes if each.elastic and there[each.name] > each.least]
        # What follows is a look at every idle replica.
        if not (wishes or spare) or not (works := self._movable(kind, now_s)):
            return None
        homes = list(fleet.placing.homes(now_s, kind))
        for wish in wishes:
            plan = to_make_room(wish.work, homes, works, now_s)
            if plan is not None:
                return plan
        for slots in spare:
            alike = [home for home in homes if home.kind == slots.name]
            if len(alike) > slots.least:
                plan = to_empty(alike, works, HELD_S, now_s)
                if plan is not None:
                    return plan
        return None

    def _begin(self, plan: Plan, kind: str, now_s: float) -> None:
        for move in plan.moves:
            status = self._fleet.replicas.get(move.replica_id)
            if status is not None:
                self._move(status, move, plan, now_s)

    def _move(self, status: ReplicaStatus, move: Move, plan: Plan, now_s: float) -> None:
        device = status.spec.options.device.partition(":")[0]
        options = msgspec.structs.replace(status.spec.options, device=device)
        successor = "rep-" + secrets.token_hex(6)
        spec = msgspec.structs.replace(status.spec, replica_id=successor, peers=(), options=options)
        self._under_way[successor] = now_s
        self._fleet.successors[successor] = move.replica_id
        logger.info("event=move replica=%s from=%s to=%s", move.replica_id, move.from_slot, move.to_slot)
        self._decisions.record(
            "move", status.function, move.replica_id, None, plan.reason,
            {"from": move.from_slot, "to": move.to_slot, "successor": successor,
             "cost_s": round(plan.cost_s, 3), "worth_s": round(plan.worth_s, 3)},
            tenant=status.spec.tenant,
        )  # fmt: skip
        placement = Placement(move.to_slot, move.expected_s, plan.reason, devices=move.devices)
        self._fleet.start_replica(placement, spec)

    def _changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        if status.state is not ReplicaState.READY and status.state not in GONE:
            return
        replica_id = self._take_out(status.replica_id)
        if replica_id and status.state is ReplicaState.READY and not self._fleet.placing.in_flight(replica_id):
            self._end(replica_id, f"moved: {status.replica_id} has its place")
