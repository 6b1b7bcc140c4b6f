"""What the control plane, an agent and a replica say to each other. Torch-free; the runtime's only public face.

Two channels. *Control plane <-> agent*: JSON over HTTP with a bearer token (`ReplicaSpec`, `SlotState`, `SlotEvent`).
*Gateway <-> replica*: one TCP connection with length-prefixed msgpack frames, `Hello` first; every message about a
request names the request and its epoch, and either side drops what carries an older epoch than the one it knows.
Limits: a frame holds at most `MAX_FRAME_BYTES`; unknown message tags are errors, unknown fields are ignored, so that
versions one apart can talk.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, TypeAlias

import msgspec

PROTOCOL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
HEARTBEAT_S: Final = 0.25
"""A replica sends `Progress` at least this often while it has work, and once a second while idle."""
STALLED_AFTER_S: Final = 20.0
"""No `Progress` for this long while work is in flight: the replica counts as lost (its process is then killed)."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, array_like=False):
    """Base of every frame; the class name is the tag."""


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what messages are made of."""


# --- what is asked for ------------------------------------------------------------------------------------------


class Sampling(Value, frozen=True):
    """How tokens are chosen. Sampling is a pure function of (seed, position, choice)."""

    seed: int
    """0 <= seed < 2**63; drawn by the gateway where the client gave none."""
    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k: the chosen token's and those of the k best."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenLogprob(Value, frozen=True):
    token_id: int
    text: str
    logprob: float


class TokenEvent(Value, frozen=True):
    """One generated token: one place in the request's log. The log's place (`seq`, from 1) is implied by order.

    `text` is what may be shown once this token is known. It may be empty (incomplete UTF-8, a possible beginning of a
    stop string) and it holds everything still held back when `finish` is set. Concatenated over a choice it is the
    choice's whole text, cut before a stop string.
    """

    choice: int
    token_id: int
    text: str = ""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the choice."""
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    token_text: str | None = None
    """The token's own text, given with log-probabilities only."""


class KvChunk(Value, frozen=True):
    """A run of tokens of one choice whose KV is in the object store (docs/kv-format.md)."""

    choice: int
    start: int
    """Position of the first token in prompt + generated tokens of the choice."""
    end: int
    pack: str
    """Key of the pack object."""
    offset: int
    nbytes: int
    digest: str
    """SHA-256 (hex) of the chunk's bytes."""
    chain: str
    """Chain hash (hex) over all tokens up to `end`."""


class Work(Value, frozen=True):
    """Everything a replica needs to carry a request on from any point: the resume record."""

    request_id: str
    epoch: int
    tenant: str
    kv_scope: str
    """Tenant scope of the request's KV: an HMAC, opaque to the slot."""
    prompt: tuple[int, ...]
    sampling: Sampling
    produced: tuple[TokenEvent, ...] = ()
    """The log so far, in order; the replica continues at seq len(produced) + 1."""
    prefill_ends: tuple[int, ...] = ()
    """Positions at which the first attempt's prefill chunks ended; empty on a first attempt or if unknown.
    The first element is the start (number of positions taken from the prefix cache)."""
    kv: tuple[KvChunk, ...] = ()
    write_kv: bool = True
    """Write this request's KV behind to the object store."""


# --- gateway -> replica ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    token: str
    gateway: str
    version: int = PROTOCOL_VERSION


class Submit(Message, frozen=True):
    work: Work


class Attach(Message, frozen=True):
    """Take over a request that another gateway (or an earlier life of this one) submitted: the replica answers
    `Attached`, sends every token after `after_seq` again and from now on reports to this connection;
    or it answers `Unknown`."""

    request_id: str
    epoch: int
    after_seq: int


class Cancel(Message, frozen=True):
    """Blocks are free within one step; the replica answers `Finished` with reason cancelled."""

    request_id: str
    epoch: int


class Settled(Message, frozen=True):
    """The outcome is committed: the replica may forget the request."""

    request_id: str
    epoch: int


GatewayMessage: TypeAlias = Hello | Submit | Attach | Cancel | Settled


