"""The life of one request as spans: what happened to it is taken down as it happens, and told when each part is over.

    POST /v1/...                         from its call to its end, whoever reads
      accept                             until the journal has it
      chat MODEL                         gen_ai.*: the work itself, over all its attempts
        queue                            waiting; below it the start of the replica it waited for
        place                            which replica, why, and the commit of that
        attempt                          one replica's turn; linked to the one before, and to the first
          load kv, prefill, decode, commit
        settle                           outcome and ledger

A gateway that adopts a request goes on with the same trace: the outermost two are told by whoever ends it, an attempt
by whoever sees its end. What a replica measured itself comes with its messages. Limits: nothing of prompts and answers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec

from control_plane.gateway.parsing import Endpoint
from control_plane.records import OutcomeError, RequestState
from control_plane.trace_context import TraceSeed, span_id
from control_plane.traces import Attributes, SpanRef, Told, Traces
from function_runtime.protocol import Accepted, DeviceTime, Finished, Parked, Tokens

if TYPE_CHECKING:
    from autoscaler.placement import Placement
    from control_plane.errors import StokerError
    from control_plane.live_request import LiveRequest, Origin, Phase

logger = logging.getLogger(__name__)

P = ParamSpec("P")
_MICRO: Final = 1000
_PATHS: Final = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.RESPONSES: "/v1/responses",
}
GATEWAY_LOST: Final = "its gateway was lost"


def _harmless(
    method: Callable[Concatenate[RequestTrace, P], None],
) -> Callable[Concatenate[RequestTrace, P], None]:
    """Whoever watches must not hinder what is watched."""

    def guarded(self: RequestTrace, /, *given: P.args, **named: P.kwargs) -> None:
        try:
            method(self, *given, **named)
        except Exception as error:
            logger.warning("event=trace_lost request=%s error=%r", self.request_id, error)

    functools.update_wrapper(guarded, method)
    return guarded


class _Attempt:
    """One replica's turn while it lasts."""

    __slots__ = (
        "appends", "begin_ns", "commit_begin_ns", "commit_end_ns", "commit_since_ns", "commit_us", "committed",
        "device", "epoch", "first_ns", "frames", "last_ns", "longest_us", "placed", "prefill_device_us", "taken",
        "taken_ns", "tokens",
    )  # fmt: skip

    def __init__(self, epoch: int, begin_ns: int, placed: dict[str, str | int]) -> None:
        self.epoch = epoch
        self.begin_ns = begin_ns
        self.placed = placed
        self.taken: Accepted | None = None
        self.taken_ns = self.first_ns = self.last_ns = 0
        self.frames = self.tokens = self.prefill_device_us = 0
        self.device = DeviceTime()
        self.commit_begin_ns = self.commit_end_ns = self.commit_since_ns = 0
        self.appends = self.committed = self.commit_us = self.longest_us = 0


