"""A wait that ran out beside other tests is judged again alone; nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.support import hearing

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    report = yield
    hearing.mark(call, report)
    return report
"""
BUSY = """
import asyncio, os, pathlib
async def wait():
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)
def test_waits():
    if "PYTEST_XDIST_WORKER" in os.environ:
        asyncio.run(wait())
"""
ALWAYS = """
import subprocess
def test_waits():
    subprocess.run(["sleep", "60"], timeout=0.01)
"""
WRONG = """
import os
def test_is_wrong_once():
    assert "PYTEST_XDIST_WORKER" not in os.environ
"""


def run(folder: Path, **modules: str) -> tuple[int, str]:
    folder.joinpath("conftest.py").write_text(CONFTEST)
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
        ({"wrong": WRONG}, 1, False),
        ({"tests__chaos__busy": BUSY}, 1, False),
        ({f"busy{number}": BUSY for number in range(4)}, 1, False),
    ],
    ids=["beside others", "alone too", "a wrong value", "random faults", "too many"],
)
def test_what_is_heard_again(tmp_path: Path, modules: dict[str, str], code: int, heard: bool) -> None:
    returncode, output = run(tmp_path, **modules)
    assert (returncode, "once more, alone" in output) == (code, heard), output
