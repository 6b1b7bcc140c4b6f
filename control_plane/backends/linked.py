"""Slots by the links there are to their agents: what a backend commands, whoever brings the slots about.

A slot that shares no folder with this process is told so in what it is given (`slot_files`), and sent the manifest of a
checkpoint when it lacks it. Limits: a link that is down refuses at once; whoever asked tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.attached import AttachedHome
from control_plane.backends.base import SlotListener, SlotRefused, SlotUnavailable
from control_plane.backends.link import SlotLink
from control_plane.settings import Settings
from function_runtime.protocol import Peer, ReplicaSpec, ReplicaStatus

if TYPE_CHECKING:
    from control_plane.backends.slot_files import Packed, SlotFiles

logger = logging.getLogger(__name__)

T = TypeVar("T")
STUB: Final = "stub"
MANIFEST_MISSING: Final = "manifest_missing"
"""What an agent answers that has not been sent a checkpoint's manifest."""


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
        return True

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
        if self._shares_files(slot_id):
            return await agent.start_replica(files.fit(spec, slot_id, shares_files=True))
        spec = msgspec.structs.replace(spec, peers=self._in_reach(spec.peers))
        if not spec.identity or spec.options.engine == STUB:
            return await agent.start_replica(files.fit(spec, slot_id, shares_files=False))
        packed = await self._packed(files, spec.manifest_path)
        fitted = files.fit(spec, slot_id, shares_files=False, manifest_sha256=packed.sha256)
        return await self._with_manifest(agent, packed, lambda: agent.start_replica(fitted))

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

    async def _packed(self, files: SlotFiles, manifest_path: str) -> Packed:
        from model_loader.errors import LoaderError

        if (known := files.at_hand(manifest_path)) is not None:
            return known
        try:
            return await asyncio.to_thread(files.parts, manifest_path)
        except LoaderError as error:
            if not error.retry:
                raise SlotRefused(error.code, str(error)) from error
            raise SlotUnavailable(f"the manifest cannot be sent: {error}") from error
        except OSError as error:
            raise SlotUnavailable(f"the manifest cannot be read: {error}") from error

    async def _with_manifest(self, agent: AgentClient, packed: Packed, command: Callable[[], Awaitable[T]]) -> T:
        """The command, and once more where the slot lacked the checkpoint's manifest."""
        try:
            return await command()
        except SlotRefused as refused:
            if refused.code != MANIFEST_MISSING:
                raise
        await agent.put_manifest(packed.manifest.identity, packed.parts)
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
        packed = await self._packed(files, manifest_path)
        identity, reach = packed.manifest.identity, self._in_reach(peers)
        token = files.token(slot_id, "", identity)  # for nobody yet

        async def warm() -> None:
            await agent.warm_pool(
                manifest_path, dtype, reach, identity=identity, manifest_sha256=packed.sha256, store_token=token
            )

        await self._with_manifest(agent, packed, warm)

    async def renew_store(self, slot_id: str, specs: Sequence[ReplicaSpec]) -> None:
        """Newer tokens for what runs at a slot, before the ones it has run out. Raises SlotUnavailable."""
        files = self.files
        if files is None or self._shares_files(slot_id):
            return
        tokens = {
            spec.replica_id: files.token(slot_id, spec.tenant, spec.identity, shares=spec.shares_kv) for spec in specs
        }
        if any(tokens.values()):
            await self._agent(slot_id).renew_store(tokens)

    async def resize_kv(self, slot_id: str, kv_bytes: Mapping[str, int]) -> None:
        await self._agent(slot_id).resize_kv(kv_bytes)

    async def evict_pool(self, slot_id: str, key: str) -> None:
        await self._agent(slot_id).evict_pool(key)

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        await self._agent(slot_id).forget_checkpoint(identity)

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        await self._agent(slot_id).expect_pool(chances, holds_s)

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return await self._agent(slot_id).replica_log(replica_id, tail_lines)


def machine_free_bytes() -> int:
    try:
        with open("/proc/meminfo", "rb") as lines:
            for line in lines:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        logger.warning("event=memory_unknown")
    return 0
