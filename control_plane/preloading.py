"""The leader tells every slot's pool how likely each checkpoint is to be wanted, has missing ones loaded ahead, and
says how many warm workers wait where.

A slot's pool evicts by it; where it lapses, least recently used. What is loaded ahead, where, and instead of what is
decided by `autoscaler.pooling` from gaps and forecasts. Limits: forms are known by their last sizes and load times; a
checkpoint that was never loaded is taken for a quarter of a pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from autoscaler.pooling import (
    HORIZON_S,
    PRELOAD_CHANCE,
    Load,
    Pool,
    Use,
    Want,
    chances,
    starts_by_slot,
    to_load,
    workers,
)
from control_plane.functions import Revision
from function_runtime.protocol import SlotState

if TYPE_CHECKING:
    from control_plane.context import AppContext

logger = logging.getLogger(__name__)

TELL_S: Final = 20.0
HOLDS_S: Final = 3 * TELL_S
"""A forecast that was not renewed for this long counts for nothing."""
LOAD_S: Final = 5.0
"""What a load takes before one was measured."""
REFILL_S: Final = 3.0
"""From taking a warm worker to another's waiting: the agent stands back for a second after a start, then forks."""
WORKER_COST: Final = 0.05
"""Device-seconds a second that a waiting worker is worth: it holds no device, and some hundred megabytes of memory."""
WAITING_WEIGHT: Final = 30.0


class Preloading:
    def __init__(self, context: AppContext) -> None:
        self._context = context

    async def look(self) -> None:
        context = self._context
        if not context.gateways.leads or not context.fleet.in_sight:
            return
        revisions = self._revisions()
        uses = self._uses(revisions)
        likely = chances(uses)
        context.fleet.placing.chances = likely
        if likely:
            await context.fleet.pools.expect(likely, HOLDS_S)
        pools = [self._pool(slot_id, state) for slot_id, state in context.fleet.slots.items()]
        for load in to_load(self._wants(likely), pools):
            await self._load(load, revisions[load.identity], likely)
        await self._warm(uses, likely, pools)

    async def _load(self, load: Load, revision: Revision, likely: Mapping[str, float]) -> None:
        context, chance = self._context, likely[load.identity]
        context.decisions.record(
            "preload", revision.function, load.identity[:12], None,
            f"wanted within {HORIZON_S:.0f} s with a chance of {chance:.2f}: loaded on {load.slot_id}"
            + (f" instead of {', '.join(each[:12] for each in load.instead_of)}" if load.instead_of else ""),
            {"chance": round(chance, 3), "threshold": PRELOAD_CHANCE, "saves_s": round(load.saves_s, 3),
             "slot": load.slot_id},
            tenant=revision.tenant,
        )  # fmt: skip
        path = revision.manifest_path or ""
        await context.fleet.pools.load(path, load.identity, revision.spec.dtype, [load.slot_id])

    def _pool(self, slot_id: str, state: SlotState) -> Pool:
        present = [entry for entry in state.pool if entry.state in ("ready", "loading")]
        return Pool(
            slot_id=slot_id,
            budget_bytes=state.pool_budget_bytes,
            used_bytes=state.pool_used_bytes,
            held={entry.identity: entry.nbytes for entry in present},
            pinned=frozenset(entry.identity for entry in present if entry.holders or entry.state == "loading"),
            busy=float(sum(entry.state == "loading" for entry in present)),
        )

    def _wants(self, likely: Mapping[str, float]) -> list[Want]:
        """With the size and the seconds of the last load of each, wherever that was."""
        nbytes: dict[str, int] = {}
        load_s: dict[str, float] = {}
        for state in self._context.fleet.slots.values():
            for entry in state.pool:
                nbytes[entry.identity] = max(nbytes.get(entry.identity, 0), entry.nbytes)
                load_s[entry.identity] = max(load_s.get(entry.identity, 0.0), entry.reload_s)
        return [
            Want(identity, chance, nbytes.get(identity, 0), load_s.get(identity) or LOAD_S)
            for identity, chance in likely.items()
        ]

    async def _warm(self, uses: list[Use], likely: Mapping[str, float], pools: list[Pool]) -> None:
        """More workers than are kept anyway, where more starts than one are expected at a time."""
        fleet = self._context.fleet
        running = {use.identity for use in uses if use.in_use}
        expected = {
            identity: chance / HORIZON_S
            for identity, chance in likely.items()
            if identity not in running and chance > 0
        }
        by_slot = starts_by_slot(expected, pools)
        saved_s = fleet.placing.measured.fork_s
        wanted = {
            slot_id: workers(rate, REFILL_S, saved_s, WAITING_WEIGHT, WORKER_COST) for slot_id, rate in by_slot.items()
        }
        await fleet.pools.warm_more(wanted)

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
                    expected=context.fleet.placing.expected(key, HORIZON_S),
                )
            )
        return found
