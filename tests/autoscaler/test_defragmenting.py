"""Idle replicas are moved together, and only where that is worth their starts."""

from __future__ import annotations

from autoscaler.defragmenting import Plan, left, taken, to_empty, to_make_room
from autoscaler.homes import Device, Homes, Resident, SlotHome
from autoscaler.placement import place
from autoscaler.work import Work

GB = 10**9


def slot(slot_id: str, free_gb: int, *residents: Resident, **fields: object) -> SlotHome:
    devices = (Device(free_gb * GB, residents),)
    return SlotHome(slot_id, devices, warm_workers=8, replicas=len(residents), **fields)  # type: ignore[arg-type]


def idle(name: str, gb: int = 4) -> Resident:
    return Resident(name, name, nbytes=gb * GB)


def busy(name: str, gb: int = 4) -> Resident:
    return Resident(name, name, nbytes=gb * GB, in_flight=1)


def works(**gb: int) -> dict[str, Work]:
    return {name: Work(name, device_bytes=size * GB, start_s=1.0) for name, size in gb.items()}


def moves(plan: Plan | None) -> list[tuple[str, str, str]]:
    return [] if plan is None else [(move.replica_id, move.from_slot, move.to_slot) for move in plan.moves]


def test_a_slot_of_idle_replicas_is_emptied_into_others_that_are_used() -> None:
    slots = [slot("a", 10, idle("x")), slot("b", 10, busy("y"), idle("z")), slot("c", 20)]
    plan = to_empty(slots, works(x=4, z=4), 60.0, 0.0)
    assert moves(plan) == [("x", "a", "b")]
    assert plan is not None and plan.freed_slot == "a" and plan.cost_s < plan.worth_s == 60.0


def test_nothing_is_moved_for_less_than_it_costs_or_out_of_slots_that_work() -> None:
    slots = [slot("a", 10, idle("x")), slot("b", 10, busy("y"))]
    assert to_empty(slots, works(x=4), 0.5, 0.0) is None
    assert to_empty([slot("a", 10, busy("x")), slot("b", 10, busy("y"))], works(x=4, y=4), 60.0, 0.0) is None
    assert to_empty([slot("a", 10, idle("x"), starting=1), slots[1]], works(x=4), 60.0, 0.0) is None
    assert to_empty(slots, {}, 60.0, 0.0) is None, "what cannot be started anew stays"


def test_a_slot_is_emptied_whole_or_not_at_all() -> None:
    slots = [slot("a", 2, idle("x", 4), idle("w", 4)), slot("b", 5, busy("y"))]
    assert to_empty(slots, works(x=4, w=4), 60.0, 0.0) is None
    roomy = [slots[0], slot("b", 9, busy("y"))]
    assert len(moves(to_empty(roomy, works(x=4, w=4), 60.0, 0.0))) == 2


def test_a_large_model_finds_a_hole_once_the_smallest_idle_one_that_is_enough_has_moved() -> None:
    large = Work("large", device_bytes=20 * GB)
    slots = [slot("a", 12, idle("x", 6), idle("w", 9)), slot("b", 10, busy("y"))]
    plan = to_make_room(large, slots, works(x=6, w=9), 0.0)
    assert moves(plan) == [("w", "a", "b")]
    plan = to_make_room(Work("large", device_bytes=17 * GB), slots, works(x=6, w=9), 0.0)
    assert moves(plan) == [("x", "a", "b")]
    assert to_make_room(Work("small", device_bytes=2 * GB), slots, works(x=6, w=9), 0.0) is None, "it fits already"
    assert to_make_room(Work("huge", device_bytes=90 * GB), slots, works(x=6, w=9), 0.0) is None


def test_what_was_placed_counts_for_the_next_of_the_same_round() -> None:
    homes = Homes([slot("a", 10), slot("b", 9)])
    work = Work("f", device_bytes=6 * GB, load=(0.5, 0.5))
    first = place(work, homes, 0.0)
    assert first is not None and first.choice == "b"
    home = homes.get("b")
    assert home is not None
    homes.put(taken(home, first.devices, work, "r1"))
    second = place(work, homes, 0.0)
    assert second is not None and second.choice == "a"
    after = homes.get("b")
    assert after is not None and (after.replicas, after.starting, after.devices[0].load) == (1, 1, (0.5, 0.5))
    assert left(after, "r1", work).devices[0].free_bytes == home.devices[0].free_bytes


def test_two_replicas_of_a_function_are_not_moved_onto_one_slot() -> None:
    twin = Resident("twin", "x", nbytes=4 * GB, in_flight=1)
    assert to_empty([slot("a", 10, idle("x")), slot("b", 10, twin)], works(x=4), 60.0, 0.0) is None
    assert moves(to_empty([slot("a", 10, idle("x")), slot("b", 10, busy("y"))], works(x=4), 60.0, 0.0))