class RequestTrace:
    __slots__ = (
        "_accepted_ns", "_attempt", "_ending_ns", "_first", "_first_token_ns", "_last", "_origin", "_place_ns",
        "_placement", "_queue_ns", "_seed", "_traces", "request_id",
    )  # fmt: skip

    def __init__(self, traces: Traces, origin: Origin, seed: TraceSeed) -> None:
        self._traces = traces
        self._origin = origin
        self._seed = seed
        self.request_id = origin.request_id
        self._accepted_ns = self._queue_ns = self._place_ns = self._ending_ns = self._first_token_ns = 0
        self._placement: Placement | None = None
        self._attempt: _Attempt | None = None
        self._first = self._last = 0
        """Epochs of attempts; 0: none yet."""

    # --- where its spans are ---

    def _ref(self, name: str) -> SpanRef:
        return SpanRef(int(self._seed.trace_id, 16), span_id(self.request_id, name))

    @property
    def _call(self) -> SpanRef:
        return self._ref("call")

    @property
    def _work(self) -> SpanRef:
        return self._ref("work")

    def _attempt_ref(self, epoch: int) -> SpanRef:
        return self._ref(f"attempt {epoch}")

    @property
    def _began_ns(self) -> int:
        return self._seed.began_us * _MICRO

    # --- what happens to it ---

    @_harmless
    def accepted(self, *, waits: bool) -> None:
        """The journal has it. `waits`: for a replica; otherwise it is with one already."""
        now_ns = self._accepted_ns = self._traces.now_ns()
        if waits:
            self._queue_ns = now_ns
        self._traces.child(
            "accept", self._call, self._began_ns, now_ns, {"stoker.prompt_tokens": len(self._origin.prompt)}
        )

    @_harmless
    def adopted(self, epoch: int, assigned_us: int | None, replica_id: str | None) -> None:
        """From another gateway. An attempt that was under way (`replica_id`) ends here, or goes on."""
        self._queue_ns = self._traces.now_ns()
        self._first, self._last = (1 if epoch else 0), epoch
        if replica_id is not None and assigned_us is not None:
            self._attempt = _Attempt(epoch, assigned_us * _MICRO, {"stoker.replica": replica_id})

    @_harmless
    def refused(self, error: StokerError) -> None:
        refusal = OutcomeError(error.http_status, error.code, error.message)
        self._tell_call(self._traces.now_ns(), refusal, {})

    @_harmless
    def moved(self, live: LiveRequest, phase: Phase) -> None:
        """Called before it is in `phase`."""
        now_ns = self._traces.now_ns()
        if phase.value == "assigning":
            self._place_ns = now_ns
        elif phase.value == "running":
            self._begin_attempt(live, now_ns)
        elif phase.value in ("queued", "ending"):
            self._end_attempt(live, now_ns)
            if phase.value == "queued":
                self._queue_ns = self._queue_ns or now_ns
            else:
                self._end_queue(now_ns, "")
                self._ending_ns = now_ns

    @_harmless
    def placed(self, placement: Placement) -> None:
        self._placement = placement

    @_harmless
    def taken(self, message: Accepted) -> None:
        """What a replica says on taking it: KV loaded and computed again, by its own measurements."""
        if self._attempt is not None:
            self._attempt.taken, self._attempt.taken_ns = message, self._traces.now_ns()

    @_harmless
    def tokens(self, message: Tokens) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        attempt.last_ns = self._traces.now_ns()
        if not attempt.first_ns:
            attempt.first_ns = attempt.last_ns
            attempt.prefill_device_us = message.device.prefill_us
        attempt.frames += 1
        attempt.tokens += len(message.events)
        attempt.device = message.device

    @_harmless
    def commit_begins(self) -> None:
        if self._attempt is not None:
            self._attempt.commit_since_ns = self._traces.now_ns()

    @_harmless
    def committed(self, count: int) -> None:
        attempt, now_ns = self._attempt, self._traces.now_ns()
        self._first_token_ns = self._first_token_ns or now_ns
        if attempt is None or not attempt.commit_since_ns:
            return
        took_us = (now_ns - attempt.commit_since_ns) // _MICRO
        attempt.commit_begin_ns = attempt.commit_begin_ns or attempt.commit_since_ns
        attempt.commit_end_ns, attempt.commit_since_ns = now_ns, 0
        attempt.appends += 1
        attempt.committed += count
        attempt.commit_us += took_us
        attempt.longest_us = max(attempt.longest_us, took_us)

    @_harmless
    def ended(self, live: LiveRequest, state: RequestState, error: OutcomeError | None) -> None:
        """Its outcome is in the journal."""
        now_ns = self._traces.now_ns()
        self._traces.child("settle", self._work, self._ending_ns or now_ns, now_ns, {"stoker.state": state.value})
        failure = error if state is not RequestState.DONE else None
        self._tell_work(live, state, failure, now_ns)
        self._tell_call(now_ns, failure, {"stoker.state": state.value})

    # --- its parts ---

    def _end_queue(self, end_ns: int, replica_id: str) -> None:
        since_ns, self._queue_ns = self._queue_ns, 0
        if not since_ns:
            return
        at = SpanRef(self._work.trace_id, span_id(self.request_id, f"queue {since_ns}"))
        cold = bool(replica_id) and self._traces.awaited_start(replica_id, since_ns, at)
        attributes: Attributes = {"stoker.cold_start": cold, "stoker.after_attempt": self._last}
        self._traces.tell(Told("queue", at, self._work.span_id, since_ns, end_ns, attributes))

    def _begin_attempt(self, live: LiveRequest, now_ns: int) -> None:
        seat, epoch = live.seat, live.epoch
        where = {"stoker.replica": seat.replica_id, "stoker.slot": seat.slot_id} if seat is not None else {}
        if self._attempt is not None:
            if self._attempt.epoch == epoch:  # it goes on: its gateway was lost, its replica not
                self._attempt.placed = {**where, "stoker.adopted": 1}
                self._queue_ns = 0
                return
            self._end_attempt(live, self._queue_ns or now_ns, GATEWAY_LOST)
        place_ns, self._place_ns = self._place_ns or now_ns, 0
        self._end_queue(place_ns, seat.replica_id if seat is not None else "")
        placement, self._placement = self._placement, None
        chosen: dict[str, str | float] = {"stoker.placement.reason": "the only one with room"}
        if placement is not None:
            chosen = {
                "stoker.placement.reason": placement.reason,
                "stoker.placement.expected_s": placement.expected_s,
                "stoker.placement.runner_up": placement.runner_up or "",
            }
        self._traces.child("place", self._work, place_ns, now_ns, {**where, **chosen})
        self._attempt = _Attempt(epoch, now_ns, {**where, "stoker.after_token": live.log.last_seq})

    def _end_attempt(self, live: LiveRequest, now_ns: int, lost: str = "") -> None:
        """`lost`: why, where its replica has not said what it came to."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        at = self._attempt_ref(attempt.epoch)
        earlier = dict.fromkeys(epoch for epoch in (self._last, self._first) if epoch and epoch != attempt.epoch)
        self._first, self._last = self._first or attempt.epoch, attempt.epoch
        self._tell_parts(attempt, at, now_ns)
        conclusion, error = live.conclusion, ""
        if isinstance(conclusion, Finished):
            outcome = "cancelled" if conclusion.cancelled else "finished"
        elif isinstance(conclusion, Parked):
            outcome = f"parked: {conclusion.reason}"
        elif conclusion is not None:
            outcome, error = "lost", conclusion.reason
        else:
            outcome, error = ("lost", lost) if lost else ("ended", "")
        attributes = {**attempt.placed, "stoker.epoch": attempt.epoch, "stoker.outcome": outcome}
        links = tuple(self._attempt_ref(epoch) for epoch in earlier)
        self._traces.tell(Told("attempt", at, self._work.span_id, attempt.begin_ns, now_ns, attributes, links, error))

    def _tell_parts(self, attempt: _Attempt, at: SpanRef, now_ns: int) -> None:
        taken, begin_ns = attempt.taken, attempt.begin_ns
        if taken is not None and (taken.loaded_tokens or taken.load_us or taken.recomputed_tokens or taken.detail):
            # By the replica's clock it took so long, and was over when it said so.
            load_ns = max(attempt.taken_ns - taken.load_us * _MICRO, begin_ns)
            self._traces.child(
                "load kv",
                at,
                load_ns,
                attempt.taken_ns,
                {
                    "stoker.kv.loaded_tokens": taken.loaded_tokens,
                    "stoker.kv.recomputed_tokens": taken.recomputed_tokens,
                    "stoker.kv.bytes": taken.load_bytes,
                    "stoker.kv.load_us": taken.load_us,
                    "stoker.kv.exact": taken.exact,
                    "stoker.kv.choice": taken.detail or ("loaded" if taken.loaded_tokens else "recomputed"),
                },
            )
        if not attempt.first_ns:
            return
        prefill = {"stoker.device.prefill_us": attempt.prefill_device_us}
        self._traces.child("prefill", at, begin_ns, attempt.first_ns, prefill)
        decode = {
            "stoker.decode.tokens": attempt.tokens,
            "stoker.decode.messages": attempt.frames,
            "stoker.device.decode_us": attempt.device.decode_us,
        }
        self._traces.child("decode", at, attempt.first_ns, attempt.last_ns, decode)
        if attempt.appends:
            commit = {
                "stoker.commit.count": attempt.appends,
                "stoker.commit.tokens": attempt.committed,
                "stoker.commit.waited_us": attempt.commit_us,
                "stoker.commit.longest_us": attempt.longest_us,
            }
            self._traces.child("commit", at, attempt.commit_begin_ns, attempt.commit_end_ns, commit)

    def _tell_work(self, live: LiveRequest, state: RequestState, error: OutcomeError | None, now_ns: int) -> None:
        origin, sampling = self._origin, self._origin.sampling
        operation = "text_completion" if origin.options.endpoint is Endpoint.COMPLETIONS else "chat"
        attributes: dict[str, str | int | float | bool | list[str]] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "stoker",
            "gen_ai.request.model": origin.model,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.response.id": self.request_id,
            "gen_ai.response.model": origin.function,
            "gen_ai.response.finish_reasons": [
                str(event.finish) for event in live.log.events if event.finish is not None
            ],
            "gen_ai.usage.input_tokens": len(origin.prompt),
            "gen_ai.usage.output_tokens": live.log.last_seq,
            "gen_ai.usage.cache_read.input_tokens": live.cached_tokens,
            "stoker.function": origin.function,
            "stoker.revision": origin.revision,
            "stoker.tenant": origin.tenant,
            "stoker.key": origin.key_id,
            "stoker.attempts": live.epoch,
        }
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if sampling.n != 1:
            attributes["gen_ai.request.choice.count"] = sampling.n
        if self._first_token_ns and self._accepted_ns:
            attributes["stoker.time_to_first_token_s"] = (self._first_token_ns - self._began_ns) / 1e9
        if error is not None:
            attributes["error.type"] = error.code
        begin_ns = self._accepted_ns or self._origin.created_us * _MICRO
        words = f"{error.code}: {error.message}" if error is not None else ""
        name = f"{operation} {origin.model}"
        self._traces.tell(Told(name, self._work, self._call.span_id, begin_ns, now_ns, attributes, (), words))

    def _tell_call(self, now_ns: int, error: OutcomeError | None, more: dict[str, str]) -> None:
        """Its status is what a client sees that waits for the whole: a stream has begun with 200, whatever follows."""
        path = _PATHS[self._origin.options.endpoint]
        attributes: dict[str, str | int] = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "url.scheme": "http",
            "http.response.status_code": error.http_status if error is not None else 200,
            "stoker.request": self.request_id,
            **more,
        }
        words = ""
        if error is not None:
            attributes["error.type"] = error.code
            # A client's own fault is none of the server's.
            words = f"{error.code}: {error.message}" if error.http_status >= 500 else ""
        parent = int(self._seed.parent, 16) if self._seed.parent else 0
        self._traces.tell(
            Told(f"POST {path}", self._call, parent, self._began_ns, now_ns, attributes, (), words, True, bool(parent))
        )
