"""Several gateways in this process over one database, with one slot of fake replicas that all of them see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.backends.base import SlotListener
from control_plane.settings import DatabaseSettings, GatewaySettings, HttpSettings, QueueSettings, Settings
from control_plane.upkeep import Upkeep
from function_runtime.protocol import Peer, ReplicaSpec, ReplicaStatus
from tests.control_plane.gateway.conftest import Plane, checkpoint, until
from tests.control_plane.gateway.fakes import Behaviour, FakeSlot, FixedSlots

__all__ = ["checkpoint"]

LEASE_S = 60.0
"""Where nothing is to die: no stall of a busy machine makes a gateway lapse."""
LEASE_OF_MORTALS_S = 3.0
LEAD_S = 1.5
"""Short, because a third of it is the pause in which gateways hear of one another."""


class SlotView(FixedSlots):
    """One gateway's view of the slot that all share."""

    def __init__(self, slot: FakeSlot) -> None:
        self._slot = slot

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return self._slot.slot_ids

    async def start(self, listener: SlotListener) -> None:
        self._slot.listen(id(self), listener)

    async def look(self) -> None:
        pass

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        self._slot.leave(id(self))

    def free_bytes(self, slot_id: str) -> int:
        return self._slot.free_bytes(slot_id)

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        return await self._slot.start_replica(slot_id, spec)

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        await self._slot.end_replica(slot_id, replica_id, grace_s, reason)

    async def warm(self, slot_id: str, workers: int) -> None:
        await self._slot.warm(slot_id, workers)

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        return

    async def evict_pool(self, slot_id: str, key: str) -> None:
        return

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        return

    def peers(self, slot_ids: Sequence[str]) -> tuple[Peer, ...]:
        return ()

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> None:
        pass

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return await self._slot.replica_log(slot_id, replica_id, tail_lines)


class Gateway(Plane):
    """A plane with its upkeep: leases are renewed, demand is told."""

    def __init__(self, settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> None:
        super().__init__(settings, slot, checkpoint)
        self.backend = SlotView(slot)
        self.lives = False

    async def start(self) -> None:
        await super().start()
        self.upkeep = Upkeep(self.context)
        self.upkeep.start()
        self.lives = True

    async def stop(self) -> None:
        if self.lives:
            self.lives = False
            await self.upkeep.close()
            await super().stop()

    async def die(self) -> None:
        self.lives = False
        await self.upkeep.close()
        await self.context.adopting.close()
        await super().die()

    @property
    def id(self) -> str:
        return self.context.gateway_id

    @property
    def leads(self) -> bool:
        return self.context.loop.leads


class Town:
    """Gateways over one database."""

    def __init__(self, settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> None:
        self.settings = settings
        self.slot = slot
        self._checkpoint = checkpoint
        self.gateways: list[Gateway] = []

    async def open(self, **queue: Any) -> Gateway:
        """One more gateway, known to all others."""
        settings = replace(self.settings, queue=replace(self.settings.queue, **queue))
        gateway = Gateway(settings, self.slot, self._checkpoint)
        await gateway.start()
        self.gateways.append(gateway)
        await self.agreed()
        return gateway

    @property
    def living(self) -> list[Gateway]:
        return [gateway for gateway in self.gateways if gateway.lives]

    async def agreed(self) -> None:
        """All living gateways know one another, and who leads."""
        ids = {gateway.id for gateway in self.living}

        def agree() -> bool:
            return all(
                set(gateway.context.gateways.peers) | {gateway.id} == ids and gateway.context.gateways.leader in ids
                for gateway in self.living
            ) and any(gateway.leads for gateway in self.living)

        await until(agree, 20.0)

    async def close(self) -> None:
        for gateway in self.living:
            await gateway.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database of either kind."""
    if request.param == "sqlite":
        yield str(tmp_path / "shared.db")
        return
    with request.getfixturevalue("postgres").database() as url:
        yield url


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path, database_url: str) -> Settings:
    (tmp_path / "data").mkdir()
    mortal = request.node.get_closest_marker("deaths") is not None
    return Settings(
        data_dir=tmp_path / "data",
        database=DatabaseSettings(url=database_url),
        http=HttpSettings(heartbeat_s=0.05),
        queue=QueueSettings(),
        gateway=GatewaySettings(lease_s=LEASE_OF_MORTALS_S if mortal else LEASE_S, lead_cap_s=LEAD_S),
    )


@pytest.fixture
async def slot() -> AsyncIterator[FakeSlot]:
    slot = FakeSlot(Behaviour())
    yield slot
    await slot.shut()


@pytest.fixture
async def town(settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> AsyncIterator[Town]:
    town = Town(settings, slot, checkpoint)
    yield town
    await town.close()


@pytest.fixture
async def pair(town: Town) -> tuple[Gateway, Gateway]:
    """The leader and another; both know the function `fn`."""
    leader = await town.open()
    other = await town.open()
    assert leader.leads and not other.leads
    await leader.deploy()
    leader.context.peers.tell("functions")
    await until(lambda: other.context.functions.find("fn", "default"))
    return leader, other


async def gather(*work: Any) -> list[Any]:
    return list(await asyncio.gather(*work))
