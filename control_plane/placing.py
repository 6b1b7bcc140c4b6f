"""The fleet as placement sees it: every slot with its device, what lies in its pool, what starts and runs there.

`place` asks `autoscaler.placement` and remembers what found no room (`unplaced`), which is what new slots are for.
Limits: a slot counts as one device as large as the memory that is free there, unless its agent tells of devices; loads
of other control planes' starts are seen when the slot tells of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from autoscaler.homes import ASSUMED_LOAD, Device, Homes, Resident, SlotHome
from autoscaler.placement import MayEnd, Placement, place
from autoscaler.room import loss_s
from autoscaler.work import Work
from control_plane.measured import Measured
from function_runtime.protocol import ReplicaSpec, ReplicaState, ReplicaStatus, SlotState

if TYPE_CHECKING:
    from control_plane.backends.base import Backend
    from control_plane.fleet import Fleet
    from control_plane.lanes import FunctionKey

AGE_S: Final = 10.0
"""Free memory and forecasts move without a word: no older than this."""
SOON_S: Final = 0.1
"""What was looked at so lately is not looked at again where there is no room."""
ROOM_WAIT_S: Final = 30.0
UNPLACED_S: Final = 3.0
"""A wish for room that was not repeated for this long is over."""
RESUME_S: Final = 2.0
"""What a request loses when its replica has to end: parked, and gone on with elsewhere."""
_STARTING: Final = frozenset({ReplicaState.STARTING, ReplicaState.LOADING})


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Of one function: replicas that nobody had room for."""

    work: Work
    count: int
    since_s: float
    at_s: float


