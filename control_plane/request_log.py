"""The committed tokens of one request, as its readers follow them.

A log only grows, and ends once. Readers come with a cursor and wait for what lies behind it; a slow reader holds up
nobody, for nothing is queued per reader. Limits: the whole log of a live request is in memory (it is what a replica
that takes over needs); logs of ended requests are read back from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.records import OutcomeError, RequestState
from function_runtime.protocol import TokenEvent


@dataclass(frozen=True, slots=True)
class End:
    state: RequestState
    cached_tokens: int = 0
    error: OutcomeError | None = None
    taken_over: bool = False
    """It goes on with another gateway: an end here only."""


class RequestLog:
    """Tokens from seq 1 on, and the end."""

    __slots__ = ("_waiters", "end", "events", "note", "paused")

    def __init__(self, events: Sequence[TokenEvent] = (), end: End | None = None) -> None:
        self.events: list[TokenEvent] = list(events)
        self.end = end
        self.note = "waiting"
        """What a waiting reader is told with the next heartbeat."""
        self.paused: OutcomeError | None = None
        """Why nobody may wait here now: readers are told to come back. What comes next takes it away."""
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def last_seq(self) -> int:
        return len(self.events)

    def extend(self, events: Sequence[TokenEvent]) -> None:
        if self.end is not None:
            raise RuntimeError("a log that has ended takes no more tokens")
        self.events.extend(events)
        self.paused = None
        self._wake()

    def pause(self, error: OutcomeError) -> None:
        if self.end is None and self.paused is None:
            self.paused = error
            self._wake()

    def finish(self, end: End) -> None:
        if self.end is None:
            self.end = end
            self.paused = None
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, after_seq: int, timeout_s: float | None = None) -> bool:
        """True as soon as there is a token behind `after_seq`, the end, or a pause; False after `timeout_s`."""
        while len(self.events) <= after_seq and self.end is None and self.paused is None:
            if not await self._woken(timeout_s):
                return False
        return True

    async def _woken(self, timeout_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, waiter.cancel)
        try:
            await waiter
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if waiter.cancelled() and not (task is not None and task.cancelling()):
                return False
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return True

    async def ended(self) -> End:
        """The end, once it is there."""
        while self.end is None:
            await self._woken(None)
        return self.end
