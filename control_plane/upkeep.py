"""What a gateway does now and then: renew its lease, look what others changed, and, where it leads, report replicas to
the ledger and drop what retention lets go.

Each task has its own pause and survives faults of the storage. Limits: small batches, so that none is ever in the way
of a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from control_plane.backends.base import SlotUnavailable
from control_plane.context import AppContext
from control_plane.database import Connection, Database
from control_plane.errors import StokerError
from control_plane.fleet import GONE
from control_plane.kv_sharing import LOOK_S as KV_SHARES_S
from control_plane.load_meter import WINDOW_S
from control_plane.moving import LOOK_S as MOVES_S
from control_plane.placing import FRESHEN_S
from control_plane.predicted import LOOK_S as PREDICTED_S
from control_plane.preloading import TELL_S, Preloading
from control_plane.slot_scaling import LOOK_S as SLOTS_S
from control_plane.store_tokens import RENEW_S
from function_runtime.protocol import EngineOptions, ReplicaSpec, ReplicaState, ReplicaStatus, ReplicaTime

logger = logging.getLogger(__name__)

REPORT_S: Final = 15.0
"""How stale the ledger's view of a living replica may be that has worked since."""
IDLE_REPORT_S: Final = 60.0
"""And of one for which only time has passed: a fleet at rest writes little."""
REPORTED_AT_ONCE: Final = 100
"""Replicas a transaction."""
SETTLE_S: Final = 1.0
"""How long a claim on a bound of all gateways may lie unused."""
TIDY_S: Final = 2.0
"""Pause between two looks at what has ended and can be compacted."""
KEEP_S: Final = 20.0
"""How late a minute of load that is over may be written down."""
FORECAST_S: Final = 2.0
"""Pause between two looks at which forecasts are due."""
LATE_S: Final = 0.05
"""How long after its end a window is closed: what was under way in that moment has been counted by then."""
BATCHES: Final = 100
"""Most batches of one sweep."""
MORE_S: Final = 0.2
"""Pause between two batches of a sweep that found a full one."""


async def _open_accounts(db: Database) -> list[ReplicaStatus]:
    """Accounts that are still open, as the last status there was of their replicas."""

    def run(connection: Connection) -> list[Any]:
        return connection.execute(
            "SELECT replica_id, tenant, function, revision, cold_us, attributed_us, idle_us, overhead_us, held_us, "
            "charged_us FROM replica_accounts WHERE closed_us IS NULL"
        ).fetchall()

    found: list[ReplicaStatus] = []
    for replica_id, tenant, function, revision, cold, attributed, idle, overhead, held, charged in await db.read(run):
        spec = ReplicaSpec(replica_id, function, revision, tenant, "", "", EngineOptions())
        time_known = ReplicaTime(max(held, charged), cold, attributed, idle, overhead)
        found.append(ReplicaStatus(replica_id, function, revision, ReplicaState.FAILED, spec, time=time_known))
    return found


def _worked_us(status: ReplicaStatus) -> int:
    return status.time.attributed_us + status.time.cold_us


async def _import_ahead() -> None:
    """What the first deployment and the first request need, and a start need not wait for."""
    for module in (
        "control_plane.spec",
        "model_loader.chat",
        "model_loader.tokenizer",
        "tokenizers",
        "jinja2",
        "numpy",
        "autoscaler.windows",
        "autoscaler.choosing",
    ):
        await asyncio.to_thread(importlib.import_module, module)


