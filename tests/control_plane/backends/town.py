"""Slots of several gateways in this process: homes and agents are stand-ins; links, backends and table are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from control_plane.backends.base import SlotRefused, SlotUnavailable
from control_plane.settings import Settings, SlotRange, SlotSettings
from function_runtime.protocol import (
    AgentInfo,
    EngineOptions,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    SlotEvent,
    SlotState,
)
from tests.support.patience import PATIENCE_S, NotInTime


class Machine:
    """Agents by the port they would listen on."""

    def __init__(self) -> None:
        self.agents: dict[int, Agent] = {}
        self._ports = 1000

    def spawn(self, slot_id: str) -> Agent:
        self._ports += 1
        agent = self.agents[self._ports] = Agent(slot_id, self._ports)
        return agent

    def of(self, slot_id: str) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.slot_id == slot_id and agent.lives), None)

    @property
    def living(self) -> list[str]:
        return sorted(agent.slot_id for agent in self.agents.values() if agent.lives)


class Agent:
    def __init__(self, slot_id: str, port: int) -> None:
        self.slot_id = slot_id
        self.info = AgentInfo(slot_id, port, "127.0.0.1", port, "token", f"life-{port}")
        self.replicas: dict[str, ReplicaStatus] = {}
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()

    @property
    def lives(self) -> bool:
        return not self.ended.is_set()

    def run(self, replica_id: str, function: str = "f") -> ReplicaStatus:
        spec = ReplicaSpec(replica_id, function, 1, "default", "", "", EngineOptions(engine="stub"))
        status = ReplicaStatus(replica_id, function, 1, ReplicaState.STARTING, spec, pid=7, created_us=1)
        self.replicas[replica_id] = status
        self.changed.set()
        return status

    def end(self, replica_id: str) -> None:
        self.replicas[replica_id] = msgspec.structs.replace(self.replicas[replica_id], state=ReplicaState.ENDED)
        self.changed.set()

    @property
    def state(self) -> SlotState:
        return SlotState(
            self.slot_id, 1, self.info.incarnation, True, 0, 0, 0, 0, replicas=tuple(self.replicas.values())
        )


def client_of(machine: Machine) -> type:
    class Client:
        def __init__(self, info: AgentInfo) -> None:
            self.info = info
            self.agent = machine.agents[info.port]

        async def __aenter__(self) -> Client:
            if not self.agent.lives:
                raise SlotUnavailable("connection refused")
            return self

        async def __aexit__(self, *_: object) -> None:
            return

        async def events(self) -> AsyncIterator[SlotEvent]:
            agent = self.agent
            while agent.lives:
                agent.changed.clear()
                yield SlotEvent(state=agent.state)
                waits = [asyncio.ensure_future(each.wait()) for each in (agent.changed, agent.ended)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()

        async def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
            if not self.agent.lives:
                raise SlotUnavailable("connection refused")
            return self.agent.run(spec.replica_id, spec.function)

        async def shutdown(self, grace_s: float, *, if_idle: bool = False) -> None:
            live = [each for each in self.agent.replicas.values() if each.state is not ReplicaState.ENDED]
            if if_idle and live:
                raise SlotRefused("slot_busy", "a replica is here")
            self.agent.ended.set()

    return Client


def home_of(machine: Machine) -> type:
    async def nobody(info: AgentInfo) -> None:
        return

    class Home:
        shares_files = True

        def __init__(
            self, settings: Settings, number: int, register: Callable[[AgentInfo], Awaitable[None]] = nobody
        ) -> None:
            self.name = f"{settings.data_dir.name}/{number}"
            self._register = register

        def lives(self) -> bool:
            return machine.of(self.name) is not None

        async def find(self) -> AgentInfo:
            return (machine.of(self.name) or machine.spawn(self.name)).info

        async def is_gone(self) -> bool:
            return not self.lives()

        async def connected(self, info: AgentInfo) -> None:
            await self._register(info)

        def heard(self) -> None:
            return

        def end_hung(self) -> None:
            return

        async def news(self, pause_s: float) -> None:
            await asyncio.sleep(min(pause_s, 0.01))

        async def wait_gone(self, within_s: float) -> None:
            return

        async def wait_ended(self, within_s: float) -> None:
            return

    return Home


class Listener:
    def __init__(self) -> None:
        self.slots: dict[str, SlotState] = {}
        self.lost: list[tuple[str, bool]] = []

    def slot_state(self, slot_id: str, state: SlotState) -> None:
        self.slots[slot_id] = state

    def replica_changed(self, slot_id: str, status: ReplicaStatus) -> None:
        return

    def time_passed(self, slot_id: str, times: Mapping[str, ReplicaTime]) -> None:
        return

    def slot_lost(self, slot_id: str, reason: str, *, agent_gone: bool) -> None:
        self.slots.pop(slot_id, None)
        self.lost.append((slot_id, agent_gone))


def settings_of(folder: Path, least: int, most: int) -> Settings:
    return Settings(data_dir=folder, slot=SlotSettings(range=SlotRange(least, most)))


def gateways_of(own: str, peers: set[str]) -> Any:
    """Who lives, as a backend asks."""
    return SimpleNamespace(
        id=own,
        peers={name: SimpleNamespace() for name in peers},
        url_of=lambda name: name if name in peers else "",
        alone=False,
    )


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise NotInTime("it did not happen")
        await asyncio.sleep(0.002)
