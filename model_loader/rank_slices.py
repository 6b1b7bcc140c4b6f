"""One rank of N: its part of every tensor, and the form that holds nothing else.

Heads of q, k, v and rows of gate and up are dealt out; o and down give each rank the columns that meet them; embedding
and head are cut by vocabulary; norms and the biases added after a sum are everybody's. A rank's form is a form like any
other (its own recipe name and list of chunks): whoever has to have it from a disk, another slot or an object store
moves its bytes and no others. Limits: half types that are copied as they are; made from a checkpoint, a slice costs the
chunks that hold any of it, which for columns is all of them; the engine has no use for a rank yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_loader.checkpoint_files import checkpoint_chunks, local_source, what_next
from model_loader.errors import FormatError
from model_loader.llama_layout import ITEM_BYTES, EngineTensor, Part, engine_tensors, groups, keeps_rows, recipe_name
from model_loader.manifest import Manifest, ModelConfig, TensorEntry
from model_loader.prepared_layout import TensorPlan, plan_layout
from model_loader.prepared_writer import PreparedWriter
from model_loader.ranges.reader import Span, VerifiedReader
from model_loader.ranges.source import RangeSource, ReadStats

_BY_COLUMNS: Final = ("o_proj.weight", "down_proj.weight")
_WHOLE: Final = ("norm.weight", "o_proj.bias", "down_proj.bias")
_STORED_AS: Final = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Rank:
    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise FormatError(f"there is no rank {self.number} of {self.count}")

    def __str__(self) -> str:
        return f"rank {self.number} of {self.count}"

    def share(self, size: int, what: str) -> tuple[int, int]:
        """Begin and end of this rank's part of `size`."""
        if size % self.count:
            raise FormatError(f"{what} has {size}, which {self.count} ranks cannot share evenly")
        part = size // self.count
        return self.number * part, (self.number + 1) * part


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows and columns of a checkpoint's tensor."""

    source: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    whole_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def runs(self, item_bytes: int) -> Iterator[tuple[int, int]]:
        """Byte offset in the tensor and number of bytes of each run that lies together."""
        rows, columns = self.shape
        row_bytes = self.whole_columns * item_bytes
        if columns == self.whole_columns:
            yield self.rows[0] * row_bytes, rows * row_bytes
            return
        for row in range(*self.rows):
            yield row * row_bytes + self.columns[0] * item_bytes, columns * item_bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    rank: Rank
    slices: tuple[tuple[EngineTensor, tuple[Slice, ...]], ...]
    plans: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        """Of the slices."""
        return sum(plan.nbytes for plan in self.plans)


def plan_rank(config: ModelConfig, dtype: str, rank: Rank) -> RankPlan:
    """What a rank holds. Raises `FormatError` where the model cannot be dealt out so."""
    if not keeps_rows(dtype):
        raise FormatError(f"forms in {dtype} are not cut by rank: choose bfloat16 or float16")
    slices: list[tuple[EngineTensor, tuple[Slice, ...]]] = []
    plans: list[TensorPlan] = []
    for tensor in engine_tensors(config):
        parts = tuple(_slice(part, config, rank) for part in tensor.parts)
        rows = sum(part.shape[0] for part in parts)
        inner = (parts[0].shape[1],) if len(tensor.parts[0].shape) > 1 else ()
        shape = (*inner, rows) if tensor.transposed else (rows, *inner)
        slices.append((tensor, parts))
        plans.append(TensorPlan(tensor.name, dtype, shape, tensor.group, tensor.transposed))
    return RankPlan(rank, tuple(slices), tuple(plans))


def rank_spans(manifest: Manifest, plan: RankPlan, places: dict[str, int], item_bytes: int) -> list[Span]:
    """Where every run of a rank's slices is, and where it goes, in the order the model needs them."""
    entries = {entry.name: entry for entry in manifest.tensors}
    spans: list[Span] = []
    for tensor, parts in plan.slices:
        to = places[tensor.name]
        for part in parts:
            entry = entries[part.source]
            file = manifest.files[entry.file].path
            for at, nbytes in part.runs(item_bytes):
                spans.append(Span(file, entry.offset + at, nbytes, to, tensor.group))
                to += nbytes
    return spans


def prepare_rank(
    manifest: Manifest, dtype: str, rank: Rank, out_path: Path, *, sources: Sequence[RangeSource] = ()
) -> ReadStats:
    """Writes the form of one rank to `out_path`, atomically."""
    plan = plan_rank(manifest.config, dtype, rank)
    for entry in manifest.tensors:
        _check_copied(manifest, entry, dtype)
    recipe, names = f"{recipe_name(dtype)}/{rank}", groups(manifest.config)
    layout = plan_layout(manifest.identity, recipe, dtype, names, plan.plans)
    spans = rank_spans(manifest, plan, dict(layout.places), ITEM_BYTES[dtype])
    with (
        what_next(manifest),
        local_source(manifest, out_path.parent) as local,
        PreparedWriter(out_path, manifest.identity, recipe, dtype, plan.plans, groups=names) as writer,
    ):
        reader = VerifiedReader(checkpoint_chunks(manifest), sources or [local])
        reader.check_sizes()
        reader.read(spans, writer.write, writer.landed)
        writer.commit()
    return reader.stats


def _slice(part: Part, config: ModelConfig, rank: Rank) -> Slice:
    rows, columns = part.shape[0], part.shape[1] if len(part.shape) > 1 else 1
    whole = Slice(part.source, (0, rows), (0, columns), columns)
    if part.source.endswith(_WHOLE):
        return whole
    if part.source.endswith(_BY_COLUMNS):
        return Slice(part.source, (0, rows), rank.share(columns, part.source), columns)
    heads = rows // config.head_dim if ".self_attn." in part.source else 0
    if heads:
        first, last = rank.share(heads, f"the heads of {part.source}")
        return Slice(part.source, (first * config.head_dim, last * config.head_dim), (0, columns), columns)
    return Slice(part.source, rank.share(rows, part.source), (0, columns), columns)


def _check_copied(manifest: Manifest, entry: TensorEntry, dtype: str) -> None:
    if manifest.format != "safetensors" or entry.dtype != _STORED_AS[dtype]:
        raise FormatError(
            f"tensor {entry.name} is {entry.dtype} of {manifest.format}: a rank's form needs {dtype} safetensors"
        )
