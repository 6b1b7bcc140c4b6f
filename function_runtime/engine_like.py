"""What the worker's loop asks of an engine; torch-free, so that the loop runs the same over the real one and a stub.

One thread owns the engine: between two `step` calls it may `submit`, `cancel` and `export_kv`. What a step produced is
given as plain records (the real engine's have the same fields). Limits: KV travels as contiguous host buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from function_runtime.passes import NONE, Passes
from function_runtime.protocol import Begun, KvChunk, TokenEvent, Work

if TYPE_CHECKING:
    from function_runtime.kv.arrival import Arrival  # with numpy, which a worker that has no KV does without


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV of a run of tokens is [layers, 2, tokens, kv_heads, head_dim] of `dtype`, contiguous."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int

    @property
    def row_nbytes(self) -> int:
        """One token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim * {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def nbytes_per_token(self) -> int:
        return self.num_layers * 2 * self.row_nbytes


@dataclass(frozen=True, slots=True)
class KvRun:
    """KV of `tokens` tokens of one choice, beginning where the run before it ends."""

    tokens: int
    data: memoryview | bytearray | bytes


@dataclass(frozen=True, slots=True)
class RestoredKv:
    """Per choice verified runs without a gap between them, and where they end. Choice 0 begins at position 0, another
    choice anywhere in the prompt (the part before is choice 0's), or it has no runs and length 0."""

    choices: tuple[tuple[KvRun, ...], ...]
    lengths: tuple[int, ...]


class Admission(Protocol):
    @property
    def loaded_tokens(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def detail(self) -> str: ...
    @property
    def pending(self) -> bool:
        """Its stored KV is on its way: what came of it is in a later step's `admitted`."""
        ...


class LateAdmission(Admission, Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def load_us(self) -> int: ...
    @property
    def load_bytes(self) -> int: ...


class RequestTokensLike(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def first_seq(self) -> int: ...
    @property
    def events(self) -> tuple[TokenEvent, ...]: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prefill_ends(self) -> tuple[int, ...]: ...
    @property
    def begun(self) -> Begun: ...


class RequestEndLike(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def cancelled(self) -> bool: ...


class FaultLike(Protocol):
    """Why a request failed: `SlotError` and the engine's own errors are of this shape."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def retry(self) -> bool: ...


class SealedRangeLike(Protocol):
    """Positions [start, end) of a choice whose KV is complete and may be exported until the next step."""

    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def partial(self) -> bool: ...
    @property
    def passes(self) -> Passes:
        """How all positions before `end` were computed."""
        ...


class DoubtLike(Protocol):
    """A stored chunk that was used and is not what computing it again gives."""

    @property
    def request_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def chunk(self) -> KvChunk: ...
    @property
    def reason(self) -> str: ...


class StepLike(Protocol):
    @property
    def tokens(self) -> Sequence[RequestTokensLike]: ...
    @property
    def finished(self) -> Sequence[RequestEndLike]: ...
    @property
    def failed(self) -> Sequence[tuple[str, int, FaultLike]]: ...
    @property
    def sealed(self) -> Sequence[SealedRangeLike]: ...
    @property
    def admitted(self) -> Sequence[LateAdmission]: ...
    @property
    def doubts(self) -> Sequence[DoubtLike]: ...
    @property
    def device_us(self) -> Mapping[str, tuple[int, int]]:
        """Per request (prefill_us, decode_us) of this step; the sum is the step's busy time."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    preemptions: int = 0


def kv_bytes_of(layout: KvLayout | None, stats: EngineStats) -> int:
    """Memory for KV, in use or not."""
    return stats.kv_total_blocks * layout.block_size * layout.nbytes_per_token if layout is not None else 0


class EngineLike(Protocol):
    @property
    def has_work(self) -> bool: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def kv_layout(self) -> KvLayout | None:
        """None: this engine's KV cannot be stored."""
        ...

    @property
    def stats(self) -> EngineStats: ...
    def submit(self, work: Work, restored: RestoredKv | Arrival | None) -> Admission:
        """Raises `EngineFault` for a request it cannot carry."""
        ...

    def cached_prefix(self, work: Work) -> int:
        """How many tokens of its prompt are here already (prefix cache)."""
        ...

    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> StepLike: ...
    def resize_kv(self, kv_bytes: int) -> int:
        """About so much memory for KV from the next step on, no less than what runs needs; what there is then. 0: this
        engine's cannot be changed. Nothing may be exported between this and the next step."""
        ...

    def export_kv(self, request_id: str, choice: int, start: int, end: int) -> memoryview:
        """A copy, contiguous, in the layout's order."""
        ...

    def while_waiting(self, call: Callable[[], None]) -> None:
        """From now on a step calls this now and then: between layers, and while it waits for weights or stored KV that
        are still on their way."""
        ...

    def kv_tail(self, request_id: str) -> Sequence[SealedRangeLike]:
        """Per choice that still runs: complete KV beyond the last sealed range."""
        ...


# --- plain records of these shapes, for engines that have none of their own --------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    exact: bool = True
    detail: str = ""
    pending: bool = False


@dataclass(frozen=True, slots=True)
class RequestTokens:
    request_id: str
    epoch: int
    first_seq: int
    events: tuple[TokenEvent, ...]
    cached_tokens: int = 0
    prefill_ends: tuple[int, ...] = ()
    begun: Begun = field(default_factory=Begun)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    request_id: str
    epoch: int
    last_seq: int
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class SealedRange:
    request_id: str
    epoch: int
    choice: int
    start: int
    end: int
    partial: bool = False
    passes: Passes = NONE


@dataclass(frozen=True, slots=True)
class Step:
    tokens: tuple[RequestTokens, ...] = ()
    finished: tuple[RequestEnd, ...] = ()
    failed: tuple[tuple[str, int, FaultLike], ...] = ()
    sealed: tuple[SealedRange, ...] = ()
    device_us: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    admitted: tuple[LateAdmission, ...] = ()
    doubts: tuple[DoubtLike, ...] = ()
