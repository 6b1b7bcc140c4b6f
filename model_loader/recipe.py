"""The recipe: a checkpoint's tensors to the engine's, in one dtype, as a prepared form.

Each engine tensor is made in row chunks that stay in the CPU's cache: pread, digest, dequantise, cast, CRC32C, pwrite.
Threads take tensors, largest first; numpy, hashlib and the kernel run outside the interpreter's lock. A source whose
bytes no longer have the digests of the manifest is an `IntegrityError`. `python -m model_loader.recipe` runs it in a
process of its own with NDJSON progress on stdout. Limits: float32, bfloat16 and float16.
"""

from __future__ import annotations

import os

# NOTE: must precede numpy's first import; BLAS is not used here and its threads cost milliseconds of start.
if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model_loader.block_types import BLOCKS, count_bytes, count_values
from model_loader.dequantise import dequantise
from model_loader.errors import FormatError, IntegrityError, LoaderError, SourceMissing
from model_loader.llama_layout import (
    ITEM_BYTES,
    RECIPE_VERSION,
    EngineTensor,
    Part,
    engine_tensors,
    recipe_name,
)
from model_loader.manifest import Manifest, TensorEntry
from model_loader.prepared import PreparedWriter, TensorPlan, crc32c
from model_loader.progress import Progress, Reporter, run_reporting

DTYPES: Final = tuple(ITEM_BYTES)
_CHUNK_VALUES: Final = 256 * 1024
"""Values per chunk: 1 MiB of float32, which stays in the second-level cache while it is made."""
_PANEL_VALUES: Final = 32 * 1024 * 1024
"""Values of a transposed tensor that are held in memory at once; larger ones are written in several panels."""


def prepare(
    manifest: Manifest,
    dtype: str,
    out_path: Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    threads: int = 0,
    durable: bool = False,
) -> None:
    """Writes the prepared form of `manifest` to `out_path`, atomically."""
    if dtype not in ITEM_BYTES:
        raise FormatError(f"dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    wanted = engine_tensors(manifest.config)
    plans = [TensorPlan(t.name, dtype, t.shape) for t in wanted]
    reporter = Reporter("prepare", sum(plan.nbytes for plan in plans), progress)
    with (
        SourceReader(manifest) as reader,
        PreparedWriter(out_path, manifest.identity, recipe_name(dtype), dtype, plans) as writer,
    ):
        scratch = threading.local()

        def make(tensor: EngineTensor) -> tuple[str, int]:
            if not hasattr(scratch, "values"):
                scratch.values = np.empty(_CHUNK_VALUES, dtype=np.float32)
            make_one = _make_transposed if tensor.transposed else _make_tensor
            return tensor.name, make_one(tensor, reader, writer, dtype, scratch.values, reporter.add)

        largest_first = sorted(wanted, key=lambda t: -count_values(t.shape))
        workers = threads or len(os.sched_getaffinity(0))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="prepare")
        try:
            checksums = dict(pool.map(make, largest_first))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        writer.commit(checksums, durable=durable)
    reporter.finish()


