"""Attention with Triton kernels, for GPUs: one launch for all decode rows, one for all prefill chunks of a step.

Long contexts are split over programs and joined by a reduction, so that few sequences fill a device. Importing this
module imports triton. Limits: head sizes that are powers of two; the plan's tables are made on the host once per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from function_runtime.engine.attention import kernels
from function_runtime.engine.attention.interface import Rows
from function_runtime.engine.errors import UnusableModel
from function_runtime.engine.kv_cache import KvCache

SPLIT_TOKENS: Final = 512
TILE_TOKENS: Final = 64
_CHUNK_ROWS: Final = 64
"""Query rows (tokens x heads that share a key) of a prefill program."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    count: int
    tables: Tensor
    lengths: Tensor
    splits: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    tables: Tensor
    rows: Tensor
    counts: Tensor
    starts: Tensor
    tile_chunks: Tensor
    tile_firsts: Tensor


@dataclass(frozen=True, slots=True)
class TritonPlan:
    slots: Tensor
    decode: DecodePlan | None
    chunks: ChunkPlan | None


class TritonAttention:
    def __init__(self, cache: KvCache, heads: int) -> None:
        layout = cache.layout
        size = layout.head_dim
        if size < 16 or size & (size - 1):
            raise UnusableModel(f"head size {size} is no power of two from 16 on: the kernels do not compute it")
        self._cache = cache
        self._device = cache.device
        self._block_size = layout.block_size
        self._group = heads // layout.kv_heads
        self._chunk_rows = max(_CHUNK_ROWS, _power_of_two(self._group))
        self._chunk_tokens = self._chunk_rows // self._group

    def plan(self, decodes: Sequence[Rows], chunks: Sequence[Rows]) -> TritonPlan:
        size = self._block_size
        every = (*decodes, *chunks)
        slots = [rows.table[p // size] * size + p % size for rows in every for p in range(rows.start, rows.end)]
        return TritonPlan(
            torch.tensor(slots, dtype=torch.int64, device=self._device),
            self._plan_decodes(decodes) if decodes else None,
            self._plan_chunks(chunks, len(decodes)) if chunks else None,
        )

    def _plan_decodes(self, decodes: Sequence[Rows]) -> DecodePlan:
        splits = -(-max(rows.end for rows in decodes) // SPLIT_TOKENS)
        return DecodePlan(len(decodes), self._tables(decodes), self._ints([rows.end for rows in decodes]), splits)

    def _plan_chunks(self, chunks: Sequence[Rows], first_row: int) -> ChunkPlan:
        rows: list[int] = []
        tile_chunks: list[int] = []
        tile_firsts: list[int] = []
        row = first_row
        for index, chunk in enumerate(chunks):
            rows.append(row)
            count = chunk.end - chunk.start
            row += count
            firsts = range(0, count, self._chunk_tokens)
            tile_chunks += [index] * len(firsts)
            tile_firsts += firsts
        return ChunkPlan(
            self._tables(chunks),
            self._ints(rows),
            self._ints([chunk.end - chunk.start for chunk in chunks]),
            self._ints([chunk.start for chunk in chunks]),
            self._ints(tile_chunks),
            self._ints(tile_firsts),
        )

    def _tables(self, all_rows: Sequence[Rows]) -> Tensor:
        counts = [-(-rows.end // self._block_size) for rows in all_rows]
        width = max(counts)
        flat = [[*rows.table[:n], *([0] * (width - n))] for rows, n in zip(all_rows, counts, strict=True)]
        return torch.tensor(flat, dtype=torch.int32, device=self._device)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, plan: TritonPlan) -> Tensor:
        cache = self._cache
        cache.key_slots[layer].index_copy_(1, plan.slots, keys.transpose(0, 1))
        cache.value_slots[layer].index_copy_(1, plan.slots, values.transpose(0, 1))
        if queries.stride(2) != 1 or queries.stride(1) != queries.shape[2]:
            queries = queries.contiguous()
        mixed = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if plan.decode is not None:
            self._decode(layer, queries, plan.decode, mixed)
        if plan.chunks is not None:
            self._prefill(layer, queries, plan.chunks, mixed)
        return mixed

    def _decode(self, layer: int, queries: Tensor, plan: DecodePlan, mixed: Tensor) -> None:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        _, heads, size = queries.shape
        places = (plan.count, heads, plan.splits)
        partial = torch.empty((*places, size), dtype=torch.float32, device=self._device)
        maxima = torch.empty(places, dtype=torch.float32, device=self._device)
        sums = torch.empty(places, dtype=torch.float32, device=self._device)
        kernels.decode_kernel[(plan.count, heads // self._group, plan.splits)](
            queries, keys, values, plan.tables, plan.lengths, partial, maxima, sums,
            1.0 / math.sqrt(size), queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0),
            values.stride(1), plan.tables.stride(0), plan.splits,
            GROUP=self._group, ROWS=max(16, _power_of_two(self._group)), SIZE=size, BLOCK=self._block_size,
            TILE=TILE_TOKENS, SPLIT=SPLIT_TOKENS,
        )  # fmt: skip
        kernels.reduce_kernel[(plan.count * heads,)](
            partial, maxima, sums, mixed, plan.splits, SIZE=size, SPLITS=_power_of_two(plan.splits)
        )

    def _prefill(self, layer: int, queries: Tensor, plan: ChunkPlan, mixed: Tensor) -> None:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        _, heads, size = queries.shape
        kernels.prefill_kernel[(plan.tile_chunks.shape[0], heads // self._group)](
            queries, keys, values, plan.tables, plan.tile_chunks, plan.tile_firsts, plan.rows, plan.counts,
            plan.starts, mixed,
            1.0 / math.sqrt(size), queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0),
            values.stride(1), plan.tables.stride(0), mixed.stride(0),
            GROUP=self._group, TOKENS=self._chunk_tokens, ROWS=self._chunk_rows, SIZE=size, BLOCK=self._block_size,
            TILE=TILE_TOKENS,
        )  # fmt: skip


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
