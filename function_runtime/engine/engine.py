"""The engine: takes requests, and computes one step of all of them at a time.

`submit` and `cancel` between steps; `step` schedules, runs the model once over every row of the step, samples, and says
what came of it. Everything happens in the caller's thread, in the caller's time, but for the compiling of grammars.
Limits: one checkpoint, one device; whoever drives the engine moves its output.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from function_runtime.engine import rehearsal, sealing
from function_runtime.engine.accounting import attribute
from function_runtime.engine.admission import Bounds, admit
from function_runtime.engine.attention.interface import Attention
from function_runtime.engine.attention.torch_attention import TorchAttention
from function_runtime.engine.blocks import BlockPool
from function_runtime.engine.emission import Emitter
from function_runtime.engine.errors import EngineError, GrammarStuck, InvalidWork, NumericError, UnusableModel
from function_runtime.engine.grammar import Grammars
from function_runtime.engine.guides import Compiled, Guides
from function_runtime.engine.kind import computed_by
from function_runtime.engine.kv_cache import BLOCK_SIZE, KvCache
from function_runtime.engine.matrix import hire
from function_runtime.engine.memory import keep_freed_memory
from function_runtime.engine.models.llama import Llama
from function_runtime.engine.output import (
    Admitted,
    RequestEnd,
    RequestTokens,
    Restored,
    SealedRange,
    StepOutput,
)
from function_runtime.engine.prefix import Chain
from function_runtime.engine.receiving import Receiver
from function_runtime.engine.request import Choice, Phase, Request
from function_runtime.engine.resizing import fitting_blocks, resize
from function_runtime.engine.restoring import Gate, Pieces, Race
from function_runtime.engine.resume import Usable, admitted, check_restored, usable
from function_runtime.engine.scheduler import Schedule, Scheduler
from function_runtime.engine.shadow import Doubt, Shadow
from function_runtime.engine.sizing import kv_blocks
from function_runtime.engine.step import Drawn, StepRunner
from function_runtime.engine.weights import map_weights
from function_runtime.engine_like import EngineStats, KvLayout
from function_runtime.kv.arrival import Arrival, ArrivalFailed
from function_runtime.kv.speeds import Measured, expected_of
from function_runtime.protocol import Begun, EngineOptions, TokenEvent, Work
from model_loader.manifest import ModelConfig
from model_loader.prepared import PreparedFile
from model_loader.tokenizer import Tokenizer

GUIDE_WAIT_S: Final = 0.02
"""How long a step without anything to compute waits for a grammar that is being compiled."""
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Failures: TypeAlias = tuple[tuple[str, int, EngineError], ...]
"""Request, epoch, reason."""


class Engine:
    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        config = model.config
        if options.kv_chunk_tokens % BLOCK_SIZE or options.kv_chunk_tokens <= 0:
            raise InvalidWork(f"kv_chunk_tokens {options.kv_chunk_tokens} is no multiple of {BLOCK_SIZE}")
        self.max_context = min(options.max_context_tokens or config.max_position, config.max_position)
        dtype = model.dtype
        self.kind = computed_by(device, dtype)
        self.kv_layout = KvLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, _DTYPE_NAMES[dtype], BLOCK_SIZE
        )
        blocks = kv_blocks(self.kv_layout, options.kv_bytes, options.max_requests, self.max_context, device)
        self._options = options
        self._tokenizer = tokenizer
        self._cache = KvCache(self.kv_layout, blocks, dtype, device)
        self._pool = BlockPool(blocks)
        self._scheduler = Scheduler(self._pool, options.max_requests, options.step_tokens, options.prefix_cache)
        self._emitter = Emitter(tokenizer, eos_token_ids)
        self.model = model
        self._runner = StepRunner(model, _attention(self._cache, config.num_heads, device), self._emitter, device)
        self._bounds = Bounds(config.vocab_size, self.max_context, blocks)
        self._guides = Guides(Grammars(tokenizer, config.vocab_size))
        self._requests: dict[str, Request] = {}
        self._ended: list[RequestEnd] = []
        """Ends that the next step's output will report."""
        self._retired: list[tuple[Request, Choice]] = []
        """Ended choices of live requests; their KV may be exported until the next step."""
        self._arrivals = 0
        self._parting: dict[str, Request] = {}
        """Requests that ended with the last step: their blocks are free, and unchanged until the next one."""
        self.shadow = Shadow(
            self._cache,
            self._pool,
            self._runner.run,
            lambda work: admit(work, 0, self._bounds, tokenizer),
            options.step_tokens,
        )
        self._receiver = Receiver(
            self._cache,
            self._scheduler,
            options.kv_chunk_tokens,
            self._publish,
            lambda request, stored: admitted(request, stored, self.kind),
            self.shadow.take,
        )
        width = config.num_heads * config.head_dim
        inner = config.hidden_size * (3 * config.intermediate_size + 2 * width)
        parameters = config.num_layers * inner + config.hidden_size * config.vocab_size
        self.measured = Measured(expected_of(parameters, config.num_layers, width, device.type))

    @classmethod
    def load(
        cls,
        prepared: Path | PreparedFile,
        config: ModelConfig,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        options: EngineOptions,
    ) -> Engine:
        """Maps a prepared checkpoint, which may still be arriving, and builds an engine on it. Sets torch's number of
        threads in this process."""
        device = torch.device(options.device)
        if device.type not in ("cpu", "cuda"):
            raise UnusableModel(f"device {options.device!r} is not computed on here (known: cpu, cuda)")
        keep_freed_memory()
        weights = map_weights(prepared, device)
        threads = options.threads or len(os.sched_getaffinity(0))
        crew = hire(threads, weights.tensors["norm"].dtype, device)
        model = Llama(config, weights.tensors, crew, weights.arrival)
        return cls(model, tokenizer, eos_token_ids, options, device)

    # --- between steps --------------------------------------------------------------------------------------------

    def submit(self, work: Work, restored: Restored | Arrival | None = None) -> Admitted:
        """Takes a request on; it is computed from the next step on. Raises `EngineError` where it cannot be served."""
        if isinstance(restored, Arrival):
            return self._submit_arriving(work, restored)
        if work.request_id in self._requests:
            raise InvalidWork(f"request {work.request_id} is here already: cancel it first")
        request = admit(work, self._arrivals, self._bounds, self._tokenizer)
        stored = Usable(0, 0)
        if restored is not None:
            starts = [
                length - sum(t.shape[2] for t in tensors)
                for length, tensors in zip(restored.lengths, restored.tensors, strict=True)
            ]
            check_restored(request, restored.lengths, starts)
            stored = usable(request, restored.lengths)
            request.restored = Pieces.of(restored) if stored.prompt else None
        self._arrivals += 1
        for choice in request.choices:
            sealing.begin(request, choice, self._options.kv_chunk_tokens, stored.prompt + stored.steps)
        if request.ended:
            self._ended.append(RequestEnd(work.request_id, work.epoch, request.seq, cancelled=False))
        else:
            self._begin(request)
        return admitted(request, stored, self.kind)

    def _begin(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if request.work.sampling.grammar is None:
            self._enter(request)
        else:
            self._guides.begin(request)

    def cached_prefix(self, work: Work) -> int:
        """Tokens of a prompt whose blocks the prefix cache has now."""
        if not self._options.prefix_cache:
            return 0
        chain = Chain(work.kv_scope, BLOCK_SIZE)
        wanted = (len(work.prompt) - 1) // BLOCK_SIZE
        chain.extend(work.prompt, wanted)
        return len(self._pool.find(chain.hashes, BLOCK_SIZE)[0]) * BLOCK_SIZE

    def _submit_arriving(self, work: Work, arrival: Arrival) -> Admitted:
        if work.request_id in self._requests:
            raise InvalidWork(f"request {work.request_id} is here already: cancel it first")
        request = admit(work, self._arrivals, self._bounds, self._tokenizer)
        self._arrivals += 1
        if request.ended:
            arrival.abandon()
            self._ended.append(RequestEnd(work.request_id, work.epoch, request.seq, cancelled=False))
            return admitted(request, Usable(0, 0), self.kind)
        for choice in request.choices:
            sealing.begin(request, choice, self._options.kv_chunk_tokens, 0)
        request.incoming = arrival
        self._begin(request)
        return replace(admitted(request, Usable(0, 0), self.kind), pending=True)

    def cancel(self, request_id: str) -> bool:
        """Ends a request; its blocks are free on return, and the next step's output reports its end."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._drop(request, self._ended, cancelled=True)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended or self.shadow.has_work)

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting) + self._guides.waiting, self._pool.used, self._pool.total,
            scheduler.preemptions,
        )  # fmt: skip

    def export_kv(self, request_id: str, choice: int, start: int, end: int) -> Tensor:
        """A copy of computed positions `[start, end)`: `[layers, 2, tokens, kv_heads, head_dim]`, on the CPU."""
        request = self._requests.get(request_id) or self._parting.get(request_id)
        if request is None:
            raise InvalidWork(f"request {request_id} is not here")
        if self._receiver.holds(request) or request.rehearsals:
            raise InvalidWork(f"the KV of {request_id} is not all here yet")
        holder = request.choices[choice]
        if not holder.blocks and end <= len(request.prompt):
            holder = next((c for c in request.choices if c.blocks), holder)
        if not 0 <= start < end <= holder.computed or not holder.blocks:
            raise InvalidWork(f"positions {start} to {end} of choice {choice} of {request_id} are not computed")
        return self._cache.read(holder.blocks, start, end)

    def kv_tails(self, request_id: str) -> tuple[SealedRange, ...]:
        """Computed positions of a running request that no chunk covers yet; to be exported before the next step."""
        request = self._requests.get(request_id)
        if request is None or self._receiver.holds(request) or request.rehearsals:
            return ()
        held = [choice for choice in request.choices if choice.blocks]
        return tuple(sealed for choice in held for sealed in sealing.tail(request, choice))

    def resize_kv(self, kv_bytes: int) -> int:
        """About so much KV from now on (`resizing`), in bytes; nothing more of the last step can be exported."""
        self._release_retired()
        self._parting = {}
        requests = self._requests.values()
        blocks = fitting_blocks(self._cache, self._pool, requests, kv_bytes, self.max_context)
        if blocks != self._pool.total and self._receiver.gate is None:
            self.shadow.make_way()
            resize(self._cache, self._pool, requests, blocks)
            self._bounds = replace(self._bounds, total_blocks=self._pool.total)
        return self._pool.total * self._cache.block_bytes

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        ended, self._ended = self._ended, []
        self._release_retired()
        self._parting = {}
        refused = self._take_guides()
        if len(self._requests) == self._guides.waiting:
            doubts: tuple[Doubt, ...] = ()
            if self.shadow.has_work and not (ended or refused or self._requests):
                with torch.inference_mode():
                    doubts = self.shadow.step()
            return StepOutput(finished=tuple(ended), failed=refused, doubts=doubts)
        begin_ns = time.monotonic_ns()
        arrival = self.model.arrival
        self.shadow.make_way()
        with torch.inference_mode():
            self._receiver.receive(alone=len(self._requests) == 1)
            schedule = self._scheduler.schedule()
            for request in schedule.admitted:
                self._receiver.admit(request)
            gate = self._receiver.take_gate(schedule)
            waits_for_layers = isinstance(gate, Gate)
            try:
                drawn = self._run(schedule, gate)
            except ArrivalFailed:
                self._receiver.give_up_pass()
                return StepOutput(finished=tuple(ended), failed=refused)
        if not (schedule.decodes or schedule.chunks or schedule.admitted):
            self._receiver.wait()
        output = self._settle(schedule, drawn, ended, refused)
        prefill: dict[str, int] = {}
        for chunk in schedule.chunks:
            name = chunk.request.request_id
            prefill[name] = prefill.get(name, 0) + chunk.rows
        decode = {request.request_id: len(choices) for request, choices in schedule.decodes}
        if not prefill and not decode:
            return output
        busy_us = (time.monotonic_ns() - begin_ns) // 1000
        if arrival is not None:
            # Waiting for weights is a cold start's, and nobody's use of the device.
            busy_us = max(0, busy_us - int(arrival.take_waited_s() * 1e6))
        elif not waits_for_layers:
            self._measure(schedule, busy_us / 1e6)
        return replace(output, device_us=attribute(busy_us, prefill, decode), busy_us=busy_us)

    def _run(self, schedule: Schedule, gate: Gate | Race | None) -> list[Drawn]:
        if not schedule.decodes and not schedule.chunks:
            return []
        if isinstance(gate, Gate) and schedule.copies:
            gate.open(self.kv_layout.num_layers)
        self._cache.copy(schedule.copies)
        drawn = self._runner.run(schedule, gate)
        # Nothing that was computed from a chunk leaves before the chunk has its digest.
        self._receiver.pass_is_sound()
        return drawn

    def _measure(self, schedule: Schedule, seconds: float) -> None:
        """What one chunk, or one row, took by itself."""
        if len(schedule.chunks) == 1 and not schedule.decodes:
            chunk = schedule.chunks[0]
            if chunk.is_step:
                self.measured.decoded(chunk.start, seconds)
            else:
                self.measured.prefilled(chunk.start, chunk.end, seconds)
        elif not schedule.chunks and len(schedule.decodes) == 1:
            self.measured.decoded(schedule.decodes[0][1][0].computed, seconds)

    def _take_guides(self) -> Failures:
        """Requests whose grammar is compiled begin now; those whose is not, fail."""
        refused: list[tuple[str, int, EngineError]] = []
        for compiled in self._guides.ready(GUIDE_WAIT_S if len(self._requests) == self._guides.waiting else 0.0):
            try:
                self._take_guide(compiled)
            except EngineError as error:
                request = compiled.request
                request.forget_stored()
                del self._requests[request.request_id]
                refused.append((request.request_id, request.work.epoch, error))
        return tuple(refused)

    def _take_guide(self, compiled: Compiled) -> None:
        request = compiled.request
        if compiled.error is not None:
            raise compiled.error
        for choice, guide in zip(request.choices, compiled.guides, strict=True):
            choice.guide = guide
            if guide is not None and not self._emitter.permit(request, choice):
                raise GrammarStuck(f"the log of {request.request_id} goes on after the end of its grammar")
        self._enter(request)

    def _enter(self, request: Request) -> None:
        """A request that knows what its answer must be like; its stored KV may still be on its way."""
        if request.incoming is not None:
            self._receiver.expect(request, request.incoming)
        else:
            self._scheduler.add(request)

    def _settle(self, schedule: Schedule, drawn: list[Drawn], ended: list[RequestEnd], refused: Failures) -> StepOutput:
        """Takes over what was computed and drawn, and says so."""
        failed = {id(d.request): d.request for d in drawn if d.sampled is None}
        for _, choices in schedule.decodes:
            for choice in choices:
                choice.computed += 1
                choice.passes = choice.passes.with_rows(1, len(choices))
        for chunk in schedule.chunks:
            choice = chunk.choice
            choice.computed = chunk.upto
            if chunk.request.rehearsals:
                rehearsal.go_on(self._cache, chunk.request)
                continue
            choice.passes = (
                choice.passes.with_rows(1, 1) if chunk.is_step else choice.passes.with_pass(chunk.upto, chunk.end)
            )
            if chunk.of_prompt:
                chunk.request.chunk_done(chunk.upto, chunk.end)
                rehearsal.go_on(self._cache, chunk.request)
        errors = [*refused, *(self._fail(request) for request in failed.values())]
        events: dict[str, list[TokenEvent]] = {}
        drawn.sort(key=lambda d: (d.request.arrival, d.choice.index))
        for d in drawn:
            if d.sampled is None or id(d.request) in failed:
                continue
            try:
                event = self._emitter.emit(d.request, d.choice, d.sampled)
            except GrammarStuck as error:
                failed[id(d.request)] = d.request
                events.pop(d.request.request_id, None)
                self._forget(d.request)
                errors.append((d.request.request_id, d.request.work.epoch, error))
                continue
            events.setdefault(d.request.request_id, []).append(event)
        sealed: list[SealedRange] = []
        for chunk in schedule.chunks:
            if id(chunk.request) not in failed and not chunk.request.rehearsals:
                after = (
                    self._after_chunk(chunk.request)
                    if chunk.of_prompt
                    else self._after_row(chunk.request, chunk.choice)
                )
                sealed += after
        for request, choices in schedule.decodes:
            if id(request) not in failed:
                for choice in choices:
                    sealed += self._after_row(request, choice)
        tokens = tuple(self._tell(self._requests[name], batch) for name, batch in events.items())
        for name in events:
            request = self._requests[name]
            if request.ended:
                self._part(request, ended)
        # Of a request that is over only whole chunks are of use, to others.
        live = tuple(
            s for s in sealed if s.request_id in self._requests or (s.request_id in self._parting and not s.partial)
        )
        return StepOutput(tokens, tuple(ended), tuple(errors), live, admitted=self._receiver.word())

    def _tell(self, request: Request, events: list[TokenEvent]) -> RequestTokens:
        first_seq = request.seq + 1
        request.seq += len(events)
        ends, begun = ((), Begun()) if request.told_schedule else request.told(self.kind)
        request.told_schedule = True
        cached = min(request.cached_tokens, len(request.prompt))
        return RequestTokens(request.request_id, request.work.epoch, first_seq, tuple(events), cached, ends, begun)

    def _after_chunk(self, request: Request) -> list[SealedRange]:
        first = request.choices[0]
        self._publish(request, first)
        sealed = sealing.complete(request, first, self._options.kv_chunk_tokens) if request.work.write_kv else []
        if first.computed == len(request.prompt):
            if request.work.write_kv:
                sealed += sealing.tail(request, first)
            participants = request.participants()
            self._scheduler.fork(request, participants)
            if first not in participants and not request.ended:
                self._retired.append((request, first))
        return sealed

    def _after_row(self, request: Request, choice: Choice) -> list[SealedRange]:
        self._publish(request, choice)
        sealed: list[SealedRange] = []
        if request.work.write_kv:
            sealed = sealing.complete(request, choice, self._options.kv_chunk_tokens)
        if not request.takes_part(choice):
            if request.work.write_kv:
                sealed += sealing.tail(request, choice)
            self._retired.append((request, choice))
        return sealed

    def _publish(self, request: Request, choice: Choice) -> None:
        complete = choice.computed // BLOCK_SIZE
        if not self._options.prefix_cache or complete <= choice.published:
            return
        choice.chain.extend(request.known(choice), complete)
        for index in range(choice.published, complete):
            passes = choice.passes.upto((index + 1) * BLOCK_SIZE)
            self._pool.publish(choice.blocks[index], choice.chain.hashes[index], passes)
        choice.published = complete

    def _fail(self, request: Request) -> tuple[str, int, EngineError]:
        """The model gave no numbers: its KV is withdrawn and overwritten before anybody else has the blocks."""
        for block in {block for choice in request.choices for block in choice.blocks}:
            self._pool.forget(block)
        self._scheduler.clear(self._cache, request)
        self._forget(request)
        error = NumericError(f"the model's output for {request.request_id} is not finite: nothing was sampled from it")
        return request.request_id, request.work.epoch, error

    def _part(self, request: Request, ended: list[RequestEnd]) -> None:
        """Ends a request whose last ranges may still be exported: no block is given away before the next step."""
        tables = [choice.blocks for choice in request.choices]
        self._drop(request, ended, cancelled=False)
        if request.work.write_kv:
            for choice, blocks in zip(request.choices, tables, strict=True):
                choice.blocks = blocks
            self._parting[request.request_id] = request

    def _drop(self, request: Request, ended: list[RequestEnd], *, cancelled: bool) -> None:
        ended.append(RequestEnd(request.request_id, request.work.epoch, request.seq, cancelled, request.cached_tokens))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._receiver.holds(request):
            # Not everything that was written has its digest yet.
            self._scheduler.clear(self._cache, request)
        if self._guides.forget(request):
            request.forget_stored()
        elif not self._receiver.forget(request):
            self._scheduler.remove(request)
        del self._requests[request.request_id]

    def _release_retired(self) -> None:
        for request, choice in self._retired:
            if request.phase is Phase.DECODE and choice.blocks:
                self._scheduler.free_choice(choice)
        self._retired = []


def _attention(cache: KvCache, heads: int, device: torch.device) -> Attention:
    if device.type == "cpu":
        return TorchAttention(cache)
    from function_runtime.engine.attention.triton_attention import TritonAttention

    return TritonAttention(cache, heads)
