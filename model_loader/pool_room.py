"""Room for a prepared form: the pool's budget, its file system, and the memory of the machine or the control group.

A file on tmpfs is memory, so all three must agree. What other loads have reserved and not yet written is not free.
Limits: a look, not a reservation in the kernel; a reserve is left for what everybody else takes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from model_loader.memory_limit import Memory, read_memory

RESERVE_BYTES: Final = 256 * 1024 * 1024
"""Memory a load leaves to everybody else."""
_SHARE: Final = 2


class Room:
    def __init__(self, directory: Path, budget_bytes: int, memory: Callable[[], Memory] = read_memory) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._memory = memory
        self._is_memory = is_memory(directory)

    def shortage(
        self, needed_bytes: int, used_bytes: int, coming: Iterable[tuple[Path, int]], recycled_bytes: int = 0
    ) -> str:
        """What stands against `needed_bytes` more beside `used_bytes`, in words; empty: nothing. `coming`: path and
        size of the forms that others are writing. `recycled_bytes` of those needed are taken already."""
        if used_bytes + needed_bytes > self.budget_bytes:
            return f"{used_bytes} of {self.budget_bytes} are in use by running replicas and other loads"
        reserved = sum(max(0, nbytes - _written_bytes(path)) for path, nbytes in coming)
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize - reserved
        if free < needed_bytes - recycled_bytes:
            return f"{max(0, free)} are free in {self.directory}"
        if self._is_memory:
            available = self._memory().available_bytes - RESERVE_BYTES - reserved
            if available < needed_bytes - recycled_bytes:
                return (
                    f"{max(0, available)} bytes of memory are available beyond a reserve of {RESERVE_BYTES} "
                    "(the machine's, or this container's limit)"
                )
        return ""


def default_budget(directory: Path, memory: Callable[[], Memory] = read_memory) -> int:
    """Half of the file system; where its files take memory, at most half of what this process may have."""
    found = os.statvfs(directory)
    budget = found.f_blocks * found.f_frsize // _SHARE
    return min(budget, memory().limit_bytes // _SHARE) if is_memory(directory) else budget


def is_memory(directory: Path) -> bool:
    """Whether files there take memory: tmpfs."""
    mount_point, kind = "", ""
    where = os.path.realpath(directory) + "/"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split()
            if where.startswith(mount.rstrip("/") + "/") and len(mount) >= len(mount_point):
                mount_point, kind = mount, name
    return kind in ("tmpfs", "ramfs")


def _written_bytes(path: Path) -> int:
    """What the half-written forms of `path` have taken so far: blocks, since a file may be sized before it is full."""
    written = 0
    for half in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(OSError):
            written += half.stat().st_blocks * 512
    return written
