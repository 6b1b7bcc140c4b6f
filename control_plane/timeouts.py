"""Every limit of a request on its own: cold start, queue, first token, silence between tokens, total.

One timer per request, set for the earliest limit of its phase and looked at again when it fires; a token moves no
timer. While a function is drained its requests wait without any limit running. Limits: resolution is the event loop's.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from typing import Final

from control_plane.lanes import Lane
from control_plane.live_request import LiveRequest, Phase
from control_plane.records import OutcomeError, RequestState

_SLACK_S: Final = 0.001


class Limit(enum.Enum):
    COLD_START = "cold_start_timeout"
    QUEUE = "queue_timeout"
    FIRST_TOKEN = "first_token_timeout"
    IDLE = "idle_timeout"
    TOTAL = "total_timeout"


class TimeoutWatch:
    def __init__(
        self,
        lane_of: Callable[[LiveRequest], Lane],
        timed_out: Callable[[LiveRequest, OutcomeError, RequestState], None],
        why: Callable[[LiveRequest], str] = lambda request: "",
    ) -> None:
        """`why`: how far it is with what a request waits for that finds no replica."""
        self._why = why
        self._lane_of = lane_of
        self._timed_out = timed_out

    def arm(self, request: LiveRequest) -> None:
        request.stop_timer()
        if request.phase is Phase.QUEUED and self._lane_of(request).paused:
            return  # armed again when its function goes on
        left_s, _ = self._next(request)
        loop = asyncio.get_running_loop()
        request.timer = loop.call_later(max(left_s, 0.0) + _SLACK_S, self._fired, request)

    def _fired(self, request: LiveRequest) -> None:
        request.timer = None
        if not request.live:
            return
        left_s, limit = self._next(request)
        if left_s > 0:
            self.arm(request)
        else:
            error, state = limit_passed(limit, request, self._why(request))
            self._timed_out(request, error, state)

    def _next(self, request: LiveRequest) -> tuple[float, Limit]:
        """Seconds left of the earliest limit, and which it is."""
        limits, now_ns = request.origin.limits, time.monotonic_ns()
        total = limits.total_s - (now_ns - request.accept_ns - request.paused_ns) / 1e9, Limit.TOTAL
        if request.phase is Phase.QUEUED:
            lane = self._lane_of(request)
            cold_ns, queue_ns = lane.waited_ns(request)
            total = total[0] + lane.paused_for_ns(request) / 1e9, Limit.TOTAL
            if lane.ready:
                other = limits.queue_s - queue_ns / 1e9, Limit.QUEUE
            else:
                other = limits.cold_start_s - cold_ns / 1e9, Limit.COLD_START
        elif request.phase is Phase.RUNNING and request.last_token_ns == 0:
            other = limits.first_token_s - (now_ns - request.submit_ns) / 1e9, Limit.FIRST_TOKEN
        elif request.phase is Phase.RUNNING:
            other = limits.idle_s - (now_ns - request.last_token_ns) / 1e9, Limit.IDLE
        else:
            return total
        return min(total, other, key=lambda found: found[0])


def limit_passed(limit: Limit, request: LiveRequest, why: str = "") -> tuple[OutcomeError, RequestState]:
    """What the client is told, and how the request ends: refused if it never ran, failed if it did."""
    limits, function = request.origin.limits, request.origin.function
    match limit:
        case Limit.QUEUE:
            text = f"all replicas of {function} were full for {limits.queue_s:g} s (timeouts.queue_s)"
            return OutcomeError(429, "saturated", text, True), RequestState.REFUSED
        case Limit.COLD_START:
            text = f"no replica of {function} was ready within {limits.cold_start_s:g} s (timeouts.cold_start_s)"
            return OutcomeError(503, "model_loading", f"{text}: {why}" if why else text, True), RequestState.REFUSED
        case Limit.FIRST_TOKEN:
            text = (
                f"no token within {limits.first_token_s:g} s of a replica's taking the request "
                f"(timeouts.first_token_s of {function})"
            )
        case Limit.IDLE:
            text = f"no token for {limits.idle_s:g} s (timeouts.idle_s of {function})"
        case Limit.TOTAL:
            text = f"not done within {limits.total_s:g} s (timeouts.total_s of {function})"
    return OutcomeError(504, limit.value, text), RequestState.FAILED
