"""A request this gateway owns: its resume record, its log, and where it stands.

`QUEUED -> ASSIGNING -> RUNNING -> ENDING -> ENDED`, back to `QUEUED` when an attempt is lost. Tokens of a replica
wait in `pending` until the journal has them; only then they reach `log`. Limits: a plain record; `dispatch` and
`commit` move it.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from control_plane.gateway.parsing import RenderOptions
from control_plane.readers import Readers
from control_plane.records import Outcome, OutcomeError, RequestState, StageTimes
from control_plane.request_log import End, RequestLog
from control_plane.store_tokens import place_of
from control_plane.trace_context import TraceSeed
from function_runtime.protocol import (
    Begun,
    DeviceTime,
    Finished,
    KvChunk,
    Parked,
    Reuse,
    Sampling,
    TokenEvent,
    Work,
)

if TYPE_CHECKING:
    from control_plane.lanes import Seat
    from control_plane.request_trace import RequestTrace


NO_REUSE: Final = Reuse()
TOKEN_BYTES: Final = 8
RECORD_BYTES: Final = 2048


class Phase(enum.Enum):
    QUEUED = "queued"
    ASSIGNING = "assigning"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


_TRANSITIONS: Final = {
    Phase.QUEUED: frozenset({Phase.ASSIGNING, Phase.RUNNING, Phase.ENDING}),
    Phase.ASSIGNING: frozenset({Phase.RUNNING, Phase.QUEUED, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.QUEUED, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Each bounds one thing and nothing else; seconds."""

    cold_start_s: float
    """Waiting while no replica of the function is ready."""
    queue_s: float
    """Waiting while replicas are ready but full."""
    first_token_s: float
    """From a replica's taking the request to its first token."""
    idle_s: float
    """Between two tokens."""
    total_s: float
    """From acceptance to the end."""
    kept_s: float | None = None
    """How long after the end the answer is kept for readers that come back; None: the service's retention."""


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt ended without an outcome."""

    reason: str
    retry: bool = True
    error: OutcomeError | None = None


@dataclass(slots=True)
class Stages:
    """Wall microseconds of a request's stages, summed over its attempts (one monotonic clock)."""

    queue_us: int = 0
    cold_start_us: int = 0
    load_kv_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """What never changes about a request."""

    request_id: str
    tenant: str
    key_id: str
    function: str
    revision: int
    identity: str
    """Identity of the checkpoint whose tokenizer made the prompt: the only one that may continue it."""
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    options: RenderOptions
    limits: TimeLimits
    kv_scope: str
    write_kv: bool
    durable: bool
    created_us: int
    share_prefix: bool = True
    """Stored KV of other requests of its scope may be used for it, and its own may be kept for them."""
    prefix_form: str = "raw"
    """In which form they are stored."""
    fast: bool = False
    """A resume may recompute in chunks of its own."""
    conversation: str = ""
    """Name of the conversation it belongs to (from `prompt_cache_key`)."""
    price_microusd_per_hour: int = 0
    reuse: Reuse = NO_REUSE
    kv_key: bytes = b""
    """What its KV is sealed with at rest; empty: not at all."""
    kv_owner: str = ""
    """Whose quota its kept KV counts against; empty: its tenant's."""
    trace: TraceSeed | None = None
    """What its spans are told under; None: none are."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.tenant, self.function)

    @property
    def nbytes(self) -> int:
        """What waiting costs in memory, roughly: eight bytes a token and the record."""
        return TOKEN_BYTES * len(self.prompt) + RECORD_BYTES


class LiveRequest:
    __slots__ = (
        "accept_ns",
        "attached",
        "attempt_first",
        "begun",
        "cached_tokens",
        "cancel_error",
        "cancelling",
        "cold_base_ns",
        "committing",
        "committing_events",
        "conclusion",
        "detached",
        "device",
        "epoch",
        "fruitless",
        "kv",
        "last_token_ns",
        "log",
        "origin",
        "parking",
        "paused_base_ns",
        "paused_ns",
        "pending",
        "pending_ends",
        "phase",
        "prefill_ends",
        "queue_base_ns",
        "readers",
        "received",
        "seat",
        "stages",
        "submit_ns",
        "timer",
        "trace",
    )

    def __init__(self, origin: Origin, detached: bool, log: RequestLog | None = None) -> None:
        self.origin = origin
        self.log = log or RequestLog()
        self.phase = Phase.QUEUED
        self.detached = detached
        """Whether the work goes on when nobody reads."""
        self.readers = Readers()
        self.epoch = 0
        self.seat: Seat | None = None
        self.received = self.log.last_seq
        """Place of the last token a replica sent, committed or not."""
        self.pending: list[TokenEvent] = []
        self.pending_ends: tuple[tuple[int, ...], Begun] | None = None
        self.committing: asyncio.Future[None] | None = None
        """An append is under way; done when it is in the log (or refused for good)."""
        self.committing_events: list[TokenEvent] = []
        self.conclusion: Finished | Lost | Parked | None = None
        """What the attempt came to; acted upon when everything it sent is committed."""
        self.cancelling: RequestState | None = None
        """How it is to end as soon as its replica (or its assignment) lets go."""
        self.cancel_error: OutcomeError | None = None
        self.parking = ""
        """Why its replica was asked to put it back (or is to be, once it has it)."""
        self.kv: list[KvChunk] = []
        self.prefill_ends: tuple[int, ...] = ()
        self.begun = Begun()
        self.cached_tokens = 0
        self.device = DeviceTime()
        self.fruitless = 0
        """Attempts in a row that were lost without a single new token."""
        self.attempt_first = 0
        self.attached = False
        """The attempt was begun by an earlier life of this gateway; the replica tells of it again."""
        self.accept_ns = time.monotonic_ns()
        self.submit_ns = 0
        self.last_token_ns = 0
        self.cold_base_ns = 0
        self.queue_base_ns = 0
        self.paused_base_ns = 0
        self.paused_ns = 0
        """How long it waited while its function was drained: none of its limits counts that."""
        self.stages = Stages()
        self.timer: asyncio.TimerHandle | None = None
        self.trace: RequestTrace | None = None

    @property
    def request_id(self) -> str:
        return self.origin.request_id

    @property
    def live(self) -> bool:
        return self.phase not in (Phase.ENDING, Phase.ENDED)

    @property
    def complete(self) -> bool:
        """Whether the log has the end of every choice: no replica has anything to add."""
        ended = sum(event.finish is not None for event in self.log.events)
        return ended == self.origin.sampling.n

    def move(self, phase: Phase) -> None:
        if phase not in _TRANSITIONS[self.phase]:
            raise RuntimeError(f"{self.request_id} cannot go from {self.phase.value} to {phase.value}")
        if self.trace is not None:
            self.trace.moved(self, phase)
        self.phase = phase

    def leave_seat(self) -> None:
        if self.seat is not None:
            self.seat.leave(self)

    def close_stage(self) -> None:
        """The attempt's wall time, so far not counted, goes to the stage it was in."""
        if self.last_token_ns and self.attempt_first:
            self.stages.decode_us += (self.last_token_ns - self.attempt_first) // 1000
        elif self.submit_ns and not self.last_token_ns:
            self.stages.prefill_us += (time.monotonic_ns() - self.submit_ns) // 1000
        self.submit_ns = self.last_token_ns = self.attempt_first = 0

    def keep_for_later(self, away_s: float) -> None:
        """The journal has been away for so long: readers are told how to come back, and may leave without harm."""
        way_back = self.origin.options.endpoint.way_back(self.request_id, self.log.last_seq)
        self.detached = True
        self.log.pause(
            OutcomeError(
                503, "storage_unavailable",
                f"the database has been away for {away_s:.0f} s. The request is kept and goes on when it is back: read "
                f"on with {way_back}", True,
            )
        )  # fmt: skip

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def work(self) -> Work:
        """The resume record for the attempt that `epoch` names."""
        origin = self.origin
        return Work(
            request_id=origin.request_id,
            epoch=self.epoch,
            tenant=origin.tenant,
            kv_scope=origin.kv_scope,
            kv_key=origin.kv_key,
            kv_place=place_of(origin.kv_owner or origin.tenant),
            prompt=origin.prompt,
            sampling=origin.sampling,
            produced=tuple(self.log.events),
            prefill_ends=self.prefill_ends,
            begun=self.begun,
            kv=tuple(self.kv),
            write_kv=origin.write_kv,
            share_prefix=origin.share_prefix,
            prefix_form=origin.prefix_form,
            fast=origin.fast,
            reuse=origin.reuse,
        )

    def outcome(self, state: RequestState, error: OutcomeError | None) -> Outcome:
        """How it ended, for the journal; `received` is the log's length once the appends under way are committed."""
        reasons = {event.choice: event.finish for event in self.log.events if event.finish is not None}
        for event in self.committing_events:
            if event.finish is not None:
                reasons[event.choice] = event.finish
        last_seq = self.log.last_seq + len(self.committing_events)
        stages = self.stages
        return Outcome(
            state=state,
            last_seq=last_seq,
            input_tokens=len(self.origin.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=last_seq,
            finish_reasons=tuple(reasons[choice] for choice in sorted(reasons)),
            error=error,
            device=self.device,
            kept_s=self.origin.limits.kept_s,
            stages=StageTimes(
                queue_us=stages.queue_us,
                cold_start_us=stages.cold_start_us,
                load_kv_us=stages.load_kv_us,
                prefill_us=stages.prefill_us,
                decode_us=stages.decode_us,
                total_us=(time.monotonic_ns() - self.accept_ns) // 1000,
            ),
        )

    def end_with(self, state: RequestState, error: OutcomeError | None = None) -> End:
        return End(state, self.cached_tokens, error)

    def end_here(self, error: OutcomeError) -> End:
        """Another gateway goes on with it."""
        return End(RequestState.FAILED, self.cached_tokens, error, taken_over=True)
