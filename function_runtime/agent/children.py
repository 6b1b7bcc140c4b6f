"""Child processes of the agent: started or adopted, watched by pidfd, reaped as soon as they end.

Every child is bound to the agent's life by the kernel. What nobody here started (the middle process of a template that
died while forking) is reaped by `reap_strays`. Limits: spawning is done on the main thread, to which the bond is tied.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from function_runtime import process

_CONTROL_FD: Final = 40
_NO_EXEC: Final = 127


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
        """`python -m module --control-fd N --agent-pid P ...`, with its output appended to a file. Bound to this
        process's life before its first instruction, so that it can be stopped at no moment that would save it."""
        command = [sys.executable, "-m", module, "--control-fd", str(_CONTROL_FD), "--agent-pid", str(os.getpid())]
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        agent_pid = os.getpid()
        # A signal to the child before its exec would be handled by our handlers, and wake our loop.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(command + list(arguments), agent_pid, control_fd, log, environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        os.close(log)
        return self.adopt(pid)

    @property
    def pids(self) -> list[int]:
        return [*self._by_pid, *self.foreign]

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
        elif pid in self.foreign:
            # Seen stopped for seconds, so not reaped: the pid is still its own.
            os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        for child in list(self._by_pid.values()):
            child.kill()


def _become(command: list[str], agent_pid: int, control_fd: int, log: int, environment: dict[str, str]) -> NoReturn:
    try:
        if not process.die_with_parent(agent_pid):
            os._exit(_NO_EXEC)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2), (control_fd, _CONTROL_FD)):
            os.dup2(source, target)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(command[0], command, environment)
    finally:
        os._exit(_NO_EXEC)
