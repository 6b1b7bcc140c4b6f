"""Placement: the least expected seconds, with the runner-up and inputs on record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.homes import Device, Homes, Resident, SlotHome, SlotRow
from autoscaler.placement import LOOK_AT, ReplicaHome, place, place_request, weights_from
from autoscaler.room import choose_victims, loss_s
from autoscaler.work import Work

GB = 10**9


def slot(slot_id: str, free_bytes: int = 10 * GB, **fields: object) -> SlotHome:
    fields.setdefault("devices", (Device(free_bytes),))
    fields.setdefault("warm_workers", 1)
    return SlotHome(slot_id, **fields)  # type: ignore[arg-type]


def chosen(work: Work, *slots: SlotHome) -> str:
    placement = place(work, slots, 0.0)
    assert placement is not None
    return placement.choice


# --- requests ---


def test_a_request_goes_to_the_least_loaded_replica() -> None:
    placement = place_request(100, None, [ReplicaHome("a", 3, 8), ReplicaHome("b", 1, 8), ReplicaHome("c", 8, 8)])
    assert placement is not None
    assert (placement.choice, placement.runner_up) == ("b", "a")
    assert set(placement.inputs) == {"a", "b"}


def test_cached_tokens_outweigh_a_short_queue() -> None:
    homes = [ReplicaHome("idle", 0, 8), ReplicaHome("cached", 1, 8, cached_tokens=950)]
    placement = place_request(1000, None, homes)
    assert placement is not None and placement.choice == "cached"


def test_affinity_is_broken_when_the_queue_costs_more_than_the_prefix_saves_and_the_record_says_so() -> None:
    homes = [ReplicaHome("idle", 0, 8), ReplicaHome("cached", 1, 8, cached_tokens=950, prefill_tokens=960)]
    placement = place_request(1000, None, homes)
    assert placement is not None and placement.choice == "idle"
    assert placement.reason == "the queue of cached costs more than the 950 tokens it holds would save"
    assert placement.inputs["cached"]["cached_tokens"] == 950


def test_stored_kv_makes_replicas_equal_but_for_their_queue() -> None:
    homes = [ReplicaHome("idle", 0, 8), ReplicaHome("cached", 1, 8, cached_tokens=950)]
    placement = place_request(1000, 0.02, homes)
    assert placement is not None and placement.choice == "idle"


def test_a_replica_whose_device_others_keep_busy_is_as_slow_as_that_makes_it() -> None:
    homes = [ReplicaHome("shared", 0, 8, load=0.8), ReplicaHome("alone", 1, 8)]
    placement = place_request(1000, None, homes)
    assert placement is not None and placement.choice == "alone"


def test_no_room_anywhere_is_none_and_not_a_guess() -> None:
    assert place_request(10, None, [ReplicaHome("a", 8, 8)]) is None
    assert place(Work(device_bytes=2), [slot("s", 1)], 0.0) is None
    assert place(Work(), [slot("s", closed=True)], 0.0) is None
    assert place(Work(kind="h200"), [slot("s")], 0.0) is None
    assert place(Work(), [slot("s", devices=(Device(GB, quarantined=True),))], 0.0) is None
    assert place(Work(), [slot("s", replicas=4, most_replicas=4)], 0.0) is None


# --- replicas ---


def test_a_replica_goes_where_the_weights_are() -> None:
    work = Work(identity="m", make_s=3.0)
    placement = place(work, [slot("far"), slot("near", replicas=1, pool=frozenset({"m"}))], 0.0)
    assert placement is not None
    assert (placement.choice, placement.runner_up, placement.tier) == ("near", "far", "pool")
    assert placement.inputs["far"]["weights_s"] == 3.0


def test_weights_come_from_the_quickest_tier_that_is_in_reach() -> None:
    work = Work(identity="m", weights_bytes=3 * GB, make_s=60.0, in_store=True)
    peer = slot("peer", pool=frozenset({"m"}))
    speeds = {"disk": 3.0 * GB, "peer": 2.0 * GB, "store": 0.5 * GB}
    assert weights_from(work, slot("s", bytes_per_s=speeds)) == ("store", 6.0)
    assert weights_from(work, slot("s", bytes_per_s=speeds), [peer]) == ("peer", 1.5)
    assert weights_from(work, slot("s", bytes_per_s=speeds, disk=frozenset({"m"})), [peer]) == ("disk", 1.0)
    assert weights_from(work, slot("s", bytes_per_s=speeds, loading={"m": 0.4}), [peer]) == ("loading", 0.4)
    assert weights_from(work, peer) == ("pool", 0.0)
    assert weights_from(Work(identity="m", make_s=2.0), slot("s")) == ("make", 2.0)


def test_a_link_that_others_use_is_slower_by_their_number() -> None:
    work = Work(identity="m", weights_bytes=2 * GB, make_s=60.0, in_store=True)
    speeds = {"store": 1.0 * GB}
    busy = slot("busy", bytes_per_s=speeds, loads={"store": 3})
    assert weights_from(work, busy) == ("store", 8.0)
    assert chosen(work, busy, slot("calm", bytes_per_s=speeds, replicas=3)) == "calm"
    asked = slot("asked", pool=frozenset({"m"}), serving=4)
    assert weights_from(work, slot("s", bytes_per_s={"store": 1.0 * GB, "peer": 1.0 * GB}), [asked]) == ("store", 2.0)


def test_a_waiting_worker_and_a_quiet_slot_are_ready_sooner() -> None:
    assert chosen(Work(), slot("a", warm_workers=0), slot("b")) == "b"
    assert chosen(Work(), slot("a", warm_workers=1, starting=1), slot("b")) == "b"
    assert chosen(Work(), slot("a", ready_in_s=30.0), slot("b", warm_workers=0)) == "b"
    assert chosen(Work(identity="m", make_s=600.0), slot("a", ready_in_s=30.0, pool=frozenset({"m"})), slot("b")) == "a"


def test_functions_that_peak_together_are_kept_apart() -> None:
    day, night = (0.8, 0.8, 0.0, 0.0), (0.0, 0.0, 0.8, 0.8)
    work = Work("new", prefill_s=0.2, load=day, device_bytes=GB)
    residents = (Resident("r", nbytes=GB, in_flight=1),)
    together = slot("a", devices=(Device(5 * GB, residents, day),))
    apart = slot("b", devices=(Device(5 * GB, residents, night),))
    placement = place(work, [together, apart], 0.0)
    assert placement is not None and placement.choice == "b"
    assert placement.inputs["b"]["contention_s"] == 0.0
    assert float(placement.inputs["a"]["contention_s"]) > 30.0, "a backlog grows while both ask for 1.6 of a device"


def test_an_empty_device_is_taken_first_unless_it_costs_more_than_sharing() -> None:
    shared = Device(5 * GB, (Resident("r", nbytes=GB, in_flight=1),), (0.1, 0.1))
    home = slot("s", devices=(shared, Device(9 * GB)))
    free = place(Work(device_bytes=GB, load=(0.1, 0.1), prefill_s=0.1), [home], 0.0)
    dear = place(Work(device_bytes=GB, load=(0.1, 0.1), prefill_s=0.1, fresh_s=10.0), [home], 0.0)
    assert free is not None and free.devices == (1,)
    assert dear is not None and dear.devices == (0,)


def test_among_equals_the_tightest_fit_leaves_large_holes_for_large_models() -> None:
    assert chosen(Work(device_bytes=4 * GB), slot("a", 80 * GB), slot("b", 5 * GB)) == "b"


def test_a_model_over_several_devices_needs_room_on_each() -> None:
    work = Work(devices=2, device_bytes=10 * GB)
    assert place(work, [slot("a", devices=(Device(40 * GB), Device(9 * GB)))], 0.0) is None
    placement = place(work, [slot("b", devices=(Device(40 * GB), Device(9 * GB), Device(10 * GB)))], 0.0)
    assert placement is not None and placement.devices == (0, 2)


def test_kv_that_residents_can_give_up_and_memory_on_its_way_back_are_room() -> None:
    giving = Resident("r", nbytes=GB, kv_bytes=8 * GB, least_kv_bytes=GB, in_flight=1)
    work = Work(device_bytes=6 * GB)
    assert chosen(work, slot("a", devices=(Device(0, (giving,)),))) == "a"
    ending = slot("b", devices=(Device(0, freeing_bytes=6 * GB, freed_in_s=4.0),))
    placement = place(work, [ending], 0.0)
    assert placement is not None and placement.inputs["b"]["queue_s"] == 4.0


# --- who has to go ---


def test_the_least_is_lost_when_somebody_has_to_go() -> None:
    busy = Resident("busy", nbytes=4 * GB, in_flight=3, loss_s=loss_s(3, 2.0, 1.0, 8.0))
    soon = Resident("soon", nbytes=4 * GB, loss_s=loss_s(0, 2.0, 0.9, 8.0))
    never = Resident("never", nbytes=4 * GB, loss_s=loss_s(0, 2.0, 0.01, 8.0))
    placement = place(
        Work(device_bytes=5 * GB, waiting=1), [slot("s", devices=(Device(GB, (busy, soon, never)),))], 0.0
    )
    assert placement is not None and placement.victims == ("never",)
    assert "no room" in placement.reason and placement.inputs["s"]["victims"] == "never"


def test_a_lower_priority_goes_even_if_it_works_and_an_equal_or_a_start_does_not() -> None:
    low = Resident("low", priority=0, nbytes=4 * GB, in_flight=2, loss_s=4.0)
    equal = Resident("equal", priority=5, nbytes=4 * GB, in_flight=1, loss_s=0.1)
    starting = Resident("starting", priority=0, nbytes=4 * GB, starting=True)
    work = Work(device_bytes=4 * GB, priority=5, waiting=1)
    placement = place(work, [slot("s", devices=(Device(0, (equal, low, starting)),))], 0.0)
    assert placement is not None and placement.victims == ("low",)
    assert place(work, [slot("s", devices=(Device(0, (equal, starting)),))], 0.0) is None


def test_nobody_goes_for_a_replica_that_nobody_waits_for() -> None:
    idle = Resident("idle", nbytes=4 * GB)
    home = slot("s", devices=(Device(0, (idle,)),))
    assert place(Work(device_bytes=GB), [home], 0.0) is None
    assert place(Work(device_bytes=GB, waiting=1), [home], 0.0) is not None
    assert place(Work(device_bytes=GB, waiting=1), [home], 0.0, lambda resident, work: False) is None


def test_a_slot_that_is_full_by_count_makes_room_by_one() -> None:
    idle = (Resident("x", loss_s=3.0), Resident("y", loss_s=1.0))
    home = slot("s", replicas=2, most_replicas=2, devices=(Device(GB, idle),))
    placement = place(Work(waiting=1), [home], 0.0)
    assert placement is not None and placement.victims == ("y",)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=8), needed=st.integers(1, 120)
)
def test_victims_are_enough_and_none_of_them_is_spare(sizes: list[tuple[int, float]], needed: int) -> None:
    residents = [Resident(str(n), nbytes=size, loss_s=loss) for n, (size, loss) in enumerate(sizes)]
    victims = choose_victims(residents, needed, Work(priority=1))
    if victims is None:
        assert sum(size for size, _ in sizes) < needed
        return
    freed = sum(each.nbytes for each in victims)
    assert freed >= needed
    assert all(freed - each.nbytes < needed for each in victims)


# --- many ---


def many(count: int) -> list[SlotHome]:
    found = []
    for number in range(count):
        residents = tuple(Resident(f"r{number}-{n}", nbytes=GB, in_flight=1) for n in range(number % 4))
        devices = tuple(Device((number * 7 + d) % 40 * GB, residents, (0.1 * (number % 7),) * 4) for d in range(8))
        pool = frozenset({f"m{number % 97}"})
        found.append(slot(f"s{number:04}", devices=devices, pool=pool, replicas=8 * len(residents)))
    return found


@pytest.mark.parametrize("identity", ["m5", "elsewhere"])
def test_an_index_kept_up_to_date_chooses_as_a_fresh_one(identity: str) -> None:
    slots = many(60)
    kept = Homes(slots)
    for number in (3, 5, 17):
        changed = slot(slots[number].slot_id, 3 * GB, pool=frozenset({"m5"}), starting=1)
        kept.put(changed)
        slots[number] = changed
    kept.drop(slots.pop(40).slot_id)
    work = Work(identity=identity, device_bytes=2 * GB, weights_bytes=GB, load=(0.2,) * 4, make_s=9.0)
    assert place(work, kept, 0.0) == place(work, slots, 0.0)
    assert len(kept) == 59 and kept.get("s0040") is None


def test_of_a_thousand_slots_only_some_are_looked_at_and_those_that_hold_the_weights_are_among_them() -> None:
    slots = many(1000)
    slots[999] = slot("s0999", devices=(Device(30 * GB),), pool=frozenset({"rare"}))
    looked: list[str] = []

    class Watched(Homes):
        def with_room(self, needed_bytes: int, kind: str) -> Iterator[SlotRow]:
            for row in super().with_room(needed_bytes, kind):
                looked.append(row.home.slot_id)
                yield row

    placement = place(Work(identity="rare", device_bytes=2 * GB, make_s=30.0), Watched(slots), 0.0)
    assert placement is not None and placement.choice == "s0999"
    assert len(looked) <= LOOK_AT + 1
