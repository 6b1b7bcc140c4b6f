"""What every backend does, whatever its slots are: the same tests for this machine's and the cluster's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.backends import link, local
from control_plane.backends.base import Backend, SlotRefused, SlotUnavailable
from control_plane.backends.kubernetes import home
from control_plane.backends.kubernetes.api import SLOT_POOLS
from control_plane.backends.local import LocalBackend
from function_runtime.protocol import EngineOptions, ReplicaSpec
from tests.control_plane.backends.kubernetes.fake_cluster import (
    FakeApi,
    Kubelet,
    backend_of,
    listening,
    pod_client_of,
    slot_pool,
)
from tests.control_plane.backends.town import Agent, Listener, Machine, home_of, settings_of, until


@dataclass
class Place:
    backend: Backend
    machine: Machine
    listener: Listener
    agent_of: Callable[[str], Agent | None]
    class_name: Callable[[], str]
    another: Callable[[], Backend]
    """One more control plane that finds the same slots."""

    async def begun(self) -> str:
        """One slot more, heard."""
        known = set(self.listener.slots)
        assert await self.backend.add_slots(self.class_name(), 1) == 1
        await until(lambda: len(set(self.listener.slots) - known) == 1)
        (slot_id,) = set(self.listener.slots) - known
        return slot_id


Make = Callable[[Path, Machine], Awaitable[Place]]


async def local_place(folder: Path, machine: Machine) -> Place:
    settings = settings_of(folder / "a", 0, 3)
    backend, listener = LocalBackend(settings), Listener()
    await backend.start(listener)
    return Place(
        backend,
        machine,
        listener,
        lambda slot_id: machine.of(f"a/{slot_id.rpartition('-')[2]}"),
        lambda: "",
        lambda: LocalBackend(settings),
    )


async def kubernetes_place(folder: Path, machine: Machine) -> Place:
    api = FakeApi()
    Kubelet(api, machine)
    api.put(SLOT_POOLS, slot_pool())
    backend, listener = backend_of(api), Listener()
    await backend.start(listener)
    await until(lambda: bool(backend.classes) and backend.synced)
    return Place(backend, machine, listener, machine.of, lambda: backend.classes[0].name, lambda: backend_of(api))


@pytest_asyncio.fixture(params=[local_place, kubernetes_place], ids=["local", "kubernetes"])
async def place(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    machine = Machine()
    monkeypatch.setattr(link, "AgentClient", pod_client_of(machine))
    monkeypatch.setattr(home, "listens", listening(lambda: bool(machine.living)))
    monkeypatch.setattr(local, "LocalHome", home_of(machine))
    made: Place = await request.param(tmp_path, machine)
    yield made
    await made.backend.close(end_agents=True, grace_s=0)


async def test_slots_are_begun_up_to_the_bound_of_their_class(place: Place) -> None:
    (kind,) = place.backend.classes
    assert (kind.least, kind.most, kind.elastic) == (0, 3, True)
    assert await place.backend.add_slots(place.class_name(), 5) == 3
    assert set(place.backend.coming) | set(place.listener.slots), "what was asked for is known at once"
    await until(lambda: len(place.listener.slots) == 3)
    assert place.backend.coming == {} and await place.backend.add_slots(place.class_name(), 1) == 0
    assert {place.backend.class_of(slot_id) for slot_id in place.listener.slots} == {place.class_name()}
    assert set(place.backend.slot_ids) == set(place.listener.slots)


async def test_an_idle_slot_is_given_back_and_comes_again(place: Place) -> None:
    slot_id = await place.begun()
    await place.backend.remove_slot(slot_id)
    await until(lambda: place.agent_of(slot_id) is None)
    assert slot_id not in place.listener.slots and slot_id not in place.backend.slot_ids
    await until(lambda: slot_id not in place.backend.leaving)
    with pytest.raises(SlotUnavailable):
        await place.backend.remove_slot(slot_id)
    await place.begun()


async def test_a_slot_where_something_runs_stays_whoever_thought_it_idle(place: Place) -> None:
    slot_id = await place.begun()
    agent = place.agent_of(slot_id)
    assert agent is not None
    agent.run("rep-1")
    with pytest.raises(SlotRefused):
        await place.backend.remove_slot(slot_id)
    assert agent.lives and place.backend.leaving == frozenset()
    agent.end("rep-1")
    await place.backend.remove_slot(slot_id)
    await until(lambda: place.agent_of(slot_id) is None)


async def test_a_replica_is_started_where_it_was_placed(place: Place) -> None:
    slot_id = await place.begun()
    spec = ReplicaSpec("rep-1", "f", 1, "default", "", "", EngineOptions(engine="stub"))
    status = await place.backend.start_replica(slot_id, spec)
    assert status.replica_id == "rep-1"
    await until(lambda: [each.replica_id for each in place.listener.slots[slot_id].replicas] == ["rep-1"])
    with pytest.raises(SlotUnavailable):
        await place.backend.start_replica("no-slot", spec)


async def test_an_agent_that_dies_is_told_with_what_ran_there(place: Place) -> None:
    slot_id = await place.begun()
    agent = place.agent_of(slot_id)
    assert agent is not None
    agent.run("rep-1")
    await until(lambda: bool(place.listener.slots[slot_id].replicas))
    place.listener.lost.clear()
    agent.ended.set()
    await until(lambda: bool(place.listener.lost))
    assert place.listener.lost[0][0] == slot_id


async def test_another_control_plane_finds_the_slots_that_live(place: Place) -> None:
    slot_id = await place.begun()
    successor, listener = place.another(), Listener()
    await successor.start(listener)
    await until(lambda: set(listener.slots) == {slot_id})
    assert (slot_id, True) not in listener.lost, "it may run something: until it was heard nobody knows"
    await successor.close(end_agents=False, grace_s=0)
