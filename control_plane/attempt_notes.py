"""What is written down about attempts without anybody waiting for it: placements, losses, parkings, how a resume went.

Read by `stoker why`. Limits: a storage that refuses costs only this history, never a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from autoscaler.placement import Placement
from control_plane.decisions import Decisions
from control_plane.errors import StokerError
from control_plane.journal import Journal
from control_plane.lanes import Seat
from control_plane.live_request import LiveRequest
from function_runtime.protocol import Accepted, Parked

logger = logging.getLogger(__name__)


class AttemptNotes:
    def __init__(self, journal: Journal, decisions: Decisions) -> None:
        self._journal = journal
        self._decisions = decisions
        self._tasks: set[asyncio.Task[None]] = set()

    def placed(self, request: LiveRequest, seat: Seat, placement: Placement) -> None:
        inputs = {
            "expected_s": placement.expected_s,
            "runner_up": placement.runner_up,
            "runner_up_s": placement.runner_up_s,
            "homes": placement.inputs,
        }
        self._record("placement", request, seat, placement.reason, inputs)

    def requeued(self, request: LiveRequest, reason: str) -> None:
        logger.info("event=requeue request=%s epoch=%d reason=%s", request.request_id, request.epoch, reason)
        # Whatever becomes of this write, the next assignment raises the epoch by itself.
        self._write("requeue", self._journal.requeue(request.request_id, request.epoch, reason, request.device))

    def parked(self, request: LiveRequest, message: Parked) -> None:
        logger.info(
            "event=parked request=%s epoch=%d after_seq=%d reason=%s",
            request.request_id, request.epoch, request.log.last_seq, message.reason,
        )  # fmt: skip
        reason = f"parked after token {request.log.last_seq}: {message.reason}"
        self._write("requeue", self._journal.requeue(request.request_id, request.epoch, reason, request.device))
        stored_tokens = max((chunk.end for chunk in request.kv), default=0)
        inputs = {"epoch": request.epoch, "after_seq": request.log.last_seq, "kv_stored_tokens": stored_tokens}
        self._record("parked", request, request.seat, reason, inputs)

    def resumed(self, request: LiveRequest, message: Accepted) -> None:
        self._write("taken", self._taken(request, request.seat, message))

    async def _taken(self, request: LiveRequest, seat: Seat | None, message: Accepted) -> None:
        after_seq = await self._journal.taken(message)
        if after_seq is None:
            return
        logger.info(
            "event=resume request=%s epoch=%d after_seq=%d loaded_tokens=%d recomputed_tokens=%d exact=%s",
            request.request_id, message.epoch, after_seq, message.loaded_tokens, message.recomputed_tokens,
            message.exact,
        )  # fmt: skip
        inputs = {
            "epoch": message.epoch,
            "after_seq": after_seq,
            "loaded_tokens": message.loaded_tokens,
            "recomputed_tokens": message.recomputed_tokens,
            "exact": message.exact,
            "load_us": message.load_us,
            "detail": message.detail,
        }
        reason = (
            f"carried on after token {after_seq}: KV of {message.loaded_tokens} tokens loaded, "
            f"{message.recomputed_tokens} recomputed, {'exact' if message.exact else 'not exact'}"
        )
        if message.detail:
            reason = f"{reason}: {message.detail}"
        self._record("resume", request, seat, reason, inputs)

    def _record(self, kind: str, request: LiveRequest, seat: Seat | None, reason: str, inputs: dict[str, Any]) -> None:
        origin = request.origin
        replica_id = seat.replica_id if seat is not None else None
        self._decisions.record(
            kind, origin.function, replica_id, origin.request_id, reason, inputs, tenant=origin.tenant
        )

    def _write(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(self._written(what, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _written(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except StokerError as error:
            logger.warning("event=note_refused what=%s error=%s", what, error)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