# --- replica -> gateway ------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    replica_id: str
    function: str
    revision: int
    identity: str
    """Checkpoint identity."""
    max_requests: int
    max_context_tokens: int
    running: tuple[tuple[str, int], ...] = ()
    """(request_id, epoch) of the requests this replica holds."""
    version: int = PROTOCOL_VERSION


class Accepted(Message, frozen=True):
    """The request is in the engine. How much of it was resumed from stored KV, and whether the arithmetic follows the
    first attempt's schedule (`exact`)."""

    request_id: str
    epoch: int
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    exact: bool = True
    load_us: int = 0
    detail: str = ""


class Attached(Message, frozen=True):
    request_id: str
    epoch: int


class DeviceTime(Value, frozen=True):
    """Cumulative device time of one request under one epoch on one replica, microseconds."""

    prefill_us: int = 0
    decode_us: int = 0


class Tokens(Message, frozen=True):
    """Tokens of one engine step, all choices of one request; `first_seq` is the place of the first of them."""

    request_id: str
    epoch: int
    first_seq: int
    events: tuple[TokenEvent, ...]
    device: DeviceTime
    cached_tokens: int = 0
    """Prompt tokens whose KV was not computed by this attempt (prefix cache or stored KV)."""
    prefill_ends: tuple[int, ...] = ()
    """Sent with the first tokens of an attempt only: see `Work.prefill_ends`."""


class KvSealed(Message, frozen=True):
    """Chunks that are durable in the object store now. Empty `chunks` with `dropped` says that writing gave up."""

    request_id: str
    epoch: int
    chunks: tuple[KvChunk, ...] = ()
    dropped: str = ""


class Finished(Message, frozen=True):
    """No more tokens will come under this epoch. The last `Tokens` precede it."""

    request_id: str
    epoch: int
    last_seq: int
    cancelled: bool
    device: DeviceTime
    cached_tokens: int = 0


class Failed(Message, frozen=True):
    """The attempt failed. `retry` says whether another replica may do better; `code` is the OpenAI error code."""

    request_id: str
    epoch: int
    code: str
    message: str
    retry: bool
    device: DeviceTime


class Unknown(Message, frozen=True):
    request_id: str
    epoch: int


class ReplicaTime(Value, frozen=True):
    """A replica's life so far on the node's monotonic clock, microseconds. The parts sum to `held_us` exactly:
    cold + attributed + idle + overhead = held. Attributed time is the sum over all its requests' `DeviceTime`."""

    held_us: int = 0
    cold_us: int = 0
    attributed_us: int = 0
    idle_us: int = 0
    overhead_us: int = 0


class Progress(Message, frozen=True):
    """Heartbeat of the engine loop itself."""

    steps: int
    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    time: ReplicaTime


ReplicaMessage: TypeAlias = Welcome | Accepted | Attached | Tokens | KvSealed | Finished | Failed | Unknown | Progress


# --- framing -----------------------------------------------------------------------------------------------------

_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage)
_replica_decoder = msgspec.msgpack.Decoder(ReplicaMessage)


class ProtocolError(Exception):
    """A peer sent what is not a frame of this protocol; the connection is of no further use."""


def encode(message: Message) -> bytes:
    """A frame: length (4 bytes, big endian) and msgpack body."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_gateway(body: bytes | memoryview) -> GatewayMessage:
    try:
        return _gateway_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a gateway message: {error}") from error


def decode_replica(body: bytes | memoryview) -> ReplicaMessage:
    try:
        return _replica_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a replica message: {error}") from error


class FrameBuffer:
    """Cuts a byte stream into frame bodies. Feed it what arrived; it yields every complete body."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return bodies


# --- control plane <-> agent (JSON) -------------------------------------------------------------------------------


class ReplicaState(enum.StrEnum):
    """`STARTING -> LOADING -> READY -> DRAINING -> ENDED`; any of the first four may go to `FAILED` or `ENDED`."""

    STARTING = "starting"
    """Waiting for a worker."""
    LOADING = "loading"
    """A worker has it: checkpoint prepared or mapped, engine built."""
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"
    """The process is gone and has been reaped."""
    FAILED = "failed"
    """It never became ready, or died; `error` says why. The process is gone."""


