"""Stored KV on its way into blocks: which pieces go where, all at once or layer by layer while a pass waits for them.

    Pieces (of a request, by choice and position) -> places (slots of the cache) -> layers written one after another

A `Gate` is asked by the model's loop before each layer: it waits for that layer of every piece, then writes it. A layer
without its checksum is never written; what a pass computed through a gate counts only after `settle`, which waits until
every chunk has its digest. Limits: writes happen in the engine's thread, into blocks the request holds at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from function_runtime.engine.kv_cache import KvCache
from function_runtime.engine.output import Restored
from function_runtime.engine.request import Choice, Request
from function_runtime.engine.resume import usable
from function_runtime.engine_like import KvLayout
from function_runtime.kv.arrival import Arrival, ArrivalFailed, ArrivingChunk, ChunkState
from function_runtime.passes import Passes

_TORCH_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Piece:
    """`[layers, 2, tokens, kv_heads, head_dim]` of a choice's positions from `start` on."""

    choice: int
    start: int
    tensor: Tensor
    known: Passes | None = None
    """How what is before its end was computed, if its chunk says."""

    @property
    def end(self) -> int:
        return self.start + self.tensor.shape[2]


@dataclass(frozen=True, slots=True)
class Pieces:
    lengths: tuple[int, ...]
    """Per choice where what can be used ends; 0: nothing can."""
    pieces: tuple[Piece, ...]
    arrival: Arrival | None = None
    """Not all of it is here yet."""

    @classmethod
    def of(cls, restored: Restored) -> Pieces:
        found: list[Piece] = []
        for choice, (length, tensors) in enumerate(zip(restored.lengths, restored.tensors, strict=True)):
            at = length - sum(t.shape[2] for t in tensors)
            for tensor in tensors:
                found.append(Piece(choice, at, tensor))
                at += tensor.shape[2]
        return cls(restored.lengths, tuple(found))

    @classmethod
    def arriving(cls, arrival: Arrival, layout: KvLayout, request: Request, position: int, *, promised: bool) -> Pieces:
        """What has arrived (`promised`: and what may) from `position` on."""
        lengths = arrival.lengths(len(request.choices), len(request.prompt), position, promised=promised)
        states = (ChunkState.SOUND, ChunkState.ARRIVING) if promised else (ChunkState.SOUND,)
        pieces = tuple(
            Piece(c.choice, c.start, chunk_tensor(c, layout), c.passes) for c in arrival.chunks if c.state in states
        )
        return cls(lengths, pieces, arrival if promised else None)

    def passes(self, choice: int) -> list[tuple[int, int, Passes | None]]:
        return [(piece.start, piece.end, piece.known) for piece in self.pieces if piece.choice == choice]


def chunk_tensor(chunk: ArrivingChunk, layout: KvLayout) -> Tensor:
    """A view of the chunk's bytes, whatever of them is here yet."""
    shape = (layout.num_layers, 2, -1, layout.kv_heads, layout.head_dim)
    return torch.frombuffer(chunk.data, dtype=_TORCH_TYPES[layout.dtype]).view(shape)


@dataclass(frozen=True, slots=True)
class _Range:
    """Positions [start, end) of `source`'s pieces go to the blocks of `table`."""

    source: int
    table: list[int]
    start: int
    end: int


class LayerWriter:
    """Writes a request's pieces into the blocks it holds now, a layer at a time."""

    def __init__(self, cache: KvCache, pieces: Pieces, ranges: Iterable[_Range]) -> None:
        self._cache = cache
        self._parts: list[Tensor] = []
        slots: list[Tensor] = []
        for target in ranges:
            at = target.start
            own = sorted((p for p in pieces.pieces if p.choice == target.source), key=lambda p: (p.start, -p.end))
            for piece in own:
                low, high = max(at, piece.start), min(target.end, piece.end)
                if low == at and low < high:
                    self._parts.append(piece.tensor[:, :, low - piece.start : high - piece.start])
                    slots.append(cache.slots(target.table, low, high))
                    at = high
            if at < target.end:
                raise RuntimeError(f"stored KV of choice {target.source} has a hole at {at}")
        self._slots = torch.cat(slots) if slots else None

    def write(self, layer: int) -> None:
        if self._slots is not None:
            self._cache.write_layer(layer, self._slots, torch.cat([part[layer] for part in self._parts], dim=1))

    def write_all(self) -> None:
        for layer in range(self._cache.layout.num_layers):
            self.write(layer)


class Gate:
    """Holds a pass up before each layer until that layer's stored KV is in its blocks."""

    def __init__(self, request: Request, arrival: Arrival, writer: LayerWriter) -> None:
        self.request = request
        self.arrival = arrival
        self._writer = writer
        self._written = 0

    def __call__(self, layer: int) -> None:
        while self._written <= layer:
            self.arrival.wait_for_layer(self._written)
            self._writer.write(self._written)
            self._written += 1

    def settle(self) -> None:
        """Raises `ArrivalFailed` if anything a layer came from is not what its record says."""
        self.arrival.wait_for_all()

    def open(self, layers: int) -> None:
        """Waits for everything at once."""
        self.settle()
        self(layers - 1)


class Overtaken(ArrivalFailed):
    """What a pass computes is here by now."""


class Race:
    """Gives a pass up at the next layer when the stored KV of all it computes has come. What the pass wrote lies in the
    request's own blocks, uncounted, and is overwritten by what came."""

    def __init__(self, request: Request, arrival: Arrival, end: int, layers: int) -> None:
        self._request = request
        self._arrival = arrival
        self._end = end
        self._last = layers - 2
        """Later it is not worth it any more."""
        self._seen = -1

    def __call__(self, layer: int) -> None:
        count = self._arrival.resolved_count
        if count == self._seen or layer > self._last:
            return
        self._seen = count
        request = self._request
        lengths = self._arrival.lengths(len(request.choices), len(request.prompt), request.choices[0].computed)
        if usable(request, lengths).prompt >= self._end:
            raise Overtaken("overtaken by what it computes")


def ranges_of(request: Request, block_size: int, since: int) -> list[_Range]:
    """Where the restored positions of every choice that holds blocks go; `since`: what is computed already."""
    prompt = len(request.prompt)
    holders: Sequence[Choice] = [choice for choice in request.choices if choice.blocks]
    found: list[_Range] = []
    for choice in holders:
        end = choice.computed
        if choice is holders[0]:
            found.append(_Range(0, choice.blocks, min(since, end, prompt), min(end, prompt)))
        elif end > prompt and prompt % block_size:
            found.append(_Range(0, choice.blocks, prompt // block_size * block_size, prompt))
        if end > prompt:
            found.append(_Range(choice.index, choice.blocks, prompt, end))
    return [r for r in found if r.start < r.end]
