"""An attempt at a request: one replica's turn under one epoch, from its begin to what it came to.

What a replica says of it goes to the journal through `Commits`; what it comes to is acted upon when all it sent is
committed: the request ends, or waits for another replica (`again`). Limits: which replica is not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from control_plane.attempt_notes import AttemptNotes
from control_plane.commit import Commits
from control_plane.endings import Endings
from control_plane.faults import error_of
from control_plane.journal import Journal
from control_plane.lanes import Seat
from control_plane.live_request import LiveRequest, Lost, Phase
from control_plane.records import OutcomeError, RequestState
from control_plane.replica_link import ReplicaLink
from function_runtime.protocol import (
    Accepted,
    Attached,
    DeviceTime,
    Failed,
    Finished,
    KvSealed,
    Parked,
    ReplicaMessage,
    Tokens,
    Unknown,
)

FRUITLESS_MAX: Final = 16
"""Attempts in a row without one new token after which a request is taken for the cause of its losses."""


class Attempts:
    """`arm(request)` sets its timer anew; `again(request)` puts it back in front of its queue; `closing(seat)` is told
    of a replica that gives its work back unasked, for it is about to end."""

    def __init__(
        self,
        journal: Journal,
        notes: AttemptNotes,
        requests: dict[str, LiveRequest],
        endings: Endings,
        arm: Callable[[LiveRequest], None],
        again: Callable[[LiveRequest], None],
        closing: Callable[[Seat], None],
    ) -> None:
        self._notes = notes
        self._requests = requests
        self._endings = endings
        self._arm = arm
        self._again = again
        self._closing = closing
        self._commits = Commits(journal, self._concluded, endings.fenced)
        self.on_first_of_attempt: Callable[[LiveRequest, Tokens], None] = lambda request, message: None
        self.on_first_token: Callable[[LiveRequest], None] = lambda request: None

    def begin(self, request: LiveRequest, seat: Seat) -> None:
        request.move(Phase.RUNNING)
        request.conclusion = None
        request.device = DeviceTime()
        request.attached = False
        request.parking = ""
        request.received = request.log.last_seq
        request.submit_ns = time.monotonic_ns()
        request.last_token_ns = 0
        request.log.note = "running"
        self._arm(request)

    # --- what replicas say ---

    def heard(self, link: ReplicaLink, message: ReplicaMessage) -> None:
        if isinstance(message, Tokens):
            request = self._requests.get(message.request_id)
            if request is not None and request.epoch == message.epoch and request.phase is Phase.RUNNING:
                first, earliest = request.last_token_ns == 0, request.received == 0
                if first:
                    self.on_first_of_attempt(request, message)
                if request.trace is not None:
                    request.trace.tokens(message)
                self._commits.tokens(request, message)
                if first:
                    self._arm(request)
                if earliest and request.received:
                    self.on_first_token(request)
            return
        if isinstance(message, Accepted | Attached | Finished | Failed | KvSealed | Parked | Unknown):
            request = self._requests.get(message.request_id)
            if request is None or request.epoch != message.epoch or request.phase is not Phase.RUNNING:
                if isinstance(message, Finished | Failed | Parked):
                    # NOTE: whoever goes on with it resumes from what this attempt stored.
                    link.settled(message.request_id, message.epoch, goes_on=request is None or request.live)
                return
            self._about(request, message)

    def _about(
        self, request: LiveRequest, message: Accepted | Attached | Finished | Failed | KvSealed | Parked | Unknown
    ) -> None:
        if isinstance(message, KvSealed):
            self._commits.sealed(request, message)
        elif isinstance(message, Finished):
            request.device, request.cached_tokens = message.device, message.cached_tokens
            if message.last_seq > request.received:
                self.give_up(request, f"the replica ended at token {message.last_seq} without sending all")
            elif message.cancelled and request.cancelling is None:
                self.give_up(request, "the replica gave the request up")
            else:
                self._commits.conclude(request, message)
        elif isinstance(message, Failed):
            request.device = message.device
            error = error_of(message, request.origin.sampling)
            self._commits.conclude(request, Lost(f"{message.code}: {message.message}", message.retry, error))
        elif isinstance(message, Parked):
            request.device = message.device
            if not request.parking and request.seat is not None:
                self._closing(request.seat)
            if message.last_seq > request.received:
                self.give_up(request, f"the replica parked it at token {message.last_seq} without sending all")
            else:
                self._commits.conclude(request, message)
        elif isinstance(message, Unknown):
            self.give_up(request, "the replica does not know the request")
        elif isinstance(message, Attached):
            request.attached = True
        elif isinstance(message, Accepted):
            if not request.attached:
                request.stages.load_kv_us += message.load_us
                if request.trace is not None:
                    request.trace.taken(message)
            # One that had stored KV to go on from and left all of it out says why, before its first token too; one that
            # is attached to may have said all this to a gateway that did not live to write it down.
            goes_on = request.log.last_seq and not request.attached
            if goes_on or message.loaded_tokens or message.recomputed_tokens or message.detail:
                self._notes.resumed(request, message)

    def give_up(self, request: LiveRequest, reason: str) -> None:
        """The attempt is lost; it is acted upon when what it sent is committed."""
        self._commits.conclude(request, Lost(reason))

    # --- what an attempt came to ---

    def _concluded(self, request: LiveRequest) -> None:
        conclusion = request.conclusion
        if isinstance(conclusion, Finished):
            state = RequestState.DONE
            if conclusion.cancelled:
                state = request.cancelling or RequestState.CANCELLED
            self._endings.end(request, state, None)
        elif isinstance(conclusion, Lost):
            if request.cancelling is not None:
                self._endings.end(request, request.cancelling, None)
            elif conclusion.retry:
                self.retry(request, conclusion.reason)
            else:
                self._endings.end(request, RequestState.FAILED, conclusion.error)

        elif isinstance(conclusion, Parked):
            if request.seat is not None:
                request.seat.link.settled(request.request_id, request.epoch)
            if request.cancelling is not None:
                self._endings.end(request, request.cancelling, None)
            elif request.complete:
                self._endings.end(request, RequestState.DONE, None)
            else:
                self._notes.parked(request, conclusion)
                self._again(request)
                if request.phase is Phase.QUEUED:
                    request.log.note = f"parked: {conclusion.reason}"

    def retry(self, request: LiveRequest, reason: str) -> None:
        """The attempt is lost; the request goes on with another replica, if there is anything left to do."""
        if request.complete:
            self._endings.end(request, RequestState.DONE, None)
            return
        request.fruitless += 1
        if request.fruitless >= FRUITLESS_MAX:
            error = OutcomeError(
                500, "attempts_exhausted",
                f"{FRUITLESS_MAX} attempts in a row ended without a token; the last: {reason}",
            )  # fmt: skip
            self._endings.end(request, RequestState.FAILED, error)
            return
        self._notes.requeued(request, reason)
        self._again(request)
