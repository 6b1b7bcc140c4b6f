"""The recipe: a checkpoint's tensors to the engine's, in one dtype, as a prepared form, in the order the model needs.

Every byte comes through a `VerifiedReader`, which checks it by the chunks of its file. Where the engine's bytes are the
checkpoint's own (half types out of safetensors) they are copied as they land; else each engine tensor is made in row
chunks that stay in the CPU's cache: verified bytes, dequantise, cast, pwrite. Groups (embedding, layers, norm and head)
are published as they land. `python -m model_loader.recipe` does it in a process of its own with NDJSON progress.
Limits: float32, bfloat16 and float16; memory beside the form: `Window` and a buffer a thread.
"""

from __future__ import annotations

import os

# NOTE: must precede numpy's first import; BLAS is not used here and its threads cost milliseconds of start.
if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model_loader.block_types import BLOCKS, count_bytes
from model_loader.checkpoint_files import checkpoint_chunks, own_sources, what_next
from model_loader.dequantise import dequantise
from model_loader.errors import FormatError, LoaderError
from model_loader.llama_layout import (
    ITEM_BYTES,
    RECIPE_VERSION,
    EngineTensor,
    Part,
    engine_tensors,
    groups,
    keeps_rows,
    recipe_name,
)
from model_loader.manifest import MANIFEST_VERSION, Manifest, TensorEntry
from model_loader.prepared_layout import Layout, TensorPlan, plan_layout
from model_loader.prepared_writer import PreparedWriter
from model_loader.progress import Progress, Reporter, run_reporting
from model_loader.ranges.reader import Span, VerifiedReader
from model_loader.ranges.source import RangeSource, ReadStats
from model_loader.ranges.window import Window

DTYPES: Final = tuple(ITEM_BYTES)
_CHUNK_VALUES: Final = 256 * 1024
"""Values per chunk: 1 MiB of float32, which stays in the second-level cache while it is made."""
_PANEL_VALUES: Final = 16 * 1024 * 1024
"""Values of transposed tensors that are held in memory at once, by all makers together; larger ones are written in
several panels."""
_MOST_MAKERS: Final = 8
"""Tensors that are made at once: beside the form a load may take 256 MB, and each takes a share of the panels, up to 5
MB of values and 4 MiB to read into, besides the window of all. Two processors did not show it; 64 would have held 8 GB
of panels."""
_STORED_AS: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What the formats call an engine's dtype."""


def prepare(
    manifest: Manifest,
    dtype: str,
    out_path: Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    threads: int = 0,
    durable: bool = False,
    recycle: Path | None = None,
    sources: Sequence[RangeSource] = (),
    on_complete: Callable[[], None] | None = None,
    is_last_resort: bool = True,
) -> ReadStats:
    """Writes the prepared form of `manifest` to `out_path`, atomically. `progress` is told the temporary name as soon
    as the form can be mapped. `recycle`: a form in the same directory that nobody maps any more; gone afterwards.
    `sources` are asked in their order, by the paths the manifest gives its files; none: those paths, then the store
    that they were fetched from. `on_complete` is called when everything has landed, before the form is sealed and gets
    its name. `is_last_resort`: as in `PreparedWriter`."""
    plan = plan_form(manifest, dtype)
    wanted, total_bytes = plan.wanted, plan.nbytes
    reporter = Reporter("prepare", total_bytes, progress)
    with (
        what_next(manifest),
        own_sources(manifest, out_path.parent) as own,
        PreparedWriter(
            out_path, manifest.identity, plan.recipe, dtype, plan.plans, groups=plan.groups, recycle=recycle,
            is_last_resort=is_last_resort,
        ) as writer,
    ):  # fmt: skip
        reader = VerifiedReader(checkpoint_chunks(manifest), sources or own, threads=threads)
        reader.check_sizes()
        maker = _Maker(manifest, dtype, reader, writer, reporter.add)
        is_copied = all(maker.is_copied(tensor, part) for tensor in wanted for part in tensor.parts)
        makers = min(threads or len(os.sched_getaffinity(0)), _MOST_MAKERS)
        writer.follow(reader.stats, _far_bytes(manifest, reader), reader.threads if is_copied else makers)
        if progress is not None:
            progress(Progress("arriving", 0, total_bytes, str(writer.temporary)))
        if is_copied:
            maker.copy_all(wanted)
        else:
            maker.make_all(wanted, makers)
        writer.complete()
        if on_complete is not None:
            on_complete()
        writer.commit(durable=durable, threads=threads)
    reporter.finish()
    return reader.stats


def _far_bytes(manifest: Manifest, reader: VerifiedReader) -> int:
    """Of the checkpoint's tensors, what comes over a network."""
    far = [reader.is_far(file.path) for file in manifest.files]
    return sum(tensor.nbytes for tensor in manifest.tensors if far[tensor.file])


