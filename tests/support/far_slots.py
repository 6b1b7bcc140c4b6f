"""Slots that share nothing with a `stoker up` but the network: agents at loopback addresses of their own, started by
hand with the hashes of their tokens.

`FarSlots.environment` is what the service is told of them; `opened_below` says what their processes have open or mapped
of a folder that is not theirs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from function_runtime.protocol import agent_token, peer_token, token_hash


class FarAgent:
    def __init__(
        self, folder: Path, slot_id: str, host: str, secret: str, *arguments: str, env: dict[str, str]
    ) -> None:
        self.env = {**os.environ, **env}
        self.slot_id, self.host = slot_id, host
        self.folder = folder / slot_id
        self.pool = Path(f"/dev/shm/stoker-test-{secrets.token_hex(6)}")
        with socket.create_server((host, 0)) as probe:
            self.port = int(probe.getsockname()[1])
        token = agent_token(secret.encode(), slot_id)
        self.command = [
            *(sys.executable, "-m", "function_runtime.agent", "--slot-dir", str(self.folder), "--slot-id", slot_id),
            *("--pool-dir", str(self.pool), "--listen", f"{host}:{self.port}", "--disk-bytes", str(1 << 30)),
            *("--token-hash", token_hash(token), "--peer-token-hash", token_hash(peer_token(token)), *arguments),
        ]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.env,
                start_new_session=True,
            )

    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")[-4000:]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def opened_below(self, folder: Path) -> set[str]:
        """Paths there that its processes have open, mapped or as working directory."""
        found: set[str] = set()
        for process in self.family():
            proc = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                names = [os.readlink(link) for link in (*(proc / "fd").iterdir(), proc / "cwd")]
                mapped = [line.split(maxsplit=5)[-1].strip() for line in (proc / "maps").read_text().splitlines()]
                found |= {name for name in (*names, *mapped) if name.startswith(f"{folder}/")}
        return found

    def close(self) -> None:
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.pool, ignore_errors=True)


class FarSlots:
    """Use as a context manager."""

    def __init__(
        self, folder: Path, hosts: tuple[str, ...], *arguments: str, env: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._secret = secrets.token_hex(32)
        self._secret_path = folder / "agents.secret"
        self._secret_path.write_text(self._secret + "\n")
        self.agents = [
            FarAgent(folder, f"far-{number}", host, self._secret, *arguments, env=env or {})
            for number, host in enumerate(hosts)
        ]

    @property
    def environment(self) -> dict[str, str]:
        places = ",".join(f"{agent.slot_id}={agent.host}:{agent.port}" for agent in self.agents)
        return {"STOKER_AGENTS": places, "STOKER_AGENT_SECRET_FILE": str(self._secret_path)}

    def __enter__(self) -> FarSlots:
        for agent in self.agents:
            agent.start()
        for agent in self.agents:
            self._until_it_listens(agent)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()

    def _until_it_listens(self, agent: FarAgent, within_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + within_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection((agent.host, agent.port), timeout=1):
                return
            if time.monotonic() > deadline_s or agent.process.poll() is not None:
                raise AssertionError(f"{agent.slot_id} does not listen: {agent.log()}")
            time.sleep(0.01)
