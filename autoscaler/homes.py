"""Where work could go, as placement sees it: slots with devices, what lies and runs on them, and an index over many.

    SlotHome -> Device -> Resident      plain values, made anew when something changed
    Homes                               the same slots, sorted and found by checkpoint, so that a choice among 1,000
                                        slots looks at a few dozen of them

Limits: seconds and bytes are the caller's, measured or estimated; a slot's links are told apart by tier only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

ASSUMED_LOAD = 0.1
"""Share of a device that a replica of unknown load takes."""
POOL, DISK, PEER, STORE, MAKE, LOADING = "pool", "disk", "peer", "store", "make", "loading"
NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Resident:
    """A replica on a device."""

    replica_id: str
    function: str = ""
    tenant: str = ""
    priority: int = 0
    nbytes: int = 0
    """Weights and whatever else it holds on each of its devices, without KV."""
    kv_bytes: int = 0
    least_kv_bytes: int = 0
    """Its KV can be cut down to this."""
    in_flight: int = 0
    loss_s: float = 0.0
    """Expected seconds of people's waiting that ending it now costs (`room.loss_s`)."""
    starting: bool = False

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.starting


@dataclass(frozen=True, slots=True)
class Device:
    free_bytes: int
    """Nobody's, now. What residents could give up of their KV, and what is about to come back, is not in it."""
    residents: tuple[Resident, ...] = ()
    load: tuple[float, ...] = ()
    """Predicted busy share of all functions on it together, per step of the horizon. Empty: unknown."""
    first_token_s: float = 0.05
    """Seconds of this device that the first token of those functions takes."""
    freeing_bytes: int = 0
    """Comes back from what is ending."""
    freed_in_s: float = 0.0
    quarantined: bool = False
    """It did not give memory back: nothing is put there."""

    @property
    def yielding_bytes(self) -> int:
        """What residents' KV can be cut down by."""
        return sum(max(each.kv_bytes - each.least_kv_bytes, 0) for each in self.residents)

    @property
    def load_now(self) -> float:
        return self.load[0] if self.load else min(ASSUMED_LOAD * len(self.residents), 1.0)


@dataclass(frozen=True, slots=True)
class SlotHome:
    """A slot as a home for a new replica."""

    slot_id: str
    devices: tuple[Device, ...] = ()
    kind: str = ""
    """Class of the slot (device kind, image, trust domain): work goes to its own class only."""
    warm_workers: int = 0
    starting: int = 0
    """Replicas that are being started there: each takes a worker and the cores."""
    replicas: int = 0
    most_replicas: int = 0
    """0: what its memory holds."""
    ready_in_s: float = 0.0
    """A slot that is still coming up."""
    pool: frozenset[str] = frozenset()
    """Checkpoints ready in its warm pool."""
    disk: frozenset[str] = frozenset()
    loading: Mapping[str, float] = field(default_factory=dict)
    """Checkpoints on their way into its pool, with the seconds left."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Measured by tier: disk, peer, store."""
    loads: Mapping[str, int] = field(default_factory=dict)
    """Loads under way by tier: they share the link."""
    serving: int = 0
    """Loads of other slots that read this one's pool now."""
    closed: bool = False
    """Drained or about to go: it takes nothing new."""

    @property
    def is_idle(self) -> bool:
        return not self.replicas and not self.starting


@dataclass(slots=True)
class DeviceRow:
    """What the choice reads of a device, added up once."""

    index: int
    room_bytes: int
    """Free, or residents can give it up."""
    coming_bytes: int
    busy: float
    """Mean predicted load."""
    device: Device


@dataclass(slots=True)
class SlotRow:
    """What the choice reads of a slot."""

    rank: tuple[float, float, str]
    """Soonest and least crowded first."""
    most_bytes: int
    """Of the emptiest device, with what is on its way back."""
    home: SlotHome
    devices: list[DeviceRow]
    """The quietest first."""
    least_priority: int | None
    """Of those that are not starting; None: there are none."""
    any_idle: bool


