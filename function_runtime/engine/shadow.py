"""Self-distrust: KV that was loaded and used is computed again when there is nothing else to do, and compared.

    loaded -> sampled -> prompt computed in a shadow, one pass a step, only between requests -> compared -> Doubt

Checksums say that bytes are those that were stored; this says that those were the right ones. Equal bits are what the
first attempt's schedule gives; another batch beside it may change the last of them, so what counts is the largest
difference, against the largest value of the chunk (`TOLERANCES`). Limits: whole chunks of the first choice's prompt, up
to `BUDGET_TOKENS` a sample, at most `KEPT` samples; whatever else is to be computed comes first, and ends the attempt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from function_runtime.engine.blocks import BlockPool
from function_runtime.engine.errors import EngineError
from function_runtime.engine.kv_cache import BLOCK_SIZE, KvCache
from function_runtime.engine.request import Request
from function_runtime.engine.restoring import chunk_tensor
from function_runtime.engine.scheduler import Chunk, Schedule, blocks_for
from function_runtime.engine.step import Drawn
from function_runtime.kv.arrival import Arrival, ArrivingChunk, ChunkState
from function_runtime.passes import NONE, recorded
from function_runtime.protocol import KvChunk, Work

BUDGET_TOKENS: Final = 2048
KEPT: Final = 2
TRIES: Final = 3
TOLERANCES: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference, as a share of the largest value in the same layer, keys or values, of the chunk."""
LOSSY_TOLERANCES: Final = {"fp8": 0.2, "int4": 0.4}
"""Root mean square of the differences, as a share of that of the values, likewise. With SmolLM2 the forms themselves
differ by 0.03 and 0.15, chunks computed and kept behind them by 0.07 and 0.19; KV of other tokens, or of the same one
place further, by 1.3."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A chunk that is not what computing it gives."""

    request_id: str
    epoch: int
    chunk: KvChunk
    reason: str


class _Sample:
    def __init__(self, work: Work, chunks: Sequence[ArrivingChunk]) -> None:
        self.work = work
        self.chunks = chunks
        last = max(chunks, key=lambda chunk: chunk.end)
        self.end = last.end
        self.passes = last.passes or recorded(() if work.fast else work.prefill_ends, work.begun.passes)
        self.tries = 0
        self.request: Request | None = None


class Shadow:
    def __init__(
        self,
        cache: KvCache,
        pool: BlockPool,
        run: Callable[[Schedule], list[Drawn]],
        make: Callable[[Work], Request],
        step_tokens: int,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._run = run
        self._make = make
        self._step_tokens = step_tokens
        self._samples: deque[_Sample] = deque()
        self.compared = 0
        self.equal_bits = 0

    @property
    def has_work(self) -> bool:
        return bool(self._samples)

    def take(self, work: Work, arrival: Arrival) -> None:
        """A load that was used. Its buffers are kept until it has been looked at."""
        limit = min(len(work.prompt), BUDGET_TOKENS)
        sound = [c for c in arrival.chunks if c.choice == 0 and c.state is ChunkState.SOUND and c.end <= limit]
        if sound and len(self._samples) < KEPT:
            self._samples.append(_Sample(work, sound))

    def make_way(self) -> None:
        """Something else is to be computed: the attempt ends, its blocks are free."""
        sample = self._samples[0] if self._samples else None
        if sample is not None and sample.request is not None:
            self._release(sample)
            sample.tries += 1
            if sample.tries >= TRIES:
                self._samples.popleft()

    def step(self) -> tuple[Doubt, ...]:
        """One pass of the sample under way; what it says once it is complete."""
        sample = self._samples[0]
        request = sample.request
        if request is None:
            request = self._begin(sample)
            if request is None:
                self._samples.popleft()
                return ()
        first = request.choices[0]
        upto, end, is_step = request.next_chunk(self._step_tokens)
        self._run(Schedule(chunks=[Chunk(request, first, first.computed, upto, end, is_step)]))
        first.computed = upto
        request.chunk_done(upto, end)
        if first.computed < sample.end:
            return ()
        doubts = tuple(self._compare(sample, chunk, first.blocks) for chunk in sample.chunks)
        self._release(sample)
        self._samples.popleft()
        return tuple(doubt for doubt in doubts if doubt is not None)

    def _begin(self, sample: _Sample) -> Request | None:
        """Without blocks to spare there is no shadow."""
        work = sample.work
        # One token more than is computed: nothing is to be drawn.
        prompt = (*work.prompt[: sample.end], work.prompt[0])
        count = blocks_for(len(prompt))
        if count * 2 > self._pool.available:
            return None
        alone = msgspec.structs.replace(work.sampling, n=1, max_tokens=1, min_tokens=0, grammar=None)
        copy = Work(
            request_id=f"{work.request_id}:shadow",
            epoch=work.epoch,
            tenant=work.tenant,
            kv_scope=work.kv_scope,
            prompt=prompt,
            sampling=alone,
            write_kv=False,
        )
        try:
            request = self._make(copy)
        except EngineError:
            return None
        passes = sample.passes.upto(sample.end).block_aligned(BLOCK_SIZE)
        # A source is not rehearsed here: other passes differ by less than what is tolerated.
        request.begin_on(NONE if passes.taken_until else passes)
        table = request.choices[0].blocks
        while len(table) < count:
            table.append(self._pool.allocate(table[-1] if table else None))
        sample.request = request
        return request

    def _release(self, sample: _Sample) -> None:
        if sample.request is not None:
            self._pool.release(sample.request.choices[0].blocks)
            sample.request = None

    def _compare(self, sample: _Sample, chunk: ArrivingChunk, table: list[int]) -> Doubt | None:
        layout = self._cache.layout
        loaded = chunk_tensor(chunk, layout)
        computed = self._cache.read(table, chunk.start, chunk.end)
        self.compared += 1
        if torch.equal(loaded, computed):
            self.equal_bits += 1
            return None
        # What was computed after a lossy prefix differs as that does.
        stands_on_lossy = chunk.passes is not None and chunk.passes.loaded_until > 0
        form = sample.work.prefix_form if stands_on_lossy else chunk.record.form
        if form == "raw":
            share, tolerance, what = difference(loaded, computed), TOLERANCES[layout.dtype], "its largest value"
        else:
            share, tolerance, what = lossy_difference(loaded, computed), LOSSY_TOLERANCES[form], f"its values ({form})"
        if share <= tolerance:
            return None
        reason = f"computed again it differs by {share:.3g} of {what} ({tolerance:g} is allowed)"
        return Doubt(sample.work.request_id, sample.work.epoch, chunk.record, reason)


def difference(loaded: Tensor, computed: Tensor) -> float:
    """The largest difference, as a share of the largest value in its layer's keys or values."""
    difference = (loaded.float() - computed.float()).abs().amax(dim=(2, 3, 4))
    size = computed.float().abs().amax(dim=(2, 3, 4)).clamp(min=1e-30)
    worst = (difference / size).max().item()
    return worst if worst == worst else float("inf")


def lossy_difference(loaded: Tensor, computed: Tensor) -> float:
    """The root mean square of the differences, as a share of that of the values, in the worst of the layers' keys and
    values: single values of a lossy form may be far off, all of them may not."""
    difference = (loaded.float() - computed.float()).square().mean(dim=(2, 3, 4)).sqrt()
    size = computed.float().square().mean(dim=(2, 3, 4)).sqrt().clamp(min=1e-30)
    worst = (difference / size).max().item()
    return worst if worst == worst else float("inf")
