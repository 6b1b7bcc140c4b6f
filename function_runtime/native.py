"""The native engine as the worker's loop sees it: torch tensors become buffers here and nowhere else.

Importing this module imports torch and everything the engine needs, which is what the template is for. Limits: the
engine is built in the worker, after the fork.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from function_runtime import process
from function_runtime.artifacts import Artifacts
from function_runtime.clock import Stopwatch
from function_runtime.compiled import keep_artifacts, make_context, restore_artifacts
from function_runtime.engine import warmup
from function_runtime.engine.engine import Engine
from function_runtime.engine.errors import EngineError
from function_runtime.engine.kind import ENGINE_FORMAT
from function_runtime.engine.output import Admitted, Restored, StepOutput
from function_runtime.engine_like import EngineLike, EngineStats, KvLayout, RestoredKv, SealedRangeLike
from function_runtime.errors import EngineFault, LoadError
from function_runtime.inbox import Inbox
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.contention import ComingWeights, WhatComes, nothing
from function_runtime.kv.identity import KvIdentity
from function_runtime.kv.kept_speeds import KeptSpeeds
from function_runtime.kv.reader import MEASURED_LATELY_S, Capabilities
from function_runtime.kv.service import DurableKv
from function_runtime.kv.speeds import Measured
from function_runtime.kv_service import KvService
from function_runtime.protocol import ReplicaSpec, Work
from function_runtime.serving import Serving
from model_loader.errors import LoaderError, SourceMissing
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.tokenizer import Tokenizer

"""Changes whenever the engine fills KV differently for the same tokens."""
MIN_FREE_BYTES: Final = 128 * 1024 * 1024
"""Below this an engine is not even begun: its first step would bring the machine down."""
POPULATE_BYTES: Final = 4 * 1024 * 1024
"""Per call, because the kernel holds up every new mapping of the process meanwhile (half a millisecond)."""
PULSE_NS: Final = 250_000_000
_TORCH_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Pulse:
    """Calls at most several times a second, however often it is called: layers of a small step are many."""

    __slots__ = ("_call", "_next_ns")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._next_ns = 0

    def __call__(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + PULSE_NS
            self._call()


class NativeEngine:
    """`EngineLike` over `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pulse: _Pulse | None = None
        self.kv_layout: KvLayout | None = engine.kv_layout
        self.max_context_tokens = engine.max_context

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def measured(self) -> Measured:
        return self._engine.measured

    def submit(self, work: Work, restored: RestoredKv | Arrival | None) -> Admitted:
        try:
            stored = self._restored(restored) if isinstance(restored, RestoredKv) else restored
            if isinstance(stored, Arrival):
                stored.while_waiting = self._pulse
            return self._engine.submit(work, stored)
        except EngineError as error:
            raise EngineFault(error.code, error.message, retry=error.retry) from error

    def _restored(self, kv: RestoredKv) -> Restored:
        layout = self._engine.kv_layout
        kind = _TORCH_TYPES[layout.dtype]
        return Restored(
            lengths=kv.lengths,
            tensors=tuple(
                tuple(
                    torch.frombuffer(run.data, dtype=kind).view(
                        layout.num_layers, 2, run.tokens, layout.kv_heads, layout.head_dim
                    )
                    for run in runs
                )
                for runs in kv.choices
            ),
        )

    def cached_prefix(self, work: Work) -> int:
        return self._engine.cached_prefix(work)

    def cancel(self, request_id: str) -> bool:
        return self._engine.cancel(request_id)

    def while_waiting(self, call: Callable[[], None]) -> None:
        self._pulse = pulse = _Pulse(call)
        self._engine.model.between_layers = pulse
        arrival = self._engine.model.arrival
        if arrival is not None:
            arrival.while_waiting = pulse

    def step(self) -> StepOutput:
        try:
            return self._engine.step()
        except LoaderError as error:
            # The weights' own: a layer that was waited for will not come.
            raise EngineFault(error.code, str(error), retry=error.retry) from error

    def resize_kv(self, kv_bytes: int) -> int:
        return self._engine.resize_kv(kv_bytes)

    def export_kv(self, request_id: str, choice: int, start: int, end: int) -> memoryview:
        tensor = self._engine.export_kv(request_id, choice, start, end)
        return tensor.contiguous().flatten().view(torch.uint8).numpy().data

    def kv_tail(self, request_id: str) -> Sequence[SealedRangeLike]:
        return self._engine.kv_tails(request_id)


class MappedForm:
    """A prepared form with its pages in this process's page tables, as far as `populated_bytes`."""

    def __init__(self, form: PreparedFile) -> None:
        self.form = form
        found = form.path.stat()
        self._file = (found.st_ino, found.st_size)
        self.populated_bytes = 0

    @classmethod
    def open(cls, path: Path, arriving: Path | None = None) -> MappedForm:
        """`arriving`: the name it has until it is complete."""
        if arriving is not None:
            with contextlib.suppress(SourceMissing, OSError):
                return cls(PreparedFile.open_arriving(arriving))
        try:
            return cls(PreparedFile.open(path, verify=False))
        except SourceMissing as error:
            # The load that was to bring it goes another way now, or somebody removed it: asked again, it is loaded.
            raise LoadError("form_gone", f"{error}: it is loaded again", retry=True) from error

    @property
    def is_current(self) -> bool:
        """The path still names the file that is mapped."""
        try:
            found = self.form.path.stat()
        except OSError:
            return False
        return (found.st_ino, found.st_size) == self._file

    def populate_some(self) -> bool:
        """False: nothing is left to do."""
        if self.populated_bytes >= self.form.nbytes:
            return False
        self.form.populate(self.populated_bytes, POPULATE_BYTES)
        self.populated_bytes = min(self.form.nbytes, self.populated_bytes + POPULATE_BYTES)
        return True

    def populate_rest(self) -> None:
        """Beside the first step, which finds the pages there or faults them in itself."""
        if self.populated_bytes < self.form.nbytes:
            threading.Thread(target=self._populate_all, name="populate", daemon=True).start()

    def _populate_all(self) -> None:
        try:
            for group in range(len(self.form.groups)):
                self.form.wait(group)
        except LoaderError:
            # Whoever computes hears of it.
            return
        while self.populate_some():
            pass


class NativeBuilder:
    """Manifest and tokenizer first, which need no weights; then the engine on the mapped checkpoint."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._tokenizer: Tokenizer | None = None
        self._ahead: dict[Path, MappedForm] = {}
        self._artifacts_dir: Path | None = None
        self._artifacts: Artifacts | None = None
        self._speeds: KeptSpeeds | None = None
        self._measured: Measured | None = None
        self._form: PreparedFile | None = None

    def warm_up(self) -> None:
        """Starts the compute threads and faults in the code of the operations every model runs."""
        warmup.warm_up()

    def map_ahead(self, paths: Sequence[Path]) -> bool:
        for path in [known for known in self._ahead if known not in paths]:
            del self._ahead[path]
        for path in paths:
            ahead = self._ahead.get(path)
            if ahead is None:
                try:
                    ahead = self._ahead[path] = MappedForm.open(path)
                except (LoaderError, LoadError):
                    # Gone meanwhile; the agent's next word will say so.
                    continue
            if ahead.populate_some():
                return True
        return False

    def begin(self, spec: ReplicaSpec, artifacts_dir: Path | None) -> None:
        self._artifacts_dir = artifacts_dir
        free_bytes = process.available_bytes()
        if free_bytes < MIN_FREE_BYTES:
            message = f"{free_bytes} bytes of memory are available, {MIN_FREE_BYTES} are needed to begin"
            raise LoadError("insufficient_memory", message, retry=True)
        self._manifest = Manifest.load(Path(spec.manifest_path))
        if self._manifest.identity != spec.identity:
            raise LoadError(
                "identity_mismatch",
                f"the manifest is of checkpoint {self._manifest.identity[:16]}, {spec.identity[:16]} was asked for",
                retry=False,
            )
        self._tokenizer = Tokenizer.load(self._manifest.directory)

    def build(
        self, spec: ReplicaSpec, prepared: Path | None, watch: Stopwatch, arriving: Path | None = None
    ) -> EngineLike:
        manifest, tokenizer = self._manifest, self._tokenizer
        if prepared is None or manifest is None or tokenizer is None:
            raise LoadError("no_checkpoint", "this engine needs a prepared checkpoint", retry=False)
        with watch.run("map") as stage:
            mapped = self._ahead.pop(prepared, None)
            if mapped is None or not mapped.is_current:
                mapped = MappedForm.open(prepared, arriving)
            self._ahead.clear()
            form = self._form = mapped.form
            if form.identity != manifest.identity:
                raise LoadError("identity_mismatch", f"{prepared} is of another checkpoint", retry=True)
            stage.nbytes, stage.tier = form.nbytes, "pool"
            stage.detail = f"mapped ahead: {mapped.populated_bytes} bytes"
            if form.board is not None and not form.board.is_complete:
                stage.detail = f"still arriving: {form.board.landed_bytes} bytes are here"
        if spec.options.device.startswith("cuda"):
            with watch.run("context") as stage:
                stage.detail = make_context(spec.options.device)
        if self._artifacts_dir is not None:
            self._artifacts = restore_artifacts(spec, form.dtype, self._artifacts_dir, watch)
        with watch.run("build") as stage:
            try:
                engine = Engine.load(form, manifest.config, tokenizer, manifest.eos_token_ids, spec.options)
            except EngineError as error:
                raise LoadError(error.code, error.message, retry=error.retry) from error
            mapped.populate_rest()
            kv_tokens = engine.stats.kv_total_blocks * engine.kv_layout.block_size
            stage.detail = f"threads={torch.get_num_threads()} kv_tokens={kv_tokens}"
        return NativeEngine(engine)

    def end(self) -> None:
        keep_artifacts(self._artifacts)
        if self._speeds is not None and self._measured is not None:
            self._speeds.keep(self._measured)

    def _coming(self, store: str, measured: Measured) -> WhatComes:
        form = self._form
        if form is None or form.pace is None:
            return nothing
        return ComingWeights(form, measured, by_network=not store.startswith("file:"), lately_s=MEASURED_LATELY_S)

    def open_kv(
        self, spec: ReplicaSpec, engine: EngineLike, inbox: Inbox, serving: Callable[[], Serving]
    ) -> KvService | None:
        layout, manifest = engine.kv_layout, self._manifest
        if not spec.kv_store or layout is None or manifest is None:
            return None
        config = manifest.config
        rope = {"theta": config.rope_theta, "scaling": config.rope_scaling, "max_position": config.max_position}
        identity = KvIdentity(
            checkpoint=manifest.identity,
            layout=layout,
            rope=json.dumps(rope, sort_keys=True, separators=(",", ":")),
            engine_format=f"{ENGINE_FORMAT}/{spec.options.device.partition(':')[0]}",
        )
        measured = engine.measured if isinstance(engine, NativeEngine) else Measured()
        kv = DurableKv(
            spec.kv_store,
            identity,
            inbox,
            serving,
            chunk_tokens=spec.options.kv_chunk_tokens,
            measured=measured,
            engine=Capabilities(layout.num_layers, spec.options.step_tokens, self._coming(spec.kv_store, measured)),
        )
        if self._artifacts_dir is not None:
            options = spec.options
            model = f"{manifest.identity} {options.device.partition(':')[0]} {layout.dtype} {torch.get_num_threads()}"
            # In the slot's directory, beside what it compiled.
            self._speeds = KeptSpeeds(self._artifacts_dir.with_name("speeds"), spec.kv_store, model)
            self._speeds.follow(kv.measured)
            self._measured = kv.measured
        return kv
