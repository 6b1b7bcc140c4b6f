"""Requests to replicas: waiting, placing, carrying on after a loss. One gateway's owned requests live here.

Everything happens on one event loop, so a state is never seen half changed; what must be durable goes through the
journal first. Whoever starts replicas is told of demand by `on_demand` and tells of replicas by `seat_ready` and
`seat_closing`. What replicas say of an attempt is the business of `attempts`, how a request ends that of `endings`.
Limits: placement knows only what this gateway has in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

from autoscaler.placement import Placement
from control_plane.attempt_notes import AttemptNotes
from control_plane.attempts import Attempts
from control_plane.decisions import Decisions
from control_plane.endings import Endings
from control_plane.errors import Fenced, FirstTokenLate, FunctionDrained, ModelUnusable, Saturated, StokerError
from control_plane.journal import Journal
from control_plane.lanes import FunctionKey, Lane, Lanes, Place, Seat
from control_plane.live_request import LiveRequest, Phase
from control_plane.load_meter import LoadMeter
from control_plane.records import NewRequest, OutcomeError, RequestState
from control_plane.replica_link import ReplicaLink
from control_plane.service_times import ServiceTimes
from control_plane.settings import QueueSettings
from control_plane.timeouts import TimeoutWatch
from function_runtime.protocol import (
    KvAsk,
    KvBad,
    KvKept,
    Progress,
    ReplicaMessage,
)

logger = logging.getLogger(__name__)

ASSIGN_AGAIN_S: Final = 0.5
"""Pause before a request whose assignment the storage refused waits for a place again, which may be another one."""


class Dispatcher:
    def __init__(self, journal: Journal, decisions: Decisions, queue: QueueSettings) -> None:
        self._journal = journal
        self._notes = AttemptNotes(journal, decisions)
        self.requests: dict[str, LiveRequest] = {}
        self.lanes = Lanes(queue)
        self.load = LoadMeter()
        self.lanes.noted = self.load.demand
        self.on_demand: Callable[[FunctionKey, bool], None] = lambda key, waiting: None
        """Told of a function whose demand changed, and whether somebody waits there for a replica."""
        self.on_seat_lost: Callable[[Seat, str], None] = lambda seat, reason: None
        self.on_kv: Callable[[ReplicaLink, LiveRequest | None, KvAsk | KvKept | KvBad], None] = lambda *said: None
        """Told what replicas ask and say about stored KV, in order with everything else they say."""
        self.claim_room: Callable[[FunctionKey, int, bool], Awaitable[None]] | None = None
        """Where several gateways share the bounds of a queue: makes sure of a part that is large enough, if one can be
        had. Nothing may happen between its return and the place's being taken."""
        self.judge: Callable[[FunctionKey, str, int], None] = lambda key, identity, prompt_tokens: None
        """Refuses a request whose first token would come later than its function's objective."""
        self.queue_moves_s: Callable[[FunctionKey, str], float | None] = lambda key, identity: None
        """After how long a request that found the queue full would find a place in it; None: not known."""
        self.service_times = ServiceTimes()
        self.lanes.speeds = self.service_times.speeds
        self.lanes.left_tokens = self.service_times.left_tokens
        self.unusable: Callable[[FunctionKey, str], str] = lambda key, identity: ""
        """Why no replica of this checkpoint can be had; empty if one can."""
        self.endings = Endings(journal, self.lanes, self.requests, self._left, self._give_up)
        self.why_waiting: Callable[[FunctionKey], str] = lambda key: ""
        """How far it is with what those wait for that find no replica; empty if there is nothing to say."""
        self._timeouts = TimeoutWatch(
            self._lane_of,
            self.endings.timed_out,
            lambda live: self.why_waiting((live.origin.tenant, live.origin.function)),
        )
        self._attempts = Attempts(
            journal, self._notes, self.requests, self.endings, self._timeouts.arm, self._again, self.seat_closing
        )
        self._attempts.on_first_token = self.load.first_token
        self._attempts.on_first_of_attempt = self.service_times.first_token
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: dict[ReplicaLink, Seat] = {}
        self.turns = 0
        """How often what runs where has changed."""
        self.closing = False

    # --- lanes ---

    def _lane_of(self, request: LiveRequest) -> Lane:
        return self.lanes.of(request.origin.key, request.origin.identity)

    def _changed(self, lane: Lane) -> None:
        lane.note_demand()
        self.on_demand(lane.key, bool(lane.waiting))

    def _left(self, lane: Lane) -> None:
        """A place became free, or somebody waits no longer."""
        self.pump(lane)
        self._changed(lane)

    def _give_up(self, request: LiveRequest, reason: str) -> None:
        self._attempts.give_up(request, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- coming in ---

    @asynccontextmanager
    async def room(
        self, key: FunctionKey, identity: str, nbytes: int, judged_tokens: int | None = None
    ) -> AsyncIterator[Place]:
        """Reserve a place in the queue while a request is accepted; refuse what would wait behind too much, or in
        vain. `judged_tokens`: of its prompt, where somebody waits for the first token."""
        paused = self.lanes.paused(key)
        if paused:
            raise FunctionDrained(f"{key[1]} takes no requests now: {paused}")
        reason = self.unusable(key, identity)
        if reason:
            raise ModelUnusable(reason)
        if self.claim_room is not None:
            await self.claim_room(key, nbytes, judged_tokens is not None)
        with ExitStack() as stack:
            try:
                if judged_tokens is not None:
                    self.judge(key, identity, judged_tokens)
                place = stack.enter_context(self.lanes.room(key, identity, nbytes))
            except Saturated as error:
                self.load.refused(key)
                if not isinstance(error, FirstTokenLate):
                    error.retry_after_s = self.queue_moves_s(key, identity) or error.retry_after_s
                raise
            yield place

    def enter(self, request: LiveRequest, *, front: bool = False) -> None:
        """Own an accepted request that is with no replica."""
        lane = self._lane_of(request)
        self.requests[request.request_id] = request
        lane.generation += 1
        if not request.log.last_seq:
            self.load.arrived(request)
        self._wait(request, lane, front=front)

    def _wait(self, request: LiveRequest, lane: Lane, *, front: bool) -> None:
        lane.push(request, front=front)
        if lane.paused:
            request.log.note = f"parked: {lane.paused}"
        self._timeouts.arm(request)
        self.pump(lane)
        self.on_demand(lane.key, bool(lane.waiting))

    def end_complete(self, request: LiveRequest) -> None:
        """Own a request whose log is whole, only to write its outcome."""
        self.requests[request.request_id] = request
        self.endings.end(request, RequestState.DONE, None)

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
            if request.trace is not None:
                request.trace.placed(placement)

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
        self.load.arrived(request)
        lane.note_demand()
        return chosen[0]

    async def accept_into(self, request: LiveRequest, seat: Seat, new: NewRequest) -> None:
        """Accept a request and begin its first attempt with one commit, while its replica begins to work already:
        what that says goes to the journal behind the acceptance, and nobody reads it before."""
        request.epoch = 1
        self.requests[request.request_id] = request
        self._attempts.begin(request, seat)
        seat.link.submit(request.work())
        accepted = self._journal.accept(new, (seat.replica_id, seat.slot_id))
        self._changed(self._lane_of(request))
        try:
            await accepted
        except BaseException:
            seat.link.settled(request.request_id, 1)
            if request.live:
                self.endings.let_go(request)
            raise

    async def _assign(self, request: LiveRequest, seat: Seat, assigning: asyncio.Task[int]) -> None:
        try:
            epoch = await assigning
        except Fenced:
            self.endings.fenced(request)
            return
        except Exception as error:
            unknown = not isinstance(error, StokerError)
            logger.warning("event=assign_refused request=%s error=%s", request.request_id, error, exc_info=unknown)
            await asyncio.sleep(ASSIGN_AGAIN_S)
            if request.phase is not Phase.ASSIGNING:
                return
            if request.cancelling is not None:
                self.endings.end(request, request.cancelling, request.cancel_error)
            else:
                self._again(request)
            return
        request.epoch = epoch
        if request.phase is not Phase.ASSIGNING:
            return
        if request.cancelling is not None:
            self.endings.end(request, request.cancelling, request.cancel_error)
            return
        if request.parking:
            self._again(request)  # nothing was begun under this epoch; the next assignment closes it
            return
        if seat.replica_id not in self._lane_of(request).seats:
            self._attempts.retry(request, "the replica went away before it took the request")
            return
        self._attempts.begin(request, seat)
        seat.link.submit(request.work())

    def _again(self, request: LiveRequest) -> None:
        """Back to the front of its queue, for another replica."""
        request.leave_seat()
        request.close_stage()
        request.move(Phase.QUEUED)
        request.parking = ""
        request.log.note = "waiting for another replica"
        if not self.closing:
            self._wait(request, self._lane_of(request), front=True)

    # --- what replicas say ---

    def link_message(self, link: ReplicaLink, message: ReplicaMessage) -> None:
        if isinstance(message, KvAsk | KvKept | KvBad):
            self.on_kv(link, self.requests.get(message.request_id), message)
        elif isinstance(message, Progress):
            self._heard_of_others(link, message)
        else:
            self._attempts.heard(link, message)

    def _heard_of_others(self, link: ReplicaLink, said: Progress) -> None:
        """Other gateways took or left places of this replica."""
        seat = self._links.get(link)
        if seat is None:
            return
        self.service_times.beat(seat, said)
        if seat.in_flight:
            self.load.memory(seat, said.kv_used_blocks, said.kv_total_blocks, said.waiting)
        if seat.others != said.others:
            left, seat.others = said.others < seat.others, said.others
            self.turns += 1
            if left:
                self.pump(self.lanes.of(seat.key, seat.identity))

    def link_lost(self, link: ReplicaLink, reason: str) -> None:
        seat = self._links.pop(link, None)
        if seat is None:
            return
        logger.info("event=replica_lost replica=%s reason=%s", seat.replica_id, reason)
        seat.accepting = False
        self.turns += 1
        self._drop_seat(seat)
        self.service_times.left(seat)
        # Each goes to the front of the queue, so the first accepted goes last.
        for request in reversed(list(seat.in_flight.values())):
            if request.phase is Phase.RUNNING:
                self._attempts.give_up(request, f"replica {seat.replica_id} was lost: {reason}")
        self.on_seat_lost(seat, reason)

    # --- parking ---

    def park_seat(self, seat: Seat, reason: str, within_s: float) -> None:
        """No new requests for this replica, and what it runs is put back to wait. Idempotent."""
        self.seat_closing(seat)
        # Each goes to the front of the queue, so the first accepted goes last.
        for request in reversed(list(seat.in_flight.values())):
            self._park(request, seat, reason, within_s)

    def _park(self, request: LiveRequest, seat: Seat, reason: str, within_s: float) -> None:
        if request.parking or request.cancelling is not None:
            return
        if request.phase is Phase.RUNNING:
            request.parking = reason
            seat.link.park(request.request_id, request.epoch, reason)
            asyncio.get_running_loop().call_later(within_s, self._park_overdue, request, request.epoch, within_s)
        elif request.phase is Phase.ASSIGNING:
            request.parking = reason

    def _park_overdue(self, request: LiveRequest, epoch: int, within_s: float) -> None:
        if request.phase is Phase.RUNNING and request.epoch == epoch and request.seat is not None:
            request.seat.link.cancel(request.request_id, epoch)
            self._attempts.give_up(request, f"the replica did not park it within {within_s:g} s")

    def pause(self, key: FunctionKey, reason: str) -> None:
        """A function that takes no work; what waits there keeps its place, with no limit running. Empty: go on."""
        for lane in self.lanes.pause(key, reason):
            for request in lane.waiting:
                self._timeouts.arm(request)
                request.log.note = f"parked: {reason}" if reason else "waiting for a replica"
            self.pump(lane)
            self._changed(lane)

    # --- ending ---

    def cancel(self, request: LiveRequest, state: RequestState = RequestState.CANCELLED) -> None:
        """Stop the work within a step, wherever it stands. Idempotent."""
        self.endings.cancel(request, state)

    def fail(self, request: LiveRequest, state: RequestState, error: OutcomeError) -> None:
        """End a request with an error of ours, stopping its work."""
        self.endings.fail(request, state, error)

    async def outcomes_written(self, timeout_s: float = 1.0) -> None:
        """Returns when the outcomes of all requests that readers have seen the end of are in the ledger, or are
        still refused by the storage after `timeout_s`."""
        await self.endings.outcomes_written(timeout_s)

    async def emptied(self) -> None:
        """Returns when no request is owned any more."""
        await self.endings.emptied()

    def fail_waiting(self, lane: Lane, error: OutcomeError) -> None:
        """No replica can be had: everything that waits for one learns why."""
        for request in list(lane.waiting):
            self.fail(request, RequestState.FAILED, error)

    # --- seats ---

    def _seated(self, seat: Seat, request: LiveRequest, taken: bool) -> None:
        self.turns += 1
        self.load.seated(seat, request, taken)

    def seat_ready(self, seat: Seat, held: Iterable[tuple[LiveRequest, int]] = ()) -> None:
        """A replica takes requests now. `held`: requests it runs already, with their epochs, to attach to."""
        lane = self.lanes.of(seat.key, seat.identity)
        lane.seats[seat.replica_id] = seat
        seat.moved = self._seated
        self.turns += 1
        self._links[seat.link] = seat
        for request, epoch in held:
            request.epoch = epoch
            self.attach(request, seat)
        self._seats_changed(lane)
        self.pump(lane)
        self._changed(lane)

    def attach(self, request: LiveRequest, seat: Seat) -> None:
        """Go on with an attempt that the replica of this seat may still run."""
        self.requests[request.request_id] = request
        seat.take(request)
        self._attempts.begin(request, seat)
        seat.link.attach(request.request_id, request.epoch, request.log.last_seq)

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

    async def close(self) -> None:
        """Let go of everything without ending it: requests stay in the journal, replicas go on."""
        self.closing = True
        for request in self.requests.values():
            request.stop_timer()
        for link in list(self._links):
            link.close()
        self._links.clear()
        await self._notes.close()
        await self.endings.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
