"""A whole Stoker for tests and benchmarks: `stoker up` as a process of its own, with everything it started.

`Service` starts it on a free loopback port and a data directory of its own, finds the pids of control plane, agent,
workers and replicas, kills what it is told to, and leaves nothing behind when it is closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.patience import PATIENCE_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HttpError(Exception):
    def __init__(self, status: int, body: str, headers: dict[str, str]) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status, self.body, self.headers = status, body, headers


class Service:
    """One `stoker up` and its data directory; `restart` brings it back on the same port after a death."""

    def __init__(self, data_dir: Path, *, env: dict[str, str] | None = None, args: tuple[str, ...] = ()) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.args = args
        # Compiled sources are kept, as they are for any user: compiling them anew at each start takes most of a second.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.env = {**inherited, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = data_dir / "up.log"

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, ready_within_s: float = PATIENCE_S) -> float:
        """Starts `stoker up`; returns the seconds until /health/ready answered 200."""
        begin = time.perf_counter()
        self.launch()
        self.wait_ready(ready_within_s)
        return time.perf_counter() - begin

    def launch(self) -> None:
        """Starts it, and does not wait."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "control_plane.cli.main", "up", "--data-dir", str(self.data_dir)]
        command += ["--port", str(self.port), *self.args]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env, start_new_session=True)

    def wait_ready(self, within_s: float = PATIENCE_S) -> None:
        deadline = time.perf_counter() + within_s
        while True:
            with contextlib.suppress(OSError, HttpError):
                self.call("GET", "/health/ready", timeout_s=2)
                return
            if self.process is None or self.process.poll() is not None:
                code = self.process.returncode if self.process is not None else "nothing"
                raise RuntimeError(f"stoker up ended with {code}:\n{self.tail()}")
            if time.perf_counter() > deadline:
                raise RuntimeError(f"not ready within {within_s} s:\n{self.tail()}")
            time.sleep(0.005)

    def tail(self, nbytes: int = 4000) -> str:
        return self.log_path.read_bytes()[-nbytes:].decode(errors="replace") if self.log_path.exists() else ""

    def close(self) -> None:
        """Ends control plane, agents and everything they started, and checks that nothing is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for directory in self.pool_directories():
            shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- who is there ---------------------------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """Every living process whose command line or environment names this data directory, agents first."""
        needle = str(self.data_dir)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(needle in part for part in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(found))

    def pool_directories(self) -> list[Path]:
        names = [f"slot-{path.name}" for path in (self.data_dir / "slots").glob("*")]
        digests = [hashlib.sha256((os.path.realpath(self.data_dir) + name).encode()).hexdigest()[:12] for name in names]
        return [path for digest in digests if (path := Path(f"/dev/shm/stoker-{digest}")).exists()]

    def agent_pid(self, slot: int = 0) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((self.data_dir / "slots" / str(slot) / "agent.json").read_text())["pid"])
        return None

    def replicas(self, *, live: bool = True) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.call("GET", "/api/v1/replicas")["data"]
        return [row for row in rows if not live or row["state"] not in ("ended", "failed")]

    def kill(self, victim: str) -> bool:
        """kill -9 of 'replica', 'agent' or 'gateway'; False: there was none."""
        pid: int | None
        if victim == "gateway":
            pid = self.process.pid if self.process and self.process.poll() is None else None
        elif victim == "agent":
            pid = self.agent_pid()
        else:
            pid = next((row["pid"] for row in self.replicas() if row["pid"]), None)
        if not pid:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        if victim == "gateway" and self.process is not None:
            self.process.wait()
        return True

    def runs(self, row: dict[str, Any]) -> bool:
        """Whether the process of a replica is there."""
        return Path(f"/proc/{row['pid']}").exists()

    def kill_replica(self, row: dict[str, Any]) -> None:
        """By its row alone: without asking the control plane, which may be dead."""
        os.kill(row["pid"], signal.SIGKILL)

    # --- HTTP -----------------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        path = self.data_dir / "admin.key"
        return path.read_text().strip() if path.exists() else "none"

    def open(self, method: str, path: str, body: Any = None, timeout_s: float = 120, **headers: str) -> Any:
        """The open response; raises HttpError for a status of 400 and above."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        names = {"authorization": f"Bearer {self.key}", "content-type": "application/json", **names}
        request = urllib.request.Request(self.url + path, data, names, method=method)
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise HttpError(error.code, error.read().decode(errors="replace"), dict(error.headers)) from None

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 120, **headers: str) -> Any:
        with self.open(method, path, body, timeout_s, **headers) as response:
            text = response.read()
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text.decode(errors="replace")

    def events(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Iterator[tuple[int, Any]]:
        """(id, data) of each SSE event of a stream, `[DONE]` left out."""
        with self.open(method, path, body, **headers) as response:
            place = 0
            for raw in response:
                line = raw.strip()
                if line.startswith(b"id:"):
                    place = int(line[3:])
                elif line.startswith(b"data:") and line != b"data: [DONE]":
                    yield place, json.loads(line[5:])

    def deploy(self, name: str, model: str, **fields: Any) -> dict[str, Any]:
        """Deploys and waits until the checkpoint is imported."""
        spec = {"name": name, "model": model, **fields}
        self.call("PUT", f"/api/v1/functions/{name}", spec)
        return self.wait_imported(name)

    def wait_imported(self, name: str, within_s: float = 180) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            status: dict[str, Any] = self.call("GET", f"/api/v1/functions/{name}/status")
            state = status.get("import", {}).get("state")
            if state == "ready":
                return status
            if state == "failed":
                raise RuntimeError(f"import of {name} failed: {status}")
            time.sleep(0.05)
        raise RuntimeError(f"{name} not imported within {within_s} s: {status}")

    def wait_zero(self, within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while self.replicas():
            if time.monotonic() > deadline:
                raise RuntimeError(f"still running after {within_s} s: {self.replicas()}")
            time.sleep(0.02)

    def wait_warm(self, within_s: float = 60) -> None:
        """Until a forked worker waits in the slot."""
        deadline = time.monotonic() + within_s
        while True:
            slots = self.call("GET", "/api/v1/slots")["data"]
            if any(slot.get("warm_workers", 0) > 0 for slot in slots):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no warm worker after {within_s} s: {slots}")
            time.sleep(0.02)
