"""Slots of this machine come and go: asked for, heard, given back when nothing runs, by one gateway or by several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.backends import link, local, shared
from control_plane.backends.base import SlotRefused, SlotUnavailable
from control_plane.backends.local import LocalBackend
from control_plane.backends.shared import RemoteHome, SharedBackend
from control_plane.database import Database
from control_plane.settings import DatabaseSettings, SlotRange
from control_plane.slot_table import SlotRow, SlotTable
from function_runtime.protocol import AgentInfo
from tests.control_plane.backends.town import (
    Listener,
    Machine,
    client_of,
    gateways_of,
    home_of,
    settings_of,
    until,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(link, "AgentClient", client_of(made))
    monkeypatch.setattr(local, "LocalHome", home_of(made))
    monkeypatch.setattr(shared, "LocalHome", home_of(made))
    return made


def test_a_range_of_slots_is_a_number_or_two() -> None:
    assert SlotRange.parse("3") == SlotRange(3, 3)
    assert SlotRange.parse("0..4") == SlotRange(0, 4)
    for wrong in ("", "4..1", "-1", "a..2", "1..900", "1..", "1.5"):
        with pytest.raises(ValueError):
            SlotRange.parse(wrong)


async def test_slots_are_begun_up_to_the_bound_and_an_idle_one_is_given_back(tmp_path: Path, machine: Machine) -> None:
    backend, listener = LocalBackend(settings_of(tmp_path / "a", 1, 3)), Listener()
    await backend.start(listener)
    await until(lambda: set(listener.slots) == {"slot-0"})
    assert listener.lost == [], "a slot that is expected is not taken for empty before it was heard"
    assert await backend.add_slots("", 5) == 2
    assert listener.lost == [("slot-1", True), ("slot-2", True)], "what is coming up holds nothing up"
    assert set(backend.coming) <= {"slot-1", "slot-2"}
    await until(lambda: set(listener.slots) == {"slot-0", "slot-1", "slot-2"})
    assert backend.coming == {} and await backend.add_slots("", 1) == 0
    await backend.remove_slot("slot-1")
    assert machine.living == ["a/0", "a/2"] and backend.slot_ids == ("slot-0", "slot-2")
    assert "slot-1" not in listener.slots and backend.leaving == frozenset()
    with pytest.raises(SlotUnavailable):
        await backend.remove_slot("slot-1")
    assert await backend.add_slots("", 1) == 1
    await until(lambda: "slot-1" in listener.slots)
    await backend.close(end_agents=True, grace_s=0)
    assert machine.living == []


async def test_a_slot_where_something_runs_stays_whoever_thought_it_idle(tmp_path: Path, machine: Machine) -> None:
    backend, listener = LocalBackend(settings_of(tmp_path / "a", 0, 1)), Listener()
    await backend.start(listener)
    assert await backend.add_slots("", 1) == 1
    await until(lambda: "slot-0" in listener.slots)
    agent = machine.of("a/0")
    assert agent is not None
    agent.run("rep-1")
    with pytest.raises(SlotRefused):
        await backend.remove_slot("slot-0")
    assert agent.lives and backend.leaving == frozenset()
    agent.end("rep-1")
    await backend.remove_slot("slot-0")
    assert not agent.lives and backend.slot_ids == ()
    await backend.close(end_agents=False, grace_s=0)


async def test_a_start_takes_over_the_slots_whose_agents_still_live(tmp_path: Path, machine: Machine) -> None:
    settings = settings_of(tmp_path / "a", 0, 3)
    first = LocalBackend(settings)
    await first.start(Listener())
    await first.add_slots("", 2)
    await until(lambda: machine.living == ["a/0", "a/1"])
    await first.remove_slot("slot-0")
    await first.close(end_agents=False, grace_s=0)
    second, listener = LocalBackend(settings), Listener()
    await second.start(listener)
    await until(lambda: set(listener.slots) == {"slot-1"})
    assert listener.lost == [], "it may run something: until it was heard nobody knows"
    await second.close(end_agents=True, grace_s=0)


# --- two gateways ---


class Pair:
    def __init__(self, database: Database, folder: Path) -> None:
        self.living = {"gw-one", "gw-two"}
        self.backends: dict[str, SharedBackend] = {}
        self.listeners: dict[str, Listener] = {}
        self.told = 0
        for name, least, most in (("gw-one", 1, 2), ("gw-two", 0, 2)):
            gateways = gateways_of(name, self.living - {name})
            backend = SharedBackend(settings_of(folder / name[3:], least, most), SlotTable(database, name), gateways)
            backend.on_registered = self._tell
            self.backends[name], self.listeners[name] = backend, Listener()

    def _tell(self) -> None:
        self.told += 1

    async def start(self) -> None:
        for name, backend in self.backends.items():
            await backend.start(self.listeners[name])
        await self.look()

    async def look(self) -> None:
        """What gateways do when another says that there is news of slots."""
        told = -1
        while told != self.told:
            told = self.told
            for backend in self.backends.values():
                await backend.look()

    def seen(self) -> list[int]:
        return [len(listener.slots) for listener in self.listeners.values()]


@pytest_asyncio.fixture
async def pair(tmp_path: Path, machine: Machine) -> AsyncIterator[Pair]:
    database = await Database.open(str(tmp_path / "db.sqlite"), DatabaseSettings())
    made = Pair(database, tmp_path)
    await made.start()
    yield made
    for backend in made.backends.values():
        await backend.close(end_agents=True, grace_s=0)
    await database.close()


async def settle(pair: Pair, count: int) -> None:
    async def agreed() -> bool:
        await pair.look()
        return pair.seen() == [count, count]

    for _ in range(400):
        if await agreed():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{pair.seen()}, not {count} each")


async def test_the_leader_adds_slots_at_every_gateway_and_gives_them_back(pair: Pair, machine: Machine) -> None:
    one = pair.backends["gw-one"]
    await settle(pair, 1)
    assert (one.classes[0].least, one.classes[0].most) == (1, 4)
    assert await one.add_slots("", 2) == 2
    assert len(one.coming) >= 1
    await settle(pair, 3)
    assert machine.living == ["one/0", "one/1", "two/0"], "here first, then elsewhere"
    assert one.coming == {}
    away = next(slot_id for slot_id in one.slot_ids if slot_id not in one._own)
    await one.remove_slot(away)
    assert one.leaving == {away}, "nothing new goes there while its gateway ends it"
    await settle(pair, 2)
    assert machine.living == ["one/0", "one/1"] and one.leaving == frozenset()


async def test_what_was_placed_meanwhile_keeps_its_slot(pair: Pair, machine: Machine) -> None:
    one = pair.backends["gw-one"]
    await one.add_slots("", 2)
    await settle(pair, 3)
    agent = machine.of("two/0")
    assert agent is not None
    agent.run("rep-1")
    away = next(slot_id for slot_id in one.slot_ids if slot_id not in one._own)
    await one.remove_slot(away)
    await pair.look()
    assert agent.lives and one.leaving == frozenset()
    own = machine.of("one/1")
    assert own is not None
    own.run("rep-2")
    slot_id = next(slot_id for slot_id in one._own._homes if slot_id.endswith("-1"))
    with pytest.raises(SlotRefused):
        await one.remove_slot(slot_id)
    assert own.lives


async def test_places_of_a_gateway_that_is_gone_are_none(pair: Pair) -> None:
    one = pair.backends["gw-one"]
    gateways: Any = one._gateways
    gateways.peers.clear()
    await one.look()
    assert one.classes[0].most == 2
    assert await one.add_slots("", 9) == 1


# --- silence ---


@pytest.mark.parametrize(
    ("silent_s", "owner_lives", "gone"), [(1.0, False, False), (50.0, True, False), (50.0, False, True)]
)
async def test_a_slot_that_was_silent_for_longer_than_it_outlives_its_readers_is_void(
    silent_s: float, owner_lives: bool, gone: bool
) -> None:
    """A machine that vanished answers nothing, not even with a refusal: it must not hold everything up for ever."""

    async def missing(row: SlotRow) -> bool:
        return not owner_lives

    # A port that takes connections into its backlog and never answers stands for a stopped agent.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        info = AgentInfo("s", 1, "127.0.0.1", listener.getsockname()[1], "token", "life")
        home = RemoteHome(SlotRow("s", info, "gw-gone"), missing, void_after_s=30.0)
        home._heard_s -= silent_s
        assert await home.is_gone() is gone
        home.heard()
        assert await home.is_gone() is False
