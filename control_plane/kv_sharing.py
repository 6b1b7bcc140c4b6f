"""KV memory of shared devices divided anew, as replicas come to a device and leave it.

    a replica is to start   who is there gives up what it needs, and it starts when they have
    one has ended, or more is needed   those that have less than they need get more, once nobody has more than its part

The rule is `autoscaler.device_sharing`, by `kv_grants`; a replica changes its memory between two steps, and what it
computes with stays. Limits: by the leader only; on CPUs, where KV takes memory as tokens come, only where a machine's
memory is short; a replica in the middle of much gives up the rest when its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from autoscaler.device_sharing import worth_telling
from control_plane.backends.base import Backend, SlotUnavailable
from control_plane.fleet import GONE, Fleet
from control_plane.placing import CUDA, place_of
from function_runtime.protocol import ReplicaSpec, ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

LOOK_S: Final = 30.0
"""What a request needs changes without a word: this often all shared devices are looked at."""
ROOM_S: Final = 5.0
"""How long a start waits for those who make room for it."""
CLOSE: Final = 1.02
"""A share is reached within a block."""


class KvSharing:
    def __init__(self, fleet: Fleet, backend: Backend, leads: Callable[[], bool]) -> None:
        self._fleet = fleet
        self._backend = backend
        self._leads = leads
        self._due: set[str] = set()
        self._changed = asyncio.Event()
        self._promised: dict[str, int] = {}
        """Larger shares that replicas were told of and may not have been able to take: memory may be somebody else's.
        They are told again when something on their slot has changed."""
        self.told: Counter[str] = Counter()
        """Replicas that were told of another share: less | more."""
        fleet.watchers.append(self._replica_changed)
        fleet.on_kv = self._kv_changed
        fleet.make_room = self.make_room

    def _replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        self._promised.pop(status.replica_id, None)
        if status.state is ReplicaState.READY or status.state in GONE:
            self._divide_soon(self._fleet.slot_of.get(status.replica_id, ""))

    def _kv_changed(self, status: ReplicaStatus) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        slot_id = self._fleet.slot_of.get(status.replica_id, "")
        self._fleet.placing.changed(slot_id)
        self._divide_soon(slot_id)

    def _divide_soon(self, slot_id: str) -> None:
        for living in self._fleet.on(slot_id):
            self._promised.pop(living.replica_id, None)
        if slot_id and slot_id not in self._due and self._leads() and self._fleet.count_on(slot_id):
            self._due.add(slot_id)
            self._fleet.spawn(self._divide(slot_id))

    async def look(self) -> None:
        if self._leads():
            for slot_id in list(self._fleet.slots):
                if self._fleet.count_on(slot_id):
                    await self._divide(slot_id)
                    await asyncio.sleep(0)

    async def _divide(self, slot_id: str) -> None:
        """Less first: nobody gets what another still has."""
        self._due.discard(slot_id)
        for kind, index in sorted({place_of(status.spec) for status in self._fleet.on(slot_id)}):
            less, more = self._shares(slot_id, kind, index)
            if less:
                await self._tell(slot_id, less, "less")
                continue
            more = {name: share for name, share in more.items() if worth_telling(self._promised.get(name, 0), share)}
            if more:
                self._promised.update(more)
                await self._tell(slot_id, more, "more")

    def _shares(self, slot_id: str, kind: str, index: int) -> tuple[dict[str, int], dict[str, int]]:
        """Shares of those who have to give some up, and of those who may have more."""
        placing = self._fleet.placing
        holders = placing.holders(slot_id, kind, index)
        if kind != CUDA and len(holders) < 2:
            return {}, {}
        shares = placing.grants.shares(holders, placing.memory_bytes(slot_id, kind, index, holders))
        less: dict[str, int] = {}
        more: dict[str, int] = {}
        for holder in holders:
            replica_id, has_bytes = holder.spec.replica_id, holder.kv_bytes
            share = shares.get(replica_id, has_bytes)
            if share and worth_telling(has_bytes, share):
                (less if share < has_bytes else more)[replica_id] = share
        return less, more

    async def _tell(self, slot_id: str, shares: Mapping[str, int], what: str) -> None:
        self.told[what] += len(shares)
        logger.info("event=kv_shares slot=%s what=%s shares=%s", slot_id, what, dict(shares))
        try:
            await self._backend.resize_kv(slot_id, shares)
        except SlotUnavailable as error:
            logger.warning("event=kv_shares_refused slot=%s error=%s", slot_id, error)

    async def make_room(self, slot_id: str, spec: ReplicaSpec) -> None:
        """Returns when who shares the device with one that is about to start has given up what it needs, or after
        `ROOM_S`: then it starts all the same, and is told where there is no memory."""
        kind, index = place_of(spec)
        less, _ = self._shares(slot_id, kind, index) if kind == CUDA else ({}, {})
        if not less:
            return
        await self._tell(slot_id, less, "less")
        try:
            async with asyncio.timeout(ROOM_S):
                while not all(self._has_given(replica_id, share) for replica_id, share in less.items()):
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("event=kv_room_late slot=%s replica=%s", slot_id, spec.replica_id)

    def _has_given(self, replica_id: str, share: int) -> bool:
        status = self._fleet.replicas.get(replica_id)
        return status is None or status.state in GONE or status.kv_bytes <= share * CLOSE
