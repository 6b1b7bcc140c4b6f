"""How much memory KV may take, and how many blocks that is.

Asked for nothing, an engine takes room for `max_requests` requests of `TYPICAL_TOKENS` each, at least for two of the
longest context, and at most a share of what is free. Limits: on CPUs memory becomes resident only as tokens come.
"""

from __future__ import annotations

from typing import Final

import torch

from function_runtime.engine.errors import OutOfMemory
from function_runtime.engine.kv_cache import BLOCK_SIZE
from function_runtime.engine_like import KvLayout
from model_loader.memory_limit import read_memory

TYPICAL_TOKENS: Final = 1024
_CPU_SHARE: Final = 0.4
_CUDA_SHARE: Final = 0.9


def kv_blocks(layout: KvLayout, kv_bytes: int, max_requests: int, max_context: int, device: torch.device) -> int:
    block_bytes = layout.nbytes_per_token * BLOCK_SIZE
    blocks_per_context = -(-max_context // BLOCK_SIZE) + 1
    if kv_bytes:
        blocks = kv_bytes // block_bytes
    else:
        free = int(_free_bytes(device) * (_CPU_SHARE if device.type == "cpu" else _CUDA_SHARE))
        typical = max_requests * (min(max_context, TYPICAL_TOKENS) // BLOCK_SIZE + 1)
        wanted = max(typical, 2 * blocks_per_context)
        if device.type == "cuda":
            wanted = max(wanted, free // block_bytes)
        blocks = min(wanted, free // block_bytes)
    if blocks < 2:
        raise OutOfMemory(
            f"there is room for {blocks} KV blocks of {block_bytes} bytes, at least 2 are needed: "
            "raise kv_bytes or free memory"
        )
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_memory().available_bytes
