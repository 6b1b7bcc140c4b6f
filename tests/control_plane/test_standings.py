"""Who holds what: counted with every change, short for a while after a start found nothing, told to other gateways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoscaler.shares import NO_QUOTA, Quota
from control_plane.allowances import Allowances
from control_plane.quotas import Quotas
from control_plane.serving import Serving
from control_plane.standings import SHORT_S, TOLD_S, Standings
from function_runtime.protocol import EngineOptions, ReplicaSpec, ReplicaState, ReplicaStatus


class Place:
    """Standings with quotas and devices per replica as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.quotas: dict[str, Quota] = {}
        self.devices: dict[str, int] = {}
        quotas = SimpleNamespace(of=lambda tenant: self.quotas.get(tenant, NO_QUOTA), tenants=frozenset())
        serving = SimpleNamespace(revision=lambda key, number: self._revision(key))
        self.standings = Standings(cast(Serving, serving), cast(Quotas, quotas), lambda: self.now_s)
        self._statuses: dict[str, ReplicaStatus] = {}

    def _revision(self, key: tuple[str, str]) -> Any:
        devices = self.devices.get(key[1], 1)
        return SimpleNamespace(spec=SimpleNamespace(resources=SimpleNamespace(devices=devices)))

    def tell(self, replica_id: str, tenant: str, state: ReplicaState, function: str = "fn") -> None:
        spec = ReplicaSpec(replica_id, function, 1, tenant, "", "", EngineOptions())
        status = ReplicaStatus(replica_id, function, 1, state, spec)
        self.standings.replica_changed(status, self._statuses.get(replica_id))
        self._statuses[replica_id] = status


@pytest.fixture
def place() -> Place:
    return Place()


def test_a_replica_counts_from_its_being_asked_for_until_it_has_gone(place: Place) -> None:
    place.devices["big"] = 4
    place.tell("r1", "a", ReplicaState.STARTING)
    place.tell("r2", "a", ReplicaState.STARTING, "big")
    place.tell("r2", "a", ReplicaState.READY, "big")
    place.tell("r3", "b", ReplicaState.DRAINING)
    assert place.standings.held() == {"a": 5, "b": 1}
    place.tell("r1", "a", ReplicaState.FAILED)
    place.tell("r3", "b", ReplicaState.ENDED)
    assert place.standings.held() == {"a": 4}


def test_devices_are_short_for_a_while_after_a_start_found_none_and_what_was_held_is_what_there_is(
    place: Place,
) -> None:
    for number in range(4):
        place.tell(f"r{number}", "a", ReplicaState.READY)
    place.standings.wants(("a", "fn"), 4)
    place.standings.wants(("b", "fn"), 4)
    assert (place.standings.capacity(), place.standings.may_have("b"), place.standings.strict()) == (None, None, {})
    place.standings.lacking()
    assert (place.standings.capacity(), place.standings.may_have("b"), place.standings.may_have("a")) == (4, None, 0)
    assert place.standings.strict() == {"a": 0.5}
    assert (place.standings.device_price("a"), place.standings.device_price("b")) == (4.0, 2.0)
    place.tell("r0", "a", ReplicaState.ENDED)
    assert (place.standings.capacity(), place.standings.may_have("a")) == (4, 0), "what has just been freed is there"
    place.now_s += SHORT_S
    assert (place.standings.capacity(), place.standings.may_have("b"), place.standings.device_price("a")) == (
        None, None, 1.0,
    )  # fmt: skip


def test_nobody_s_devices_are_short_while_more_can_be_had(place: Place) -> None:
    functions = SimpleNamespace(find=lambda name, tenant: None)
    rest = cast(Any, SimpleNamespace())
    allowances = Allowances(place.standings, cast(Any, functions), rest, rest, rest, rest, lambda: place.now_s)
    grows = True
    allowances.may_grow = lambda key: grows
    place.tell("r1", "a", ReplicaState.READY)
    place.standings.wants(("b", "fn"), 1)
    allowances.no_room(("b", "fn"), 1, 1)
    assert place.standings.may_have("a") is None, "a slot comes for b: what others have is not all there is"
    grows = False
    allowances.no_room(("b", "fn"), 1, 1)
    assert place.standings.short


def test_a_function_whose_slots_cannot_be_had_bounds_nobody_elses(place: Place) -> None:
    """A device that no node has, say: it is asked for once a second for as long as somebody waits."""
    functions = SimpleNamespace(find=lambda name, tenant: None)
    rest = cast(Any, SimpleNamespace())
    allowances = Allowances(place.standings, cast(Any, functions), rest, rest, rest, rest, lambda: place.now_s)
    allowances.may_grow = lambda key: False
    allowances.has_slots = lambda key: key[0] != "b"
    for number in range(3):
        place.tell(f"r{number}", "a", ReplicaState.READY)
    place.standings.wants(("a", "fn"), 3)
    place.standings.wants(("b", "stuck"), 1)
    for _ in range(30):
        place.now_s += 1.0
        allowances.no_room(("b", "stuck"), 1, 1)
        assert not place.standings.short and place.standings.may_have("a") is None
        assert place.standings.device_price("a") == 1.0 and place.standings.strict() == {}


def test_a_quota_bounds_though_nothing_is_short(place: Place) -> None:
    place.quotas["a"] = Quota(devices=2)
    place.tell("r1", "a", ReplicaState.READY)
    assert (place.standings.may_have("a"), place.standings.may_have("b")) == (1, None)


def test_what_the_leader_told_holds_for_a_while(place: Place) -> None:
    place.standings.told({"a": 0.5})
    assert (place.standings.strictness("a", False), place.standings.strictness("b", False)) == (0.5, 1.0)
    assert place.standings.strictness("a", True) == 1.0
    place.now_s += TOLD_S
    assert place.standings.strictness("a", False) == 1.0
