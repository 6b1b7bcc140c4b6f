"""What the kernel is asked about processes: who dies with whom, who is stopped, how much memory each holds.

A process bound with `die_with_parent` is killed by the kernel when its parent is, even while it is stopped. Linux only.
Limits: the bond is to the parent at the time of the call, and is checked once right after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from model_loader.memory_limit import read_memory

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NAME: Final = 15
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when `parent_pid` dies. False if it is not (or no longer) our parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """The name `ps` and `top` show (15 bytes)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, ctypes.cast(buffer, ctypes.c_void_p), 0, 0, 0)


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass


def is_stopped(pid: int) -> bool:
    """Stopped by a signal (a process held by a debugger is not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] == b"T"


def ran_ns(pid: int) -> int:
    """Processor time of its threads so far; 0 where the kernel does not count it."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(path.read_bytes().split()[0])
    return total


def describe_exit(result: os.waitid_result) -> str:
    return f"exit {result.si_status}" if result.si_code == os.CLD_EXITED else f"signal {result.si_status}"


def available_bytes() -> int:
    """What can be had without swapping, and without being killed by the container's limit."""
    return read_memory().available_bytes


def processes_with_arguments(*needles: str) -> Iterator[int]:
    """Pids of this user's processes whose command line holds every needle as an argument of its own."""
    wanted = {needle.encode() for needle in needles}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            owner = entry.stat().st_uid
        except OSError:
            continue
        if owner == os.getuid() and wanted <= set(arguments):
            yield int(entry.name)
