"""What a request is made of: how tokens are chosen, what came out, where its KV lies, and the record it resumes from.

Values only; frames (`protocol.frames`) carry them and the journal keeps them, so unknown fields are ignored and new
ones have defaults. Limits: no behaviour here.
"""

from __future__ import annotations

import enum

import msgspec


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what messages are made of."""


class GrammarKind(enum.StrEnum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(Value, frozen=True):
    """What every answer has to match; its state is rebuilt from the tokens, so nothing of it is stored."""

    kind: GrammarKind
    text: str = ""
    """The schema as JSON, the expression, or the grammar; empty for `json_object`."""
    field: str = ""
    """The request's field it came from, so that a refusal can name it."""


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
    grammar: Grammar | None = None


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
    parent: str = ""
    """Chain hash (hex) at `start`; empty in records older than format 2."""
    form: str = "raw"
    """raw, or a lossy form (fp8, int4) that serves shared prefixes only."""
    lineage: str = ""
    """Digest (hex) of the passes that computed everything before `end`; empty where that is not known."""


class Begun(Value, frozen=True):
    """What an exact resume has to know of the first attempt beside the ends of its prefill chunks."""

    passes: tuple[int, ...] = ()
    """How what is before `prefill_ends[0]` was computed, should it have to be computed again: two numbers for each pass
    (`function_runtime/passes.py`); empty if unknown."""
    computed_by: str = ""
    """The engine and the kind of device: another kind gives other bits. Empty if unknown."""


class Reuse(Value, frozen=True):
    """What the gateway knows about the worth of keeping this request's KV when it is over."""

    probability: float = 0.0
    """That somebody asks for a continuation of its tokens again; 0: nothing is kept."""
    device_microusd_per_hour: int = 0
    """What the device time costs that a reuse saves."""


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
    The first element is the start (number of positions whose KV others had computed)."""
    begun: Begun = Begun()
    kv: tuple[KvChunk, ...] = ()
    write_kv: bool = True
    """Write this request's KV behind to the object store."""
    fast: bool = False
    """A resume may recompute in whatever schedule is quickest; otherwise in the original one (exact)."""
    share_prefix: bool = True
    """Stored prefixes of the same scope may be used, and this request's prompt may become one."""
    prefix_form: str = "raw"
    """The form of stored prefixes that this request may use, and in which its own are kept (raw, fp8, int4)."""
    reuse: Reuse = Reuse()
    kv_key: bytes = b""
    """Key (AES-256) the request's KV is sealed with at rest; empty: not sealed. Held in memory only."""
    kv_place: str = ""
    """Folder of its owner's packs in the object store; empty: as releases had it that had none."""


class DeviceTime(Value, frozen=True):
    """Cumulative device time of one request under one epoch on one replica, microseconds."""

    prefill_us: int = 0
    decode_us: int = 0


class ReplicaTime(Value, frozen=True):
    """A replica's life so far on the node's monotonic clock, microseconds. The parts sum to `held_us` exactly:
    cold + attributed + idle + overhead = held. Attributed time is the sum over all its requests' `DeviceTime`."""

    held_us: int = 0
    cold_us: int = 0
    attributed_us: int = 0
    idle_us: int = 0
    overhead_us: int = 0
