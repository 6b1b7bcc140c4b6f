"""Child processes of the agent: started or adopted, watched by pidfd, reaped as soon as they end.

Every child is bound to the agent's life by the kernel. What nobody here started (the middle process of a template that
died while forking) is reaped by `reap_strays`. Limits: spawning is done on the main thread, to which the bond is tied.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from function_runtime import process


class Child:
    """A process of ours. `exited` resolves with how it ended, after it was reaped."""

    def __init__(self, pid: int, registry: Children) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = loop.create_future()
        self._registry = registry
        loop.add_reader(self.pidfd, self._reap)

    def _reap(self) -> None:
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            ended = "exit unknown"
        else:
            if result is None:
                return
            ended = process.describe_exit(result)
        asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        self._registry.forget(self.pid)
        self.exited.set_result(ended)

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    def kill(self) -> None:
        if self.alive:
            process.kill(self.pidfd)

    async def end(self) -> str:
        self.kill()
        return await asyncio.shield(self.exited)


class Children:
    def __init__(self) -> None:
        self._by_pid: dict[int, Child] = {}
        self.foreign: set[int] = set()
        """Pids that something else in this process waits for."""

    def adopt(self, pid: int) -> Child:
        child = Child(pid, self)
        self._by_pid[pid] = child
        return child

    def forget(self, pid: int) -> None:
        self._by_pid.pop(pid, None)

    def spawn_module(
        self, module: str, arguments: Sequence[str], *, control_fd: int, output: str, environment: dict[str, str]
    ) -> Child:
        """`python -m module --control-fd N ...`, with its output appended to a file."""
        handed_fd = 40
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", module, "--control-fd", str(handed_fd), *arguments],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, control_fd, handed_fd),
            ],
            setsigmask=[],
        )
        return self.adopt(pid)

    def reap_strays(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in self._by_pid or found.si_pid in self.foreign:
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def kill(self, pid: int) -> None:
        child = self._by_pid.get(pid)
        if child is not None:
            child.kill()

    def kill_all(self) -> None:
        for child in list(self._by_pid.values()):
            child.kill()
