"""Attention with torch's own operations, for CPUs: one call for all decode rows of similar length, one per chunk.

The heads that share a key are the rows of one small product, so that keys are read once. Sequences whose blocks are
neighbours are views; others are gathered block by block. Limits: decode rows are padded to the longest of their group,
so groups are cut where padding would cost more than a call; what comes out depends on lengths, not on where blocks lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from function_runtime.engine.attention.interface import Rows
from function_runtime.engine.kv_cache import KvCache

_PLAIN_FROM: Final = 4
"""Sequences in a group from which two plain products and a softmax are faster than the fused call, which is made for
many queries of one sequence and here gets a few of each (32 sequences of 150 positions: 720 us against 1,030)."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    first: int
    last: int
    width: int
    """Positions looked at, padding included."""
    blocks: Tensor | None
    """Rows of the cache seen as `[kv_heads * blocks, block]`, all sequences of one head after the other: whole rows
    are gathered at twice the speed of slices. None: one sequence whose blocks are neighbours, from slot `base` on."""
    base: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPart:
    first: int
    last: int
    slots: Tensor | None
    """Slots of all positions up to the chunk's end; None where the chunk is the whole context."""
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    slots: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkPart, ...]


class TorchAttention:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._block_size = cache.layout.block_size

    def plan(self, decodes: Sequence[Rows], chunks: Sequence[Rows]) -> TorchPlan:
        size = self._block_size
        slots = [rows.table[rows.start // size] * size + rows.start % size for rows in decodes]
        parts: list[ChunkPart] = []
        row = len(decodes)
        for chunk in chunks:
            own = _slots(chunk.table, chunk.start, chunk.end, size)
            slots += own
            count = chunk.end - chunk.start
            if chunk.start == 0:
                parts.append(ChunkPart(row, row + count, None, None))
            else:
                context = torch.tensor(_slots(chunk.table, 0, chunk.start, size) + own)
                mask = torch.ones(count, chunk.end, dtype=torch.bool).tril(chunk.start)
                parts.append(ChunkPart(row, row + count, context, mask))
            row += count
        return TorchPlan(torch.tensor(slots), tuple(self._group(decodes)), tuple(parts))

    def _group(self, decodes: Sequence[Rows]) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        first = 0
        while first < len(decodes):
            longest = decodes[first].end
            last = first + 1
            while last < len(decodes) and decodes[last].end * 5 // 4 + 64 >= longest:
                last += 1
            groups.append(self._decode_group(decodes, first, last))
            first = last
        return groups

    def _decode_group(self, decodes: Sequence[Rows], first: int, last: int) -> DecodeGroup:
        size = self._block_size
        lengths = [rows.end for rows in decodes[first:last]]
        if len(lengths) == 1:
            table = decodes[first].table
            count = -(-lengths[0] // size)
            if table[count - 1] - table[0] == count - 1 and _neighbours(table, count):
                return DecodeGroup(first, last, lengths[0], None, table[0] * size, None)
        width = -(-max(lengths) // size)
        heads = torch.arange(self._cache.layout.kv_heads).unsqueeze(1) * self._cache.blocks
        if len(lengths) == 1:
            # As wide as the view would be: where blocks lie must not change what comes out.
            rows_of = (heads + torch.tensor(decodes[first].table[:width])).flatten()
            return DecodeGroup(first, last, lengths[0], rows_of, 0, None)
        blocks: list[int] = []
        for rows in decodes[first:last]:
            table = rows.table[:width]
            blocks += table
            blocks += [table[0]] * (width - len(table))
        limits = torch.tensor(lengths).unsqueeze(1)
        visible = torch.arange(width * size).unsqueeze(0) < limits
        mask = torch.zeros(visible.shape, dtype=self._cache.dtype).masked_fill_(~visible, -torch.inf)
        rows_of = (heads + torch.tensor(blocks)).flatten()
        return DecodeGroup(first, last, width * size, rows_of, 0, mask.view(1, len(lengths), 1, -1))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, plan: TorchPlan) -> Tensor:
        cache = self._cache
        key_slots, value_slots = cache.key_slots[layer], cache.value_slots[layer]
        key_slots.index_copy_(1, plan.slots, keys.transpose(0, 1))
        value_slots.index_copy_(1, plan.slots, values.transpose(0, 1))
        rows, heads, head_dim = queries.shape
        kv_heads = keys.shape[1]
        grouped = queries.view(rows, kv_heads, heads // kv_heads, head_dim)
        mixed: list[Tensor] = []
        for group in plan.groups:
            count = group.last - group.first
            if group.blocks is None:
                k = key_slots[:, group.base : group.base + group.width].unsqueeze(1)
                v = value_slots[:, group.base : group.base + group.width].unsqueeze(1)
            else:
                k = self._gather(cache.keys[layer], group.blocks, count)[:, :, : group.width]
                v = self._gather(cache.values[layer], group.blocks, count)[:, :, : group.width]
            q = grouped[group.first : group.last].transpose(0, 1)
            if count < _PLAIN_FROM or group.mask is None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            else:
                scores = torch.matmul(q * head_dim**-0.5, k.transpose(-1, -2)).add_(group.mask)
                out = torch.matmul(scores.softmax(-1), v)
            mixed.append(out.transpose(0, 1).reshape(count, heads, head_dim))
        for part in plan.chunks:
            q = grouped[part.first : part.last].permute(1, 2, 0, 3)
            if part.slots is None:
                k = keys[part.first : part.last].transpose(0, 1)
                v = values[part.first : part.last].transpose(0, 1)
            else:
                k = key_slots.index_select(1, part.slots)
                v = value_slots.index_select(1, part.slots)
            k = k.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
            v = v.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=part.mask, is_causal=part.mask is None)
            mixed.append(out.permute(2, 0, 1, 3).reshape(part.last - part.first, heads, head_dim))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _gather(self, memory: Tensor, rows: Tensor, count: int) -> Tensor:
        """`[kv_heads, count, positions, head_dim]` of `count` sequences of equally many blocks."""
        kv_heads, blocks, size, head_dim = memory.shape
        return memory.view(kv_heads * blocks, size * head_dim).index_select(0, rows).view(kv_heads, count, -1, head_dim)


def _neighbours(table: Sequence[int], count: int) -> bool:
    return all(table[i] + 1 == table[i + 1] for i in range(count - 1))


def _slots(table: Sequence[int], start: int, end: int, size: int) -> list[int]:
    slots: list[int] = []
    for index in range(start // size, -(-end // size)):
        base = table[index] * size
        slots.extend(range(base + max(0, start - index * size), base + min(size, end - index * size)))
    return slots
