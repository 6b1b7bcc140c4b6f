"""The machines of a simulation: slots with devices, and what their pools hold.

Pools hold weights by bytes, the least recently used of those that no replica uses go first; a start from a pool is
faster than one from disk, and that faster than one from the store. Limits: a slot's disk holds all it ever loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

TIER_POOL = "pool"
TIER_DISK = "disk"
TIER_STORE = "store"


@dataclass(frozen=True, slots=True)
class Cluster:
    slots: int = 8
    devices_per_slot: int = 8
    device_bytes: int = 80 * 10**9
    pool_bytes: int = 512 * 10**9
    """Host memory of each slot for weights."""
    link_shared: bool = True
    """Loads that run on a slot at once share its link."""

    @property
    def devices(self) -> int:
        return self.slots * self.devices_per_slot
