"""This machine's slot: its agent is a process of its own, found again or started, and watched by its event stream.

The agent is detached (own session, no pipe to us): it and its replicas outlive us, and whoever holds `agent.lock` is
the one that lives. Limits: one slot; a hung agent is only noticed by the silence of its stream.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.base import SlotListener, SlotUnavailable
from control_plane.settings import Settings
from function_runtime.protocol import AgentInfo, ReplicaSpec, ReplicaStatus

logger = logging.getLogger(__name__)

LISTEN_S: Final = 15.0
"""An agent that does not listen within this time of its start has failed."""
LOOK_S: Final = 0.005
"""Pause between looks at agent.json while an agent starts: the bound on the delay this adds."""
RESTART_S: Final = (0.0, 0.2, 1.0, 3.0, 10.0)
"""Pauses before an agent that keeps ending is started again; the last one repeats."""
STEADY_S: Final = 30.0
"""An agent that lived this long is trusted again."""
HUNG_S: Final = 60.0
"""An agent that lives and has said nothing for this long is killed: its replicas with it, so not sooner."""


def pool_directory(data_dir: Path, slot_dir: Path, slot_id: str) -> Path:
    """Shared memory if there is any; the name ties it to this data directory."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        return slot_dir / "pool"
    digest = hashlib.sha256((os.path.realpath(data_dir) + slot_id).encode()).hexdigest()[:12]
    return shared / f"stoker-{digest}"


class LocalBackend:
    """One slot, `slot-0`, in `<data_dir>/slots/0`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._slot_id = "slot-0"
        self._dir = settings.slots_dir / "0"
        self._client: AgentClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard_s = time.monotonic()

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return (self._slot_id,)

    async def start(self, listener: SlotListener) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        self._task = asyncio.get_running_loop().create_task(self._watch(listener))

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        client = self._client
        if end_agents and client is not None:
            try:
                await client.shutdown(grace_s)
            except SlotUnavailable as error:
                logger.warning("event=agent_shutdown_failed error=%s", error)
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if end_agents and self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace_s + 5.0)

    # --- watching ---

    async def _watch(self, listener: SlotListener) -> None:
        failures = 0
        while True:
            begin_s = time.monotonic()
            try:
                info = await self._find_or_start()
                async with AgentClient(info) as client:
                    self._client = client
                    logger.info("event=agent_connected slot=%s pid=%d", self._slot_id, info.pid)
                    async for event in client.events():
                        self._heard_s = time.monotonic()
                        if event.state is not None:
                            listener.slot_state(self._slot_id, event.state)
                        if event.replica is not None:
                            listener.replica_changed(self._slot_id, event.replica)
                        if event.log:
                            logger.info("event=agent_says slot=%s text=%s", self._slot_id, event.log)
                    reason = "the agent closed its event stream"
            except SlotUnavailable as error:
                reason = str(error)
            except OSError as error:
                reason = f"the slot's directory cannot be used: {error}"
            finally:
                self._client = None
            gone = not self._agent_lives()
            if self._process is not None:
                self._process.poll()
            failures = 0 if time.monotonic() - begin_s > STEADY_S else failures + 1
            logger.warning("event=agent_lost slot=%s gone=%s reason=%s", self._slot_id, gone, reason)
            listener.slot_lost(self._slot_id, reason, agent_gone=gone)
            if not gone and time.monotonic() - self._heard_s > HUNG_S:
                self._kill_hung()
            await asyncio.sleep(RESTART_S[min(max(failures - 1, 0), len(RESTART_S) - 1)])

    async def _find_or_start(self) -> AgentInfo:
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

    def _spawn(self) -> subprocess.Popen[bytes]:
        slot = self._settings.slot
        (self._dir / "agent.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "function_runtime.agent", "--slot-dir", str(self._dir)]
        command += ["--slot-id", self._slot_id]
        command += ["--pool-dir", str(pool_directory(self._settings.data_dir, self._dir, self._slot_id))]
        if slot.pool_bytes:
            command += ["--pool-bytes", str(slot.pool_bytes)]
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

    def _kill_hung(self) -> None:
        info = self._read_info()
        if info is not None:
            logger.error("event=agent_hung slot=%s pid=%d action=kill", self._slot_id, info.pid)
            with suppress(OSError):
                os.kill(info.pid, signal.SIGKILL)

    # --- commands ---

    def _agent(self) -> AgentClient:
        if self._client is None:
            raise SlotUnavailable(f"the agent of {self._slot_id} is not connected")
        return self._client

    def free_bytes(self, slot_id: str) -> int:
        try:
            with open("/proc/meminfo", "rb") as lines:
                for line in lines:
                    if line.startswith(b"MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            logger.warning("event=memory_unknown slot=%s", slot_id)
        return 0

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        return await self._agent().start_replica(spec)

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        await self._agent().end_replica(replica_id, grace_s, reason)

    async def warm(self, slot_id: str, workers: int) -> None:
        await self._agent().warm(workers)

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str) -> None:
        await self._agent().warm_pool(manifest_path, dtype)

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return await self._agent().replica_log(replica_id, tail_lines)
