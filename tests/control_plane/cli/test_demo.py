"""The demo keeps every promise on the real model, and fails loudly and cleanly where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from control_plane.cli.demo_service import processes_of

DEMO = [sys.executable, "-m", "control_plane.cli.main", "demo", "--json"]


def run_demo(folder: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Its temporary directory lies in `folder`, so that what it leaves can be seen."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(
        [*DEMO, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
    )


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_story_on_the_real_model(smollm2_gguf: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="demo-") as place:
        folder = Path(place)
        done = run_demo(folder, "--model", f"file://{smollm2_gguf}", timeout_s=590)
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert len(told["promises"]) >= 20
        assert [item for item in told["promises"] if not item["kept"]] == []
        assert [item["title"] for item in told["requests"]] == [
            "woken from zero",
            "woken from warm",
            "killed in mid-stream",
        ]
        assert len(told["requests"][2]["replicas"]) == 2
        assert list(folder.glob("stoker-demo-*")) == []
        assert processes_of(folder) == []


@pytest.mark.e2e
def test_a_model_that_is_not_there_ends_the_story_without_a_trace(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--model", f"file://{tmp_path}/none.gguf", timeout_s=120)
    assert done.returncode == 1
    assert "none.gguf" in json.loads(done.stderr.splitlines()[-1])["error"]["message"]
    assert list(tmp_path.glob("stoker-demo-*")) == []
    assert processes_of(tmp_path) == []
