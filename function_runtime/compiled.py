"""Which compiled kernels a replica may use: of its checkpoint's form, for its kind of device, by its very versions.

Only devices whose kernels are compiled at run time have any: on CPUs nothing is. Limits: the key asks torch for the
device, which makes its context; so it is for the replica's process, after the fork.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Final

import torch

from function_runtime.artifacts import ArtifactKey, Artifacts
from function_runtime.clock import Stopwatch
from function_runtime.errors import LoadError
from function_runtime.protocol import ReplicaSpec
from model_loader.errors import LoaderError
from model_loader.llama_layout import recipe_name
from model_loader.objects import ObjectStore, open_store

_KERNELS: Final = Path(__file__).parent / "engine" / "attention"


def is_compiled(device: str) -> bool:
    return device.partition(":")[0] != "cpu"


def key_of(spec: ReplicaSpec, dtype: str, device: str, versions: dict[str, str]) -> ArtifactKey:
    """`device`: kind and capability."""
    return ArtifactKey(f"{spec.identity}/{recipe_name(dtype)}", device, tuple(sorted(versions.items())))


def versions() -> dict[str, str]:
    """Of everything that makes or loads the code."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    found["cuda"] = str(torch.version.cuda)
    found["kernels"] = kernels_digest()
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "none"
    return found


def kernels_digest() -> str:
    """Of this engine's own kernels as they are written."""
    digest = hashlib.sha256()
    for path in sorted(_KERNELS.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def device_kind(device: str) -> str:
    found = torch.cuda.get_device_properties(torch.device(device))
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"{found.name} {found.major}.{found.minor} driver {driver}"


def make_context(device: str) -> str:
    """The device's context, which takes a good part of a second and some hundred megabytes of the device; gives its
    kind. Raises `LoadError` for a device that is not there."""
    try:
        torch.zeros(1, device=torch.device(device))
        return device_kind(device)
    except (RuntimeError, AssertionError) as error:
        message = f"the device {device} cannot be used: {error}"
        raise LoadError("device_unavailable", message, retry=True) from error


def restore_artifacts(spec: ReplicaSpec, dtype: str, root: Path, watch: Stopwatch) -> Artifacts | None:
    """Points the compilers to what is kept for this replica, and brings it there. None where nothing is compiled."""
    if not is_compiled(spec.options.device):
        return None
    with watch.run("artifacts") as stage:
        store: ObjectStore | None = None
        try:
            store = open_store(spec.kv_store) if spec.kv_store else None
        except LoaderError as error:
            stage.detail = f"no store: {error}"
        key = key_of(spec, dtype, device_kind(spec.options.device), versions())
        artifacts = Artifacts(key, root, store)
        found = artifacts.restore()
        os.environ.update(artifacts.environment())
        stage.nbytes, stage.tier = found.nbytes, found.tier
        stage.detail = found.detail or f"{found.files} files of {key.name[:12]}"
        return artifacts


def keep_artifacts(artifacts: Artifacts | None) -> None:
    """At an orderly end. What fails is told and costs the next replica its compiling."""
    if artifacts is None:
        return
    try:
        nbytes = artifacts.keep()
    except (OSError, LoaderError) as error:
        print(f"compiled kernels are not kept: {error}", flush=True)
        return
    if nbytes:
        print(f"compiled kernels kept: {nbytes} bytes as {artifacts.object_key}", flush=True)
