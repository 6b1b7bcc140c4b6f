"""Driving an engine the way a worker does, and remembering what it said."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from function_runtime.engine.engine import Engine
from function_runtime.engine.errors import EngineError
from function_runtime.engine.output import Restored
from function_runtime.passes import Passes
from function_runtime.protocol import Begun, EngineOptions, Sampling, TokenEvent, Work
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from model_loader.recipe import prepare
from model_loader.tokenizer import Tokenizer
from tests.support.checkpoints import LLAMA3_SCALING

_UNKNOWN = Begun()
LLAMA2: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "seed": 2}
LLAMA3: dict[str, Any] = {
    "layers": 3, "hidden": 96, "heads": 6, "kv_heads": 2, "seed": 3, "rope_scaling": LLAMA3_SCALING, "tie": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    source: Path
    manifest: Manifest
    prepared: Path
    tokenizer: Tokenizer

    def engine(self, **options: Any) -> Engine:
        chosen = EngineOptions(**{"threads": 1, "kv_bytes": 64 << 20, **options})
        manifest = self.manifest
        return Engine.load(self.prepared, manifest.config, self.tokenizer, manifest.eos_token_ids, chosen)

    def prompt(self, tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Random ordinary tokens."""
        chance = random.Random(seed)
        return tuple(chance.randrange(6, self.manifest.config.vocab_size) for _ in range(tokens))


def prepare_checkpoint(source: Path, directory: Path, dtype: str = "float32") -> Checkpoint:
    manifest = import_model(f"file://{source}", directory / "imported")
    prepared = directory / f"prepared.{dtype}"
    prepare(manifest, dtype, prepared)
    return Checkpoint(source, manifest, prepared, Tokenizer.load(manifest.directory))


def make_work(
    prompt: Sequence[int],
    name: str = "r",
    *,
    epoch: int = 1,
    scope: str = "tenant",
    produced: Sequence[TokenEvent] = (),
    prefill_ends: Sequence[int] = (),
    begun: Begun = _UNKNOWN,
    write_kv: bool = True,
    **sampling: Any,
) -> Work:
    chosen = Sampling(**{"seed": 11, "max_tokens": 16, "temperature": 0.0, **sampling})
    return Work(
        name, epoch, "tenant", scope, tuple(prompt), chosen,
        produced=tuple(produced), prefill_ends=tuple(prefill_ends), begun=begun,
        write_kv=write_kv,
    )  # fmt: skip


@dataclass(slots=True)
class Transcript:
    """Everything an engine said about one request."""

    events: list[TokenEvent] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    prefill_ends: tuple[int, ...] = ()
    begun: Begun = field(default_factory=Begun)
    cached_tokens: int = 0
    ended: bool = False
    cancelled: bool = False
    error: EngineError | None = None
    kv: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """(choice, start, end) -> exported KV of each sealed range."""
    passes: dict[tuple[int, int, int], Passes] = field(default_factory=dict)
    """How it was computed, likewise."""
    device_us: int = 0

    def text(self, choice: int = 0) -> str:
        return "".join(event.text for event in self.events if event.choice == choice)

    def tokens(self, choice: int = 0) -> list[int]:
        return [event.token_id for event in self.events if event.choice == choice]


class Driver:
    """Steps an engine and checks what must hold of every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transcripts: dict[str, Transcript] = {}
        self.steps = 0

    def submit(self, work: Work, restored: Restored | None = None) -> Transcript:
        self.engine.submit(work, restored)
        return self.transcripts.setdefault(work.request_id, Transcript())

    def step(self) -> None:
        output = self.engine.step()
        self.steps += 1
        assert sum(prefill + decode for prefill, decode in output.device_us.values()) == output.busy_us
        for name, (prefill_us, decode_us) in output.device_us.items():
            self.transcripts[name].device_us += prefill_us + decode_us
        for sealed in output.sealed:
            kv = self.engine.export_kv(sealed.request_id, sealed.choice, sealed.start, sealed.end)
            place = (sealed.choice, sealed.start, sealed.end)
            self.transcripts[sealed.request_id].kv[place] = kv
            self.transcripts[sealed.request_id].passes[place] = sealed.passes
        for batch in output.tokens:
            transcript = self.transcripts[batch.request_id]
            transcript.seqs += range(batch.first_seq, batch.first_seq + len(batch.events))
            transcript.events += batch.events
            transcript.cached_tokens = batch.cached_tokens
            if batch.prefill_ends:
                assert not transcript.prefill_ends
                transcript.prefill_ends, transcript.begun = batch.prefill_ends, batch.begun
        for end in output.finished:
            transcript = self.transcripts[end.request_id]
            assert not transcript.ended
            transcript.ended, transcript.cancelled = True, end.cancelled
        for name, _, error in output.failed:
            self.transcripts[name].error = error

    def run(self, limit: int = 5000) -> None:
        while self.engine.has_work:
            assert limit > 0, "the engine does not come to an end"
            limit -= 1
            self.step()


def run_one(engine: Engine, work: Work, restored: Restored | None = None) -> Transcript:
    driver = Driver(engine)
    transcript = driver.submit(work, restored)
    driver.run()
    return transcript


def run_many(engine: Engine, works: Iterable[Work]) -> list[Transcript]:
    driver = Driver(engine)
    transcripts = [driver.submit(work) for work in works]
    driver.run()
    return transcripts


def stored_kv(first: Transcript, prompt: int, produced: Sequence[TokenEvent], choices: int) -> Restored:
    """What a store would hold of `first` when its log was `produced`: per choice the longest gapless run of ranges."""
    lengths: list[int] = []
    tensors: list[tuple[Tensor, ...]] = []
    for choice in range(choices):
        known = prompt + sum(1 for event in produced if event.choice == choice) - 1
        ranges = {key: kv for key, kv in first.kv.items() if key[0] == choice and key[2] <= max(prompt, known)}
        position = min((start for _, start, _ in ranges), default=0)
        found: list[Tensor] = []
        while ends := [end for _, start, end in ranges if start == position]:
            found.append(ranges[choice, position, max(ends)])
            position = max(ends)
        lengths.append(position if found else 0)
        tensors.append(tuple(found))
    return Restored(tuple(lengths), tuple(tensors))
