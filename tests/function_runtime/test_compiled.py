"""A replica finds the kernels of its kind, and no others; on a CPU nothing is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from function_runtime import compiled
from function_runtime.clock import Stopwatch
from function_runtime.errors import LoadError
from function_runtime.protocol import EngineOptions, ReplicaSpec

SPEC = ReplicaSpec("r", "f", 1, "default", "", "c" * 64, EngineOptions(device="cuda:0"))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "device_kind", lambda device: "NVIDIA H200 9.0 driver 12080")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")


def test_what_one_replica_compiled_the_next_slot_s_has(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, kv_store=f"file://{tmp_path / 'objects'}")
    watch = Stopwatch()
    first = compiled.restore_artifacts(spec, "bfloat16", tmp_path / "slot-0", watch)
    assert first is not None and watch.stages[-1].name == "artifacts" and watch.stages[-1].tier == "none"
    kernel = Path(os.environ["TRITON_CACHE_DIR"]) / "AB" / "k.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"code")
    compiled.keep_artifacts(first)
    second = compiled.restore_artifacts(spec, "bfloat16", tmp_path / "slot-1", watch)
    assert second is not None and watch.stages[-1].tier == "store"
    assert (Path(os.environ["TRITON_CACHE_DIR"]) / "AB" / "k.cubin").read_bytes() == b"code"
    other = compiled.restore_artifacts(spec, "float16", tmp_path / "slot-1", watch)
    assert other is not None and watch.stages[-1].tier == "none"


def test_on_a_cpu_nothing_is_compiled(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, options=EngineOptions(device="cpu"))
    watch = Stopwatch()
    assert compiled.restore_artifacts(spec, "float32", tmp_path, watch) is None
    assert watch.stages == [] and os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    compiled.keep_artifacts(None)


def test_a_store_that_cannot_be_opened_costs_nothing_but_the_kernels(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, kv_store="ftp://nowhere")
    watch = Stopwatch()
    assert compiled.restore_artifacts(spec, "bfloat16", tmp_path, watch) is not None
    assert watch.stages[-1].tier == "none"


def test_a_change_of_any_version_or_kernel_is_another_key() -> None:
    known = compiled.versions()
    assert {"torch", "triton", "cuda", "kernels"} <= known.keys()
    key = compiled.key_of(SPEC, "bfloat16", "H200", known)
    for name in known:
        assert compiled.key_of(SPEC, "bfloat16", "H200", {**known, name: "other"}).name != key.name
    assert compiled.key_of(SPEC, "bfloat16", "H100", known).name != key.name
    assert compiled.key_of(SPEC, "bfloat16", "H200", dict(known)).name == key.name


def test_a_device_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(LoadError, match="the device meta:7x cannot be used") as refused:
        compiled.make_context("meta:7x")
    assert refused.value.code == "device_unavailable" and refused.value.retry
