"""The leader tells every slot's pool how likely each checkpoint is to be wanted, and has missing ones loaded ahead.

A slot's pool evicts by it; where it lapses, least recently used. Loading ahead evicts nothing: only where a pool has
room left by its own count. Limits: what is likely is decided by `autoscaler.preload` from observed gaps.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from autoscaler.pooling import PRELOAD_CHANCE, Use, chances
from control_plane.functions import Revision

if TYPE_CHECKING:
    from control_plane.context import AppContext

logger = logging.getLogger(__name__)

TELL_S: Final = 20.0
HOLDS_S: Final = 3 * TELL_S
"""A forecast that was not renewed for this long counts for nothing."""
ROOM_SHARE: Final = 0.5
"""Nothing is loaded ahead into a pool that is fuller than this."""


class Preloading:
    def __init__(self, context: AppContext) -> None:
        self._context = context

    async def look(self) -> None:
        context = self._context
        if not context.gateways.leads or not context.fleet.in_sight:
            return
        revisions = self._revisions()
        likely = chances(self._uses(revisions))
        if likely:
            await context.fleet.expect_pool(likely, HOLDS_S)
        slots = context.fleet.slots
        held = frozenset(entry.identity for slot in slots.values() for entry in slot.pool if entry.state != "absent")
        roomy = [
            slot_id for slot_id, slot in slots.items() if slot.pool_used_bytes <= ROOM_SHARE * slot.pool_budget_bytes
        ]
        if not roomy:
            return
        for identity in to_preload(likely, held):
            revision = revisions[identity]
            context.decisions.record(
                "preload", revision.function, identity[:12], None,
                f"wanted within the horizon with a chance of {likely[identity]:.2f}, and in no pool",
                {"chance": round(likely[identity], 3), "threshold": PRELOAD_CHANCE, "slots": ",".join(roomy)},
                tenant=revision.tenant,
            )  # fmt: skip
            await context.fleet.warm_pool(revision.manifest_path or "", identity, revision.spec.dtype, roomy)

    def _revisions(self) -> dict[str, Revision]:
        """Current revisions that the native engine serves and whose checkpoint is imported."""
        return {
            function.current.identity: function.current
            for function in self._context.functions.list()
            if function.current.identity and function.current.manifest_path and function.current.spec.engine == "native"
        }

    def _uses(self, revisions: dict[str, Revision]) -> list[Use]:
        context, now_s = self._context, time.monotonic()
        found: list[Use] = []
        for function in context.functions.list():
            identity, key = function.current.identity, (function.tenant, function.name)
            if identity is None or identity not in revisions:
                continue
            lane = context.dispatcher.lanes.find(key, identity)
            elsewhere = context.loop.demand.elsewhere(key)
            active_s = max(lane.last_activity_s(now_s) if lane is not None else 0.0, elsewhere.last_activity_s)
            found.append(
                Use(
                    identity=identity,
                    idle_s=max(0.0, now_s - active_s),
                    gaps_s=(tuple(lane.gaps_s) if lane is not None else ()) + elsewhere.gaps_s,
                    in_use=bool(context.fleet.living(key)) or (lane is not None and bool(lane.waiting)),
                )
            )
        return found
