"""Control plane <-> agent: JSON over HTTP with a bearer token. What a replica is to be, what became of it, and a slot's
state.

Versions one apart talk: unknown fields are ignored, so that one that must not be is sent only to an agent whose state
says a version that knows it. Limits: values only; a state that the other does not know cannot be said.
"""

from __future__ import annotations

import enum
import hashlib
import hmac

import msgspec

from function_runtime.protocol.request import ReplicaTime, Value


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


class Peer(Value, frozen=True):
    """Another slot's warm pool, as `GET URL/v1/pool/KEY` and, by HTTP ranges, `GET URL/v1/pool/KEY/bytes`."""

    url: str
    token: str
    """Reads the pool, and nothing else of that agent."""


def agent_token(secret: bytes, slot_id: str) -> str:
    """What commands the agent of a slot that was not started here: derived where it is needed, kept nowhere. The agent
    is given only its SHA-256, and that of its `peer_token`."""
    return hmac.new(secret, f"stoker agent:{slot_id}".encode(), hashlib.sha256).hexdigest()


def token_hash(token: str) -> str:
    """All that an agent on another machine is told of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def peer_token(agent_token: str) -> str:
    """What lets another slot read an agent's pool, made from what lets the control plane command it."""
    return hmac.new(agent_token.encode(), b"stoker: read the warm pool", hashlib.sha256).hexdigest()


class ReplicaSpec(Value, frozen=True):
    """What an agent needs to make a replica. `manifest_path` names a manifest that `model_loader` wrote."""

    replica_id: str
    function: str
    revision: int
    tenant: str
    manifest_path: str
    identity: str
    options: EngineOptions
    env: dict[str, str] = msgspec.field(default_factory=dict)
    kv_store: str = ""
    """URI of the object store for durable KV; empty: none."""
    start_timeout_s: float = 600.0
    peers: tuple[Peer, ...] = ()
    """Slots whose pools hold the prepared form already."""
    manifest_sha256: str = ""
    """Of a slot that shares no folder with the control plane: which copy of its own of the checkpoint's manifest it
    goes by; `manifest_path` then only says where the control plane has its own. One checkpoint, one identity, may have
    several: it was imported again in other files, or lies in another store."""
    store_token: str = ""
    """What `kv_store` and the checkpoint's store are used with where they are a control plane's: for this replica's
    tenant and checkpoint at this slot."""
    shares_kv: bool = False
    """Its requests' KV may be that of all tenants whose functions say so."""


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


class StoreTotals(Value, frozen=True):
    """What a replica asked of the object store since its start: requests as a provider bills them, retries included."""

    reads: int = 0
    writes: int = 0
    """And listings, which cost the same."""
    deletes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    retries: int = 0
    failures: int = 0
    breaker_open: bool = False


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
    store: StoreTotals = StoreTotals()
    """By its last report."""
    error: ReplicaError | None = None
    exit: str = ""
    """`exit 0`, `signal 9`, ...; empty while it lives."""
    end_reason: str = ""
    memory_returned: bool | None = None
    """After the end: the process is gone and the slot's own baseline was reached again."""
    kv_bytes: int = 0
    """Memory it has for KV now. 0: none, not ready yet, or an agent that does not tell, and whose replicas keep what
    they were started with."""


class PoolEntry(Value, frozen=True):
    key: str
    identity: str
    state: str
    nbytes: int
    holders: tuple[str, ...] = ()
    last_used_us: int = 0
    error: str = ""
    dtype: str = ""
    reload_s: float = 0.0
    """What its last load took, or would take by a prior."""
    chance: float | None = None
    """Of being wanted within the forecast's horizon; None: no forecast holds."""
    load: str = ""
    """How it came, in words: from where, bytes, speed, chunks verified. Empty: while it comes, and of older agents."""
    load_s: float = 0.0
    """What that took; 0: it was here when the agent began."""


class LoadTotals(Value, frozen=True):
    """Of an agent since its start: how prepared forms came into its pool."""

    by_origin: dict[str, int] = msgspec.field(default_factory=dict)
    """Loads by origin: make | disk | peer | store."""
    read_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    """By tier."""
    seconds: float = 0.0
    chunks: int = 0
    """Verified."""
    bad_chunks: int = 0
    retries: int = 0
    failures: int = 0


class DeviceState(Value, frozen=True):
    kind: str
    """cpu | cuda"""
    index: int
    """As the engine numbers it."""
    total_bytes: int
    free_bytes: int
    """When the slot last looked."""


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
    loads: LoadTotals = msgspec.field(default_factory=LoadTotals)
    devices: tuple[DeviceState, ...] = ()
    """Empty: an agent that does not tell yet."""
    terminating: bool = False
    """The slot is going away: it takes nothing new, what runs finishes or is parked within its grace, then it ends."""
    protocol: int = 1
    """Version of these structures and of the frames that its agent speaks; 1 where it does not say."""
    disk: tuple[str, ...] = ()
    """Checkpoints of which a prepared form lies in its disk tier; what is read is checked then, and not now."""


class SlotEvent(Value, frozen=True):
    """A line of the agent's event stream (NDJSON): the whole state first, then replicas as they change, and an empty
    event at least once a second. While a control plane reads the stream, the agent's lease is held."""

    state: SlotState | None = None
    replica: ReplicaStatus | None = None
    log: str = ""
    times: dict[str, ReplicaTime] = msgspec.field(default_factory=dict)
    """Of replicas, by id, for which only time has passed since they were told of. Who does not know this field hears
    how long such a replica was held when it works again, or ends."""


class AgentInfo(Value, frozen=True):
    """How to reach an agent; on one machine the file `agent.json` (mode 0600) of the slot's directory."""

    slot_id: str
    pid: int
    host: str
    port: int
    token: str
    incarnation: str
