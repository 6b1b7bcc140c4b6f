"""What an agent had said, or was about to say, that is no more: nobody waits for it, and it brings nothing back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from autoscaler.placement import Placement
from control_plane.backends import link as link_module
from control_plane.backends.base import SlotUnavailable
from control_plane.backends.link import SlotLink
from control_plane.fleet import Fleet
from function_runtime.protocol import (
    AgentInfo,
    EngineOptions,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    SlotEvent,
    SlotState,
)


def state(incarnation: str, *replicas: ReplicaStatus) -> SlotState:
    return SlotState("s", 1, incarnation, True, 0, 0, 0, 0, replicas=replicas)


SPEC = ReplicaSpec("rep-1", "fn", 1, "default", "", "", EngineOptions(engine="stub"))
STARTING = ReplicaStatus("rep-1", "fn", 1, ReplicaState.STARTING, SPEC)


class Backend:
    """One slot; what its agent answers to a start is the test's to say."""

    slot_ids = ("s",)

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[ReplicaStatus] = asyncio.get_running_loop().create_future()

    def peers(self, slot_ids: Any) -> tuple[()]:
        return ()

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        self.asked.set()
        return await self.answer


@pytest.fixture
async def backend() -> Backend:
    return Backend()


@pytest.fixture
async def fleet(backend: Backend) -> Fleet:
    made: Any = backend
    fleet = Fleet(made, books=None)  # type: ignore[arg-type]
    fleet.keeps_books = False
    fleet.slot_state("s", state("one"))
    fleet.start_replica(Placement("s", 0.0, "only one"), SPEC)
    await backend.asked.wait()
    return fleet


async def settled(backend: Backend, answer: ReplicaStatus | Exception) -> None:
    if isinstance(answer, Exception):
        backend.answer.set_exception(answer)
    else:
        backend.answer.set_result(answer)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_start_that_only_the_agent_before_knew_of_has_failed(fleet: Fleet, backend: Backend) -> None:
    await settled(backend, STARTING)
    assert len(fleet.living()) == 1
    fleet.slot_state("s", state("two"))
    assert fleet.living() == []
    assert fleet.replicas["rep-1"].error is not None and fleet.replicas["rep-1"].error.retry


async def test_an_answer_of_the_agent_before_that_comes_late_is_no_start(fleet: Fleet, backend: Backend) -> None:
    fleet.slot_state("s", state("two"))
    assert len(fleet.living()) == 1, "the new agent may be the one that is asked"
    await settled(backend, STARTING)
    assert fleet.living() == []


async def test_a_start_that_the_new_agent_has_lives(fleet: Fleet, backend: Backend) -> None:
    fleet.slot_state("s", state("two"))
    await settled(backend, STARTING)
    alive = ReplicaStatus("rep-1", "fn", 1, ReplicaState.LOADING, SPEC, pid=7)
    fleet.replica_changed("s", alive)
    assert [each.pid for each in fleet.living()] == [7]


async def test_the_same_agent_that_is_heard_again_keeps_what_it_was_asked_for(fleet: Fleet, backend: Backend) -> None:
    fleet.slot_lost("s", "its events broke off", agent_gone=False)
    fleet.slot_state("s", state("one"))
    await settled(backend, STARTING)
    assert len(fleet.living()) == 1


async def test_an_agent_that_died_unanswering_has_started_nothing(fleet: Fleet, backend: Backend) -> None:
    fleet.slot_state("s", state("two"))
    await settled(backend, SlotUnavailable("the connection broke off"))
    assert fleet.living() == []


async def test_a_link_that_is_closed_tells_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come already is not told either: it would bring a slot back that is gone."""
    events: asyncio.Queue[SlotEvent] = asyncio.Queue()

    class Client:
        def __init__(self, info: AgentInfo) -> None:
            pass

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def events(self) -> AsyncIterator[SlotEvent]:
            while True:
                yield await events.get()

    async def find() -> AgentInfo:
        return AgentInfo("s", 1, "127.0.0.1", 1, "token", "one")

    async def connected(info: AgentInfo) -> None:
        pass

    monkeypatch.setattr(link_module, "AgentClient", Client)
    home: Any = SimpleNamespace(find=find, connected=connected, heard=lambda: None, shares_files=True)
    told: list[str] = []
    listener: Any = SimpleNamespace(slot_state=lambda slot_id, said: told.append(said.incarnation))
    link = SlotLink("s", home)
    link.start(listener)
    events.put_nowait(SlotEvent(state=state("one")))
    while not told:  # noqa: ASYNC110
        await asyncio.sleep(0)
    events.put_nowait(SlotEvent(state=state("one")))
    closing = link.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == ["one"]
    await closing
