"""Triton kernels for attention over paged KV: decode rows (split over the context), their reduction, prefill chunks.

All heads that share a key head are rows of one tile, so that keys and values are read once. Softmax is computed online
in float32. Limits: head sizes that are powers of two from 16 on; memory layout `[kv_heads, blocks, block_size,
head_dim]` with the last two axes dense.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    queries, keys, values, tables, lengths, partial, maxima, sums,
    scale, query_stride, key_head_stride, key_block_stride, value_head_stride, value_block_stride, table_stride, splits,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and key head: `SPLIT` positions, `GROUP` query rows."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lengths + sequence)
    begin = split * SPLIT
    end = tl.minimum(length, begin + SPLIT)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, SIZE)
    query_head = head * GROUP + row
    query_at = sequence * query_stride + query_head * SIZE
    q = tl.load(queries + query_at[:, None] + dim[None, :], mask=(row < GROUP)[:, None], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for first in range(begin, end, TILE):
        position = first + tl.arange(0, TILE)
        seen = position < end
        block = tl.load(tables + sequence * table_stride + position // BLOCK, mask=seen, other=0).to(tl.int64)
        inner = (position % BLOCK) * SIZE
        key_at = head * key_head_stride + block * key_block_stride + inner
        k = tl.load(keys + key_at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        value_at = head * value_head_stride + block * value_block_stride + inner
        v = tl.load(values + value_at[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = higher
    place = (sequence * heads + query_head) * splits + split
    mask = row < GROUP
    tl.store(maxima + place, top, mask=mask)
    tl.store(sums + place, total, mask=mask)
    tl.store(partial + place[:, None] * SIZE + dim[None, :], mixed, mask=mask[:, None])


@triton.jit
def reduce_kernel(
    partial, maxima, sums, mixed, splits, SIZE: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Joins the splits of one sequence and query head."""
    place = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, SIZE)
    mask = split < splits
    top = tl.load(maxima + place * splits + split, mask=mask, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + place * splits + split, mask=mask, other=0.0) * weight, 0)
    parts = tl.load(partial + (place * splits + split)[:, None] * SIZE + dim[None, :], mask=mask[:, None], other=0.0)
    joined = tl.sum(parts * weight[:, None], 0) / total
    tl.store(mixed + place * SIZE + dim, joined.to(mixed.dtype.element_ty))


@triton.jit
def prefill_kernel(
    queries, keys, values, tables, tile_chunks, tile_firsts, chunk_rows, chunk_counts, chunk_starts, mixed,
    scale, query_stride, key_head_stride, key_block_stride, value_head_stride, value_block_stride, table_stride,
    mixed_stride,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """`TOKENS` consecutive tokens of one chunk, all heads of one key head, over everything up to the last of them."""
    tile, head = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(tile_chunks + tile)
    first = tl.load(tile_firsts + tile)
    count = tl.load(chunk_counts + chunk)
    start = tl.load(chunk_starts + chunk)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, SIZE)
    token = first + row // GROUP
    mask = (row < TOKENS * GROUP) & (token < count)
    query_row = (tl.load(chunk_rows + chunk) + token).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    query_at = query_row * query_stride + query_head * SIZE
    q = tl.load(queries + query_at[:, None] + dim[None, :], mask=mask[:, None], other=0.0)
    limit = start + token
    end = start + tl.minimum(first + TOKENS, count)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, SIZE), tl.float32)
    for begin in range(0, end, TILE):
        position = begin + tl.arange(0, TILE)
        there = position < end
        block = tl.load(tables + chunk * table_stride + position // BLOCK, mask=there, other=0).to(tl.int64)
        inner = (position % BLOCK) * SIZE
        key_at = head * key_head_stride + block * key_block_stride + inner
        k = tl.load(keys + key_at[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # NOTE: position 0 is seen by every row, and tiles begin with it, so that no row's maximum stays at -inf.
        scores = tl.where(position[None, :] <= limit[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        value_at = head * value_head_stride + block * value_block_stride + inner
        v = tl.load(values + value_at[:, None] + dim[None, :], mask=there[:, None], other=0.0)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = higher
    out = out / total[:, None]
    mixed_at = query_row * mixed_stride + query_head * SIZE
    tl.store(mixed + mixed_at[:, None] + dim[None, :], out.to(mixed.dtype.element_ty), mask=mask[:, None])
