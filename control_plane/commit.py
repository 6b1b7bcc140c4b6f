"""From a replica's tokens to a request's log: journal first, readers second.

Each live request has at most one append under way; what arrives meanwhile goes with the next, so that groups form under
load and not by waiting. An attempt's conclusion is acted upon when all it sent is committed. Limits: with durability
`off` tokens go straight to the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from control_plane.journal import Journal
from control_plane.live_request import LiveRequest, Lost, Phase
from control_plane.retries import Retry
from function_runtime.protocol import Begun, Finished, KvChunk, KvSealed, Parked, TokenEvent, Tokens

logger = logging.getLogger(__name__)

_encode: Final = msgspec.msgpack.Encoder().encode


class Commits:
    """`concluded(request)` is called once everything an attempt sent is in the log and it has come to something;
    `fenced(request)` when the journal says that another gateway owns the request now."""

    def __init__(
        self,
        journal: Journal,
        concluded: Callable[[LiveRequest], None],
        fenced: Callable[[LiveRequest], None],
    ) -> None:
        self._journal = journal
        self._concluded = concluded
        self._fenced = fenced
        self._tasks: set[asyncio.Future[bool]] = set()

    def tokens(self, request: LiveRequest, message: Tokens) -> None:
        """Take what is new of these tokens. A repetition is dropped; a gap ends the attempt."""
        skip = request.received + 1 - message.first_seq
        if skip < 0:
            self.conclude(request, Lost(f"the replica skipped from token {request.received} to {message.first_seq}"))
            return
        events = message.events[skip:] if skip else message.events
        request.device = message.device
        request.cached_tokens = message.cached_tokens
        now_ns = time.monotonic_ns()
        if request.last_token_ns == 0:
            request.stages.prefill_us += (now_ns - request.submit_ns) // 1000
            request.attempt_first = now_ns
        request.last_token_ns = now_ns
        if message.prefill_ends and not request.prefill_ends:
            request.prefill_ends, request.begun = message.prefill_ends, message.begun
            request.pending_ends = (message.prefill_ends, message.begun)
        if not events:
            return
        request.received += len(events)
        request.fruitless = 0
        request.pending.extend(events)
        self.flush(request)

    def conclude(self, request: LiveRequest, conclusion: Finished | Lost | Parked) -> None:
        """The attempt is over; nothing more is taken from it."""
        if request.conclusion is None:
            request.conclusion = conclusion
            self.flush(request)

    def flush(self, request: LiveRequest) -> None:
        if request.committing is not None:
            return
        if request.pending:
            self._append(request)
            return
        if request.conclusion is not None and request.phase is Phase.RUNNING:
            self._concluded(request)

    def _append(self, request: LiveRequest) -> None:
        events, request.pending = request.pending, []
        if not request.origin.durable:
            request.log.extend(events)
            self.flush(request)
            return
        request.committing = asyncio.get_running_loop().create_future()
        request.committing_events = events
        ends, request.pending_ends = request.pending_ends, None
        if request.trace is not None:
            request.trace.commit_begins()
        self._write(request, request.epoch, events, ends, time.monotonic())

    def _write(
        self,
        request: LiveRequest,
        epoch: int,
        events: list[TokenEvent],
        ends: tuple[tuple[int, ...], Begun] | None,
        since_s: float,
        retry: Retry | None = None,
    ) -> None:
        future = asyncio.ensure_future(
            self._journal.append(
                request.request_id,
                epoch,
                request.log.last_seq + 1,
                _encode(events),
                len(events),
                request.device,
                request.cached_tokens,
                *(ends or ((), Begun())),
            )
        )
        self._tasks.add(future)

        def written(done: asyncio.Future[bool]) -> None:
            self._tasks.discard(done)
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                again = retry or Retry(
                    "append_refused", request.request_id, self._journal.patience_s, request.keep_for_later, since_s
                )
                asyncio.get_running_loop().call_later(
                    again.refused(error), self._write, request, epoch, events, ends, since_s, again
                )
                return
            if request.committing is not None:
                request.committing.set_result(None)
                request.committing = None
            request.committing_events = []
            if not done.result():
                self._fenced(request)
            else:
                if request.trace is not None:
                    request.trace.committed(len(events))
                request.log.extend(events)
                self.flush(request)

        future.add_done_callback(written)

    def sealed(self, request: LiveRequest, message: KvSealed) -> None:
        if not message.chunks:
            logger.info("event=kv_dropped request=%s reason=%s", request.request_id, message.dropped)
            return
        # The same bytes are named again where another choice has them too, or where they were written anew.
        known = {(chunk.choice, chunk.pack, chunk.digest) for chunk in request.kv}
        chunks = tuple(c for c in message.chunks if (c.choice, c.pack, c.digest) not in known)
        if not chunks:
            return  # told again after an attach
        # As the journal reads it: of a range that was written twice in the same way, the later one.
        stored = {(c.choice, c.start, c.end, c.lineage): c for c in (*request.kv, *chunks)}
        request.kv = list(stored.values())
        if not request.origin.durable:
            return
        self._seal(request.request_id, message.epoch, chunks)

    def _seal(self, request_id: str, epoch: int, chunks: tuple[KvChunk, ...], retry: Retry | None = None) -> None:
        """Nobody waits for it, but what the journal does not name is computed again after this gateway's death: a
        storage that refuses is asked again."""
        future = asyncio.ensure_future(self._journal.seal_kv(request_id, epoch, chunks))
        self._tasks.add(future)

        def written(done: asyncio.Future[bool]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                again = retry or Retry("seal_refused", request_id, self._journal.patience_s)
                asyncio.get_running_loop().call_later(
                    again.refused(error), self._seal, request_id, epoch, chunks, again
                )

        future.add_done_callback(written)
