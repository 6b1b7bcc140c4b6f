"""What the journal is told and tells: a request as accepted, as it stands, how it ended, and its attempts.

`QUEUED -> RUNNING -> DONE | CANCELLED | FAILED | REFUSED`, back to `QUEUED` when an attempt is lost; a request may also
end while queued. Limits: plain values; who may write what is the journal's business.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from function_runtime.protocol import Begun, DeviceTime, FinishReason


class RequestState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"

    @property
    def ended(self) -> bool:
        return self not in LIVE_STATES


LIVE_STATES: Final = frozenset({RequestState.QUEUED, RequestState.RUNNING})

TRANSITIONS: Final[dict[RequestState, frozenset[RequestState]]] = {
    RequestState.QUEUED: frozenset(RequestState) - {RequestState.QUEUED},
    RequestState.RUNNING: frozenset(RequestState),
    RequestState.DONE: frozenset(),
    RequestState.CANCELLED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.REFUSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class NewRequest:
    id: str
    tenant: str
    key_id: str
    function: str
    revision: int
    endpoint: str
    """chat | completions"""
    model: str
    """As the client named it."""
    params: bytes
    """Sampling and rendering options, opaque to the journal."""
    prompt: bytes
    """`pack_tokens` of the prompt."""
    on_disconnect: str
    """cancel | detach"""
    stream: bool
    durability: str
    """off | process | host"""
    created_us: int
    idempotency_key: str | None = None
    body_hash: bytes | None = None
    """Digest of the body under an idempotency key: the same key with another body is refused."""


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wall microseconds a request spent in each stage, summed over its attempts."""

    queue_us: int = 0
    """Waiting while replicas were ready, but full."""
    cold_start_us: int = 0
    """Waiting for a replica to start."""
    load_kv_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    total_us: int = 0
    """From acceptance to the end."""


class OutcomeError(msgspec.Struct, frozen=True, omit_defaults=True):
    http_status: int
    code: str
    message: str
    retry: bool = False
    param: str | None = None
    """The request's field it is about, where there is one."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ended. `device` is that of the last attempt."""

    state: RequestState
    last_seq: int | None = None
    """The log's length as the author knows it. Given, the end waits for an append that storage refused."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: tuple[FinishReason, ...] = ()
    """One per choice."""
    error: OutcomeError | None = None
    device: DeviceTime = DeviceTime()
    stages: StageTimes = StageTimes()
    kept_s: float | None = None
    """How long the log and the input are kept from now on; None: the service's retention."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as the journal has it: everything a gateway that never saw it needs to carry it on."""

    id: str
    tenant: str
    key_id: str
    function: str
    revision: int
    endpoint: str
    model: str
    durability: str
    on_disconnect: str
    stream: bool
    idempotency_key: str | None
    input_tokens: int
    created_us: int
    state: RequestState
    owner: str
    epoch: int
    last_seq: int
    replica_id: str | None
    slot_id: str | None
    assigned_us: int | None
    first_token_us: int | None
    finished_us: int | None
    cached_tokens: int
    device: DeviceTime
    prefill_ends: tuple[int, ...]
    """Schedule of the attempt that produced the first token; empty while there is none."""
    outcome: Outcome | None
    params: bytes
    """Empty once the retention of the input has passed, or the key it was sealed with is deleted."""
    prompt: bytes
    sealed: int = 0
    """Number of the tenant's key that input and log are sealed with in the database; 0: none."""
    damaged: str = ""
    """Why it cannot be read although it is there; empty: it can. Its input is then empty."""
    begun: Begun = field(default_factory=Begun)
    """What else a resume has to know of that attempt; empty where a release did not say."""


@dataclass(frozen=True, slots=True)
class Accepted:
    record: RequestRecord
    attached: bool
    """The idempotency key was known: `record` is the earlier request."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One replica's turn at a request, for `stoker why`."""

    epoch: int
    replica_id: str
    slot_id: str
    gateway: str
    after_seq: int
    """Tokens there were when it began."""
    assigned_us: int
    ended_us: int | None
    last_seq: int | None
    reason: str | None
    loaded_tokens: int | None
    """Tokens whose KV came from the store; None until the replica said so."""
    recomputed_tokens: int | None
    exact: bool | None
    load_us: int | None
    detail: str | None
    device: DeviceTime


def fresh_record(new: NewRequest, owner: str) -> RequestRecord:
    """What `accept` has just written."""
    return RequestRecord(
        id=new.id,
        tenant=new.tenant,
        key_id=new.key_id,
        function=new.function,
        revision=new.revision,
        endpoint=new.endpoint,
        model=new.model,
        durability=new.durability,
        on_disconnect=new.on_disconnect,
        stream=new.stream,
        idempotency_key=new.idempotency_key,
        input_tokens=len(new.prompt) // 4,
        created_us=new.created_us,
        state=RequestState.QUEUED,
        owner=owner,
        epoch=0,
        last_seq=0,
        replica_id=None,
        slot_id=None,
        assigned_us=None,
        first_token_us=None,
        finished_us=None,
        cached_tokens=0,
        device=DeviceTime(),
        prefill_ends=(),
        outcome=None,
        params=new.params,
        prompt=new.prompt,
    )


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Four bytes a token, little endian."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tuple(tokens)
