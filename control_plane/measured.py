"""What starts have been seen to take, as placement needs it: bytes per second of each tier, seconds of a checkpoint's
making, of a start with everything at hand, of a worker that had to be forked.

Exponential means of what ready replicas told, over all slots. Limits: forgotten with the process; the first starts are
judged by priors.
"""

from __future__ import annotations

from typing import Final

from autoscaler.homes import DISK, MAKE, PEER, STORE
from function_runtime.protocol import ReplicaState, ReplicaStatus

NEW: Final = 0.3
"""Weight of the newest value."""
LEAST_BYTES: Final = 1 << 20
"""A smaller load says more about latency than about the link."""
START_S: Final = 0.1
FORK_S: Final = 1.5
MAKE_S: Final = 1.0
_LINKS: Final = (DISK, PEER, STORE)
_OWN_STAGES: Final = frozenset({"map", "build", "listen"})


class Measured:
    def __init__(self) -> None:
        self.bytes_per_s: dict[str, float] = {}
        self.weights_bytes: dict[str, int] = {}
        """Of a checkpoint's prepared form."""
        self._make_s: dict[str, float] = {}
        self._start_s: dict[str, float] = {}
        self._fork_s = FORK_S
        self.seen = 0
        """How often something was measured."""

    def see(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        """A replica changed; counted once, when it has become ready."""
        if status.state is not ReplicaState.READY or (before is not None and before.state is ReplicaState.READY):
            return
        self.seen += 1
        identity, own_s, measured = status.spec.identity, 0.0, False
        for stage in status.stages:
            seconds = stage.duration_us / 1e6
            if stage.name == "prepare":
                self._see_load(identity, stage.tier, stage.nbytes, seconds)
            elif stage.name == "worker" and not status.warm_worker:
                self._fork_s = _mean(self._fork_s, seconds)
            elif stage.name in _OWN_STAGES:
                own_s, measured = own_s + seconds, True
        if identity and measured:
            self._start_s[identity] = _mean(self._start_s.get(identity), own_s)

    def _see_load(self, identity: str, tier: str, nbytes: int, seconds: float) -> None:
        if not identity:
            return
        if nbytes:
            self.weights_bytes[identity] = nbytes
        if tier in _LINKS and nbytes >= LEAST_BYTES and seconds > 0:
            self.bytes_per_s[tier] = _mean(self.bytes_per_s.get(tier), nbytes / seconds)
        if tier in (DISK, MAKE):
            self._make_s[identity] = _mean(self._make_s.get(identity), seconds)

    def make_s(self, identity: str) -> float:
        return self._make_s.get(identity, MAKE_S)

    def start_s(self, identity: str) -> float:
        return self._start_s.get(identity, START_S)

    @property
    def fork_s(self) -> float:
        return self._fork_s


def _mean(known: float | None, value: float) -> float:
    return value if known is None else known + NEW * (value - known)
