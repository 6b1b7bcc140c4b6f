"""The few tests that failed beside others are judged again alone; random faults never are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUSY = """
import os
def test_needs_the_machine():
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""
ALWAYS = """
def test_is_wrong():
    assert False
"""


def run(folder: Path, **modules: str) -> tuple[int, str]:
    for name, text in modules.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"test_{path.name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hearing", "-n", "2", "--rootdir", str(folder), "-c", "/dev/null"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("modules", "code", "heard"),
    [
        ({"busy": BUSY}, 0, True),
        ({"always": ALWAYS}, 1, True),
        ({"busy": BUSY, "always": ALWAYS}, 1, True),
        ({"tests__chaos__busy": BUSY}, 1, False),
        ({f"busy{number}": BUSY for number in range(4)}, 1, False),
    ],
    ids=["beside others", "alone too", "one of two", "random faults", "too many"],
)
def test_what_is_heard_again(tmp_path: Path, modules: dict[str, str], code: int, heard: bool) -> None:
    returncode, output = run(tmp_path, **modules)
    assert (returncode, "once more, alone" in output) == (code, heard), output
