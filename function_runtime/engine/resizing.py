"""KV memory that becomes more or less while requests run, as others come to the device and leave it.

    prefixes nobody holds are given up -> blocks beyond the new end take free numbers -> each layer is laid out anew

What is computed stays, whatever it is called from then on, and so does every token that follows: where blocks lie
changes nothing in what comes out. Limits: between two steps; never less than what is held, what any request here needs
by itself and one of the longest context does, if there was room for that.
"""

from __future__ import annotations

from collections.abc import Collection

from function_runtime.engine.admission import needed_blocks
from function_runtime.engine.blocks import BlockPool
from function_runtime.engine.errors import OutOfMemory
from function_runtime.engine.kv_cache import KvCache
from function_runtime.engine.request import Request
from function_runtime.engine.scheduler import blocks_for


def fitting_blocks(
    cache: KvCache, pool: BlockPool, requests: Collection[Request], kv_bytes: int, max_context: int
) -> int:
    """As many as so many bytes hold, or as few as there may be."""
    least = min(pool.total, blocks_for(max_context) + 2)
    needed = (needed_blocks(len(each.prompt), each.limit, len(each.choices)) for each in requests)
    return max(kv_bytes // cache.block_bytes, least, pool.used, *needed)


def resize(cache: KvCache, pool: BlockPool, requests: Collection[Request], blocks: int) -> None:
    """Where there is no memory for more, all stays as it is."""
    numbers = pool.numbers_within(blocks)
    try:
        cache.resize(blocks, numbers)
    except OutOfMemory:
        return
    pool.renumber(blocks, numbers)
    for request in requests:
        for choice in request.choices:
            choice.blocks = [numbers[block] for block in choice.blocks]
