"""Idle replicas moved together, so that a slot becomes empty and can be given back, or a large model finds a hole.

A move is a start elsewhere and, once that is ready, the end of the idle one: nobody waits for it. It is worth while if
what it frees is worth more than the starts it costs. Limits: only idle replicas of nobody's higher need are moved; a
slot is emptied whole or not at all; choices are greedy, the emptiest slot first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.homes import Device, Homes, Resident, SlotHome
from autoscaler.placement import place
from autoscaler.work import Work

MOST_MOVES = 4
"""Of one plan: loads that nobody waits for share links with those that somebody waits for."""


TRIED = 4
"""Slots that are tried to be emptied, at a look."""
TARGETS = 64
"""Slots that are looked at for what is moved, the fullest."""


@dataclass(frozen=True, slots=True)
class Move:
    replica_id: str
    from_slot: str
    to_slot: str
    devices: tuple[int, ...]
    expected_s: float
    """Until its successor is ready."""


@dataclass(frozen=True, slots=True)
class Plan:
    moves: tuple[Move, ...]
    freed_slot: str = ""
    """Empty: no slot, but a hole."""
    cost_s: float = 0.0
    """Device-seconds of the starts."""
    worth_s: float = 0.0
    reason: str = ""


def taken(home: SlotHome, devices: Sequence[int], work: Work, replica_id: str, *, starting: bool = True) -> SlotHome:
    """The slot with one replica more: what a placement leaves for the next of the same round."""
    resident = Resident(replica_id, work.function, work.tenant, work.priority, work.device_bytes, starting=starting)
    changed = list(home.devices)
    for index in devices:
        device = changed[index]
        changed[index] = replace(
            device,
            free_bytes=device.free_bytes - work.device_bytes,
            residents=(*device.residents, resident),
            load=_added(device.load, work.load),
        )
    return replace(home, devices=tuple(changed), replicas=home.replicas + 1, starting=home.starting + int(starting))


def left(home: SlotHome, replica_id: str, work: Work) -> SlotHome:
    """The slot with one replica fewer."""
    changed: list[Device] = []
    for device in home.devices:
        stay = tuple(each for each in device.residents if each.replica_id != replica_id)
        if len(stay) < len(device.residents):
            device = replace(device, residents=stay, free_bytes=device.free_bytes + work.device_bytes)
        changed.append(device)
    return replace(home, devices=tuple(changed), replicas=max(home.replicas - 1, 0))


def _added(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    if not one or not other:
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=False))


def _movable(home: SlotHome, works: Mapping[str, Work]) -> list[Resident] | None:
    """All replicas of a slot, if all of them are idle and known; None: it cannot be emptied."""
    found = {each.replica_id: each for device in home.devices for each in device.residents}
    if home.starting or not found or len(found) < home.replicas:
        return None
    if any(not each.idle or replica_id not in works for replica_id, each in found.items()):
        return None
    return sorted(found.values(), key=lambda each: -works[each.replica_id].device_bytes)


def to_empty(
    slots: Iterable[SlotHome], works: Mapping[str, Work], held_s: float, now_s: float, most_moves: int = MOST_MOVES
) -> Plan | None:
    """Moves that empty one slot, the one with the fewest replicas; None: none is worth it.

    `works` says of each replica what starting it anew needs; `held_s`: for how long the slot would be held otherwise.
    Slots without replicas are no targets: they are to be given back themselves.
    """
    used = [home for home in slots if not home.closed and not home.is_idle]
    used.sort(key=lambda each: (each.replicas, each.slot_id))
    tried = 0
    for home in used:
        residents = _movable(home, works)
        if residents is None or len(residents) > most_moves:
            continue
        tried += 1
        if tried > TRIED:
            break
        # The fullest first: what is moved should not keep another slot from becoming empty.
        others = Homes(each for each in used[-TARGETS:] if each.slot_id != home.slot_id)
        moves = _moved(residents, home.slot_id, others, works, now_s)
        if moves is None:
            continue
        cost_s = sum(move.expected_s * works[move.replica_id].devices for move in moves)
        worth_s = held_s * max(len(home.devices), 1)
        if cost_s < worth_s:
            reason = f"{len(moves)} idle replicas elsewhere empty {home.slot_id}"
            return Plan(moves, home.slot_id, cost_s, worth_s, reason)
    return None


def to_make_room(
    work: Work, slots: Iterable[SlotHome], works: Mapping[str, Work], now_s: float, most_moves: int = MOST_MOVES
) -> Plan | None:
    """Moves of idle replicas after which this work has room on one slot; None: none, or it has room beside one now.

    The device that lacks least comes first; its smallest idle replicas that are enough go.
    """
    homes = [home for home in slots if not home.closed and home.kind == work.kind]
    if work.devices != 1:
        return None
    options = sorted(
        (work.device_bytes - device.free_bytes, home.slot_id, index, home)
        for home in homes
        for index, device in enumerate(home.devices)
        if not device.quarantined and any(each.replica_id in works for each in device.residents)
    )
    if options and options[0][0] <= 0:
        return None
    for missing, slot_id, index, home in options[:TRIED]:
        idle = [each for each in home.devices[index].residents if each.idle and each.replica_id in works]
        idle.sort(key=lambda each: works[each.replica_id].device_bytes)
        chosen = _enough(idle, works, missing, most_moves)
        if chosen is None:
            continue
        others = Homes(each for each in homes[:TARGETS] if each.slot_id != slot_id)
        moves = _moved(chosen, slot_id, others, works, now_s)
        if moves is not None:
            cost_s = sum(move.expected_s for move in moves)
            return Plan(moves, "", cost_s, work.room_wait_s, f"{work.function} fits on {slot_id} then")
    return None


def _enough(
    idle: Sequence[Resident], works: Mapping[str, Work], missing: int, most_moves: int
) -> list[Resident] | None:
    """One that is enough, the smallest such; else several."""
    for each in idle:
        if works[each.replica_id].device_bytes >= missing:
            return [each]
    chosen: list[Resident] = []
    for each in reversed(idle):
        if missing <= 0 or len(chosen) >= most_moves:
            break
        chosen.append(each)
        missing -= works[each.replica_id].device_bytes
    return chosen if missing <= 0 and chosen else None


def _without(homes: Homes, replica: Resident) -> list[SlotHome]:
    """Slots that have no other replica of its function: what is on two slots outlives the loss of one."""
    own = (replica.tenant, replica.function)
    return [
        home
        for home in homes
        if not any((each.tenant, each.function) == own for device in home.devices for each in device.residents)
    ]


def _moved(
    residents: Sequence[Resident], from_slot: str, others: Homes, works: Mapping[str, Work], now_s: float
) -> tuple[Move, ...] | None:
    """Each placed where there is room as it is, one after the other."""
    moves: list[Move] = []
    for each in residents:
        work = replace(works[each.replica_id], waiting=0)
        placement = place(work, _without(others, each), now_s, lambda resident, asked: False)
        if placement is None:
            return None
        home = others.get(placement.choice)
        if home is None:
            return None
        others.put(taken(home, placement.devices, work, each.replica_id))
        moves.append(Move(each.replica_id, from_slot, placement.choice, placement.devices, placement.expected_s))
    return tuple(moves)
