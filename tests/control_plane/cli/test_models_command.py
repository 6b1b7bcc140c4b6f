"""`stoker models` against a running service."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.control_plane.cli.conftest import Stoker
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import wait_for
from tests.support.service import Service


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = make_tiny_llama(tmp_path / "m", seed=len(tmp_path.name))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def test_a_model_is_imported_looked_at_verified_and_removed(stoker: Stoker, root: Path) -> None:
    uri = f"file://{root}"
    said = stoker("models", "import", uri)
    assert said.status == 0, said.err
    assert f"{uri} is " in said.out and "llama safetensors float32" in said.out and "licence apache-2.0" in said.out
    assert f"importing {uri}: read" in said.err, "without a terminal: a line per stage"
    identity = stoker("models", "import", uri, "--json").json["identity"]
    row = next(line for line in stoker("models", "ls").out.splitlines() if uri in line)
    assert row.startswith(identity[:12]) and row.rstrip().endswith("ready")
    shown = stoker("models", "inspect", uri, "--tensors").out
    assert shown.startswith(identity)
    assert "model.layers.1.mlp.down_proj.weight" in shown and "licence apache-2.0" in shown
    assert "are as they were imported, 0 are not" in stoker("models", "verify", identity[:8]).out
    path = root / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"abcd")
    bad = stoker("models", "verify", identity[:8])
    assert (bad.status, f"{path}: bytes 0 to {len(content)} have xxh3-128" in bad.out) == (1, True)
    assert "0 models are as they were imported, 1 are not" in bad.out
    removed = stoker("models", "rm", identity[:8])
    assert "is removed" in removed.out and f"left where it was: {path}" in removed.err
    gone = stoker("models", "inspect", uri)
    assert (gone.status, "has been imported" in gone.err) == (1, True)


def test_a_model_in_use_is_not_removed(stoker: Stoker, root: Path, service: Service) -> None:
    uri = f"file://{root}"
    assert stoker("deploy", "user-of-it", "--model", uri, "--engine", "stub").status == 0
    refused = stoker("models", "rm", uri)
    assert (refused.status, "is used by default/user-of-it" in refused.err) == (1, True)
    assert "user-of-it" in next(line for line in stoker("models", "ls").out.splitlines() if uri in line)
    stoker("delete", "user-of-it")
    assert stoker("models", "rm", uri).status == 0


def test_what_cannot_be_imported_says_what_and_what_next(stoker: Stoker, root: Path, tmp_path: Path) -> None:
    (root / "model.safetensors").rename(root / "pytorch_model.bin")
    refused = stoker("models", "import", f"file://{root}")
    assert refused.status == 1
    assert "pytorch_model.bin is a pickle" in refused.err and "python -c" in refused.err
    shutil.rmtree(root)
    missing = stoker("models", "import", f"file://{root}")
    assert (missing.status, "there is no model at" in missing.err) == (1, True)
    assert stoker("models", "import", "gopher://x").status == 1


def test_a_model_is_warmed_and_evicted_on_command(stoker: Stoker, root: Path, service: Service) -> None:
    uri = f"file://{root}"
    identity = stoker("models", "import", uri, "--json").json["identity"]
    warmed = stoker("models", "warm", uri, "--dtype", "float32")
    assert warmed.status == 0, warmed.err
    assert f"{identity[:12]} is in the pool of slot-0" in warmed.out
    wait_for(lambda: "pool       slot-0: ready, float32" in stoker("models", "inspect", uri).out, 30)
    assert "chunks verified" in stoker("models", "inspect", uri).out
    evicted = stoker("models", "evict", identity[:8], "--slot", "slot-0")
    assert evicted.status == 0 and "left the pool of slot-0" in evicted.out
    wait_for(lambda: "slot-0: ready" not in stoker("models", "inspect", uri).out, 30)
    assert "is in no pool" in stoker("models", "evict", uri).out
    unknown = stoker("models", "warm", uri, "--slot", "slot-9")
    assert (unknown.status, "no slot slot-9" in unknown.err) == (1, True)
    bad = stoker("models", "warm", uri, "--dtype", "int3")
    assert (bad.status, "int3" in bad.err) == (1, True)
