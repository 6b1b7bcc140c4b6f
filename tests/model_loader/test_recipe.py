import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from model_loader.errors import FormatError, IntegrityError, OutOfSpace, SourceMissing
from model_loader.llama_layout import prepared_bytes
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.recipe import cast_values, prepare
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_files import make_tiny_gguf

Import = Callable[[Path], Manifest]


def expected(source: Path) -> dict[str, np.ndarray]:
    raw = load_file(source / "model.safetensors")
    tensors = {"embed": raw["model.embed_tokens.weight"], "norm": raw["model.norm.weight"]}
    if "lm_head.weight" in raw:
        tensors["lm_head"] = raw["lm_head.weight"]
    for layer in range(2):
        at, to = f"model.layers.{layer}", f"layers.{layer}"
        tensors[f"{to}.qkv"] = np.concatenate([raw[f"{at}.self_attn.{p}_proj.weight"] for p in "qkv"])
        tensors[f"{to}.o"] = raw[f"{at}.self_attn.o_proj.weight"]
        tensors[f"{to}.gate_up"] = np.concatenate([raw[f"{at}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
        tensors[f"{to}.down"] = raw[f"{at}.mlp.down_proj.weight"]
        tensors[f"{to}.attn_norm"] = raw[f"{at}.input_layernorm.weight"]
        tensors[f"{to}.mlp_norm"] = raw[f"{at}.post_attention_layernorm.weight"]
    return tensors


def assert_equal(prepared: PreparedFile, tensors: dict[str, np.ndarray]) -> None:
    assert set(prepared.keys()) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(by_outputs(prepared, name), values, err_msg=name)


def by_outputs(prepared: PreparedFile, name: str) -> np.ndarray:
    """The tensor as the checkpoint has it: matrices are prepared transposed, but for an untied embedding."""
    stored, names = prepared.tensor(name), prepared.keys()
    return stored.T if stored.ndim == 2 and (name != "embed" or "lm_head" not in names) else stored


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_both_formats_give_the_same_engine_tensors(tiny: Path, tiny_gguf: Path, imported: Import, form: str) -> None:
    manifest = imported(tiny if form == "safetensors" else tiny_gguf)
    out = manifest.directory / "out"
    prepare(manifest, "float32", out)
    prepared = PreparedFile.open(out, verify=True)
    assert_equal(prepared, expected(tiny))
    assert prepared.identity == manifest.identity
    assert out.stat().st_size <= prepared_bytes(manifest.config, "float32")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices_are_near_what_they_were(tiny: Path, tmp_path: Path, imported: Import, kind: str) -> None:
    manifest = imported(make_tiny_gguf(tmp_path / "q.gguf", tiny, kind=kind))
    prepare(manifest, "float32", tmp_path / "out")
    prepared = PreparedFile.open(tmp_path / "out", verify=True)
    for name, values in expected(tiny).items():
        bits = {"F16": 10, "BF16": 8, "Q8_0": 7}.get(kind, 3 if kind.startswith("Q4") else 4)
        assert np.abs(by_outputs(prepared, name) - values).max() <= np.abs(values).max() * 2.0**-bits, name


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_stored_halves_are_widened_exactly_and_kept_exactly(tmp_path: Path, imported: Import, stored: str) -> None:
    wide, narrow = make_tiny_llama(tmp_path / "a"), make_tiny_llama(tmp_path / "b", dtype=stored)
    manifest = imported(narrow)
    assert manifest.config.dtype == stored
    prepare(manifest, stored, tmp_path / "same")
    prepare(manifest, "float32", tmp_path / "wide")
    same = PreparedFile.open(tmp_path / "same", verify=True)
    widened = PreparedFile.open(tmp_path / "wide", verify=True)
    for name, values in expected(wide).items():
        cast = cast_values(values.reshape(-1), stored, name).view(np.uint16).reshape(values.shape)
        np.testing.assert_array_equal(by_outputs(same, name), cast, err_msg=name)
        back = cast.view(np.float16).astype(np.float32) if stored == "float16" else (
            cast.astype(np.uint32) << 16
        ).view(np.float32)  # fmt: skip
        np.testing.assert_array_equal(by_outputs(widened, name), back, err_msg=name)


def test_a_tensor_written_in_panels_is_the_same(
    tiny: Path, tmp_path: Path, imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = imported(tiny)
    prepare(manifest, "float32", tmp_path / "whole")
    monkeypatch.setattr("model_loader.recipe._PANEL_VALUES", 64 * 50)
    prepare(manifest, "float32", tmp_path / "panels")
    whole, panels = (PreparedFile.open(tmp_path / name, verify=True) for name in ("whole", "panels"))
    assert panels.chunks() == whole.chunks()


def test_what_is_held_beside_the_form_does_not_grow_with_the_processors(
    tmp_path: Path, imported: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panel for each of as many tensors as there are threads would be twice as much."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "layers": 4}
    manifest = imported(make_tiny_llama(tmp_path / "model", **sizes))
    monkeypatch.setattr("model_loader.recipe._PANEL_VALUES", 256 * 1024)
    monkeypatch.setattr("model_loader.recipe._CHUNK_VALUES", 16 * 1024)
    tracemalloc.start()
    try:
        prepare(manifest, "float32", tmp_path / "form", threads=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000, f"{peak} bytes"
    PreparedFile.open(tmp_path / "form", verify=True)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32) * 1e3
    ties = (np.arange(0x3F800000, 0x3F880000, 0x4000, dtype=np.uint32)).view(np.float32)
    values = np.concatenate([values, ties, np.array([np.inf, -np.inf, 0.0, -0.0, 3e38, 3.4e38], np.float32)])
    ours = cast_values(values, "bfloat16", "t")
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(ours, theirs)
    nan = cast_values(np.array([np.nan], np.float32), "bfloat16", "t")
    assert nan[0] & 0x7FFF > 0x7F80


def test_values_beyond_float16_are_refused_with_a_remedy() -> None:
    with pytest.raises(FormatError, match="choose bfloat16"):
        cast_values(np.array([1e6], np.float32), "float16", "t")


def test_a_tied_head_is_absent(tmp_path: Path, imported: Import) -> None:
    manifest = imported(make_tiny_llama(tmp_path / "tied", tie=True))
    prepare(manifest, "float32", tmp_path / "out")
    names = PreparedFile.open(tmp_path / "out", verify=True).keys()
    assert "lm_head" not in names


def test_progress_ends_at_the_total(tiny: Path, tmp_path: Path, imported: Import) -> None:
    seen: list[Progress] = []
    prepare(imported(tiny), "float32", tmp_path / "out", seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_file_swapped_after_the_import_is_not_used(tiny: Path, tiny_gguf: Path, imported: Import, form: str) -> None:
    path = tiny / "model.safetensors" if form == "safetensors" else tiny_gguf
    manifest = imported(tiny if form == "safetensors" else tiny_gguf)
    content = bytearray(path.read_bytes())
    content[-40] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match="import the model again"):
        prepare(manifest, "float32", manifest.directory / "out")
    assert not list(manifest.directory.glob("*out*"))


def test_a_file_cut_or_gone_after_the_import_is_named(tiny: Path, imported: Import) -> None:
    manifest = imported(tiny)
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(IntegrityError, match=r"bytes, expected are .* import the model again"):
        prepare(manifest, "float32", manifest.directory / "out")
    path.unlink()
    with pytest.raises(SourceMissing, match=r"cannot read .* import the model again"):
        prepare(manifest, "float32", manifest.directory / "out")


def test_an_unknown_dtype_is_refused(tiny: Path, tmp_path: Path, imported: Import) -> None:
    with pytest.raises(FormatError, match="int8"):
        prepare(imported(tiny), "int8", tmp_path / "out")


# --- as a process -----------------------------------------------------------------------------------------------


def command(manifest: Manifest, out: Path) -> list[str]:
    return [sys.executable, "-m", "model_loader.recipe", str(manifest.path), "--out", str(out)]


def test_the_process_reports_and_imports_neither_torch_nor_tokenizers(
    tiny: Path, tmp_path: Path, imported: Import
) -> None:
    manifest = imported(tiny)
    code = (
        "import sys; from model_loader.recipe import main; status = main(sys.argv[1:]);"
        "sys.exit(status or bool({'torch', 'tokenizers', 'gguf', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(manifest.path), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "done"
    assert events[-1]["identity"] == manifest.identity
    assert {event["event"] for event in events[:-1]} == {"progress"}


def test_a_full_disk_is_reported_and_leaves_nothing(tiny: Path, tmp_path: Path, imported: Import) -> None:
    manifest = imported(tiny)
    folder = tmp_path / "pool"
    folder.mkdir()
    done = subprocess.run(
        command(manifest, folder / "out"), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert done.returncode == 1
    event = json.loads(done.stdout.splitlines()[-1])
    assert (event["event"], event["code"], event["retry"]) == ("error", OutOfSpace.code, True)
    assert list(folder.iterdir()) == []


def test_killed_at_any_point_it_leaves_no_file_under_the_final_name(tmp_path: Path, imported: Import) -> None:
    manifest = imported(make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=3, vocab=4096))
    folder = tmp_path / "pool"
    folder.mkdir()
    for after_lines in (1, 2, 3):
        process = subprocess.Popen(
            [*command(manifest, folder / "out"), "--threads", "1"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(after_lines):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for found in folder.iterdir():
            if found.name == "out":
                PreparedFile.open(found, verify=True)
                found.unlink()
            else:
                with pytest.raises((FormatError, IntegrityError)):
                    PreparedFile.open(found, verify=True)
    shutil.rmtree(folder)


def test_it_ends_when_nobody_reads_its_progress(tmp_path: Path, imported: Import) -> None:
    manifest = imported(make_tiny_llama(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=3, vocab=4096))
    process = subprocess.Popen(command(manifest, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
    assert not (tmp_path / "out").exists()
