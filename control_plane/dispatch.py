"""Requests to replicas: waiting, placing, carrying on after a loss, ending. One gateway's owned requests live here.

Everything happens on one event loop, so a state is never seen half changed; what must be durable goes through the
journal first. Whoever starts replicas is told of demand by `on_demand` and tells of replicas by `seat_ready` and
`seat_closing`. Limits: placement knows only what this gateway has in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from autoscaler.placement import Placement
from control_plane.attempt_notes import AttemptNotes
from control_plane.commit import RETRY_S, Commits
from control_plane.decisions import Decisions
from control_plane.errors import Fenced, ModelUnusable, StokerError
from control_plane.journal import Journal
from control_plane.lanes import FunctionKey, Lane, Lanes, Seat
from control_plane.live_request import LiveRequest, Lost, Phase
from control_plane.records import NewRequest, OutcomeError, RequestState
from control_plane.replica_link import ReplicaLink
from control_plane.settings import QueueSettings
from control_plane.timeouts import TimeoutWatch
from function_runtime.protocol import (
    Accepted,
    Attached,
    DeviceTime,
    Failed,
    Finished,
    KvSealed,
    ReplicaMessage,
    Tokens,
    Unknown,
)

logger = logging.getLogger(__name__)

FRUITLESS_MAX: Final = 8
"""Attempts in a row without one new token after which a request is taken for the cause of its losses."""
CANCEL_S: Final = 10.0
"""A replica that does not confirm a cancellation within this time is given up for the request."""

LostHook = Callable[[Seat, str, list[LiveRequest]], None]


class Dispatcher:
    def __init__(self, journal: Journal, decisions: Decisions, queue: QueueSettings) -> None:
        self._journal = journal
        self._notes = AttemptNotes(journal, decisions)
        self.requests: dict[str, LiveRequest] = {}
        self.lanes = Lanes(queue)
        self.on_demand: Callable[[FunctionKey, bool], None] = lambda key, waiting: None
        """Told of a function whose demand changed, and whether somebody waits there for a replica."""
        self.on_seat_lost: Callable[[Seat, str], None] = lambda seat, reason: None
        self.unusable: Callable[[FunctionKey, str], str] = lambda key, identity: ""
        """Why no replica of this checkpoint can be had; empty if one can."""
        self._commits = Commits(journal, self._concluded, self._fenced)
        self._timeouts = TimeoutWatch(self._lane_of, self._timed_out)
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._links: dict[ReplicaLink, Seat] = {}
        self.on_end: Callable[[LiveRequest, RequestState, float], None] = lambda live, state, total_s: None
        self._emptied: list[asyncio.Future[None]] = []
        self.closing = False

    # --- lanes ---

    def _lane_of(self, request: LiveRequest) -> Lane:
        return self.lanes.of(request.origin.key, request.origin.identity)

    def _changed(self, lane: Lane) -> None:
        lane.note_demand()
        self.on_demand(lane.key, bool(lane.waiting))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- coming in ---

    @contextmanager
    def room(self, key: FunctionKey, identity: str, nbytes: int) -> Iterator[None]:
        """Reserve a place in the queue while a request is accepted; refuse what would wait behind too much, or in
        vain."""
        reason = self.unusable(key, identity)
        if reason:
            raise ModelUnusable(reason)
        with self.lanes.room(key, identity, nbytes):
            yield

    def enter(self, request: LiveRequest, *, front: bool = False) -> None:
        """Own an accepted request that is with no replica."""
        lane = self._lane_of(request)
        self.requests[request.request_id] = request
        lane.generation += 1
        self._wait(request, lane, front=front)

    def _wait(self, request: LiveRequest, lane: Lane, *, front: bool) -> None:
        lane.push(request, front=front)
        self._timeouts.arm(request)
        self.pump(lane)
        self.on_demand(lane.key, bool(lane.waiting))

    def end_complete(self, request: LiveRequest) -> None:
        """Own a request whose log is whole, only to write its outcome."""
        self.requests[request.request_id] = request
        self._end(request, RequestState.DONE, None)

    def hold(self, request: LiveRequest) -> None:
        """Own a request that may still run somewhere; it waits for news of that."""
        self.requests[request.request_id] = request
        self._timeouts.arm(request)

    def pump(self, lane: Lane) -> None:
        """Release as many waiting requests as there are free places."""
        while lane.waiting:
            chosen = lane.choose(lane.waiting[0])
            if chosen is None:
                break
            request, (seat, placement) = lane.pop(), chosen
            self._place(request, seat, placement)
            self._spawn(self._assign(request, seat, self._begin_assign(request, seat)))

    def _place(self, request: LiveRequest, seat: Seat, placement: Placement | None) -> None:
        request.move(Phase.ASSIGNING)
        seat.take(request)
        if placement is not None:
            self._notes.placed(request, seat, placement)

    def _begin_assign(self, request: LiveRequest, seat: Seat) -> asyncio.Task[int]:
        work = self._journal.assign(request.request_id, seat.replica_id, seat.slot_id)
        return asyncio.get_running_loop().create_task(work)

    def take_seat(self, request: LiveRequest) -> Seat | None:
        """A free place for a request that need not wait at all; None: it has to. `accept_into` must follow at once."""
        lane = self._lane_of(request)
        chosen = None if lane.waiting or self.closing else lane.choose(request)
        if chosen is None:
            return None
        self._place(request, *chosen)
        lane.generation += 1
        lane.note_demand()
        return chosen[0]

    async def accept_into(self, request: LiveRequest, seat: Seat, new: NewRequest) -> None:
        """Accept a request and begin its first attempt with one commit, while its replica begins to work already:
        what that says goes to the journal behind the acceptance, and nobody reads it before."""
        request.epoch = 1
        self.requests[request.request_id] = request
        self._run(request, seat)
        seat.link.submit(request.work())
        accepted = self._journal.accept(new, (seat.replica_id, seat.slot_id))
        self._changed(self._lane_of(request))
        try:
            await accepted
        except BaseException:
            seat.link.settled(request.request_id, 1)
            if request.live:
                self._let_go(request)
            raise

    async def _assign(self, request: LiveRequest, seat: Seat, assigning: asyncio.Task[int]) -> None:
        try:
            epoch = await assigning
        except Fenced:
            self._fenced(request)
            return
        except StokerError as error:
            logger.warning("event=assign_refused request=%s error=%s", request.request_id, error)
            await asyncio.sleep(RETRY_S[2])
            if request.phase is not Phase.ASSIGNING:
                return
            if request.cancelling is not None:
                self._end(request, request.cancelling, request.cancel_error)
            else:
                self._requeue(request)
            return
        request.epoch = epoch
        if request.phase is not Phase.ASSIGNING:
            return
        if request.cancelling is not None:
            self._end(request, request.cancelling, request.cancel_error)
            return
        if seat.replica_id not in self._lane_of(request).seats:
            self._retry(request, "the replica went away before it took the request")
            return
        self._run(request, seat)
        seat.link.submit(request.work())

    def _run(self, request: LiveRequest, seat: Seat) -> None:
        request.move(Phase.RUNNING)
        request.conclusion = None
        request.device = DeviceTime()
        request.attached = False
        request.received = request.log.last_seq
        request.submit_ns = time.monotonic_ns()
        request.last_token_ns = 0
        request.log.note = "running"
        self._timeouts.arm(request)

    # --- what replicas say ---

    def link_message(self, link: ReplicaLink, message: ReplicaMessage) -> None:
        if isinstance(message, Tokens):
            request = self.requests.get(message.request_id)
            if request is not None and request.epoch == message.epoch and request.phase is Phase.RUNNING:
                first = request.last_token_ns == 0
                self._commits.tokens(request, message)
                if first:
                    self._timeouts.arm(request)
            return
        if isinstance(message, Accepted | Attached | Finished | Failed | KvSealed | Unknown):
            request = self.requests.get(message.request_id)
            if request is None or request.epoch != message.epoch or request.phase is not Phase.RUNNING:
                if isinstance(message, Finished | Failed):
                    link.settled(message.request_id, message.epoch)
                return
            self._about(request, message)

    def _about(
        self, request: LiveRequest, message: Accepted | Attached | Finished | Failed | KvSealed | Unknown
    ) -> None:
        if isinstance(message, KvSealed):
            self._commits.sealed(request, message)
        elif isinstance(message, Finished):
            request.device, request.cached_tokens = message.device, message.cached_tokens
            if message.last_seq > request.received:
                self._commits.conclude(
                    request, Lost(f"the replica ended at token {message.last_seq} without sending all")
                )
            elif message.cancelled and request.cancelling is None:
                self._commits.conclude(request, Lost("the replica gave the request up"))
            else:
                self._commits.conclude(request, message)
        elif isinstance(message, Failed):
            request.device = message.device
            status = 400 if message.code in CLIENT_FAULTS else 500
            error = OutcomeError(status, message.code, message.message, message.retry)
            self._commits.conclude(request, Lost(f"{message.code}: {message.message}", message.retry, error))
        elif isinstance(message, Unknown):
            self._commits.conclude(request, Lost("the replica does not know the request"))
        elif isinstance(message, Attached):
            request.attached = True
        elif isinstance(message, Accepted) and not request.attached:
            request.stages.load_kv_us += message.load_us
            if request.log.last_seq or message.loaded_tokens:
                self._notes.resumed(request, message)

    def link_lost(self, link: ReplicaLink, reason: str) -> None:
        seat = self._links.pop(link, None)
        if seat is None:
            return
        logger.info("event=replica_lost replica=%s reason=%s", seat.replica_id, reason)
        seat.accepting = False
        self._drop_seat(seat)
        # Each goes to the front of the queue, so the first accepted goes last.
        for request in reversed(list(seat.in_flight.values())):
            if request.phase is Phase.RUNNING:
                self._commits.conclude(request, Lost(f"replica {seat.replica_id} was lost: {reason}"))
        self.on_seat_lost(seat, reason)

    # --- what an attempt came to ---

    def _concluded(self, request: LiveRequest) -> None:
        conclusion = request.conclusion
        if isinstance(conclusion, Finished):
            state = RequestState.DONE
            if conclusion.cancelled:
                state = request.cancelling or RequestState.CANCELLED
            self._end(request, state, None)
        elif isinstance(conclusion, Lost):
            if request.cancelling is not None:
                self._end(request, request.cancelling, None)
            elif conclusion.retry:
                self._retry(request, conclusion.reason)
            else:
                self._end(request, RequestState.FAILED, conclusion.error)

    def _retry(self, request: LiveRequest, reason: str) -> None:
        """The attempt is lost; the request goes on with another replica, if there is anything left to do."""
        if request.complete:
            self._end(request, RequestState.DONE, None)
            return
        request.fruitless += 1
        if request.fruitless >= FRUITLESS_MAX:
            error = OutcomeError(
                500, "attempts_exhausted",
                f"{FRUITLESS_MAX} attempts in a row ended without a token; the last: {reason}",
            )  # fmt: skip
            self._end(request, RequestState.FAILED, error)
            return
        self._notes.requeued(request, reason)
        self._requeue(request)

    def _requeue(self, request: LiveRequest) -> None:
        self._leave_seat(request)
        self._close_stage(request)
        request.move(Phase.QUEUED)
        request.log.note = "waiting for another replica"
        if self.closing:
            return
        self._wait(request, self._lane_of(request), front=True)

    def _leave_seat(self, request: LiveRequest) -> None:
        seat = request.seat
        if seat is not None:
            seat.leave(request)

    def _close_stage(self, request: LiveRequest) -> None:
        if request.last_token_ns and request.attempt_first:
            request.stages.decode_us += (request.last_token_ns - request.attempt_first) // 1000
        elif request.submit_ns and not request.last_token_ns:
            request.stages.prefill_us += (time.monotonic_ns() - request.submit_ns) // 1000
        request.submit_ns = request.last_token_ns = request.attempt_first = 0

    # --- ending ---

    def cancel(self, request: LiveRequest, state: RequestState = RequestState.CANCELLED) -> None:
        """Stop the work within a step, wherever it stands. Idempotent."""
        if not request.live or request.cancelling is not None:
            return
        request.cancelling = state
        if request.phase is Phase.QUEUED:
            self._lane_of(request).remove(request)
            self._end(request, state, None)
        elif request.phase is Phase.RUNNING and request.seat is not None:
            request.seat.link.cancel(request.request_id, request.epoch)
            asyncio.get_running_loop().call_later(CANCEL_S, self._cancel_overdue, request, request.epoch)

    def _cancel_overdue(self, request: LiveRequest, epoch: int) -> None:
        if request.phase is Phase.RUNNING and request.epoch == epoch:
            self._commits.conclude(request, Lost("the replica did not confirm the cancellation"))

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
        self._end(request, state, error)

    def _end(self, request: LiveRequest, state: RequestState, error: OutcomeError | None) -> None:
        request.stop_timer()
        seat, epoch = request.seat, request.epoch
        self._leave_seat(request)
        self._close_stage(request)
        request.move(Phase.ENDING)
        lane = self._lane_of(request)
        self.pump(lane)
        self._changed(lane)
        if state is RequestState.DONE:
            # Every token and the end of every choice is in the journal; whoever finds them there ends it so.
            request.log.finish(request.end_with(state))
        task = self._spawn(self._finish(request, state, error, seat, epoch))
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
        tries = 0
        while True:
            try:
                written = await self._journal.finish(request.request_id, epoch, request.outcome(state, error))
                break
            except StokerError as refused:
                pause_s = RETRY_S[min(tries, len(RETRY_S) - 1)]
                logger.warning(
                    "event=finish_refused request=%s retry_s=%s error=%s", request.request_id, pause_s, refused
                )
                tries += 1
                await asyncio.sleep(pause_s)
        if request.committing is not None:
            await asyncio.wait([request.committing])
        request.move(Phase.ENDED)
        self._forget(request)
        self.on_end(request, state, (time.monotonic_ns() - request.accept_ns) / 1e9)
        if not written:
            state, error = RequestState.FAILED, _TAKEN_OVER
        elif seat is not None:
            seat.link.settled(request.request_id, epoch)
        request.log.finish(request.end_with(state, error))

    def _fenced(self, request: LiveRequest) -> None:
        """Another gateway owns the request: stop working on it and send readers there."""
        logger.warning("event=fenced request=%s epoch=%d", request.request_id, request.epoch)
        self._let_go(request)
        request.log.finish(request.end_with(RequestState.FAILED, _TAKEN_OVER))

    def _let_go(self, request: LiveRequest) -> None:
        """Stop working on a request that is not ours (any more); the journal is not told."""
        if request.phase is Phase.QUEUED:
            self._lane_of(request).remove(request)
        self._leave_seat(request)
        request.stop_timer()
        if request.live:
            request.move(Phase.ENDING)
            request.move(Phase.ENDED)
        self._forget(request)
        self._changed(self._lane_of(request))

    def _timed_out(self, request: LiveRequest, error: OutcomeError, state: RequestState) -> None:
        logger.info("event=timeout request=%s code=%s", request.request_id, error.code)
        self.fail(request, state, error)

    def fail_waiting(self, lane: Lane, error: OutcomeError) -> None:
        """No replica can be had: everything that waits for one learns why."""
        for request in list(lane.waiting):
            self.fail(request, RequestState.FAILED, error)

    # --- seats ---

    def seat_ready(self, seat: Seat, held: Iterable[tuple[LiveRequest, int]] = ()) -> None:
        """A replica takes requests now. `held`: requests it runs already, with their epochs, to attach to."""
        lane = self.lanes.of(seat.key, seat.identity)
        lane.seats[seat.replica_id] = seat
        self._links[seat.link] = seat
        for request, epoch in held:
            self.requests[request.request_id] = request
            request.epoch = epoch
            seat.take(request)
            self._run(request, seat)
            seat.link.attach(request.request_id, epoch, request.log.last_seq)
        self._seats_changed(lane)
        self.pump(lane)
        self._changed(lane)

    def seat_closing(self, seat: Seat) -> None:
        """No new requests for this replica; what runs there goes on."""
        if seat.accepting:
            seat.accepting = False
            self._seats_changed(self.lanes.of(seat.key, seat.identity))

    def _drop_seat(self, seat: Seat) -> None:
        lane = self.lanes.of(seat.key, seat.identity)
        lane.seats.pop(seat.replica_id, None)
        self._seats_changed(lane)

    def _seats_changed(self, lane: Lane) -> None:
        if lane.seats_changed():
            for request in lane.waiting:
                self._timeouts.arm(request)

    async def emptied(self) -> None:
        """Returns when no request is owned any more."""
        while self.requests:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._emptied.append(waiter)
            await waiter

    def _forget(self, request: LiveRequest) -> None:
        self.requests.pop(request.request_id, None)
        if not self.requests:
            waiters, self._emptied = self._emptied, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def close(self) -> None:
        """Let go of everything without ending it: requests stay in the journal, replicas go on."""
        self.closing = True
        for request in self.requests.values():
            request.stop_timer()
        for link in list(self._links):
            link.close()
        self._links.clear()
        await self._notes.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)


CLIENT_FAULTS: Final = frozenset(
    {"context_length_exceeded", "invalid_request", "prompt_too_long", "invalid_request_error"}
)
"""Codes of a replica's refusals that are about the request itself."""

_TAKEN_OVER: Final = OutcomeError(
    503, "taken_over", "another gateway has taken this request over; read on with your cursor", True
)
