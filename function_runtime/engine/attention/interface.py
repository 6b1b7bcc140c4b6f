"""What a model asks of attention, and how a step's rows lie.

Rows of a step: first one row per decoding choice, longest context first, then the rows of each prefill chunk. `plan` is
made once per step and used by every layer; `attend` stores the rows' keys and values in their slots and gives the mixed
values. Limits: causal attention, one scale (1/sqrt(head_dim)), grouped heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one choice: positions `[start, end)` of its sequence, in the blocks of `table`."""

    start: int
    end: int
    table: Sequence[int]


Plan: TypeAlias = Any
"""An implementation's own preparation of a step."""


class Attention(Protocol):
    def plan(self, decodes: Sequence[Rows], chunks: Sequence[Rows]) -> Plan: ...

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Tensor:
        """`[rows, heads, head_dim]` from queries of that shape and keys and values `[rows, kv_heads, head_dim]`."""
        ...