class SourceReader:
    """The checkpoint's files, open for reading."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._entries = {t.name: t for t in manifest.tensors}
        self._handles: list[int] = []
        self.format = manifest.format

    def __enter__(self) -> SourceReader:
        try:
            for file in self._manifest.files:
                self._handles.append(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.__exit__()
            raise SourceMissing(
                f"the checkpoint's file {error.filename} is gone ({error.strerror}): import the model again"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise FormatError(f"the checkpoint {self._manifest.uri} has no tensor {name}") from None

    def read(self, entry: TensorEntry, start: int, nbytes: int) -> bytes:
        """`nbytes` bytes of a tensor from its byte `start`; a short file is an error."""
        file = self._manifest.files[entry.file]
        at, data = entry.offset + start, b""
        try:
            while len(data) < nbytes:
                piece = os.pread(self._handles[entry.file], nbytes - len(data), at + len(data))
                if not piece:
                    raise IntegrityError(
                        f"{file.path} is shorter than when it was imported: tensor {entry.name} needs bytes up to "
                        f"{at + nbytes}, {at + len(data)} found; import the model again"
                    )
                data = data + piece if data else piece
        except OSError as error:
            raise SourceMissing(f"cannot read {file.path}: {error.strerror}") from error
        return data

    def check(self, entry: TensorEntry, digest: str) -> None:
        if digest != entry.sha256:
            raise IntegrityError(
                f"{self._manifest.files[entry.file].path} is not the file that was imported: tensor {entry.name} "
                f"has SHA-256 {digest[:16]}…, the manifest says {entry.sha256[:16]}…; import the model again"
            )


def _make_tensor(
    tensor: EngineTensor,
    reader: SourceReader,
    writer: PreparedWriter,
    dtype: str,
    scratch: NDArray[np.float32],
    on_bytes: Callable[[int], None],
) -> int:
    offset, checksum = writer.place(tensor.name), 0
    for part in tensor.parts:
        for values in _part_chunks(part, reader, scratch):
            out = cast_values(values, dtype, tensor.name)
            checksum = crc32c(out, checksum)
            writer.write(offset, out)
            offset += out.nbytes
            on_bytes(out.nbytes)
    return checksum


def _make_transposed(
    tensor: EngineTensor,
    reader: SourceReader,
    writer: PreparedWriter,
    dtype: str,
    scratch: NDArray[np.float32],
    on_bytes: Callable[[int], None],
) -> int:
    """Collects the rows that come in as columns of a panel, and writes the panel when it is full."""
    inputs, outputs = tensor.shape
    offset, width = writer.place(tensor.name), min(outputs, max(1, _PANEL_VALUES // inputs))
    chunks = (
        cast_values(values, dtype, tensor.name).reshape(-1, inputs)
        for part in tensor.parts
        for values in _part_chunks(part, reader, scratch)
    )
    panel: NDArray[Any] | None = None
    first = filled = 0
    for chunk in chunks:
        taken = 0
        while taken < len(chunk):
            if panel is None:
                panel = np.empty((inputs, min(width, outputs - first)), dtype=chunk.dtype)
            count = min(len(chunk) - taken, panel.shape[1] - filled)
            panel[:, filled : filled + count] = chunk[taken : taken + count].T
            taken, filled = taken + count, filled + count
            if filled == panel.shape[1]:
                _write_panel(writer, offset, panel, first, outputs)
                on_bytes(panel.nbytes)
                if filled == outputs:
                    return crc32c(panel)
                panel, first, filled = None, first + filled, 0
    checksum = 0
    row_bytes = outputs * ITEM_BYTES[dtype]
    for row in range(inputs):
        checksum = crc32c(os.pread(writer.fileno, row_bytes, offset + row * row_bytes), checksum)
    return checksum


def _write_panel(writer: PreparedWriter, offset: int, panel: NDArray[Any], first: int, outputs: int) -> None:
    """Columns from `first` on of the tensor at `offset`, which has `outputs` columns."""
    if panel.shape[1] == outputs:
        writer.write(offset, panel)
        return
    for row, values in enumerate(panel):
        writer.write(offset + (row * outputs + first) * panel.itemsize, values)


def _part_chunks(part: Part, reader: SourceReader, scratch: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """The part's values in order, as float32 chunks of whole rows (of whole heads where rows are put back)."""
    entry = reader.entry(part.source)
    if entry.shape != part.shape:
        raise FormatError(f"tensor {part.source} has shape {entry.shape}, the configuration says {part.shape}")
    if entry.dtype not in BLOCKS:
        raise FormatError(f"tensor {part.source} is of unknown type {entry.dtype}")
    columns = part.shape[1] if len(part.shape) > 1 else 1
    interleaved = part.heads if reader.format == "gguf" else 0
    unit = part.shape[0] // interleaved if interleaved else 1
    if len(part.shape) == 1 and not interleaved:
        unit = BLOCKS[entry.dtype][0]
    rows_at_once = max(1, _CHUNK_VALUES // (columns * unit)) * unit
    if rows_at_once * columns > scratch.size:
        scratch = np.empty(rows_at_once * columns, dtype=np.float32)
    digest, start = hashlib.sha256(), 0
    for row in range(0, part.shape[0], rows_at_once):
        rows = min(rows_at_once, part.shape[0] - row)
        raw = reader.read(entry, start, count_bytes(entry.dtype, rows * columns))
        start += len(raw)
        digest.update(raw)
        values = scratch[: rows * columns]
        dequantise(np.frombuffer(raw, dtype=np.uint8), entry.dtype, values)
        yield deinterleave(values, rows // unit, unit, columns) if interleaved else values
    reader.check(entry, digest.hexdigest())


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="model_loader.recipe", description="Prepare an imported checkpoint.")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: one per CPU")
    parser.add_argument("--durable", action="store_true", help="fsync what is written (not needed on tmpfs)")
    given = parser.parse_args(arguments)

    def work(report: Callable[[Progress], None]) -> dict[str, object]:
        manifest = Manifest.load(given.manifest)
        prepare(manifest, given.dtype, given.out, report, threads=given.threads, durable=given.durable)
        return {"identity": manifest.identity, "path": str(given.out), "nbytes": os.stat(given.out).st_size}

    return run_reporting(work)


__all__ = ["DTYPES", "RECIPE_VERSION", "LoaderError", "main", "prepare", "recipe_name"]

if __name__ == "__main__":
    raise SystemExit(main())
