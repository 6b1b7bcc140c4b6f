"""The slots of this machine: `stoker up --slots N` makes N, each with an agent, a directory and a pool of its own;
with `--slots MIN..MAX` they come and go, and one whose agent still lives is taken over at a start.

Limits: slots share the machine's cores and memory; nothing keeps their replicas apart but the processes themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.attached import AttachedHome
from control_plane.backends.base import SlotClass, SlotListener, SlotRefused, SlotUnavailable
from control_plane.backends.home import LocalHome
from control_plane.backends.link import SlotLink
from control_plane.settings import Settings
from function_runtime.protocol import Peer, ReplicaSpec, ReplicaStatus

if TYPE_CHECKING:
    from control_plane.backends.slot_files import SlotFiles

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST_MISSING: Final = "manifest_missing"
"""What an agent answers that has not been sent a checkpoint's manifest."""
END_S = 5.0
"""An agent without replicas that takes longer than this to end is killed."""


class LinkedSlots:
    """Commands to slots by the links there are."""

    def __init__(self) -> None:
        self._links: dict[str, SlotLink] = {}
        self.files: SlotFiles | None = None
        """What slots elsewhere need of this machine; None: all slots share its folders."""
        self._attached: dict[str, SlotLink] = {}

    @property
    def any_elsewhere(self) -> bool:
        """Whether there are, or may be, slots that share no folder with this process."""
        return bool(self._attached)

    def _attach(self, settings: Settings) -> None:
        """Slots that somebody else started: their links begin and end with the backend."""
        secret, orphan_s = Path(settings.slot.agent_secret_file), settings.slot.orphan_s
        for place in settings.slot.agents:
            self._attached[place.slot_id] = SlotLink(place.slot_id, AttachedHome(place, secret, orphan_s))
        self._links.update(self._attached)

    def _start_attached(self, listener: SlotListener) -> None:
        for link in self._attached.values():
            link.start(listener)

    async def _close_attached(self) -> None:
        await asyncio.gather(*(link.close() for link in self._attached.values()))

    def _refuse_attached(self, slot_id: str) -> None:
        if slot_id in self._attached:
            raise SlotRefused("slot_attached", f"{slot_id} was not begun here, and is not given back from here")

    def _agent(self, slot_id: str) -> AgentClient:
        link = self._links.get(slot_id)
        if link is None:
            raise SlotUnavailable(f"there is no slot {slot_id} any more")
        return link.agent

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return tuple(self._links)

    def class_of(self, slot_id: str) -> str:
        return ""

    def free_bytes(self, slot_id: str) -> int:
        return machine_free_bytes()

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        agent, files = self._agent(slot_id), self.files
        if files is None:
            return await agent.start_replica(spec)
        shares = self._shares_files(slot_id)
        spec = files.fit(spec, slot_id, shares_files=shares)
        if not shares:
            spec = msgspec.structs.replace(spec, peers=self._in_reach(spec.peers))
        return await self._with_manifest(agent, spec.manifest_path, spec.identity, lambda: agent.start_replica(spec))

    def _shares_files(self, slot_id: str) -> bool:
        return self._links[slot_id].shares_files

    def _in_reach(self, peers: Sequence[Peer]) -> tuple[Peer, ...]:
        """Those that a slot elsewhere reaches: agents of this machine listen on its loopback address."""
        here: set[str] = set()
        for link in self._links.values():
            if link.shares_files:
                with suppress(SlotUnavailable):
                    here.add(link.agent.as_peer.url)
        return tuple(peer for peer in peers if peer.url not in here)

    async def _with_manifest(
        self, agent: AgentClient, manifest_path: str, identity: str, command: Callable[[], Awaitable[T]]
    ) -> T:
        """The command, and once more where the slot lacked the checkpoint's manifest."""
        from model_loader.errors import LoaderError

        try:
            return await command()
        except SlotRefused as refused:
            if refused.code != MANIFEST_MISSING or self.files is None:
                raise
        try:
            parts = await asyncio.to_thread(self.files.parts, manifest_path)
        except (LoaderError, OSError) as error:
            if isinstance(error, LoaderError) and not error.retry:
                raise SlotRefused(error.code, str(error)) from error
            raise SlotUnavailable(f"the manifest cannot be sent: {error}") from error
        await agent.put_manifest(identity, parts)
        return await command()

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
        agent, files = self._agent(slot_id), self.files
        if files is None or self._shares_files(slot_id):
            await agent.warm_pool(manifest_path, dtype, peers)
            return
        identity = Path(manifest_path).parent.name
        elsewhere: dict[str, str | bool] = {
            "identity": identity,
            "by_identity": True,
            "store_token": files.token(slot_id),
        }
        await self._with_manifest(
            agent, manifest_path, identity,
            lambda: agent.warm_pool(manifest_path, dtype, self._in_reach(peers), **elsewhere),
        )  # fmt: skip

    async def evict_pool(self, slot_id: str, key: str) -> None:
        await self._agent(slot_id).evict_pool(key)

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        await self._agent(slot_id).forget_checkpoint(identity)

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        await self._agent(slot_id).expect_pool(chances, holds_s)

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return await self._agent(slot_id).replica_log(replica_id, tail_lines)


