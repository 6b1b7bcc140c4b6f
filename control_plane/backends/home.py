"""A slot's place on this machine: its directory, and the agent that is found there or started.

The agent is detached (own session, no pipe to us): it and its replicas outlive us, and whoever holds `agent.lock` is
the one that lives. Limits: one machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from control_plane.backends.base import SlotUnavailable
from control_plane.settings import Settings
from function_runtime.protocol import AgentInfo

logger = logging.getLogger(__name__)

LISTEN_S: Final = 15.0
"""An agent that does not listen within this time of its start has failed."""
LOOK_S: Final = 0.005
"""Pause between looks at agent.json while an agent starts: the bound on the delay this adds."""
Registrar = Callable[[AgentInfo], Awaitable[None]]


def pool_directory(data_dir: Path, slot_dir: Path, slot_id: str) -> Path:
    """Shared memory if there is any; the name ties it to this data directory."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        return slot_dir / "pool"
    digest = hashlib.sha256((os.path.realpath(data_dir) + slot_id).encode()).hexdigest()[:12]
    return shared / f"stoker-{digest}"


def _await_end(pid: int, within_s: float) -> None:
    with suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(watch, select.POLLIN)
            if not poller.poll(within_s * 1000):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
                poller.poll()
        finally:
            os.close(watch)


async def _unregistered(info: AgentInfo) -> None:
    return


class LocalHome:
    """Slot `slot-N` of this data directory, in `<data_dir>/slots/N`."""

    shares_files = True

    def __init__(self, settings: Settings, number: int, register: Registrar = _unregistered) -> None:
        self._settings = settings
        self._name = f"slot-{number}"
        self._dir = settings.slots_dir / str(number)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        """Of the agent that was heard last."""
        self._register = register

    async def connected(self, info: AgentInfo) -> None:
        self._pid = info.pid
        await self._register(info)

    def heard(self) -> None:
        return

    async def news(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    async def find(self) -> AgentInfo:
        """The agent that lives there, or a new one."""
        self._dir.mkdir(parents=True, exist_ok=True)
        if self._agent_lives():
            info = self._read_info()
            if info is not None:
                return info
            started: subprocess.Popen[bytes] | None = None
        else:
            started = self._process = self._spawn()
        deadline_s = time.monotonic() + LISTEN_S
        while time.monotonic() < deadline_s:
            info = self._read_info()
            if info is not None and (started is None or info.pid == started.pid):
                return info
            if started is not None and started.poll() is not None and not self._agent_lives():
                raise SlotUnavailable(
                    f"the agent ended with {started.returncode} at its start; see {self._dir.name}/agent.log"
                )
            await asyncio.sleep(LOOK_S)
        raise SlotUnavailable(f"the agent did not listen within {LISTEN_S} s")

    async def is_gone(self) -> bool:
        if self._process is not None:
            self._process.poll()
        return not self._agent_lives()

    def end_hung(self) -> None:
        """Its replicas go with it, so this is not done soon."""
        info = self._read_info()
        if info is not None:
            logger.error("event=agent_hung slot=%s pid=%d action=kill", self._name, info.pid)
            with suppress(OSError):
                os.kill(info.pid, signal.SIGKILL)

    def lives(self) -> bool:
        """Whether there is an agent, of ours or left by an earlier control plane."""
        return self._dir.is_dir() and self._agent_lives()

    async def wait_ended(self, within_s: float) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, within_s)

    async def wait_gone(self, within_s: float) -> None:
        """Until its agent has ended, whoever started it; one that outstays this is killed. Its pool is given back."""
        if self._pid:
            await asyncio.to_thread(_await_end, self._pid, within_s)
        if self._process is not None:
            self._process.poll()
        pool = pool_directory(self._settings.data_dir, self._dir, self._name)
        await asyncio.to_thread(shutil.rmtree, pool, ignore_errors=True)

    def _spawn(self) -> subprocess.Popen[bytes]:
        slot = self._settings.slot
        (self._dir / "agent.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "function_runtime.agent", "--slot-dir", str(self._dir)]
        command += ["--slot-id", self._name]
        command += ["--pool-dir", str(pool_directory(self._settings.data_dir, self._dir, self._name))]
        if slot.pool_bytes:
            command += ["--pool-bytes", str(slot.pool_bytes)]
        command += ["--disk-bytes", str(slot.disk_bytes)]
        if slot.keep_forms and not self._settings.store_uri.startswith("file:"):
            command += ["--form-store", self._settings.store_uri]
        command += ["--warm", "0", "--orphan-s", str(slot.orphan_s)]
        with (self._dir / "agent.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
            )

    def _read_info(self) -> AgentInfo | None:
        try:
            return msgspec.json.decode((self._dir / "agent.json").read_bytes(), type=AgentInfo)
        except (OSError, msgspec.MsgspecError):
            return None

    def _agent_lives(self) -> bool:
        """Whether somebody holds the lock, which only a living agent can."""
        try:
            with (self._dir / "agent.lock").open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                return False
        except OSError:
            return False