class Upkeep:
    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: dict[str, tuple[float, int]] = {}
        """When the ledger was told of each replica, and for how long it had worked by then."""

    def start(self) -> None:
        context, settings = self._context, self._context.settings
        for name, pause_s, work in (
            ("report", REPORT_S, self._report),
            ("tidy", TIDY_S, self._tidy),
            ("sweep", settings.retention.sweep_s, self._sweep),
            ("refresh", settings.gateway.refresh_s, self._refresh),
            ("slots", SLOTS_S, context.slot_scaling.look),
            ("moves", MOVES_S, context.moves.look),
            ("kv_shares", KV_SHARES_S, context.kv_sharing.look),
            ("homes", FRESHEN_S, self._freshen),
            ("predicted", PREDICTED_S, context.predicted.look),
            ("preload", TELL_S, Preloading(context).look),
            ("keep_load", KEEP_S, self._keep_load),
            ("forecast", FORECAST_S, self._forecast),
            ("store_tokens", RENEW_S, self._renew_store_tokens),
        ):
            self._spawn(self._every(name, pause_s, work))
        self._spawn(context.gateways.run())
        self._spawn(self._once("import_ahead", _import_ahead))
        self._spawn(self._once("watch_store", context.store.watch))
        if not context.gateways.alone:
            self._spawn(context.sender.run())
            self._spawn(self._keep_shares())
        self._spawn(self._every("budgets", SETTLE_S, context.budgets.settle))
        self._spawn(self._keep_books())
        self._spawn(self._watch_load())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _keep_books(self) -> None:
        """What nobody wrote down is made good by whoever comes to lead."""
        led = False
        while True:
            leads = self._context.gateways.leads
            if leads and not led:
                await self._once("close_unseen", self.close_unseen)
            led = leads
            await self._context.gateways.moved()

    async def _watch_load(self) -> None:
        """Close each window of load when it is over, and count it or tell the leader of it."""
        context, meter = self._context, self._context.dispatcher.load
        observations, led = context.loop.observations, False
        while True:
            await asyncio.sleep(min(max(meter.ends_s - time.time(), 0.0), WINDOW_S) + LATE_S)
            leads = context.loop.leads
            if leads and not (led and observations.restored):
                await self._once("restore_load", observations.restore)
                await self._once("restore_restarts", context.loop.starting.restore)
            led = leads
            closed = meter.close(list(context.dispatcher.requests.values()))
            if leads:
                meter.sent(observations.take(context.gateways.id, meter.unsent()))
                await self._try("settle_load", observations.settle())
            elif closed:
                context.sender.changed(waiting=False)

    async def _freshen(self) -> None:
        if self._context.loop.leads:
            await self._context.fleet.placing.freshen()

    async def _keep_load(self) -> None:
        if self._context.loop.leads:
            await self._context.loop.observations.keep()

    async def _forecast(self) -> None:
        if self._context.loop.leads:
            await self._context.loop.forecasting.look()

    async def _renew_store_tokens(self) -> None:
        """Each gateway does: whichever reaches a slot."""
        fleet = self._context.fleet
        for slot_id in list(fleet.slots):
            try:
                await fleet.renew_store(slot_id)
            except SlotUnavailable as error:
                logger.warning("event=store_tokens_not_renewed slot=%s error=%s", slot_id, error)

    async def _keep_shares(self) -> None:
        shares, gateways = self._context.queue_shares, self._context.gateways
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await shares.due.wait()
            shares.due.clear()
            if gateways.held:
                await self._try("shares", shares.settle())

    async def _refresh(self) -> None:
        """News of other gateways that did not reach this one."""
        if not self._context.gateways.alone:
            await self._context.look_again(("keys", "functions", "slots", "drains"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _once(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        await self._try(name, work())

    async def _every(self, name: str, pause_s: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            await self._try(name, work())

    async def _try(self, name: str, work: Awaitable[object]) -> None:
        """Whatever is the matter with it stops nothing else."""
        try:
            await work
        except StokerError as error:
            logger.warning("event=upkeep_refused task=%s error=%s", name, error)
        except Exception:
            logger.exception("event=upkeep_failed task=%s", name)

    async def close_unseen(self) -> None:
        """Replicas whose end nobody saw, because agent and control plane were gone at once, or nobody who kept books:
        these are closed with what was last known of them."""
        context = self._context
        await context.fleet.seen()
        for status in await _open_accounts(context.db):
            known = context.fleet.replicas.get(status.replica_id)
            if known is None or known.state in GONE:
                logger.info("event=close_unseen replica=%s", status.replica_id)
                await self._try("close_unseen", context.ledger.close_replica(known or status))

    async def _report(self) -> None:
        if not self._context.gateways.leads:
            return
        now_s, living = time.monotonic(), self._context.fleet.living()
        self._reported = {s.replica_id: self._reported[s.replica_id] for s in living if s.replica_id in self._reported}
        due = [status for status in living if self._is_due(status, now_s)]
        for first in range(0, len(due), REPORTED_AT_ONCE):
            await self._try("report", self._report_some(due[first : first + REPORTED_AT_ONCE], now_s))

    def _is_due(self, status: ReplicaStatus, now_s: float) -> bool:
        at_s, worked_us = self._reported.get(status.replica_id, (float("-inf"), 0))
        return worked_us != _worked_us(status) or now_s - at_s >= IDLE_REPORT_S - REPORT_S / 2

    async def _report_some(self, statuses: list[ReplicaStatus], now_s: float) -> None:
        await self._context.ledger.report_replicas(statuses)
        self._reported.update({status.replica_id: (now_s, _worked_us(status)) for status in statuses})

    async def _tidy(self) -> None:
        for _ in range(BATCHES):
            if await self._context.journal.tidy() == 0:
                break

    async def _sweep(self) -> None:
        context, retention = self._context, self._context.settings.retention
        if not context.gateways.leads:
            return
        await self._try("sweep_requests", self._sweep_requests())
        await self._try("sweep_shares", context.shares.sweep(context.db.clock.now_us()))
        await self._try("sweep_decisions", context.decisions.sweep(retention.decision_s))
        await self._try("sweep_load", self._sweep_load())
        await self._try("sweep_kv", context.kv_collection.sweep())
        await self._try("sweep_derived", context.derived.sweep())
        await self._try("sweep_drains", context.drains.sweep(retention.request_s))

    async def _sweep_load(self) -> None:
        for _ in range(BATCHES):
            if await self._context.loop.observations.sweep() == 0:
                break
            await asyncio.sleep(MORE_S)

    async def _sweep_requests(self) -> None:
        for _ in range(BATCHES):
            if await self._context.journal.sweep() == 0:
                break
            await asyncio.sleep(MORE_S)
