"""What the slot's processes hold, and whether what a replica held came back.

At zero the agent, the template and the waiting workers are there; each one's resident size then is its baseline. After
a replica's end its process must be gone, and none of these may hold more than its baseline and a tolerance.
Limits: sums over processes are of proportional sizes, so that pages shared by forks count once; the pool's own bytes
are the pool's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from function_runtime.protocol import ReplicaMemory

TOLERANCE_BYTES: Final = 32 * 1024 * 1024


def memory_of(pid: int) -> ReplicaMemory:
    """Zeroes for a process that is gone."""
    fields = {b"Rss:": 0, b"Pss:": 0, b"Shared_Clean:": 0, b"Shared_Dirty:": 0}
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:
        return ReplicaMemory()
    for line in text.splitlines():
        name, _, rest = line.partition(b" ")
        if name in fields:
            fields[name] = int(rest.split()[0]) * 1024
    return ReplicaMemory(
        rss_bytes=fields[b"Rss:"],
        pss_bytes=fields[b"Pss:"],
        shared_bytes=fields[b"Shared_Clean:"] + fields[b"Shared_Dirty:"],
    )


def sample(pids: Iterable[int]) -> dict[int, ReplicaMemory]:
    """Takes about a millisecond per process; for a helper thread."""
    return {pid: memory_of(pid) for pid in pids}


class Baseline:
    def __init__(self) -> None:
        self._resident: dict[int, int] = {}
        self.bytes = 0
        """Proportional size of the whole slot at zero, as last seen."""

    def learn(self, memory: Mapping[int, ReplicaMemory]) -> None:
        """Called while no replica lives."""
        self.bytes = sum(held.pss_bytes for held in memory.values())
        for pid, held in memory.items():
            self._resident[pid] = min(held.rss_bytes, self._resident.get(pid, held.rss_bytes))
        self._resident = {pid: resident for pid, resident in self._resident.items() if pid in memory}

    def is_reached(self, gone_pid: int, memory: Mapping[int, ReplicaMemory]) -> bool:
        if gone_pid and os.path.exists(f"/proc/{gone_pid}"):
            return False
        return all(
            held.rss_bytes <= self._resident[pid] + TOLERANCE_BYTES
            for pid, held in memory.items()
            if pid in self._resident
        )
