"""Containers as processes: started by the launcher, signalled, waited for; and commands run inside them.

What this machine can do is found out once: namespaces of mounts and processes, or neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.kubernetes.kubelet.forking import FORKS, REPOSITORY, Forked, module_of

Object = dict[str, Any]
LAUNCHER = Path(__file__).with_name("launcher.py")
_PYTHON = [sys.executable, "-I", "-S", str(LAUNCHER)]
# A /dev/shm of its own: containers have one of 64 MiB.
_SHM_OPTIONS = "mode=1777,size=64m"


class StartError(Exception):
    """A container that could not be started: reported as CreateContainerError or RunContainerError."""


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@cache
def can_isolate() -> bool:
    """Whether mount and PID namespaces, with a fresh /proc, are to be had here."""
    if os.environ.get("STOKER_TEST_NO_NAMESPACES"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        return _tried(Path(folder))


def _tried(folder: Path) -> bool:
    reads, writes = os.pipe()
    spec = _described(["true"], {"PATH": "/usr/bin:/bin"}, "/", [], folder) | {"report": writes, "isolated": True}
    try:
        done = subprocess.run(
            _PYTHON, input=json.dumps(spec).encode(), pass_fds=[writes], capture_output=True, timeout=120, check=False
        )
        return done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        os.close(reads)
        os.close(writes)


def kept_paths() -> list[str]:
    """What a container needs of this machine even where a volume lies over it."""
    wanted = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)}
    return sorted(wanted)


def _described(command: list[str], env: dict[str, str], cwd: str, mounts: list[Object], root: Path) -> Object:
    return {"command": command, "env": env, "cwd": cwd, "mounts": mounts, "root": str(root), "kept": kept_paths()}


@dataclass(slots=True)
class Running:
    """A container's process: `pid` is its own, `launcher` the process that waits for it."""

    pid: int
    launcher: asyncio.subprocess.Process | Forked
    isolated: bool
    env: dict[str, str]

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.isolated:
                os.kill(self.pid, number)
            elif number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    async def wait(self) -> int:
        code = await self.launcher.wait()
        if not self.isolated:
            # Without a PID namespace nobody else ends what the container left behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


async def start(
    command: list[str],
    env: dict[str, str],
    cwd: str,
    mounts: list[Mount],
    root: Path,
    log: IO[bytes],
    forks: bool = True,
) -> Running:
    """`forks`: programs that have been imported already are not started from nothing (`forking.py`)."""
    isolated = can_isolate()
    described = [{"source": str(each.source), "target": each.target, "read_only": each.read_only} for each in mounts]
    if isolated:
        targets = {each["target"] for each in described}
        if "/dev/shm" not in targets:
            described.append({"source": "", "target": "/dev/shm", "options": _SHM_OPTIONS})
        os.makedirs(root, exist_ok=True)
    else:
        command, env = rewritten(command, env, mounts)
        cwd = next((str(each.source) for each in mounts if each.target == cwd), cwd)
    spec = _described(command, env, cwd, described, root) | {"isolated": isolated}
    if forks and module_of(command) is not None:
        return await _forked(spec, log)
    reads, writes = os.pipe()
    try:
        launcher = await asyncio.create_subprocess_exec(
            *_PYTHON, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writes], start_new_session=True
        )
        assert launcher.stdin is not None
        launcher.stdin.write(json.dumps(spec | {"report": writes}).encode())
        launcher.stdin.close()
    finally:
        os.close(writes)
    try:
        with os.fdopen(reads, "rb") as pipe:
            said = await asyncio.get_running_loop().run_in_executor(None, pipe.read)
    except asyncio.CancelledError:
        # The container dies with its launcher.
        with suppress(ProcessLookupError):
            launcher.kill()
        raise
    try:
        return Running(_pid_of(said), launcher, isolated, env)
    except StartError:
        await launcher.wait()
        raise


async def _forked(spec: Object, log: IO[bytes]) -> Running:
    reads, writes = os.pipe()
    ends, exits = os.pipe()
    launcher = Forked(ends)
    try:
        FORKS.send(spec, log, writes, exits)
    finally:
        os.close(writes)
        os.close(exits)
    said = concurrent.futures.ThreadPoolExecutor(1).submit(_read, reads)
    try:
        pid = _pid_of(await asyncio.wrap_future(said))
    except asyncio.CancelledError:
        # Whose it is is known only when it is there; nobody else would end it.
        launcher.close()
        with suppress(StartError, ProcessLookupError, TimeoutError):
            os.kill(_pid_of(said.result(60)), signal.SIGKILL)
        raise
    except StartError:
        launcher.close()
        raise
    return Running(pid, launcher, spec["isolated"], spec["env"])


def _read(reads: int) -> bytes:
    with os.fdopen(reads, "rb") as pipe:
        return pipe.read()


def _pid_of(said: bytes) -> int:
    report = json.loads(said) if said else {"error": "the launcher ended"}
    if "error" in report:
        raise StartError(str(report["error"]))
    return int(report["pid"])


async def execute(container: Running, command: list[str], timeout_s: float) -> tuple[int, bytes]:
    """Runs a command inside a container: its exit code, and what it printed."""
    if container.isolated:
        spec = json.dumps({"pid": container.pid, "command": command, "env": container.env, "cwd": "/"}).encode()
        process = await asyncio.create_subprocess_exec(
            *_PYTHON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    else:
        spec = b""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=container.env
        )
    try:
        output, _ = await asyncio.wait_for(process.communicate(spec), timeout_s)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return 124, b"command timed out"
    return process.returncode or 0, output


def rewritten(command: list[str], env: dict[str, str], mounts: list[Mount]) -> tuple[list[str], dict[str, str]]:
    """Paths of volumes in a command and environment, where the container cannot have them mounted."""

    sources = {each.target.rstrip("/"): str(each.source) for each in mounts}
    targets = "|".join(re.escape(each) for each in sorted(sources, key=len, reverse=True))
    # In one pass: where a volume lies may look like another volume's path.
    whole = re.compile(rf"(?<![A-Za-z0-9_/.\-])(?:{targets})(?=$|[/:,; \"'])")

    def one(text: str) -> str:
        return whole.sub(lambda match: sources[match[0]], text) if sources else text

    return [one(each) for each in command], {name: one(each) for name, each in env.items()}
