"""Placement: the least expected seconds, with the runner-up and inputs on record."""

from __future__ import annotations

from autoscaler.placement import ReplicaHome, SlotHome, place_replica, place_request


def test_a_request_goes_to_the_least_loaded_replica() -> None:
    placement = place_request(100, None, [ReplicaHome("a", 3, 8), ReplicaHome("b", 1, 8), ReplicaHome("c", 8, 8)])
    assert placement is not None
    assert (placement.choice, placement.runner_up) == ("b", "a")
    assert set(placement.inputs) == {"a", "b"}


def test_cached_tokens_outweigh_a_short_queue() -> None:
    homes = [ReplicaHome("idle", 0, 8), ReplicaHome("cached", 1, 8, cached_tokens=950)]
    placement = place_request(1000, None, homes)
    assert placement is not None and placement.choice == "cached"


def test_stored_kv_makes_replicas_equal_but_for_their_queue() -> None:
    homes = [ReplicaHome("idle", 0, 8), ReplicaHome("cached", 1, 8, cached_tokens=950)]
    placement = place_request(1000, 0.02, homes)
    assert placement is not None and placement.choice == "idle"


def test_no_room_anywhere_is_none_and_not_a_guess() -> None:
    assert place_request(10, None, [ReplicaHome("a", 8, 8)]) is None
    assert place_replica([SlotHome("s", 0, free_bytes=1, needed_bytes=2, warm_workers=1, weights_in_pool=True)]) is None


def test_a_replica_goes_where_the_weights_are() -> None:
    homes = [
        SlotHome("far", 0, 10, 1, warm_workers=1, weights_in_pool=False, prepare_s=3.0),
        SlotHome("near", 1, 10, 1, warm_workers=1, weights_in_pool=True),
    ]
    placement = place_replica(homes)
    assert placement is not None and placement.choice == "near" and placement.runner_up == "far"