@dataclass(frozen=True, slots=True)
class FormPlan:
    """What the form of a checkpoint in one dtype holds, before any of it is there."""

    identity: str
    dtype: str
    groups: tuple[str, ...]
    wanted: tuple[EngineTensor, ...]
    plans: tuple[TensorPlan, ...]

    @property
    def recipe(self) -> str:
        return recipe_name(self.dtype)

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(plan.nbytes for plan in self.plans)

    def layout(self) -> Layout:
        return plan_layout(self.identity, self.recipe, self.dtype, self.groups, self.plans)


def plan_form(manifest: Manifest, dtype: str) -> FormPlan:
    if dtype not in ITEM_BYTES:
        raise FormatError(f"dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    wanted = engine_tensors(manifest.config)
    as_is = keeps_rows(dtype)
    plans = tuple(TensorPlan(t.name, dtype, t.shape, t.group, as_is and t.transposed) for t in wanted)
    return FormPlan(manifest.identity, dtype, tuple(groups(manifest.config)), tuple(wanted), plans)


class _Maker:
    def __init__(
        self,
        manifest: Manifest,
        dtype: str,
        reader: VerifiedReader,
        writer: PreparedWriter,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._manifest = manifest
        self._dtype = dtype
        self._reader = reader
        self._writer = writer
        self._on_bytes = on_bytes
        self._window = Window(reader)
        self._entries = {t.name: t for t in manifest.tensors}
        self._scratch = threading.local()
        self._panel_values = _PANEL_VALUES

    def is_copied(self, tensor: EngineTensor, part: Part) -> bool:
        """Whether the part's bytes in the form are those of the checkpoint."""
        interleaved = part.heads and self._manifest.format == "gguf"
        return (
            self._entry(part).dtype == _STORED_AS[self._dtype]
            and not interleaved
            and not (tensor.transposed and not keeps_rows(self._dtype))
        )

    def copy_all(self, wanted: Sequence[EngineTensor]) -> None:
        """Everything as it is, in the order wanted."""
        spans: list[Span] = []
        for tensor in wanted:
            to = self._writer.place(tensor.name)
            for part in tensor.parts:
                entry = self._entry(part)
                spans.append(Span(self._file(entry), entry.offset, entry.nbytes, to, tensor.group))
                to += entry.nbytes
        self._reader.read(spans, self._put, self._writer.landed, self)

    def view(self, to: int, nbytes: int) -> memoryview | None:
        return self._writer.view(to, nbytes)

    def moved(self, nbytes: int) -> None:
        self._writer.moved(nbytes)
        self._on_bytes(nbytes)

    def make_all(self, wanted: Sequence[EngineTensor], threads: int) -> None:
        """Tensor by tensor, several at once, in the order wanted."""
        self._panel_values = _PANEL_VALUES // threads
        left: dict[int, int] = {}
        for tensor in wanted:
            left[tensor.group] = left.get(tensor.group, 0) + 1
        lock = threading.Lock()

        def make(tensor: EngineTensor) -> None:
            self._make_transposed(tensor) if tensor.transposed and not keeps_rows(self._dtype) else self._make(tensor)
            with lock:
                left[tensor.group] -= 1
                has_landed = left[tensor.group] == 0
            if has_landed:
                self._writer.landed(tensor.group)

        pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        try:
            for _ in pool.map(make, wanted):
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _put(self, offset: int, data: Any) -> None:
        self._writer.write(offset, data)
        nbytes = memoryview(data).nbytes
        self.moved(nbytes)

    def _make(self, tensor: EngineTensor) -> None:
        offset = self._writer.place(tensor.name)
        for part in tensor.parts:
            pieces: Iterator[NDArray[Any]] = (
                self._copied(part)
                if self.is_copied(tensor, part)
                else (cast_values(values, self._dtype, tensor.name) for values in self._values(part))
            )
            for piece in pieces:
                self._put(offset, piece)
                offset += piece.nbytes

    def _make_transposed(self, tensor: EngineTensor) -> None:
        """Collects the rows that come in as columns of a panel, and writes the panel when it is full."""
        inputs, outputs = tensor.shape
        offset, width = self._writer.place(tensor.name), min(outputs, max(1, self._panel_values // inputs))
        panel: NDArray[Any] | None = None
        first = filled = 0
        for part in tensor.parts:
            for values in self._values(part):
                chunk = cast_values(values, self._dtype, tensor.name).reshape(-1, inputs)
                taken = 0
                while taken < len(chunk):
                    if panel is None:
                        panel = np.empty((inputs, min(width, outputs - first)), dtype=chunk.dtype)
                    count = min(len(chunk) - taken, panel.shape[1] - filled)
                    panel[:, filled : filled + count] = chunk[taken : taken + count].T
                    taken, filled = taken + count, filled + count
                    if filled == panel.shape[1]:
                        self._put_panel(offset, panel, first, outputs)
                        panel, first, filled = None, first + filled, 0

    def _put_panel(self, offset: int, panel: NDArray[Any], first: int, outputs: int) -> None:
        """Columns from `first` on of the tensor at `offset`, which has `outputs` columns."""
        if panel.shape[1] == outputs:
            self._put(offset, panel)
            return
        whole = self.view(offset, len(panel) * outputs * panel.itemsize)
        if whole is not None:
            # Thousands of short rows in one call, which lets go of the interpreter.
            rows = np.frombuffer(whole, dtype=panel.dtype).reshape(len(panel), outputs)
            rows[:, first : first + panel.shape[1]] = panel
            self.moved(panel.nbytes)
            return
        for row, values in enumerate(panel):
            self._put(offset + (row * outputs + first) * panel.itemsize, values)

    def _copied(self, part: Part) -> Iterator[NDArray[np.uint8]]:
        entry = self._entry(part)
        for start in range(0, entry.nbytes, 4 * _CHUNK_VALUES):
            yield self._raw(entry, start, min(4 * _CHUNK_VALUES, entry.nbytes - start))

    def _values(self, part: Part) -> Iterator[NDArray[np.float32]]:
        """The part's values in order, as float32 chunks of whole rows (of whole heads where rows are put back)."""
        entry = self._entry(part)
        columns = part.shape[1] if len(part.shape) > 1 else 1
        interleaved = part.heads if self._manifest.format == "gguf" else 0
        unit = part.shape[0] // interleaved if interleaved else 1
        if len(part.shape) == 1 and not interleaved:
            unit = BLOCKS[entry.dtype][0]
        rows_at_once = max(1, _CHUNK_VALUES // (columns * unit)) * unit
        scratch = self._floats(rows_at_once * columns)
        start = 0
        for row in range(0, part.shape[0], rows_at_once):
            rows = min(rows_at_once, part.shape[0] - row)
            raw = self._raw(entry, start, count_bytes(entry.dtype, rows * columns))
            start += len(raw)
            values = scratch[: rows * columns]
            dequantise(raw, entry.dtype, values)
            yield deinterleave(values, rows // unit, unit, columns) if interleaved else values

    def _raw(self, entry: TensorEntry, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Verified bytes of a tensor, in this thread's memory until it asks for more."""
        raw: NDArray[np.uint8] | None = getattr(self._scratch, "raw", None)
        if raw is None or raw.size < nbytes:
            raw = self._scratch.raw = np.empty(max(nbytes, 4 * _CHUNK_VALUES), dtype=np.uint8)
        self._window.read_into(self._file(entry), entry.offset + start, raw[:nbytes].data)
        return raw[:nbytes]

    def _floats(self, count: int) -> NDArray[np.float32]:
        floats: NDArray[np.float32] | None = getattr(self._scratch, "floats", None)
        if floats is None or floats.size < count:
            floats = self._scratch.floats = np.empty(max(count, _CHUNK_VALUES), dtype=np.float32)
        return floats

    def _file(self, entry: TensorEntry) -> str:
        return self._manifest.files[entry.file].path

    def _entry(self, part: Part) -> TensorEntry:
        entry = self._entries.get(part.source)
        if entry is None:
            raise FormatError(f"the checkpoint {self._manifest.uri} has no tensor {part.source}")
        if entry.shape != part.shape:
            raise FormatError(f"tensor {part.source} has shape {entry.shape}, the configuration says {part.shape}")
        if entry.dtype not in BLOCKS:
            raise FormatError(f"tensor {part.source} is of unknown type {entry.dtype}")
        return entry


def deinterleave(values: NDArray[np.float32], heads: int, head_dim: int, columns: int) -> NDArray[np.float32]:
    """llama.cpp keeps rotary pairs side by side (rows 0, d/2, 1, d/2+1, ...); the halves are put back in order."""
    pairs = values.reshape(heads, head_dim // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def cast_values(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
    """float32 values to the bytes of `dtype`, rounded to nearest even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if np.isinf(halves).any() and not np.isinf(values).any():
            raise FormatError(f"tensor {name} holds values beyond float16's range; choose bfloat16 or float32")
        return halves
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    nans = np.isnan(values)
    if nans.any():
        result[nans] = 0x7FC0
    return result


def current_manifest(path: Path) -> Manifest:
    """As `importer.load_current`, which takes its import only for a manifest of an earlier version."""
    manifest = Manifest.load(path)
    if manifest.version == MANIFEST_VERSION:
        return manifest
    from model_loader.importer import load_current

    return load_current(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="model_loader.recipe", description="Prepare an imported checkpoint.")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: one per CPU")
    parser.add_argument("--recycle", type=Path, help="a form beside --out that nobody uses: its memory is written over")
    parser.add_argument("--durable", action="store_true", help="fsync what is written (not needed on tmpfs)")
    given = parser.parse_args(arguments)

    def work(report: Callable[[Progress], None]) -> dict[str, object]:
        manifest = current_manifest(given.manifest)
        stats = prepare(
            manifest, given.dtype, given.out, report, threads=given.threads, durable=given.durable,
            recycle=given.recycle,
        )  # fmt: skip
        return {
            "identity": manifest.identity,
            "path": str(given.out),
            "nbytes": os.stat(given.out).st_size,
            "read_bytes": stats.by_tier(),
            "chunks": stats.chunks,
            "bad_chunks": stats.bad_chunks,
        }

    return run_reporting(work)


__all__ = ["DTYPES", "RECIPE_VERSION", "LoaderError", "main", "prepare", "recipe_name"]

if __name__ == "__main__":
    raise SystemExit(main())
