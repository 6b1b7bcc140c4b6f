"""Loads that are under way, as placement knows them: by the link they share and by whose pool is read for them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from autoscaler.homes import DISK, MAKE, PEER
from autoscaler.placement import weights_from
from autoscaler.work import Work
from control_plane.backends.base import SlotClass
from control_plane.placing import Placing
from function_runtime.protocol import PoolEntry, SlotState

GB = 10**9


class Town:
    def __init__(self) -> None:
        self.slots: dict[str, SlotState] = {}
        backend: Any = SimpleNamespace(
            classes=(SlotClass(),), leaving=frozenset(), class_of=lambda slot_id: "", free_bytes=lambda slot_id: GB
        )
        fleet: Any = self
        self.placing = Placing(fleet, backend)

    def on(self, slot_id: str) -> list[Any]:
        return []

    def is_closed(self, slot_id: str) -> bool:
        return False

    def tell(self, slot_id: str, *, disk: tuple[str, ...] = (), **pool: str) -> None:
        """What lies in its pool, by checkpoint: `ready` or `loading`; and on its disk."""
        entries = tuple(PoolEntry(name, name, state, GB, reload_s=8.0) for name, state in pool.items())
        self.slots[slot_id] = SlotState(slot_id, 1, "i", True, 1, 1, 0, 0, pool=entries, disk=disk)
        self.placing.changed(slot_id)

    def home(self, slot_id: str) -> Any:
        return self.placing.homes(time.monotonic()).get(slot_id)


def test_a_pool_is_known_to_be_read_until_the_loads_are_over() -> None:
    town = Town()
    town.tell("has", model="ready")
    town.tell("one", model="loading")
    town.tell("two", model="loading", other="loading")
    assert town.home("has").serving == 2 and not town.home("has").loads
    assert town.home("one").loads == {PEER: 1}
    assert town.home("two").loads == {PEER: 1, MAKE: 1}, "nobody has the other one"
    town.tell("one", model="ready")
    assert town.home("has").serving == 1, "it said nothing itself"
    town.tell("two")
    assert town.home("has").serving == 0 and not town.home("two").loads
    del town.slots["one"]
    town.placing.changed("one")
    assert town.home("one") is None and not town.placing._loads_of


def test_a_pool_that_others_read_is_expected_to_take_longer() -> None:
    town = Town()
    town.tell("has", model="ready")
    town.tell("new")
    work = Work(identity="model", weights_bytes=8 * GB, make_s=100.0)

    def expected_s() -> float:
        homes = town.placing.homes(time.monotonic())
        new = homes.get("new")
        assert new is not None
        tier, seconds = weights_from(work, new, homes.peers("model"))
        assert tier == PEER
        return seconds

    alone_s = expected_s()
    town.tell("third", model="loading")
    assert expected_s() == 2 * alone_s


def test_a_start_goes_where_the_form_lies_on_the_disk_until_it_is_gone_from_there() -> None:
    town = Town()
    town.tell("a")
    town.tell("b", disk=("model",))
    work = Work(identity="model", weights_bytes=8 * GB, make_s=100.0)

    def placed() -> tuple[str, str]:
        found = town.placing.place(work)
        assert found is not None
        return found.choice, found.tier

    assert placed() == ("b", DISK)
    town.tell("b", disk=("model",), model="loading", other="loading")
    assert town.home("b").loads == {DISK: 1, MAKE: 1}
    town.tell("b")
    assert placed() == ("a", MAKE), "both would make it anew"
