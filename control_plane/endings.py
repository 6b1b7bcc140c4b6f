"""How requests end: the outcome is written with the ledger's rows, readers see the end, the replica may forget.

`end` is for what is over, `cancel` for what a client gave up, `fail` for an error of ours, `fenced` for what another
gateway owns now. Limits: an outcome that the storage refuses is written again until it takes it; whoever waits for the
end of a request that failed waits as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from control_plane.journal import Journal
from control_plane.lanes import Lane, Lanes, Seat
from control_plane.live_request import LiveRequest, Phase
from control_plane.records import OutcomeError, RequestState
from control_plane.retries import Retry

logger = logging.getLogger(__name__)

CANCEL_S: Final = 10.0
"""A replica that does not confirm a cancellation within this time is given up for the request."""


class Endings:
    """`requests` are those this gateway owns; what has ended is taken out. `left(lane)` is told that a place in a lane
    became free, `give_up(request, reason)` that the attempt under way counts as lost."""

    def __init__(
        self,
        journal: Journal,
        lanes: Lanes,
        requests: dict[str, LiveRequest],
        left: Callable[[Lane], None],
        give_up: Callable[[LiveRequest, str], None],
    ) -> None:
        self._journal = journal
        self._lanes = lanes
        self._requests = requests
        self._left = left
        self._give_up = give_up
        self._finishing: set[asyncio.Task[None]] = set()
        self._emptied: list[asyncio.Future[None]] = []
        self.on_end: Callable[[LiveRequest, RequestState, float], None] = lambda live, state, total_s: None

    def _lane_of(self, request: LiveRequest) -> Lane:
        return self._lanes.of(request.origin.key, request.origin.identity)

    def cancel(self, request: LiveRequest, state: RequestState = RequestState.CANCELLED) -> None:
        """Stop the work within a step, wherever it stands. Idempotent."""
        if not request.live or request.cancelling is not None:
            return
        request.cancelling = state
        if request.phase is Phase.QUEUED:
            self._lane_of(request).remove(request)
            self.end(request, state, None)
        elif request.phase is Phase.RUNNING and request.seat is not None:
            request.seat.link.cancel(request.request_id, request.epoch)
            asyncio.get_running_loop().call_later(CANCEL_S, self._cancel_overdue, request, request.epoch)

    def _cancel_overdue(self, request: LiveRequest, epoch: int) -> None:
        if request.phase is Phase.RUNNING and request.epoch == epoch:
            self._give_up(request, "the replica did not confirm the cancellation")

    def fail(self, request: LiveRequest, state: RequestState, error: OutcomeError) -> None:
        """End a request with an error of ours, stopping its work."""
        if not request.live:
            return
        if request.phase is Phase.ASSIGNING:
            # The epoch is being raised: only when it is known can the end be written under it.
            request.cancelling, request.cancel_error = request.cancelling or state, error
            return
        if request.phase is Phase.QUEUED:
            self._lane_of(request).remove(request)
        elif request.phase is Phase.RUNNING and request.seat is not None:
            request.seat.link.cancel(request.request_id, request.epoch)
        self.end(request, state, error)

    def end(self, request: LiveRequest, state: RequestState, error: OutcomeError | None) -> None:
        request.stop_timer()
        seat, epoch = request.seat, request.epoch
        request.leave_seat()
        request.close_stage()
        request.move(Phase.ENDING)
        self._left(self._lane_of(request))
        if state is RequestState.DONE:
            # Every token and the end of every choice is in the journal; whoever finds them there ends it so.
            request.log.finish(request.end_with(state))
        self._spawn(self._finish(request, state, error, seat, epoch))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def outcomes_written(self, timeout_s: float = 1.0) -> None:
        """Returns when the outcomes of all requests that readers have seen the end of are in the ledger, or are
        still refused by the storage after `timeout_s`."""
        if self._finishing:
            await asyncio.wait(set(self._finishing), timeout=timeout_s)

    async def _finish(
        self, request: LiveRequest, state: RequestState, error: OutcomeError | None, seat: Seat | None, epoch: int
    ) -> None:
        retry = Retry("finish_refused", request.request_id, self._journal.patience_s, request.keep_for_later)
        while True:
            try:
                written = await self._journal.finish(request.request_id, epoch, request.outcome(state, error))
                break
            except Exception as refused:
                await asyncio.sleep(retry.refused(refused))
        if request.committing is not None:
            await asyncio.wait([request.committing])
        request.move(Phase.ENDED)
        self._forget(request)
        self.on_end(request, state, (time.monotonic_ns() - request.accept_ns) / 1e9)
        if not written:
            request.log.finish(request.end_here(TAKEN_OVER))
            return
        if request.trace is not None:
            request.trace.ended(request, state, error)
        if seat is not None:
            seat.link.settled(request.request_id, epoch)
        request.log.finish(request.end_with(state, error))

    def fenced(self, request: LiveRequest) -> None:
        """Another gateway owns the request: stop working on it and send readers there."""
        if self._requests.get(request.request_id) is not request:
            return
        logger.warning("event=fenced request=%s epoch=%d", request.request_id, request.epoch)
        self.let_go(request)
        request.log.finish(request.end_here(TAKEN_OVER))

    def let_go(self, request: LiveRequest) -> None:
        """Stop working on a request that is not ours (any more); the journal is not told."""
        lane = self._lane_of(request)
        request.trace = None  # whoever goes on with it tells of it
        if request.phase is Phase.QUEUED:
            lane.remove(request)
        request.leave_seat()
        request.stop_timer()
        if request.live:
            request.move(Phase.ENDING)
            request.move(Phase.ENDED)
        self._forget(request)
        self._left(lane)

    def timed_out(self, request: LiveRequest, error: OutcomeError, state: RequestState) -> None:
        logger.info("event=timeout request=%s code=%s", request.request_id, error.code)
        self.fail(request, state, error)

    def _forget(self, request: LiveRequest) -> None:
        self._requests.pop(request.request_id, None)
        if not self._requests:
            waiters, self._emptied = self._emptied, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def emptied(self) -> None:
        """Returns when no request is owned any more."""
        while self._requests:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._emptied.append(waiter)
            await waiter

    async def close(self) -> None:
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=2.0)


TAKEN_OVER: Final = OutcomeError(
    503, "taken_over", "another gateway has taken this request over; read on with your cursor", True
)