class Placing:
    def __init__(self, fleet: Fleet, backend: Backend) -> None:
        self._fleet = fleet
        self._backend = backend
        self.measured = Measured()
        self._homes = Homes()
        self._changed: set[str] = set()
        self._shut_before: frozenset[str] = frozenset()
        self._made_s = float("-inf")
        self.unplaced: dict[FunctionKey, Unplaced] = {}
        self.on_no_room: Callable[[], None] = lambda: None
        """Told when something has just found no room."""
        self.on_room: Callable[[FunctionKey], None] = lambda key: None
        """Told of a function that found none, when something has ended."""
        self.in_flight: Callable[[str], int] = lambda replica_id: 0
        """Requests that a replica runs."""
        self.chances: Mapping[str, float] = {}
        """Of each checkpoint's being wanted within the horizon of `autoscaler.pooling`, where that is known."""
        self.expected: Callable[[FunctionKey, float], float] = lambda key, horizon_s: 0.0
        """Arrivals that a forecast expects within so many seconds."""
        self.kept: Callable[[FunctionKey], int] = lambda key: 0
        """Replicas a function must have: nobody ends them for another."""
        self.priority: Callable[[FunctionKey], int] = lambda key: 0
        self.load: Callable[[FunctionKey], tuple[float, ...]] = lambda key: ()
        """Predicted busy share of one of its replicas' devices, per step of the horizon."""
        self.room_wait_s: Callable[[str], float] = lambda kind: ROOM_WAIT_S
        """After how long there is room without anybody's having to go, in a class of slots."""
        self.may_end: MayEnd | None = None
        """Who may be ended for whom (`autoscaler.shares`); None: by priority, and idle equals."""

    def work(self, spec: ReplicaSpec, *, devices: int = 1, waiting: int = 0, needed_bytes: int = 0) -> Work:
        key, measured = (spec.tenant, spec.function), self.measured
        return Work(
            function=spec.function,
            tenant=spec.tenant,
            identity=spec.identity,
            devices=1,  # a slot's devices are one home here: see the module's limits
            device_bytes=needed_bytes or spec.options.kv_bytes,
            weights_bytes=measured.weights_bytes.get(spec.identity, 0),
            make_s=measured.make_s(spec.identity),
            start_s=measured.start_s(spec.identity),
            fork_s=measured.fork_s,
            waiting=waiting,
            room_wait_s=self.room_wait_s(""),
            priority=self.priority(key),
            load=self.load(key),
        )

    def changed(self, slot_id: str) -> None:
        """What is there, or whether it is there at all."""
        self._changed.add(slot_id)

    def room_came(self) -> None:
        for key in self.unplaced:
            self.on_room(key)

    def place(self, work: Work, count: int = 1) -> Placement | None:
        """None: there is no room. Then, and where others have to go for it, new slots are asked for, where they can be
        had, for `count` replicas."""
        key, now_s = (work.tenant, work.function), time.monotonic()
        homes = self.homes(now_s)
        placement = place(work, homes, now_s, self.may_end)
        if (placement is None and now_s - self._made_s > SOON_S) or (placement is not None and placement.victims):
            # Who runs what changes without a word: it is looked at anew before anybody has to go, or nobody can.
            self._made_s = float("-inf")
            placement = place(work, self.homes(now_s), now_s, self.may_end)
        if placement is not None and not placement.victims:
            self.unplaced.pop(key, None)
            return placement
        known = self.unplaced.get(key)
        self.unplaced[key] = Unplaced(work, count, known.since_s if known is not None else now_s, now_s)
        if known is None or known.count != count:
            self.on_no_room()
        return placement

    def still_unplaced(self, now_s: float) -> Mapping[FunctionKey, Unplaced]:
        self.unplaced = {key: wish for key, wish in self.unplaced.items() if now_s - wish.at_s < UNPLACED_S}
        return self.unplaced

    def homes(self, now_s: float) -> Homes:
        """Every slot in sight; those that were only just asked for count. Kept, and made anew where something changed,
        as what has not changed may have been forgotten to be told: everything now and then."""
        fleet, backend, homes = self._fleet, self._backend, self._homes
        if now_s - self._made_s > AGE_S:
            self._made_s = now_s
            self._changed |= fleet.slots.keys() | {home.slot_id for home in homes}
        shut = backend.leaving | self._shut(fleet)
        self._changed |= shut ^ self._shut_before
        self._shut_before = shut
        bounds = {each.name: each.most_replicas for each in backend.classes}
        for slot_id in self._changed:
            state = fleet.slots.get(slot_id)
            if state is None:
                homes.drop(slot_id)
                continue
            kind = backend.class_of(slot_id)
            homes.put(self._home(slot_id, state, fleet.on(slot_id), kind, bounds.get(kind, 0), closed=slot_id in shut))
        self._changed.clear()
        return homes

    def _shut(self, fleet: Fleet) -> frozenset[str]:
        return frozenset(slot_id for slot_id in fleet.slots if fleet.is_closed(slot_id))

    def _home(
        self,
        slot_id: str,
        state: SlotState,
        living: list[ReplicaStatus],
        kind: str,
        most_replicas: int,
        *,
        closed: bool,
    ) -> SlotHome:
        starting = sum(status.state in _STARTING for status in living)
        loading = {
            entry.identity: entry.reload_s for entry in state.pool if entry.state == "loading" and entry.identity
        }
        return SlotHome(
            slot_id=slot_id,
            devices=(self._device(slot_id, living),),
            kind=kind,
            warm_workers=state.warm_workers,
            starting=starting,
            replicas=len(living),
            most_replicas=most_replicas,
            pool=frozenset(entry.identity for entry in state.pool if entry.state == "ready"),
            loading=loading,
            bytes_per_s=self.measured.bytes_per_s,
            closed=closed,
        )

    def _device(self, slot_id: str, living: list[ReplicaStatus]) -> Device:
        residents = tuple(self._resident(status) for status in living if status.state is not ReplicaState.DRAINING)
        loads = [self.load((status.spec.tenant, status.function)) or (ASSUMED_LOAD,) for status in living]
        steps = max((len(load) for load in loads), default=0)
        together = tuple(min(sum(load[min(step, len(load) - 1)] for load in loads), 1.0) for step in range(steps))
        return Device(self._backend.free_bytes(slot_id), residents, together)

    def _resident(self, status: ReplicaStatus) -> Resident:
        key, in_flight = (status.spec.tenant, status.function), self.in_flight(status.replica_id)
        measured, identity = self.measured, status.spec.identity
        reload_s = measured.start_s(identity)  # its weights stay in the pool
        lost_s = loss_s(in_flight, RESUME_S, self.chances.get(identity, 1.0), reload_s)
        if len(self._fleet.living(key)) <= self.kept(key):
            lost_s = float("inf")
        return Resident(
            replica_id=status.replica_id,
            function=status.function,
            tenant=status.spec.tenant,
            priority=self.priority(key),
            kv_bytes=status.spec.options.kv_bytes,
            least_kv_bytes=status.spec.options.kv_bytes,  # an engine keeps what it was started with
            in_flight=in_flight,
            loss_s=lost_s,
            starting=status.state in _STARTING,
        )
