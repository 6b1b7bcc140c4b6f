"""A replica that is to be, and what waits for it: what placement finds a home for.

Limits: one size for all its devices; seconds are measured, or the caller's estimates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Of one function."""

    function: str = ""
    tenant: str = ""
    identity: str = ""
    """Of its checkpoint."""
    kind: str = ""
    """Class of slots it needs."""
    devices: int = 1
    device_bytes: int = 0
    """On each device: weights and the least KV."""
    weights_bytes: int = 0
    make_s: float = 1.0
    """Measured seconds to make the prepared form from the checkpoint."""
    in_store: bool = False
    """An object store has the form."""
    start_s: float = 0.1
    """Measured seconds from a warm worker and weights in the pool to ready."""
    fork_s: float = 1.5
    """Measured seconds when no worker waits."""
    prefill_s: float = 0.0
    """Of the request that waits, or a typical one."""
    kv_load_s: float | None = None
    """To load its stored KV instead; None: there is none."""
    waiting: int = 0
    """Requests that wait for it: a replica that nobody waits for pushes nobody aside."""
    room_wait_s: float = 30.0
    """After this long there would be room without anybody's having to go: a slot that can be had, or a guess."""
    priority: int = 0
    load: tuple[float, ...] = ()
    """Predicted busy share of one device, per step of the horizon."""
    step_s: float = 60.0
    fresh_s: float = 0.0
    """What taking a device on which nothing runs costs, in seconds of waiting: device-seconds over the weight of
    waiting. 0: devices are there anyway."""

    @property
    def first_s(self) -> float:
        return self.prefill_s if self.kv_load_s is None else min(self.prefill_s, self.kv_load_s)
