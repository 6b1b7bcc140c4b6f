"""Taking over the unfinished requests of gateways that are gone, each by exactly one of those that live.

The journal moves the owner in one statement; whoever moved it goes on with the request: attached to the replica that
still runs it, under the epoch it has, or queued for another under the next. A former owner that wakes up again is
refused by the journal from then on, and lets go of what it finds taken.
What cannot be read of a request (altered bytes) ends that request with its reason and none of the others; what the
storage refuses is tried again. Limits: a fault of ours ends a request too, after a few tries.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Final

from control_plane.database.clock import Clock
from control_plane.dispatch import Dispatcher
from control_plane.errors import Damaged, StokerError
from control_plane.gateway.acceptance import origin_of
from control_plane.journal import Journal
from control_plane.kv_desk import KvDesk
from control_plane.lanes import FunctionKey
from control_plane.live_request import LiveRequest, TimeLimits
from control_plane.records import Outcome, OutcomeError, RequestRecord, RequestState
from control_plane.request_log import RequestLog
from control_plane.retries import Retry
from control_plane.sealing import TenantKeys
from control_plane.seating import Seating
from control_plane.serving import Serving, limits_of
from control_plane.traces import Traces

logger = logging.getLogger(__name__)

DEFAULT_LIMITS: Final = TimeLimits(600.0, 120.0, 120.0, 60.0, 3600.0)
"""For an adopted request whose function is gone."""
FAULTS: Final = 5
"""So often a request is taken up before a fault of ours ends it."""


class Adopting:
    def __init__(
        self,
        journal: Journal,
        tenant_keys: TenantKeys,
        serving: Serving,
        dispatcher: Dispatcher,
        seating: Seating,
        kv_desk: KvDesk,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._tenant_keys = tenant_keys
        self._serving = serving
        self._dispatcher = dispatcher
        self._seating = seating
        self._kv_desk = kv_desk
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._again: set[asyncio.Task[None]] = set()
        self.adopted = 0
        self.traces: Traces | None = None
        self.paused_us: Callable[[FunctionKey, int, int], int] = lambda key, since_us, now_us: 0
        """For how much of this time a function was drained: no limit of its requests ran."""
        self.on_adopted: Callable[[], None] = lambda: None

    async def at_start(self) -> None:
        """Where the data directory's lock says that nobody else lives, no lease has to run out first."""
        await self._resume_all(await self._journal.adopt(alive=()))

    def orphans(self, owners: tuple[str, ...]) -> None:
        """Take over from these gateways, unless that is under way: they are told again until nothing is left."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._take_over(owners))

    async def settled(self) -> None:
        """Returns when no adoption is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _take_over(self, owners: tuple[str, ...]) -> None:
        try:
            await self._resume_all(await self._journal.take_over(owners))
        except StokerError as error:
            logger.warning("event=adoption_refused owners=%s error=%s", ",".join(owners), error)
        except Exception:
            logger.exception("event=adoption_failed owners=%s", ",".join(owners))

    async def _resume_all(self, records: list[RequestRecord]) -> None:
        for record in records:
            retry = Retry("adoption_refused", record.id, float("inf"))
            pause_s = await self._take_up(record, retry)
            if pause_s is not None:
                task = asyncio.get_running_loop().create_task(self._take_up_later(record, retry, pause_s))
                self._again.add(task)
                task.add_done_callback(self._again.discard)
        if records:
            self.adopted += len(records)
            logger.info("event=adopted requests=%d", len(records))
            self.on_adopted()

    async def _take_up_later(self, record: RequestRecord, retry: Retry, pause_s: float | None) -> None:
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            pause_s = await self._take_up(record, retry)

    async def _take_up(self, record: RequestRecord, retry: Retry) -> float | None:
        """Go on with it, or end it; the others must not suffer for it. How soon to try again; None: it is done."""
        try:
            try:
                await self._resume(record)
            except Damaged as error:
                await self._refuse(record, "stored_data_damaged", error.message)
            except StokerError:
                raise
            except Exception as error:
                if record.id in self._dispatcher.requests:
                    logger.exception("event=adopt_failed request=%s", record.id)
                elif retry.tries < FAULTS:
                    raise
                else:
                    await self._refuse(record, "adoption_failed", f"it could not be taken over: {error!r}")
        except Exception as error:
            return retry.refused(error)
        return None

    async def _refuse(self, record: RequestRecord, code: str, message: str) -> None:
        error = OutcomeError(500, code, message)
        await self._journal.finish(record.id, record.epoch, Outcome(RequestState.REFUSED, error=error))

    async def _resume(self, record: RequestRecord) -> None:
        record = await self._journal.opened(record)
        if record.damaged:
            raise Damaged(record.damaged)
        if not record.params:
            error = OutcomeError(410, "key_deleted", "its input was sealed with a key that has been deleted")
            await self._journal.finish(record.id, record.epoch, Outcome(RequestState.FAILED, error=error))
            return
        if self._serving.revision((record.tenant, record.function), record.revision) is None:
            await self._serving.load_older((record.tenant, record.function))
        revision = self._serving.revision((record.tenant, record.function), record.revision)
        limits = limits_of(revision) if revision is not None else DEFAULT_LIMITS
        shares, price = ("tenant", 0)
        if revision is not None:
            shares, price = revision.spec.share_prefixes, revision.spec.price_microusd_per_hour
        kv = await self._tenant_keys.kv_access(record.tenant, record.sealed, shares=shares)
        origin = origin_of(record, limits, kv, shares, price)
        if revision is not None:
            spec = revision.spec
            origin = dataclasses.replace(origin, fast=spec.resume == "fast", prefix_form=spec.shared_prefix_form)
        origin = dataclasses.replace(origin, reuse=self._kv_desk.reuse(origin))
        # Whoever was reading it is gone with the gateway: that is not the client's leaving.
        live = LiveRequest(origin, detached=True, log=RequestLog(await self._journal.log(record.id)))
        live.epoch = record.epoch
        if self.traces is not None and (trace := self.traces.request(origin)) is not None:
            attempt = record.replica_id if record.state is RequestState.RUNNING else None
            trace.adopted(record.epoch, record.assigned_us, attempt)
            live.trace = trace
        live.kv = await self._journal.kv(record.id)
        live.prefill_ends, live.begun = record.prefill_ends, record.begun
        live.cached_tokens = record.cached_tokens
        now_us = self._clock.now_us()
        live.accept_ns = time.monotonic_ns() - max(now_us - record.created_us, 0) * 1000
        live.paused_ns = self.paused_us(origin.key, record.created_us, now_us) * 1000
        if not origin.durable and record.state is RequestState.RUNNING:
            error = OutcomeError(
                500, "gateway_lost", "the gateway died and this function keeps no log (durability: off)"
            )
            self._dispatcher.requests[live.request_id] = live
            self._dispatcher.fail(live, RequestState.FAILED, error)
        elif live.complete:
            self._dispatcher.end_complete(live)
        elif record.state is RequestState.RUNNING and record.replica_id is not None:
            self._seating.bring_home(live, record.replica_id)
        else:
            self._dispatcher.enter(live)

    def regained(self) -> None:
        """The lease was lost for a while: let go of what others have taken over."""
        if self._dispatcher.requests:
            asyncio.get_running_loop().create_task(self._let_go_of_taken())

    async def _let_go_of_taken(self) -> None:
        try:
            whose = await self._journal.whose(list(self._dispatcher.requests))
            for request_id, (owner, _, _) in whose.items():
                live = self._dispatcher.requests.get(request_id)
                if live is not None and live.live and owner != self._journal.gateway_id:
                    self._dispatcher.endings.fenced(live)
        except StokerError as error:
            logger.warning("event=owners_not_read error=%s", error)  # what was taken shows at its next commit

    async def close(self) -> None:
        tasks = [*self._again, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