class EngineOptions(Value, frozen=True):
    engine: str = "native"
    device: str = "cpu"
    """cpu | cuda | cuda:N"""
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16; auto is float32 on CPUs and the checkpoint's own on GPUs."""
    max_requests: int = 32
    max_context_tokens: int = 0
    """0: the checkpoint's own limit."""
    kv_bytes: int = 0
    """Memory for KV blocks; 0: chosen from max_requests and free memory."""
    step_tokens: int = 512
    """Token budget of one engine step (chunked prefill)."""
    threads: int = 0
    """0: all cores."""
    prefix_cache: bool = True
    kv_chunk_tokens: int = 32
    """Tokens of a durable KV chunk; a multiple of the block size (16)."""


class ReplicaSpec(Value, frozen=True):
    """What an agent needs to make a replica. `manifest_path` names a manifest that `model_loader` wrote."""

    replica_id: str
    function: str
    revision: int
    tenant: str
    manifest_path: str
    identity: str
    options: EngineOptions
    env: dict[str, str] = {}
    kv_store: str = ""
    """URI of the object store for durable KV; empty: none."""
    start_timeout_s: float = 600.0


class Stage(Value, frozen=True):
    """One stage of a start or an end. Times are wall-clock microseconds for people; durations come from one
    monotonic clock."""

    name: str
    """start: worker | prepare | map | build | listen; end: drain | flush | exit | memory"""
    start_us: int
    duration_us: int
    nbytes: int = 0
    tier: str = ""
    """Where the bytes came from: pool | disk | peer | store | none"""
    detail: str = ""


class ReplicaError(Value, frozen=True):
    code: str
    message: str
    retry: bool
    """False: the same spec would fail again (bad checkpoint); do not start another."""


class ReplicaMemory(Value, frozen=True):
    """Bytes, from /proc/PID/smaps_rollup: resident, proportional, and shared file pages (the pool's)."""

    rss_bytes: int = 0
    pss_bytes: int = 0
    shared_bytes: int = 0


class ReplicaStatus(Value, frozen=True):
    replica_id: str
    function: str
    revision: int
    state: ReplicaState
    spec: ReplicaSpec
    pid: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    """What `Hello` must carry."""
    warm_worker: bool = False
    """A forked worker was waiting when the replica was asked for."""
    created_us: int = 0
    ready_us: int = 0
    ended_us: int = 0
    stages: tuple[Stage, ...] = ()
    time: ReplicaTime = ReplicaTime()
    """The last report of the replica; after its end `held_us` is the agent's own measurement."""
    memory: ReplicaMemory = ReplicaMemory()
    error: ReplicaError | None = None
    exit: str = ""
    """`exit 0`, `signal 9`, ...; empty while it lives."""
    end_reason: str = ""
    memory_returned: bool | None = None
    """After the end: the process is gone and the slot's own baseline was reached again."""


class PoolEntry(Value, frozen=True):
    key: str
    identity: str
    state: str
    nbytes: int
    holders: tuple[str, ...] = ()
    last_used_us: int = 0
    error: str = ""


class SlotState(Value, frozen=True):
    slot_id: str
    agent_pid: int
    incarnation: str
    """Changes with every start of an agent."""
    template_ready: bool
    warm_workers: int
    warm_target: int
    pool_budget_bytes: int
    pool_used_bytes: int
    pool: tuple[PoolEntry, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    memory_baseline_bytes: int = 0
    memory_used_bytes: int = 0
    template_import_us: int = 0


class SlotEvent(Value, frozen=True):
    """A line of the agent's event stream (NDJSON): the whole state first, then replicas as they change, and an empty
    event at least once a second. While a control plane reads the stream, the agent's lease is held."""

    state: SlotState | None = None
    replica: ReplicaStatus | None = None
    log: str = ""


class AgentInfo(Value, frozen=True):
    """How to reach an agent; on one machine the file `agent.json` (mode 0600) of the slot's directory."""

    slot_id: str
    pid: int
    host: str
    port: int
    token: str
    incarnation: str
