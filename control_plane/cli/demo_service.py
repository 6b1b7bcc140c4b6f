"""A private service for the demo: `stoker up` as a process of its own, in a directory and on a port nobody else uses.

Leaving the context ends everything it started and says whether anything was left. Limits: Linux (/proc, pidfds).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control_plane.backends.home import pool_directory
from control_plane.cli.data_dir import DataDir
from control_plane.cli.down import end_all
from control_plane.cli.failure import CommandError
from control_plane.client import Client

START_WITHIN_S: Final = 20.0
LOOK_EVERY_S: Final = 0.05
"""The HTTP surface has no event for states of replicas; this bounds how late the demo notices one."""


@dataclass(frozen=True, slots=True)
class DemoService:
    place: DataDir
    client: Client
    pid: int
    started_s: float
    """From the start of the process until it was ready."""

    def replicas(self) -> list[dict[str, Any]]:
        answer = self.client.request("GET", "/api/v1/replicas", query={"all": "1"})
        found: list[dict[str, Any]] = answer["data"]
        return found

    def living(self) -> list[dict[str, Any]]:
        return [item for item in self.replicas() if item["state"] not in ("ended", "failed")]

    def slot(self) -> dict[str, Any]:
        """Zeroes until the agent is connected."""
        unknown = {"memory_baseline_bytes": 0, "memory_used_bytes": 0, "warm_workers": 0, "pool_used_bytes": 0}
        found: dict[str, Any] = next(iter(self.client.request("GET", "/api/v1/slots")["data"]), unknown)
        return found

    def shared_memory(self) -> list[Path]:
        """Where this service's pools lie; gone with it."""
        return [pool_directory(self.place.path, self.place.path / "slots" / "0", "slot-0")]

    def until(self, what: str, holds: Callable[[], bool], within_s: float) -> float:
        """Seconds until it held."""
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > within_s:
                raise CommandError(f"waited {within_s:g} s in vain: {what}", code="demo_failed")
            time.sleep(LOOK_EVERY_S)
        return time.monotonic() - began_s

    def diagnosis(self) -> str:
        """The ends of the logs, for a story that went wrong."""
        parts = []
        logs = [self.place.path / "up.log", self.place.path / "logs" / "control.log"]
        for path in [*logs, *sorted(self.place.path.glob("slots/*/agent.log"))]:
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()[-15:]
                parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)


@contextlib.contextmanager
def private_service(*, keep: bool) -> Iterator[DemoService]:
    signal.signal(signal.SIGTERM, interrupt)  # whoever ends the demo ends what it started, too
    directory = Path(tempfile.mkdtemp(prefix="stoker-demo-"))
    place = DataDir.at(directory)
    command = [sys.executable, "-m", "control_plane.cli.main", "up", "--data-dir", str(directory), "--port", "0"]
    began_s = time.monotonic()
    with (directory / "up.log").open("wb") as log:
        # A session of its own: Ctrl-C at the terminal reaches the demo alone, which then ends the service in order.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        client = Client(place.endpoint)
        await_ready(client, process, directory)
        yield DemoService(place, client, process.pid, time.monotonic() - began_s)
    finally:
        with uninterrupted():
            end_all(place, 10.0)
            if process.poll() is None:
                process.kill()
            process.wait()
            if not keep:
                shutil.rmtree(directory, ignore_errors=True)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def await_ready(client: Client, process: subprocess.Popen[bytes], directory: Path) -> None:
    from control_plane.client import ClientError

    deadline_s = time.monotonic() + START_WITHIN_S
    while True:
        with contextlib.suppress(ClientError):
            client.request("GET", "/health/ready")
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            told = (directory / "up.log").read_text(errors="replace")[-2000:]
            raise CommandError(f"the service did not become ready: {told.strip() or 'it said nothing'}",
                               code="demo_failed")  # fmt: skip
        time.sleep(LOOK_EVERY_S / 10)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Cleaning up is not interrupted half way by an impatient Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def processes_of(directory: Path) -> list[int]:
    """Living processes whose command line names the directory: what would be a leak after the end."""
    needle, found = os.fsencode(str(directory)), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    """No process has the pid, or only a corpse that waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")
