"""What the engine says to the worker that drives it: admissions and the output of a step.

Plain frozen values; nothing here refers to the engine's own state. Limits: tensors appear in `Restored` only, and are
the caller's until the request is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from function_runtime.engine.errors import EngineError
from function_runtime.passes import NONE, Passes
from function_runtime.protocol import Begun, TokenEvent

if TYPE_CHECKING:
    from torch import Tensor

    from function_runtime.engine.shadow import Doubt


@dataclass(frozen=True, slots=True)
class Restored:
    """KV read back for a request: per choice, tensors `[layers, 2, tokens, kv_heads, head_dim]` that follow one another
    and end at `lengths[choice]`. Choice 0 begins at position 0. Another choice may begin anywhere up to the end of the
    prompt (the part before is choice 0's) or be empty.
    """

    lengths: tuple[int, ...]
    tensors: tuple[tuple[Tensor, ...], ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """How a request will be carried on: positions taken from stored KV, positions to be computed again, and whether
    the arithmetic follows the first attempt's schedule."""

    request_id: str
    epoch: int
    loaded_tokens: int
    recomputed_tokens: int
    exact: bool
    detail: str
    pending: bool = False
    """Stored KV is still on its way: what came of it is in a later step's output."""
    load_us: int = 0
    load_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """New tokens of one request in one step; `first_seq` is the place of the first in the request's log."""

    request_id: str
    epoch: int
    first_seq: int
    events: tuple[TokenEvent, ...]
    cached_tokens: int
    prefill_ends: tuple[int, ...]
    """Given with the first tokens of an attempt, empty after."""
    begun: Begun = field(default_factory=Begun)
    """Likewise."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    request_id: str
    epoch: int
    last_seq: int
    cancelled: bool
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SealedRange:
    """Positions `[start, end)` of a choice whose KV is complete. `partial`: shorter than a chunk; a longer range from
    the same start follows if the choice goes on."""

    request_id: str
    epoch: int
    choice: int
    start: int
    end: int
    partial: bool
    passes: Passes = NONE
    """How all positions before `end` were computed."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    tokens: tuple[RequestTokens, ...] = ()
    finished: tuple[RequestEnd, ...] = ()
    failed: tuple[tuple[str, int, EngineError], ...] = ()
    sealed: tuple[SealedRange, ...] = ()
    """To be exported before the next step."""
    device_us: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Request id -> (prefill, decode) share of `busy_us`; the shares sum to it exactly."""
    busy_us: int = 0
    doubts: tuple[Doubt, ...] = ()
    """Stored KV that was used and is not what computing it again gives."""
    admitted: tuple[Admitted, ...] = ()
    """What became of requests whose stored KV was on its way when they came."""
