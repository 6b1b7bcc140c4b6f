"""The machines of a simulation: slots with devices, what their pools hold, and how long a start there takes.

Where a start goes is `placement.place`'s to say, as it is live. Pools hold weights by bytes; of those that no replica
of the slot uses, the least recently used go first. What a start takes is drawn from what was measured from the tier
that placement chose; loads of a slot from one tier share its link, so what such a start takes longer than one from the
pool is multiplied by the loads there are when it begins. Replicas of one checkpoint that start in a slot at once load
it once, as a pool does: who comes later waits for the load that is under way. Limits: a slot's disk holds all that it
ever loaded; replicas that share a device do not slow each other down; a pool is read by its own slot, or as the tier
"peer" where starts from there were measured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from autoscaler.homes import DISK, LOADING, PEER, POOL, STORE, Device, Homes, Resident, SlotHome
from autoscaler.placement import Placement, place
from autoscaler.room import MayEnd
from autoscaler.simulator.replica import SimReplica
from autoscaler.simulator.workload import SimFunction
from autoscaler.work import Work

_NEVER_S: Final = 1e9
_SLOW: Final = 1.0
"""Bytes a second of a tier that is not there."""


@dataclass(frozen=True, slots=True)
class Cluster:
    slots: int = 8
    devices_per_slot: int = 8
    device_bytes: int = 80 * 10**9
    pool_bytes: int = 512 * 10**9
    """Host memory of each slot for weights."""
    bytes_per_s: Mapping[str, float] = field(default_factory=lambda: {DISK: 6e9, STORE: 3e9})
    """By tier, as placement expects them; what a start takes is drawn from the function's start times."""
    link_shared: bool = True

    @property
    def devices(self) -> int:
        return self.slots * self.devices_per_slot


