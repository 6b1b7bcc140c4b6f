"""How much memory this process and what it shares with others may take: the machine's, or its control group's.

A file on tmpfs is memory: a pool that looks at its file system only is killed by the limit of its pod. Both versions of
control groups are read, and every group above ours counts, because each limits all below it. Limits: Linux; elsewhere,
or where nothing can be read, nothing limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_UNLIMITED: Final = 1 << 60
"""Version 1 writes a page short of 2^63 for "none"."""


@dataclass(frozen=True, slots=True)
class Memory:
    limit_bytes: int
    available_bytes: int
    """What could be taken now without anybody being killed or swapped; the page cache counts as free."""


def read_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The smallest limit and the least that is available, of the machine and every control group this process is in."""
    limits, available = [_UNLIMITED], [_UNLIMITED]
    machine = _fields(proc / "meminfo", scale=1024)
    if "MemTotal" in machine:
        limits.append(machine["MemTotal"])
        available.append(machine.get("MemAvailable", machine["MemTotal"]))
    for folder, names in _groups(proc, groups):
        limit = _number(folder / names[0])
        used = _number(folder / names[1])
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        told = _fields(folder / "memory.stat")
        cache = sum(told.get(names[2] + name, 0) for name in ("inactive_file", "active_file"))
        limits.append(limit)
        available.append(max(0, limit - used + cache))
    return Memory(min(limits), min(available))


def _groups(proc: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = groups, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            yield base / part, names


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path, scale: int = 1) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, int] = {}
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) * scale
    return found
