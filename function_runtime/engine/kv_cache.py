"""Paged KV memory: `[layers, 2, kv_heads, blocks, block_size, head_dim]`, zero and untouched until written.

Heads are outermost within a layer, so that the blocks of a sequence are gathered by one `index_select` into what
batched attention wants, and a sequence whose blocks are neighbours is a view. Limits: on CPUs the memory is an
anonymous mapping, resident only where tokens were; who holds which block is `blocks`' business.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from function_runtime.engine.errors import OutOfMemory
from function_runtime.engine_like import KvLayout

BLOCK_SIZE: Final = 16


class KvCache:
    def __init__(self, layout: KvLayout, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.blocks = blocks
        self.device = device
        shape = (layout.num_layers, 2, layout.kv_heads, blocks, layout.block_size, layout.head_dim)
        nbytes = layout.nbytes_per_token * layout.block_size * blocks
        try:
            if device.type == "cpu":
                # NOTE: attention multiplies masked positions by zero, so memory that was never written must hold
                # numbers. A fresh mapping is zero without being touched.
                memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype)
                self.memory = memory.view(shape)
            else:
                self.memory = torch.zeros(shape, dtype=dtype, device=device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise OutOfMemory(f"no memory for {blocks} KV blocks ({nbytes} bytes): lower kv_bytes") from error
        self._slots = self.memory.view(
            layout.num_layers, 2, layout.kv_heads, blocks * layout.block_size, layout.head_dim
        )
        self.keys: tuple[Tensor, ...] = tuple(self.memory[i, 0] for i in range(layout.num_layers))
        """Per layer `[kv_heads, blocks, block_size, head_dim]`."""
        self.values: tuple[Tensor, ...] = tuple(self.memory[i, 1] for i in range(layout.num_layers))
        self.key_slots: tuple[Tensor, ...] = tuple(self._slots[i, 0] for i in range(layout.num_layers))
        """Per layer `[kv_heads, blocks * block_size, head_dim]`."""
        self.value_slots: tuple[Tensor, ...] = tuple(self._slots[i, 1] for i in range(layout.num_layers))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) each."""
        for source, destination in pairs:
            self.memory[:, :, :, destination] = self.memory[:, :, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[:, :, :, block] = 0

    def read(self, table: Sequence[int], start: int, end: int) -> Tensor:
        """A copy on the CPU of positions `[start, end)`: `[layers, 2, tokens, kv_heads, head_dim]`."""
        slots = self.slots(table, start, end)
        return self._slots.index_select(3, slots).permute(0, 1, 3, 2, 4).contiguous().cpu()

    def write(self, table: Sequence[int], start: int, values: Tensor) -> None:
        """Writes `values` (as `read` gives them) at positions from `start` on."""
        slots = self.slots(table, start, start + values.shape[2])
        source = values.to(self.device).permute(0, 1, 3, 2, 4).contiguous()
        self._slots.index_copy_(3, slots, source)

    def write_layer(self, layer: int, slots: Tensor, values: Tensor) -> None:
        """Writes `values` `[2, tokens, kv_heads, head_dim]` into these slots of one layer."""
        self._slots[layer].index_copy_(2, slots, values.to(self.device).transpose(1, 2).contiguous())

    def slots(self, table: Sequence[int], start: int, end: int) -> Tensor:
        size = self.layout.block_size
        flat = [table[p // size] * size + p % size for p in range(start, end)]
        return torch.tensor(flat, dtype=torch.int64, device=self.device)
