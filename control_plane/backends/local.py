"""The slots of this machine: `stoker up --slots N` makes N, each with an agent, a directory and a pool of its own.

Limits: slots share the machine's cores and memory; nothing keeps their replicas apart but the processes themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.base import SlotListener, SlotUnavailable
from control_plane.backends.home import LocalHome
from control_plane.backends.link import SlotLink
from control_plane.settings import Settings
from function_runtime.protocol import Peer, ReplicaSpec, ReplicaStatus

logger = logging.getLogger(__name__)


class LinkedSlots:
    """Commands to slots by the links there are."""

    def __init__(self) -> None:
        self._links: dict[str, SlotLink] = {}

    def _agent(self, slot_id: str) -> AgentClient:
        link = self._links.get(slot_id)
        if link is None:
            raise SlotUnavailable(f"there is no slot {slot_id} any more")
        return link.agent

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return tuple(self._links)

    def free_bytes(self, slot_id: str) -> int:
        return machine_free_bytes()

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        return await self._agent(slot_id).start_replica(spec)

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        await self._agent(slot_id).end_replica(replica_id, grace_s, reason)

    async def warm(self, slot_id: str, workers: int) -> None:
        await self._agent(slot_id).warm(workers)

    def peers(self, slot_ids: Sequence[str]) -> tuple[Peer, ...]:
        found: list[Peer] = []
        for slot_id in slot_ids:
            with suppress(SlotUnavailable):
                found.append(self._agent(slot_id).as_peer)
        return tuple(found)

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> None:
        await self._agent(slot_id).warm_pool(manifest_path, dtype, peers)

    async def evict_pool(self, slot_id: str, key: str) -> None:
        await self._agent(slot_id).evict_pool(key)

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        await self._agent(slot_id).expect_pool(chances, holds_s)

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return await self._agent(slot_id).replica_log(replica_id, tail_lines)


class LocalBackend(LinkedSlots):
    """Slots `slot-0` to `slot-N`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._homes: list[LocalHome] = []
        for number in range(settings.slot.count):
            home = LocalHome(settings, number)
            self._homes.append(home)
            self._links[f"slot-{number}"] = SlotLink(f"slot-{number}", home)

    async def start(self, listener: SlotListener) -> None:
        for link in self._links.values():
            link.start(listener)

    async def look(self) -> None:
        """All its slots are here: there is nothing to look for."""

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        if end_agents:
            await asyncio.gather(*(link.shutdown_agent(grace_s) for link in self._links.values()))
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if end_agents:
            await asyncio.gather(*(home.wait_ended(grace_s + 5.0) for home in self._homes))


def machine_free_bytes() -> int:
    try:
        with open("/proc/meminfo", "rb") as lines:
            for line in lines:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        logger.warning("event=memory_unknown")
    return 0
