"""One rank of N: together the ranks hold every byte once, and each moves its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import FormatError
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.ranges.local import LocalSource
from model_loader.ranges.reader import Span, VerifiedReader
from model_loader.rank_slices import Rank, plan_rank, prepare_rank
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama

Import = Callable[[Path], Manifest]


@pytest.fixture
def manifest(tmp_path: Path, imported: Import) -> Manifest:
    return imported(
        make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=3, vocab=4096, dtype="bfloat16")
    )


def together(manifest: Manifest, name: str, parts: list[np.ndarray], whole: np.ndarray) -> np.ndarray:
    """What the ranks' slices of an engine tensor make when they are put back. Matrices are [inputs, outputs]."""
    if parts[0].shape == whole.shape:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    config = manifest.config
    if name.endswith((".o", ".down")):
        return np.concatenate(parts, axis=0)
    if name == "embed":
        return np.concatenate(parts, axis=0)
    sizes = {
        "qkv": [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2],
        "gate_up": [config.intermediate_size] * 2,
    }.get(name.rpartition(".")[2], [whole.shape[1]])
    count, runs, at = len(parts), [], 0
    for size in sizes:
        runs += [part[:, at // count : (at + size) // count] for part in parts]
        at += size
    return np.concatenate(runs, axis=1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_slices_put_together_are_the_whole(manifest: Manifest, tmp_path: Path, count: int) -> None:
    prepare(manifest, "bfloat16", tmp_path / "whole")
    whole = PreparedFile.open(tmp_path / "whole", verify=True)
    forms = []
    for number in range(count):
        prepare_rank(manifest, "bfloat16", Rank(number, count), tmp_path / f"rank-{number}")
        forms.append(PreparedFile.open(tmp_path / f"rank-{number}", verify=True))
    names = whole.keys()
    assert all(form.keys() == names for form in forms)
    for name in names:
        parts = [form.tensor(name) for form in forms]
        np.testing.assert_array_equal(together(manifest, name, parts, whole.tensor(name)), whole.tensor(name), name)
    shared = sum(whole.info(name).nbytes for name in names if forms[0].info(name).shape == whole.info(name).shape)
    slices = [sum(form.info(name).nbytes for name in names) for form in forms]
    everything = sum(whole.info(name).nbytes for name in names)
    assert sum(slices) == everything + (count - 1) * (shared if count > 1 else 0)


def test_a_reader_of_a_ranks_form_moves_its_bytes_and_no_others(manifest: Manifest, tmp_path: Path) -> None:
    """From a disk, a peer or a store alike: what is counted is the form's body."""
    rank = Rank(1, 4)
    prepare_rank(manifest, "bfloat16", rank, tmp_path / "rank")
    form = PreparedFile.open(tmp_path / "rank", verify=True)
    body = form.preamble.body_bytes
    content = (tmp_path / "rank").read_bytes()[form.preamble.body_offset :][:body]
    (tmp_path / "body").write_bytes(content)
    copied = bytearray(body)

    def write(to: int, piece: memoryview) -> None:
        copied[to : to + len(piece)] = piece

    with LocalSource({"rank": tmp_path / "body"}) as source:
        reading = VerifiedReader({"rank": form.chunks()}, [source])
        reading.read([Span("rank", 0, body, 0, 0)], write)
    assert copied == content
    assert reading.stats.nbytes == body
    slices = plan_rank(manifest.config, "bfloat16", rank).nbytes
    assert slices <= body <= slices + 4096 * (len(form.keys()) + 1) + form.preamble.table_bytes


def test_made_from_a_checkpoint_rows_of_other_ranks_are_not_read(tmp_path: Path, imported: Import) -> None:
    """Chunks are read whole: beyond its slices a rank reads the rest of the chunks at their edges and under columns."""
    manifest = imported(
        make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=1, vocab=16_384, dtype="bfloat16")
    )
    whole_bytes = sum(Path(file.path).stat().st_size for file in manifest.files)
    stats = prepare_rank(manifest, "bfloat16", Rank(0, 4), tmp_path / "rank")
    # Embedding and head are four chunks each, of which this rank has a quarter.
    assert stats.nbytes <= whole_bytes - 4 * CHUNK_BYTES
    assert stats.chunks == -(-stats.nbytes // CHUNK_BYTES)


def test_what_cannot_be_dealt_out_is_refused_by_name(manifest: Manifest, tmp_path: Path, imported: Import) -> None:
    with pytest.raises(FormatError, match=r"heads of .*k_proj"):
        plan_rank(manifest.config, "bfloat16", Rank(0, 8))
    with pytest.raises(FormatError, match="no rank 2 of 2"):
        Rank(2, 2)
    with pytest.raises(FormatError, match="choose bfloat16"):
        plan_rank(manifest.config, "float32", Rank(0, 2))
    wide = imported(make_tiny_llama(tmp_path / "f32"))
    with pytest.raises(FormatError, match="F32 of safetensors"):
        prepare_rank(wide, "bfloat16", Rank(0, 2), tmp_path / "out")
