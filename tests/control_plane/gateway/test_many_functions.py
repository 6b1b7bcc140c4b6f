"""What one event costs where there are many functions: looks are counted, of those whom it concerns and no others."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.lanes import FunctionKey
from tests.control_plane.gateway.conftest import Plane, until
from tests.control_plane.gateway.fakes import FakeSlot

NAMES = [f"f-{number}" for number in range(20)]


class Looks:
    """Functions that the control loop looked at, in order."""

    def __init__(self, plane: Plane) -> None:
        self.loop = plane.context.loop
        self.of: list[str] = []
        tick = self.loop._tick

        def counted(key: FunctionKey) -> None:
            self.of.append(key[1])
            tick(key)

        self.loop._tick = counted  # type: ignore[method-assign]

    async def since(self) -> list[str]:
        """Everything that is due has been looked at, the marker last."""
        self.loop.poke_later(("default", "marker"))
        await until(lambda: "marker" in self.of)
        found = [name for name in self.of if name != "marker"]
        self.of.clear()
        return found


@pytest.fixture
async def looks(plane: Plane) -> Looks:
    for name in NAMES:
        await plane.deploy(name)
    await until(lambda: plane.context.fleet.in_sight)
    looks = Looks(plane)
    await looks.since()
    return looks


async def test_what_a_slot_says_of_itself_concerns_no_function_that_is_not_there(plane: Plane, looks: Looks) -> None:
    for _ in range(5):
        plane.slot.tell_state()
    assert await looks.since() == []


async def test_when_not_all_is_in_sight_and_when_it_is_again_everybody_is_looked_at_once(
    plane: Plane, looks: Looks
) -> None:
    plane.slot.go_out_of_sight()
    assert sorted(await looks.since()) == sorted(NAMES)
    plane.slot.come_back()
    plane.slot.tell_state()
    assert sorted(await looks.since()) == sorted(NAMES)


async def test_a_round_of_decisions_is_one_look_at_the_slots(
    plane: Plane, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def slot_ids(slot: FakeSlot) -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return (slot.slot_id,)

    monkeypatch.setattr(FakeSlot, "slot_ids", property(slot_ids))
    monkeypatch.setattr("control_plane.loop.SLICE_S", 60.0)
    plane.context.loop.poke_all()
    assert len(await looks.since()) == len(NAMES)
    assert asked <= 3, "slices of a round, not functions"


async def test_who_has_news_is_looked_at_before_those_who_are_looked_at_anyway(plane: Plane, looks: Looks) -> None:
    plane.context.loop.poke_all()
    plane.context.loop.poke(("default", NAMES[-1]))
    found = await looks.since()
    assert found[0] == NAMES[-1] and sorted(found) == sorted(NAMES)


async def test_how_many_functions_are_native_is_known_without_counting_them(plane: Plane, looks: Looks) -> None:
    functions: Any = plane.context.functions
    assert functions.natives == 0
    await plane.deploy("native", engine="native")
    assert functions.natives == 1
    await plane.deploy("native", engine="stub")
    assert functions.natives == 0
    await plane.deploy("native", engine="native")
    await functions.delete("native", "default")
    assert functions.natives == 0 and [each.name for each in functions.list()] == sorted(NAMES)