@dataclass(slots=True)
class SimSlot:
    slot_id: str
    devices: int
    residents: list[list[SimReplica]] = field(default_factory=list)
    """By device."""
    pool: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Weights by bytes, the least recently used first."""
    disk: set[str] = field(default_factory=set)
    used: dict[str, int] = field(default_factory=dict)
    """Replicas here by function."""
    replicas: int = 0
    starting: int = 0
    empty: int = 0
    """Devices without a replica."""
    loads: dict[str, int] = field(default_factory=dict)
    """Under way, by tier."""
    loading: dict[str, float] = field(default_factory=dict)
    """When the weights that are on their way into the pool will be there."""
    seen: dict[int, Device] = field(default_factory=dict)
    """By device: as placement was last told of it, until it changes."""
    holds: tuple[frozenset[str], frozenset[str]] | None = None
    """What the pool and the disk hold, likewise."""

    def hold(self, function: SimFunction, pool_bytes: int) -> None:
        """The weights are in the pool from now on, if they fit beside what is in use."""
        if function.name not in self.pool:
            self.holds = None
        self.disk.add(function.name)
        if function.name in self.pool:
            self.pool.move_to_end(function.name)
            return
        held = sum(self.pool.values()) + function.model_bytes
        for name in [name for name in self.pool if not self.used.get(name)]:
            if held <= pool_bytes:
                break
            held -= self.pool.pop(name)
        if held <= pool_bytes:
            self.pool[function.name] = function.model_bytes


class Slots:
    """All slots: where a start goes, what it takes, and what is free."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.all = {
            slot_id: SimSlot(
                slot_id,
                cluster.devices_per_slot,
                [[] for _ in range(cluster.devices_per_slot)],
                empty=cluster.devices_per_slot,
            )
            for slot_id in (f"slot{number:04d}" for number in range(cluster.slots))
        }
        self._bytes_per_s = {PEER: _SLOW, **cluster.bytes_per_s}
        self._homes = Homes()
        self._changed = set(self.all)
        self._works: dict[str, Work] = {}
        self.held = 0.0
        """Devices, in shares."""

    def place(
        self,
        function: SimFunction,
        now_s: float,
        may_end: MayEnd | None = None,
        loss_s: Callable[[SimReplica], float] | None = None,
    ) -> Placement | None:
        """Where a replica's first token would come soonest. Without `may_end` nobody has to go for it."""
        if may_end is not None:
            homes = Homes(self._home(slot, loss_s, now_s) for slot in self.all.values())
            return place(self._work(function), homes, now_s, may_end)
        if self.held + function.held_devices > self.cluster.devices + 1e-6:
            return None
        soonest = self._soonest(function)
        if soonest is not None:
            return soonest
        for slot_id in self._changed:
            self._homes.put(self._home(self.all[slot_id], None, now_s))
        # What is left of a load changes by itself.
        self._changed = {slot.slot_id for slot in self.all.values() if slot.loading}
        return place(self._work(function), self._homes, now_s, lambda resident, work: False)

    def _soonest(self, function: SimFunction) -> Placement | None:
        """What `place` answers where nothing can be sooner: the weights in the pool, devices of nobody else's, and no
        other start there. Most starts are like this, and found in a hundredth of the time."""
        if function.device_share < 1.0:
            return None
        for slot in self.all.values():
            if slot.empty >= function.devices and not slot.starting and function.name in slot.pool:
                empty = [index for index, residents in enumerate(slot.residents) if not residents]
                return Placement(
                    slot.slot_id,
                    self._work(function).start_s,
                    "nothing can be sooner",
                    devices=tuple(empty[: function.devices]),
                    tier=POOL,
                )
        return None

    def start(self, number: int, function: SimFunction, placed: Placement, u: float, now_s: float) -> SimReplica:
        """A replica begins to start; `ready_s` is when it will be. `u` in [0, 1) says which of the measured starts."""
        slot, starts = self.all[placed.choice], function.starts
        tier = LOADING if placed.tier != POOL and function.name in slot.loading else placed.tier
        quick_s = starts.draw(u, POOL) if starts.expected_s(POOL) is not None else 0.0
        if tier == LOADING:
            taken_s = max(slot.loading[function.name] - now_s, 0.0) + quick_s
        elif starts.expected_s(tier) is None:
            taken_s = starts.draw(u)
        else:
            taken_s = starts.draw(u, tier)
            others = slot.loads.get(tier, 0)
            if tier != POOL and self.cluster.link_shared and others:
                taken_s += max(taken_s - quick_s, 0.0) * others
        if tier not in (POOL, LOADING):
            slot.loading[function.name] = now_s + max(taken_s - quick_s, 0.0)
        replica = SimReplica(number, function, slot, placed.devices, tier, now_s, now_s + taken_s)
        for index in placed.devices:
            slot.empty -= not slot.residents[index]
            slot.residents[index].append(replica)
            slot.seen.pop(index, None)
        slot.replicas += 1
        slot.starting += 1
        slot.used[function.name] = slot.used.get(function.name, 0) + 1
        if tier not in (POOL, LOADING):
            slot.loads[tier] = slot.loads.get(tier, 0) + 1
        self.held += function.held_devices
        self._changed.add(slot.slot_id)
        return replica

    def started(self, replica: SimReplica, *, ready: bool) -> None:
        """Its start is over: it is ready, or was given up."""
        slot = replica.slot
        slot.starting -= 1
        for index in replica.devices:
            slot.seen.pop(index, None)
        if replica.tier not in (POOL, LOADING):
            slot.loads[replica.tier] -= 1
            slot.loading.pop(replica.function.name, None)
        if ready:
            slot.hold(replica.function, self.cluster.pool_bytes)
        self._changed.add(slot.slot_id)

    def free(self, replica: SimReplica) -> None:
        """Its devices are free."""
        slot, function = replica.slot, replica.function
        for index in replica.devices:
            slot.residents[index].remove(replica)
            slot.empty += not slot.residents[index]
            slot.seen.pop(index, None)
        slot.replicas -= 1
        slot.used[function.name] -= 1
        self.held -= function.held_devices
        self._changed.add(slot.slot_id)

    def _work(self, function: SimFunction) -> Work:
        work = self._works.get(function.name)
        if work is None:
            start_s = function.starts.expected_s(POOL) or function.starts.expected_s() or 0.0
            work = self._works[function.name] = Work(
                function=function.name,
                tenant=function.tenant,
                identity=function.name,
                devices=function.devices,
                device_bytes=self._bytes(function),
                weights_bytes=function.model_bytes,
                make_s=_NEVER_S,
                in_store=True,
                start_s=start_s,
                fork_s=0.0,
                priority=function.priority,
                waiting=1,
            )
        return work

    def _bytes(self, function: SimFunction) -> int:
        return int(self.cluster.device_bytes * function.device_share)

    def _home(self, slot: SimSlot, loss_s: Callable[[SimReplica], float] | None, now_s: float) -> SlotHome:
        if loss_s is not None:
            devices = [self._device(residents, loss_s) for residents in slot.residents]
        else:
            for index, residents in enumerate(slot.residents):
                if index not in slot.seen:
                    slot.seen[index] = self._device(residents, None)
            devices = [slot.seen[index] for index in range(slot.devices)]
        if slot.holds is None:
            slot.holds = (frozenset(slot.pool), frozenset(slot.disk))
        return SlotHome(
            slot_id=slot.slot_id,
            devices=tuple(devices),
            warm_workers=1 << 20,
            starting=slot.starting,
            replicas=slot.replicas,
            pool=slot.holds[0],
            disk=slot.holds[1],
            bytes_per_s=self._bytes_per_s,
            loading={name: max(until_s - now_s, 0.0) for name, until_s in slot.loading.items()},
            loads=dict(slot.loads),
        )

    def _device(self, residents: list[SimReplica], loss_s: Callable[[SimReplica], float] | None) -> Device:
        seen = tuple(
            Resident(
                replica_id=str(each.number),
                function=each.function.name,
                tenant=each.function.tenant,
                priority=each.function.priority,
                nbytes=self._bytes(each.function),
                in_flight=len(each.heap),
                loss_s=0.0 if loss_s is None else loss_s(each),
                starting=not each.is_ready,
            )
            for each in residents
        )
        return Device(self.cluster.device_bytes - sum(each.nbytes for each in seen), seen)
