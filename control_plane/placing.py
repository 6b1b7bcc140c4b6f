"""The fleet as placement sees it: every slot with its device, what lies in its pool, what starts and runs there.

`place` asks `autoscaler.placement` and remembers what found no room (`unplaced`), which is what new slots are for.
Limits: a slot whose agent does not tell of devices counts as one, as large as the memory that is free there; loads of
other control planes' starts are seen when the slot tells of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from autoscaler.homes import ASSUMED_LOAD, DISK, MAKE, PEER, Device, Homes, Resident, SlotHome
from autoscaler.placement import MayEnd, Placement, place
from autoscaler.room import loss_s
from autoscaler.work import Work
from control_plane.kv_grants import Holder, KvGrants
from control_plane.measured import Measured
from function_runtime.protocol import ReplicaSpec, ReplicaState, ReplicaStatus, SlotState

if TYPE_CHECKING:
    from control_plane.backends.base import Backend
    from control_plane.fleet import Fleet
    from control_plane.lanes import FunctionKey

AGE_S: Final = 20.0
"""Free memory and forecasts move without a word: what is older is looked at by who needs it."""
ROUND_S: Final = 8.0
"""In so long `freshen` goes through all slots, so that who waits does not wait for a look at all of them."""
FRESHEN_S: Final = 0.5
"""Its pause."""
FRESHENED_AT_ONCE: Final = 8
"""Slots, before anything else runs."""
SOON_S: Final = 0.1
"""What was looked at so lately is not looked at again where there is no room."""
ROOM_WAIT_S: Final = 30.0
NO_ROOM_AGAIN_S: Final = 1.0
"""Memory freed by others raises no event here: this often a start that found no room is tried again."""
AGAIN_MOST_S: Final = 2.5
"""Where many found none: less than `UNPLACED_S`, in which each has to be tried again."""
TRIED_A_SECOND: Final = 400
UNPLACED_S: Final = 3.0
"""A wish for room that was not repeated for this long is over."""
RESUME_S: Final = 2.0
"""What a request loses when its replica has to end: parked, and gone on with elsewhere."""
CPU: Final = "cpu"
CUDA: Final = "cuda"
_STARTING: Final = frozenset({ReplicaState.STARTING, ReplicaState.LOADING})


def place_of(spec: ReplicaSpec) -> tuple[str, int]:
    """Kind and number of the device that a replica was started for."""
    kind, _, index = spec.options.device.partition(":")
    return kind, int(index) if index.isdigit() else 0


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
        self.grants = KvGrants()
        self._homes = {CPU: Homes(), CUDA: Homes()}
        """By kind of device."""
        self._changed: set[str] = set()
        self.changes = 0
        """How often something was told to have changed: who found nothing to do need not look again before."""
        self._loading: dict[str, frozenset[str]] = {}
        """By slot: checkpoints on their way into its pool."""
        self._loads_of: Counter[str] = Counter()
        """Slots that load a checkpoint now."""
        self._shut_before: frozenset[str] = frozenset()
        self._made_s = float("-inf")
        self._looked_s: dict[str, float] = {}
        """By class of slots: when they were last looked at for somebody who found no room."""
        self._round: tuple[float, list[str]] = (float("-inf"), [])
        """When `freshen` began its round, and which slots it has left."""
        self._seen: dict[str, tuple[object, ...]] = {}
        """What moves without a word of each slot, as `freshen` saw it when it last had it looked at."""
        self._seen_chances: tuple[int, Mapping[str, float]] = (0, {})
        self.specs = 0
        """How often a function's spec changed, which may say another priority and how many replicas it keeps."""
        self.unplaced: dict[FunctionKey, Unplaced] = {}
        self.on_no_room: Callable[[], None] = lambda: None
        """Told when something has just found no room."""
        self.on_room: Callable[[FunctionKey], None] = lambda key: None
        """Told of a function that found none, when something has ended."""
        self.in_flight: Callable[[str], int] = lambda replica_id: 0
        """Requests that a replica runs."""
        self.turns: Callable[[], object] = object
        """Equal as long as no replica runs anything else than before; not known: never."""
        self.chances: Mapping[str, float] = {}
        """Of each checkpoint's being wanted within the horizon of `autoscaler.pooling`, where that is known."""
        self.expected: Callable[[FunctionKey, float], float] = lambda key, horizon_s: 0.0
        """Arrivals that a forecast expects within so many seconds."""
        self.kept: Callable[[FunctionKey], int] = lambda key: 0
        """Replicas a function must have: nobody ends them for another."""
        self.priority: Callable[[FunctionKey], int] = lambda key: 0
        self.load: Callable[[FunctionKey], tuple[float, ...]] = lambda key: ()
        """Predicted busy share of one of its replicas' devices, per step of the horizon."""
        self.context_tokens: Callable[[FunctionKey], float] = lambda key: 0.0
        """Of a request, as predicted; 0: not known."""
        self.own_kv: Callable[[FunctionKey], bool] = lambda key: False
        """Whether a function's spec says how much KV its replicas have: that is not changed."""
        self.kind_of: Callable[[FunctionKey], str] = lambda key: ""
        """Class of slots that a function needs."""
        self.room_wait_s: Callable[[str], float] = lambda kind: ROOM_WAIT_S
        """After how long there is room without anybody's having to go, in a class of slots."""
        self.may_end: MayEnd | None = None
        """Who may be ended for whom (`autoscaler.shares`); None: by priority, and idle equals."""

    def work(self, spec: ReplicaSpec, *, devices: int = 1, waiting: int = 0, needed_bytes: int = 0) -> Work:
        key, measured = (spec.tenant, spec.function), self.measured
        kind = self.kind_of(key)
        self.grants.learn(spec.identity, spec.manifest_path)
        return Work(
            function=spec.function,
            tenant=spec.tenant,
            identity=spec.identity,
            kind=kind,
            devices=devices,
            device_bytes=needed_bytes or self.grants.device_bytes(self._holder(spec)),
            weights_bytes=measured.weights_bytes.get(spec.identity, 0),
            make_s=measured.make_s(spec.identity),
            start_s=measured.start_s(spec.identity),
            fork_s=measured.fork_s,
            waiting=waiting,
            room_wait_s=self.room_wait_s(kind),
            priority=self.priority(key),
            load=self.load(key),
        )

    def changed(self, slot_id: str) -> None:
        """What is there, or whether it is there at all."""
        self._changed.add(slot_id)
        self.changes += 1

    @property
    def again_s(self) -> float:
        """Until a start that has found no room is tried again: how many are tried in a second has a bound."""
        return min(max(NO_ROOM_AGAIN_S, len(self.unplaced) / TRIED_A_SECOND), AGAIN_MOST_S)

    def room_came(self) -> None:
        for key in self.unplaced:
            self.on_room(key)

    def place(self, work: Work, count: int = 1, device: str = CPU) -> Placement | None:
        """None: there is no room. Then, and where others have to go for it, new slots are asked for, where they can be
        had, for `count` replicas."""
        key, now_s = (work.tenant, work.function), time.monotonic()
        kind = CUDA if device.startswith(CUDA) else CPU
        placement = place(work, self.homes(now_s, kind), now_s, self.may_end)
        looked_s = max(self._made_s, self._looked_s.get(work.kind, float("-inf")))
        if (placement is None and now_s - looked_s > SOON_S) or (placement is not None and placement.victims):
            # Who runs what changes without a word: it is looked at anew before anybody has to go, or nobody can.
            self._looked_s[work.kind] = now_s
            self._changed |= {slot_id for slot_id in self._fleet.slots if self._backend.class_of(slot_id) == work.kind}
            placement = place(work, self.homes(now_s, kind), now_s, self.may_end)
        if placement is not None and not placement.victims:
            self.unplaced.pop(key, None)
            return placement
        known = self.unplaced.get(key)
        self.unplaced[key] = Unplaced(work, count, known.since_s if known is not None else now_s, now_s)
        self.on_no_room()
        return placement

    def still_unplaced(self, now_s: float) -> Mapping[FunctionKey, Unplaced]:
        self.unplaced = {key: wish for key, wish in self.unplaced.items() if now_s - wish.at_s < UNPLACED_S}
        return self.unplaced

    def homes(self, now_s: float, device_kind: str = CPU) -> Homes:
        """Every slot in sight with its devices of a kind; replicas that were only just asked for count. Kept, and made
        anew where something changed, as what has not changed may have been forgotten to be told: everything now and
        then."""
        fleet, backend = self._fleet, self._backend
        if now_s - self._made_s > AGE_S:
            self._made_s = now_s
            self._changed |= fleet.slots.keys() | {home.slot_id for homes in self._homes.values() for home in homes}
        shut = backend.leaving | {slot_id for slot_id in fleet.slots if fleet.is_closed(slot_id)}
        self._changed |= shut ^ self._shut_before
        self._shut_before = shut
        for slot_id in list(self._changed):
            self._changed |= self._note_loads(slot_id)
        bounds = {each.name: each.most_replicas for each in backend.classes} if self._changed else {}
        # Those that load something last: from where depends on what the others hold.
        for slot_id in sorted(self._changed, key=lambda each: each in self._loading):
            state = fleet.slots.get(slot_id)
            self._seen.pop(slot_id, None)
            for kind, homes in self._homes.items():
                if state is None:
                    homes.drop(slot_id)
                    continue
                class_name = backend.class_of(slot_id)
                most = bounds.get(class_name, 0)
                homes.put(self._home(state, slot_id, kind, class_name, most, closed=slot_id in shut))
        self._changed.clear()
        return self._homes[device_kind]

    async def freshen(self) -> None:
        """Looks whether something has moved on some slots, and anew at those: at each once in a round."""
        now_s = time.monotonic()
        if not self._round[1]:
            self._round = (now_s, list(self._fleet.slots))
        begun_s, left = self._round
        bounds = {each.name: each.most_replicas for each in self._backend.classes}
        for _ in range(math.ceil(len(self._fleet.slots) * FRESHEN_S / (ROUND_S * FRESHENED_AT_ONCE))):
            seen = {slot_id: self._look(slot_id, bounds) for slot_id in left[-FRESHENED_AT_ONCE:]}
            del left[-FRESHENED_AT_ONCE:]
            self._changed |= {slot_id for slot_id, now in seen.items() if self._seen.get(slot_id) != now}
            self.homes(now_s)
            self._seen.update(seen)
            await asyncio.sleep(0)
        if not left:
            self._made_s = max(self._made_s, begun_s)

    def _look(self, slot_id: str, bounds: Mapping[str, int]) -> tuple[object, ...]:
        """Of what a home is made from, that which moves without a word: a tenth of what making it costs."""
        version, chances = self._seen_chances
        if chances is not self.chances:
            version += chances != self.chances
            self._seen_chances = version, self.chances
        class_name = self._backend.class_of(slot_id)
        found: list[object] = [version, self.specs, self.measured.seen, class_name, bounds.get(class_name)]
        found.append(self._backend.free_bytes(slot_id))
        for status in self._fleet.on(slot_id):
            key = (status.spec.tenant, status.function)
            found += (status.replica_id, self.in_flight(status.replica_id), self._fleet.count_of(key))
            found += (self.load(key), self.context_tokens(key))
        return tuple(found)

    def having(self, identity: str) -> list[str]:
        """Slots whose pools have a checkpoint ready."""
        self.homes(time.monotonic())
        return [home.slot_id for home in self._homes[CPU].peers(identity)]

    def _note_loads(self, slot_id: str) -> set[str]:
        """Which checkpoints the slot loads; the slots whose pools are read more or less for it than before."""
        state, before = self._fleet.slots.get(slot_id), self._loading.pop(slot_id, frozenset())
        now = frozenset(entry.identity for entry in state.pool if entry.state == "loading") if state else frozenset()
        if now:
            self._loading[slot_id] = now
        self._loads_of.subtract(before)
        self._loads_of.update(now)
        for identity in before | now:
            if not self._loads_of[identity]:
                del self._loads_of[identity]
        return {peer.slot_id for identity in before ^ now for peer in self._homes[CPU].peers(identity)} - {slot_id}

    def _loads(self, slot_id: str) -> dict[str, int]:
        """Loads under way there by the link they share: from its own disk, from another slot's pool where one has it,
        else made anew."""
        state = self._fleet.slots.get(slot_id)
        on_disk, found = frozenset(state.disk if state is not None else ()), dict[str, int]()
        for identity in self._loading.get(slot_id, ()):
            if identity in on_disk:
                tier = DISK
            elif any(peer.slot_id != slot_id for peer in self._homes[CPU].peers(identity)):
                tier = PEER
            else:
                tier = MAKE
            found[tier] = found.get(tier, 0) + 1
        return found

    def _home(
        self, state: SlotState, slot_id: str, device_kind: str, class_name: str, most_replicas: int, *, closed: bool
    ) -> SlotHome:
        living = self._fleet.on(slot_id)
        pool = frozenset(entry.identity for entry in state.pool if entry.state == "ready")
        return SlotHome(
            slot_id=slot_id,
            devices=self._devices(state, slot_id, device_kind, living),
            kind=class_name,
            warm_workers=state.warm_workers,
            starting=sum(status.state in _STARTING for status in living),
            replicas=len(living),
            most_replicas=most_replicas,
            pool=pool,
            disk=frozenset(state.disk),
            loading={entry.identity: entry.reload_s for entry in state.pool if entry.state == "loading"},
            bytes_per_s=self.measured.bytes_per_s,
            loads=self._loads(slot_id),
            serving=sum(count for identity, count in self._loads_of.items() if identity in pool),
            closed=closed,
        )

    def _devices(
        self, state: SlotState, slot_id: str, device_kind: str, living: list[ReplicaStatus]
    ) -> tuple[Device, ...]:
        if not state.devices:
            return (self._device(living, self._backend.free_bytes(slot_id)),)
        return tuple(
            self._device(
                [status for status in living if place_of(status.spec) == (device_kind, told.index)], told.free_bytes
            )
            for told in state.devices
            if told.kind == device_kind
        )

    def _device(self, living: list[ReplicaStatus], free_bytes: int) -> Device:
        residents = tuple(self._resident(status) for status in living if status.state is not ReplicaState.DRAINING)
        loads = [self.load((status.spec.tenant, status.function)) or (ASSUMED_LOAD,) for status in living]
        steps = max((len(load) for load in loads), default=0)
        together = tuple(min(sum(load[min(step, len(load) - 1)] for load in loads), 1.0) for step in range(steps))
        # What was only just started has not taken its memory yet, as its slot tells.
        promised = sum(self._promised_bytes(status) for status in living if status.state in _STARTING)
        return Device(max(free_bytes - promised, 0), residents, together)

    # --- the memory of a device ---

    def _holder(self, spec: ReplicaSpec, has_bytes: int = 0, *, yields: bool = False) -> Holder:
        key = (spec.tenant, spec.function)
        weights_bytes = self.measured.weights_bytes.get(spec.identity, 0)
        weight = max(1.0 + self.priority(key), 0.1)
        return Holder(spec, weights_bytes, weight, self.context_tokens(key), has_bytes, yields)

    def _holder_of(self, status: ReplicaStatus) -> Holder:
        serves = status.state is ReplicaState.READY and status.kv_bytes > 0
        yields = serves and not self.own_kv((status.spec.tenant, status.function))
        return self._holder(status.spec, status.kv_bytes, yields=yields)

    def _promised_bytes(self, status: ReplicaStatus) -> int:
        return self.grants.device_bytes(self._holder(status.spec))

    def holders(self, slot_id: str, kind: str, index: int) -> list[Holder]:
        """Everybody who lives on a device, whoever is only just starting there too."""
        return [self._holder_of(each) for each in self._fleet.on(slot_id) if place_of(each.spec) == (kind, index)]

    def memory_bytes(self, slot_id: str, kind: str, index: int, holders: Sequence[Holder]) -> int:
        """That these can have together; 0: not known."""
        state = self._fleet.slots.get(slot_id)
        told = state.devices if state is not None else ()
        device = next((each for each in told if (each.kind, each.index) == (kind, index)), None)
        if device is None:
            return 0
        # A machine's memory is not replicas' alone: what is free, and what those that are there have been given.
        here_bytes = sum(self.grants.device_bytes(holder) for holder in holders)
        return device.total_bytes if kind == CUDA else device.free_bytes + here_bytes

    def fitted(self, spec: ReplicaSpec, placement: Placement) -> ReplicaSpec:
        """The replica as it starts there: on which device, and with how much KV where others share that."""
        state = self._fleet.slots.get(placement.choice)
        kind, index = place_of(spec)
        if placement.devices and ":" not in spec.options.device:
            index = placement.devices[0]
        told = (
            next((each for each in state.devices if (each.kind, each.index) == (kind, index)), None) if state else None
        )
        if told is None:
            return spec
        device = f"{kind}:{index}" if kind == CUDA else spec.options.device
        options = msgspec.structs.replace(spec.options, device=device)
        spec = msgspec.structs.replace(spec, options=options)
        others = [
            each for each in self.holders(placement.choice, kind, index) if each.spec.replica_id != spec.replica_id
        ]
        total_bytes = self.memory_bytes(placement.choice, kind, index, others)
        kv_bytes = self.grants.grant(self._holder(spec), others, total_bytes)
        return msgspec.structs.replace(spec, options=msgspec.structs.replace(options, kv_bytes=kv_bytes))

    def _resident(self, status: ReplicaStatus) -> Resident:
        key, in_flight = (status.spec.tenant, status.function), self.in_flight(status.replica_id)
        measured, identity = self.measured, status.spec.identity
        reload_s = measured.start_s(identity)  # its weights stay in the pool
        lost_s = loss_s(in_flight, RESUME_S, self.chances.get(identity, 1.0), reload_s)
        if self._fleet.count_of(key) <= self.kept(key):
            lost_s = float("inf")
        holder = self._holder_of(status)
        # On CPUs memory for KV is taken as tokens come: what has not come cannot be given up.
        least_bytes = self.grants.least_bytes(holder) if place_of(status.spec)[0] == CUDA else None
        return Resident(
            replica_id=status.replica_id,
            function=status.function,
            tenant=status.spec.tenant,
            priority=self.priority(key),
            kv_bytes=holder.kv_bytes,
            least_kv_bytes=holder.kv_bytes if least_bytes is None else least_bytes,
            in_flight=in_flight,
            loss_s=lost_s,
            starting=status.state in _STARTING,
        )
