"""What the slot's processes hold, and whether what a replica held came back.

The baseline is the memory of the agent, the template and the waiting workers, known per composition of these; after a
replica's end its process must be gone and the same processes may not hold more than the baseline and a tolerance.
Limits: proportional set sizes, so that pages shared by forks count once; the pool's own bytes are the pool's.
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
        self._by_composition: dict[frozenset[int], int] = {}
        self.bytes = 0

    def learn(self, pids: frozenset[int], memory: Mapping[int, ReplicaMemory]) -> None:
        """Called while no replica lives: this is what the slot holds at zero."""
        self.bytes = _sum(pids, memory)
        self._by_composition = {pids: min(self.bytes, self._by_composition.get(pids, self.bytes))}

    def is_reached(self, gone_pid: int, pids: frozenset[int], memory: Mapping[int, ReplicaMemory]) -> bool:
        if gone_pid and os.path.exists(f"/proc/{gone_pid}"):
            return False
        known = self._by_composition.get(pids)
        return known is None or _sum(pids, memory) <= known + TOLERANCE_BYTES


def _sum(pids: Iterable[int], memory: Mapping[int, ReplicaMemory]) -> int:
    return sum(memory[pid].pss_bytes for pid in pids if pid in memory)