class OwnSlots:
    """Those whose agents this process starts: opened, and given back when nothing runs there."""

    def __init__(self, links: dict[str, SlotLink]) -> None:
        self._links = links
        self._homes: dict[str, LocalHome] = {}
        self.leaving: set[str] = set()
        self.listener: SlotListener | None = None

    def __contains__(self, slot_id: str) -> bool:
        return slot_id in self._homes

    def open(self, slot_id: str, home: LocalHome) -> None:
        """Begins at once where there is a listener, else with `start`."""
        self._homes[slot_id] = home
        self._links[slot_id] = link = SlotLink(slot_id, home)
        if self.listener is not None:
            self._begin(link, home)

    def start(self, listener: SlotListener) -> None:
        self.listener = listener
        for slot_id, home in self._homes.items():
            self._begin(self._links[slot_id], home, expected=True)

    def _begin(self, link: SlotLink, home: LocalHome, *, expected: bool = False) -> None:
        if self.listener is None:
            raise RuntimeError("nobody listens to the slots yet")
        if not expected and not home.lives():
            # Nothing runs on a slot that is only coming up: nobody has to wait for it to know what does.
            self.listener.slot_lost(link.slot_id, "it is coming up", agent_gone=True)
        link.start(self.listener)

    @property
    def coming(self) -> dict[str, float]:
        now_s = time.monotonic()
        own = ((slot_id, self._links[slot_id]) for slot_id in self._homes)
        return {slot_id: now_s - link.since_s for slot_id, link in own if not link.heard}

    async def retire(self, slot_id: str) -> None:
        """Raises SlotRefused where something runs there, SlotUnavailable where that cannot be told."""
        link, home = self._links[slot_id], self._homes[slot_id]
        self.leaving.add(slot_id)
        try:
            await link.retire()
            await link.close()
            await home.wait_gone(END_S)
            del self._homes[slot_id], self._links[slot_id]
            if self.listener is not None:
                self.listener.slot_lost(slot_id, "it was given back", agent_gone=True)
        finally:
            self.leaving.discard(slot_id)
        logger.info("event=slot_given_back slot=%s", slot_id)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        links = [self._links[slot_id] for slot_id in self._homes]
        if end_agents:
            await asyncio.gather(*(link.shutdown_agent(grace_s) for link in links))
        await asyncio.gather(*(link.close() for link in links))
        if end_agents:
            await asyncio.gather(*(home.wait_ended(grace_s + 5.0) for home in self._homes.values()))


class LocalBackend(LinkedSlots):
    """Slots `slot-0` to `slot-N`, and those of other machines that it was told of."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._own = OwnSlots(self._links)
        slots = settings.slot
        self.classes = (
            SlotClass(
                least=slots.range.least + len(slots.agents),
                most=slots.range.most + len(slots.agents),
                most_replicas=slots.replicas_at_most,
            ),
        )
        self._attach(settings)
        for number in range(slots.range.most):
            home = LocalHome(settings, number)
            if number < slots.range.least or home.lives():
                self._own.open(f"slot-{number}", home)

    @property
    def coming(self) -> Mapping[str, float]:
        return self._own.coming

    @property
    def leaving(self) -> frozenset[str]:
        return frozenset(self._own.leaving)

    async def start(self, listener: SlotListener) -> None:
        self._own.start(listener)
        self._start_attached(listener)

    async def look(self) -> None:
        """All its slots are here: there is nothing to look for."""

    async def add_slots(self, class_name: str, count: int) -> int:
        free = [number for number in range(self._settings.slot.range.most) if f"slot-{number}" not in self._own]
        for number in free[:count]:
            self._own.open(f"slot-{number}", LocalHome(self._settings, number))
        return min(len(free), max(count, 0))

    async def remove_slot(self, slot_id: str) -> None:
        self._refuse_attached(slot_id)
        if slot_id not in self._own:
            raise SlotUnavailable(f"there is no slot {slot_id} any more")
        if slot_id not in self._own.leaving:
            await self._own.retire(slot_id)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        await self._close_attached()
        await self._own.close(end_agents=end_agents, grace_s=grace_s)


def machine_free_bytes() -> int:
    try:
        with open("/proc/meminfo", "rb") as lines:
            for line in lines:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        logger.warning("event=memory_unknown")
    return 0