class Homes:
    """Slots with an order and an index by checkpoint. Kept between decisions: `put` replaces a slot that changed."""

    def __init__(self, slots: Iterable[SlotHome] = ()) -> None:
        self._rows: dict[str, SlotRow] = {}
        self._holders: dict[str, dict[str, None]] = {}
        for slot in slots:
            self._rows[slot.slot_id] = _row(slot)
            self._index(slot)
        self._order = sorted(row.rank for row in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SlotHome]:
        return (row.home for row in self._rows.values())

    def get(self, slot_id: str) -> SlotHome | None:
        row = self._rows.get(slot_id)
        return row.home if row is not None else None

    def put(self, slot: SlotHome) -> None:
        known = self._rows.get(slot.slot_id)
        if known is not None and known.home == slot:
            return  # most are looked at because they may have changed, and have not
        self.drop(slot.slot_id)
        self._rows[slot.slot_id] = row = _row(slot)
        insort(self._order, row.rank)
        self._index(slot)

    def drop(self, slot_id: str) -> None:
        row = self._rows.pop(slot_id, None)
        if row is None:
            return
        del self._order[bisect_left(self._order, row.rank)]
        for identity in {*row.home.pool, *row.home.disk, *row.home.loading}:
            holders = self._holders[identity]
            del holders[slot_id]
            if not holders:
                del self._holders[identity]

    def _index(self, slot: SlotHome) -> None:
        for identity in (*slot.pool, *slot.disk, *slot.loading):
            self._holders.setdefault(identity, {})[slot.slot_id] = None

    def holders(self, identity: str) -> Iterator[SlotRow]:
        """Slots that have some of a checkpoint: pool, disk, or on its way."""
        rows = self._rows
        return (rows[slot_id] for slot_id in self._holders.get(identity, ()))

    def peers(self, identity: str) -> list[SlotHome]:
        """Slots whose pools others can read it from."""
        return [row.home for row in self.holders(identity) if identity in row.home.pool]

    def with_room(self, needed_bytes: int, kind: str) -> Iterator[SlotRow]:
        """Open slots of a class with a device that could hold this much, the soonest and least crowded first."""
        rows = self._rows
        for rank in self._order:
            row = rows[rank[2]]
            if row.most_bytes >= needed_bytes and row.home.kind == kind:
                yield row

    def with_endable(self, kind: str, priority: int | None) -> Iterator[SlotRow]:
        """Open slots of a class where somebody could have to go: of a lower priority, or idle; priority None: anybody.
        The soonest first."""
        for rank in self._order:
            row = self._rows[rank[2]]
            if row.least_priority is None or row.home.closed or row.home.kind != kind:
                continue
            if priority is None or row.least_priority < priority or (row.any_idle and row.least_priority == priority):
                yield row


def is_full(slot: SlotHome) -> bool:
    """Whether it takes nothing more, whatever its memory holds."""
    return slot.closed or bool(slot.most_replicas and slot.replicas >= slot.most_replicas)


def _row(slot: SlotHome) -> SlotRow:
    devices = [
        DeviceRow(index, device.free_bytes + device.yielding_bytes, device.freeing_bytes, _busy(device), device)
        for index, device in enumerate(slot.devices)
        if not device.quarantined
    ]
    devices.sort(key=lambda row: (row.busy, row.index))
    most_bytes = -1
    if devices and not is_full(slot):
        most_bytes = max(row.room_bytes + row.coming_bytes for row in devices)
    able = [each for row in devices for each in row.device.residents if not each.starting]
    least_priority = min((each.priority for each in able), default=None)
    crowding = (devices[0].busy if devices else 1.0) + max(slot.starting + 1 - slot.warm_workers, 0)
    rank = (slot.ready_in_s, crowding, slot.slot_id)
    return SlotRow(rank, most_bytes, slot, devices, least_priority, any(each.idle for each in able))


def _busy(device: Device) -> float:
    return sum(device.load) / len(device.load) if device.load else device.load_now
