"""Containers whose program has been imported already: a process that forks itself for each.

Model: `main` imports the modules once, then waits at a socket. Each message is a container's description
(`launcher.py`) with three descriptors: its log, where to report its process, and where to write what it exited with.
The fork becomes the container's launcher, and the container's process runs its module as `python -m` would, without
the half second of imports. `Forks` is the other end of the socket.

Limits: the interpreter's own options and variables (PYTHONPATH and the like) are those of the first process. A start
that is to be timed is to be made without this (`Kubelet.forks = False`).
"""

from __future__ import annotations

import array
import asyncio
import compileall
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.kubernetes.kubelet import launcher

Object = dict[str, Any]
MODULES = ("function_runtime.agent",)
PACKAGES = ("function_runtime", "model_loader")
REPOSITORY = Path(__file__).parents[3]
MESSAGE_BYTES = 1 << 20


def module_of(command: Sequence[str]) -> str | None:
    """The module that `python -m MODULE ...` names, if it is one of those that are imported already."""
    named = len(command) > 2 and command[0] == sys.executable and command[1] == "-m" and command[2] in MODULES
    return command[2] if named else None


class Forked:
    """A launcher that is a fork: waited for by its pipe, since it is no child of ours."""

    def __init__(self, exits: int) -> None:
        self._exits = exits
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(exits, self._read)

    def _read(self) -> None:
        said = os.read(self._exits, 16)
        self.close()
        self._ended.set_result(int(said) if said else -signal.SIGKILL)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._exits)
        os.close(self._exits)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


class Forks:
    """One process for all clusters of this one, which ends when this one does: its socket tells."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def send(self, spec: Object, log: IO[bytes], report: int, exits: int) -> None:
        fds = array.array("i", [log.fileno(), report, exits])
        message = [json.dumps(spec).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.sendmsg(*message)
                    return
                except OSError:
                    self._socket.close()  # it has died, and another one is made
            self._socket = _started()
            self._socket.sendmsg(*message)


def _started() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    os.set_inheritable(theirs.fileno(), True)
    # Not by -m, which would find this module imported by its package.
    command = [sys.executable, "-c", f"import {__name__} as it; it.main()", str(theirs.fileno()), *MODULES]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
    os.posix_spawn(sys.executable, command, env, setsid=True)
    theirs.close()
    return ours


FORKS = Forks()


def become(spec: Object) -> None:
    """The container's process: forgets what it was, and runs the module. Does not return."""
    command: list[str] = spec["command"]
    code = 1
    try:
        os.chdir(spec["cwd"])
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(spec["env"])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        sys.argv[:] = ["-m", *command[3:]]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(waiting: socket.socket) -> None:
    while True:
        described, ancillary, _, _ = waiting.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(3 * 4))
        if not described:
            return
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        if os.fork() == 0:
            _launch(waiting, json.loads(described), *fds)
        for fd in fds:
            os.close(fd)


def _launch(waiting: socket.socket, spec: Object, log: int, report: int, exits: int) -> None:
    try:
        waiting.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        launcher._LIBC.prctl(launcher.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.write(exits, str(launcher.run(spec, report, become)).encode())
    finally:
        os._exit(0)


def main() -> None:
    for package in PACKAGES:
        # As an image is: what a container starts cannot write beside its sources, and would compile them each time.
        compileall.compile_dir(str(REPOSITORY / package), quiet=2)
    for module in sys.argv[2:]:
        importlib.import_module(f"{module}.__main__")
        # It is run anew in each fork.
        del sys.modules[f"{module}.__main__"]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Forks report by their pipes; the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
