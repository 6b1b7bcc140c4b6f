"""When a replica says how it is: to its agent at every beat, to gateways at every one while it works.

    working  twice a heartbeat        idle  once a second, and gateways are told every few seconds only

Limits: whoever calls brings the clock.
"""

from __future__ import annotations

from typing import Final

from function_runtime.engine_like import EngineStats
from function_runtime.protocol import HEARTBEAT_S, IDLE_TOLD_S, Progress, ReplicaTime

_BUSY_NS: Final = int(HEARTBEAT_S / 2 * 1e9)
_IDLE_NS: Final = 1_000_000_000
_IDLE_TOLD_NS: Final = int(IDLE_TOLD_S * 1e9)


def progress_of(steps: int, stats: EngineStats, time: ReplicaTime) -> Progress:
    return Progress(
        steps=steps,
        running=stats.running,
        waiting=stats.waiting,
        kv_used_blocks=stats.kv_used_blocks,
        kv_total_blocks=stats.kv_total_blocks,
        time=time,
    )


class Beats:
    def __init__(self) -> None:
        self.next_ns = 0
        self._was_busy = False
        self._next_told_ns = 0
        """When gateways hear of it again although it does nothing."""

    def begin(self, now_ns: int, busy: bool) -> bool:
        """Notes a beat; whether gateways are told, too: the first one without work tells them that it has ended."""
        self.next_ns = now_ns + (_BUSY_NS if busy else _IDLE_NS)
        tells = busy or self._was_busy or now_ns >= self._next_told_ns
        if tells:
            self._next_told_ns = now_ns + _IDLE_TOLD_NS
        self._was_busy = busy
        return tells

    def soon(self, now_ns: int) -> None:
        """Work has come: from here on it beats as one that works."""
        self.next_ns = min(self.next_ns, now_ns + _BUSY_NS)

    def at_once(self) -> None:
        """Something changed that gateways are to know."""
        self.next_ns = self._next_told_ns = 0
