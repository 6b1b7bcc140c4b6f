"""The kernels give what torch attention gives, under Triton's interpreter: groups, sizes, block edges, contexts."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read by triton when the kernels are defined

from function_runtime.engine.attention.interface import Rows
from function_runtime.engine.attention.torch_attention import TorchAttention
from function_runtime.engine.attention.triton_attention import TritonAttention
from function_runtime.engine.kv_cache import BLOCK_SIZE, KvCache
from function_runtime.engine_like import KvLayout

GROUPS = (1, 3, 4, 8)
SIZES = (64, 128)

Spans = Sequence[tuple[int, int]]
"""(start, end) of the rows of each sequence; its context is everything up to the end."""

SHORT: dict[str, tuple[Spans, Spans]] = {
    "one-token": ([(0, 1)], []),
    "block-edges": ([(16, 17), (15, 16), (14, 15)], []),
    "ragged-decode": ([(130, 131), (63, 64), (31, 32), (4, 5)], []),
    "whole-prompt": ([], [(0, 37)]),
    "chunk-across-blocks": ([], [(15, 34), (16, 32)]),
    "mixed": ([(70, 71), (9, 10)], [(0, 5), (33, 50)]),
}
LONG: dict[str, tuple[Spans, Spans]] = {
    "long-decode": ([(4095, 4096), (511, 512), (512, 513), (0, 1)], []),
    "long-chunk": ([], [(4080, 4096)]),
}


def compare(group: int, size: int, decodes: Spans, chunks: Spans, kv_heads: int = 2) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(group * 1000 + size)
    spans = [*decodes, *chunks]
    needed = [-(-end // BLOCK_SIZE) for _, end in spans]
    layout = KvLayout(1, kv_heads, size, "float32", BLOCK_SIZE)
    caches = [KvCache(layout, sum(needed) + 3, torch.float32, torch.device("cpu")) for _ in range(2)]
    caches[0].layers[0].normal_()
    caches[1].layers[0].copy_(caches[0].layers[0])
    order = list(range(sum(needed) + 3))
    random.Random(size).shuffle(order)
    rows = [Rows(start, end, [order.pop() for _ in range(n)]) for (start, end), n in zip(spans, needed, strict=True)]
    count = sum(end - start for start, end in spans)
    queries = torch.randn(count, kv_heads * group, size)
    keys, values = torch.randn(2, count, kv_heads, size)
    results = []
    for attention, cache in (
        (TorchAttention(caches[0]), caches[0]),
        (TritonAttention(caches[1], kv_heads * group), caches[1]),
    ):
        plan = attention.plan(rows[: len(decodes)], rows[len(decodes) :])
        results.append(attention.attend(0, queries, keys, values, plan))
        assert torch.equal(cache.layers[0], caches[0].layers[0])
    assert (results[0] - results[1]).abs().max().item() < 1e-5


@pytest.mark.parametrize("case", SHORT)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_agree_with_torch(group: int, size: int, case: str) -> None:
    compare(group, size, *SHORT[case])


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize(("group", "size"), [(1, 64), (3, 64), (4, 128), (8, 128)])
def test_kernels_agree_with_torch_on_long_contexts(group: int, size: int, case: str) -> None:
    compare(group, size, *LONG[case], kv_heads=1)


def test_torch_attention_agrees_with_plain_attention() -> None:
    """The reference itself, against softmax(QK)V written out."""
    layout = KvLayout(1, 2, 64, "float32", BLOCK_SIZE)
    cache = KvCache(layout, 8, torch.float32, torch.device("cpu"))
    torch.manual_seed(1)
    attention = TorchAttention(cache)
    table = [5, 2, 7]
    keys, values = torch.randn(2, 40, 2, 64)
    queries = torch.randn(40, 6, 64)
    parts = [
        attention.attend(0, queries[a:b], keys[a:b], values[a:b], attention.plan([], [Rows(a, b, table)]))
        for a, b in ((0, 17), (17, 38))
    ]
    for position in (38, 39):
        plan = attention.plan([Rows(position, position + 1, table)], [])
        row = slice(position, position + 1)
        parts.append(attention.attend(0, queries[row], keys[row], values[row], plan))
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(3, 1)) / 8.0
    scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(3, 1))
    assert (torch.cat(parts) - expected).abs().max().item() < 1e-5
