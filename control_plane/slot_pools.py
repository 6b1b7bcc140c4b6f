"""What slots keep ready for starts: workers that wait, and prepared forms in their pools.

The leader says how many workers wait where and how likely each checkpoint is; forms are loaded and let go on request, a
new one from slots that have it already. Limits: a slot that cannot be reached is left out, and told with the next look.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from control_plane.backends.base import Backend, SlotUnavailable
from control_plane.lanes import FunctionKey
from function_runtime.protocol import Peer, SlotState

if TYPE_CHECKING:
    from control_plane.fleet import Fleet

logger = logging.getLogger(__name__)

PEERS: Final = 4
"""Slots a checkpoint is read from at once."""
FULL_SHARE: Final = 0.9
"""A pool that is as full takes nothing that nobody has asked for."""


def in_pools(slots: Mapping[str, SlotState], identity: str | None) -> list[dict[str, Any]]:
    """A checkpoint's forms, slot by slot, as the APIs show them."""
    return [
        {
            "slot_id": slot_id,
            "key": entry.key,
            "state": entry.state,
            "dtype": entry.dtype,
            "nbytes": entry.nbytes,
            "holders": list(entry.holders),
            "reload_s": entry.reload_s,
            "chance": entry.chance,
            "load": entry.load or None,
            "error": entry.error or None,
        }
        for slot_id, slot in slots.items()
        for entry in slot.pool
        if entry.identity == identity
    ]


class SlotPools:
    def __init__(self, fleet: Fleet, backend: Backend) -> None:
        self._fleet = fleet
        self._backend = backend
        self._warm = 0
        self._warm_more: dict[str, int] = {}
        self._expected: dict[str, tuple[str, Mapping[str, float], float]] = {}
        """What each slot was last told of its pool: to which agent, and when."""

    async def warm(self, workers: int) -> None:
        """Workers that wait in every slot; more may wait in some (`warm_more`), and none at all if this is 0."""
        self._warm = workers
        for slot_id in list(self._fleet.slots):
            await self.tell_warm(slot_id)

    async def warm_more(self, workers: Mapping[str, int]) -> None:
        self._warm_more = dict(workers)
        for slot_id in list(self._fleet.slots):
            await self.tell_warm(slot_id)

    def warm_target(self, slot_id: str) -> int:
        if self._fleet.is_terminating(slot_id):
            return self._fleet.slots[slot_id].warm_target
        return max(self._warm, self._warm_more.get(slot_id, 0)) if self._warm else 0

    async def tell_warm(self, slot_id: str) -> None:
        state, target = self._fleet.slots.get(slot_id), self.warm_target(slot_id)
        if state is None or state.warm_target == target:
            return
        try:
            await self._backend.warm(slot_id, target)
        except SlotUnavailable as error:
            logger.warning("event=warm_refused slot=%s error=%s", slot_id, error)

    def peers(self, slot_id: str, identity: str, just_warmed: Sequence[str] = ()) -> tuple[Peer, ...]:
        """Other slots whose pools have some form of a checkpoint, those with the fewest replicas first."""
        if not identity:
            return ()
        fleet = self._fleet
        known = dict.fromkeys((*fleet.placing.having(identity), *just_warmed))
        holders = [other for other in known if other != slot_id and other in fleet.slots]
        return self._backend.peers(sorted(holders, key=fleet.count_on)[:PEERS])

    def can_prepare(self, key: FunctionKey, slot_id: str) -> bool:
        """Whether a function may run there, and its checkpoint be loaded without another's having to go."""
        state = self._fleet.slots.get(slot_id)
        if state is None or state.pool_used_bytes > FULL_SHARE * (state.pool_budget_bytes or math.inf):
            return False
        return self._fleet.placing.kind_of(key) in ("", self._backend.class_of(slot_id))

    async def load(
        self, manifest_path: str, identity: str, dtype: str, slot_ids: Sequence[str] | None = None
    ) -> dict[str, str]:
        """Has a form loaded by every slot, or by those named, one after the other, so that each can take it from those
        before. Gives what went wrong, by slot."""
        warmed: list[str] = []
        refused: dict[str, str] = {}
        for slot_id in list(self._fleet.slots) if slot_ids is None else slot_ids:
            if self._fleet.is_terminating(slot_id):
                continue
            try:
                peers = self.peers(slot_id, identity, warmed)
                await self._backend.warm_pool(slot_id, manifest_path, dtype, peers)
                warmed.append(slot_id)
            except SlotUnavailable as error:
                refused[slot_id] = str(error)
                logger.warning("event=pool_warm_refused slot=%s error=%s", slot_id, error)
        return refused

    async def evict(self, slot_id: str, key: str) -> None:
        """Raises SlotUnavailable, and SlotRefused where the slot says no."""
        await self._backend.evict_pool(slot_id, key)

    async def forget_checkpoint(self, identity: str) -> None:
        """Lets every slot drop what it keeps of a model that is no more; one that does not answer drops it for want of
        use."""
        for slot_id in list(self._fleet.slots):
            try:
                await self._backend.forget_checkpoint(slot_id, identity)
            except SlotUnavailable as error:
                logger.warning("event=forget_refused slot=%s error=%s", slot_id, error)

    async def expect(self, chances: Mapping[str, float], holds_s: float) -> None:
        """Every slot is told of what its pool has; what it was told already again once half of its time is over."""
        now_s, told = time.monotonic(), self._expected
        self._expected = {}
        for slot_id, state in list(self._fleet.slots.items()):
            held = (entry.identity for entry in state.pool)
            here = {identity: round(chances[identity], 2) for identity in held if identity in chances}
            known = told.get(slot_id)
            if known is not None and known[:2] == (state.incarnation, here) and now_s - known[2] < holds_s / 2:
                self._expected[slot_id] = known
                continue
            if not here:
                continue
            try:
                await self._backend.expect_pool(slot_id, here, holds_s)
                self._expected[slot_id] = (state.incarnation, here, now_s)
            except SlotUnavailable as error:
                logger.warning("event=pool_forecast_refused slot=%s error=%s", slot_id, error)
