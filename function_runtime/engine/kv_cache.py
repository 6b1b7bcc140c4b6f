"""Paged KV memory: per layer `[2, kv_heads, blocks, block_size, head_dim]`, zero and untouched until written.

Heads are outermost within a layer, so that the blocks of a sequence are gathered by one `index_select` into what
batched attention wants, and a sequence whose blocks are neighbours is a view. Layers lie apart, so that they can be
laid out anew one after another (`resize`). Limits: on CPUs the memory is an anonymous mapping, resident only where
tokens were; who holds which block is `blocks`' business.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
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
        self.dtype = dtype
        self.device = device
        self.layers: list[Tensor] = [self._fresh(blocks) for _ in range(layout.num_layers)]
        self.keys: tuple[Tensor, ...] = ()
        """Per layer `[kv_heads, blocks, block_size, head_dim]`."""
        self.values: tuple[Tensor, ...] = ()
        self.key_slots: tuple[Tensor, ...] = ()
        """Per layer `[kv_heads, blocks * block_size, head_dim]`."""
        self.value_slots: tuple[Tensor, ...] = ()
        self._slots: tuple[Tensor, ...] = ()
        """Per layer keys and values, `[2, kv_heads, blocks * block_size, head_dim]`."""
        self._point()

    @property
    def block_bytes(self) -> int:
        return self.layout.nbytes_per_token * self.layout.block_size

    def _fresh(self, blocks: int) -> Tensor:
        """One layer's. NOTE: attention multiplies masked positions by zero, so memory that was never written must hold
        numbers. A fresh mapping is zero without being touched."""
        layout = self.layout
        shape = (2, layout.kv_heads, blocks, layout.block_size, layout.head_dim)
        nbytes = blocks * self.block_bytes // layout.num_layers
        try:
            if self.device.type == "cpu":
                return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=self.dtype).view(shape)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise OutOfMemory(
                f"no memory for {blocks} KV blocks ({blocks * self.block_bytes} bytes): lower kv_bytes"
            ) from error

    def _point(self) -> None:
        layout = self.layout
        shape = (2, layout.kv_heads, self.blocks * layout.block_size, layout.head_dim)
        self._slots = tuple(layer.view(shape) for layer in self.layers)
        self.keys, self.values = tuple(each[0] for each in self.layers), tuple(each[1] for each in self.layers)
        self.key_slots, self.value_slots = (
            tuple(each[0] for each in self._slots),
            tuple(each[1] for each in self._slots),
        )

    def resize(self, blocks: int, numbers: Mapping[int, int]) -> None:
        """Room for so many blocks. `numbers`: what those whose content counts are called from now on. No more than one
        layer is there twice at any time. Raises OutOfMemory, and all is as it was."""
        self.keys = self.values = self.key_slots = self.value_slots = self._slots = ()
        for number in range(len(self.layers)):
            try:
                self._lay_out(number, blocks, numbers)
            except OutOfMemory:
                self._take_back(number, {now: before for before, now in numbers.items()})
                raise
        self.blocks = blocks
        self._point()

    def _take_back(self, until: int, numbers: Mapping[int, int]) -> None:
        """The layers before this one as they were. What they were given is there again, unless somebody took it: then
        nothing here is of use any more."""
        try:
            for number in range(until):
                self._lay_out(number, self.blocks, numbers)
        except OutOfMemory as error:
            raise RuntimeError(f"layers of the KV memory differ: {error}") from error
        self._point()

    def _lay_out(self, number: int, blocks: int, numbers: Mapping[int, int]) -> None:
        fresh = self._fresh(blocks)
        if numbers:
            from_, to = (torch.tensor(list(each), device=self.device) for each in (numbers.keys(), numbers.values()))
            try:
                fresh.index_copy_(2, to, self.layers[number].index_select(2, from_))
            except (MemoryError, RuntimeError) as error:
                raise OutOfMemory(f"no memory to lay {len(numbers)} KV blocks out anew") from error
        self.layers[number] = fresh
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for itself nobody else on the device has

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) each."""
        for source, destination in pairs:
            for layer in self.layers:
                layer[:, :, destination] = layer[:, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            for layer in self.layers:
                layer[:, :, block] = 0

    def read(self, table: Sequence[int], start: int, end: int) -> Tensor:
        """A copy on the CPU of positions `[start, end)`: `[layers, 2, tokens, kv_heads, head_dim]`."""
        slots, layout = self.slots(table, start, end), self.layout
        shape = (layout.num_layers, 2, layout.kv_heads, end - start, layout.head_dim)
        found = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer, into in zip(self._slots, found, strict=True):
            torch.index_select(layer, 2, slots, out=into)
        return found.permute(0, 1, 3, 2, 4).contiguous().cpu()

    def write(self, table: Sequence[int], start: int, values: Tensor) -> None:
        """Writes `values` (as `read` gives them) at positions from `start` on."""
        slots = self.slots(table, start, start + values.shape[2])
        source = values.to(self.device).permute(0, 1, 3, 2, 4).contiguous()
        for layer, of_layer in zip(self._slots, source, strict=True):
            layer.index_copy_(2, slots, of_layer)

    def write_layer(self, layer: int, slots: Tensor, values: Tensor) -> None:
        """Writes `values` `[2, tokens, kv_heads, head_dim]` into these slots of one layer."""
        self._slots[layer].index_copy_(2, slots, values.to(self.device).transpose(1, 2).contiguous())

    def slots(self, table: Sequence[int], start: int, end: int) -> Tensor:
        size = self.layout.block_size
        flat = [table[p // size] * size + p % size for p in range(start, end)]
        return torch.tensor(flat, dtype=torch.int64, device=self.device)
