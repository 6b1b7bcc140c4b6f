"""What the slot's processes hold, and whether what a replica held came back.

At zero the agent, the template and the waiting workers are there; what each one holds of its own then is its baseline.
After a replica's end its process must be gone, and none of these may hold more than its baseline and a tolerance.
Limits: the pool's bytes, mapped by whom they may, are the pool's and no process's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from function_runtime.protocol import ReplicaMemory

TOLERANCE_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """From smaps_rollup; zeroes for a process that is gone."""

    resident_bytes: int = 0
    proportional_bytes: int = 0
    shared_bytes: int = 0
    anonymous_bytes: int = 0
    """Independent of who else maps what."""
    shared_memory_bytes: int = 0
    """Proportional share of tmpfs pages: the pool's, and the KV of a replica."""

    @property
    def own_bytes(self) -> int:
        return self.proportional_bytes - self.shared_memory_bytes

    def as_replica(self) -> ReplicaMemory:
        return ReplicaMemory(
            rss_bytes=self.resident_bytes, pss_bytes=self.proportional_bytes, shared_bytes=self.shared_bytes
        )


def memory_of(pid: int) -> ProcessMemory:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:
        return ProcessMemory()
    fields: dict[bytes, int] = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(b":")
        fields[name] = int(rest.split()[0]) * 1024
    return ProcessMemory(
        resident_bytes=fields.get(b"Rss", 0),
        proportional_bytes=fields.get(b"Pss", 0),
        shared_bytes=fields.get(b"Shared_Clean", 0) + fields.get(b"Shared_Dirty", 0),
        anonymous_bytes=fields.get(b"Anonymous", 0),
        shared_memory_bytes=fields.get(b"Pss_Shmem", 0),
    )


def sample(pids: Iterable[int]) -> dict[int, ProcessMemory]:
    """Takes about a millisecond per process; for a helper thread."""
    return {pid: memory_of(pid) for pid in pids}


class Baseline:
    def __init__(self) -> None:
        self._anonymous: dict[int, int] = {}
        self.bytes = 0
        """What the slot's processes held of their own at zero, as last seen."""

    def learn(self, memory: Mapping[int, ProcessMemory]) -> None:
        """Called while no replica lives."""
        self.bytes = sum(held.own_bytes for held in memory.values())
        self._anonymous = {
            pid: min(held.anonymous_bytes, self._anonymous.get(pid, held.anonymous_bytes))
            for pid, held in memory.items()
        }

    def is_reached(self, gone_pid: int, memory: Mapping[int, ProcessMemory]) -> bool:
        if gone_pid and os.path.exists(f"/proc/{gone_pid}"):
            return False
        return all(
            held.anonymous_bytes <= self._anonymous[pid] + TOLERANCE_BYTES
            for pid, held in memory.items()
            if pid in self._anonymous
        )
