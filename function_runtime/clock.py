"""A replica's life on one monotonic clock, cut into cold start, attributed, idle and overhead without a rest.

Overhead is what is left of the life after the measured parts, so the parts sum to `held_us` exactly; attributed
time comes from the engine's steps, idle time from waits without work. Limits: whole microseconds, each rounded down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from function_runtime.protocol import ReplicaTime, Stage


class LifeClock:
    def __init__(self, held_since_ns: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._held_since_ns = held_since_ns
        self._now_ns = now_ns
        self._ready_ns = 0
        self._idle_ns = 0
        self._attributed_us = 0

    def become_ready(self) -> None:
        self._ready_ns = self._now_ns()

    def add_idle(self, duration_ns: int) -> None:
        self._idle_ns += duration_ns

    def attribute(self, duration_us: int) -> None:
        self._attributed_us += duration_us

    def read(self) -> ReplicaTime:
        now_ns = self._now_ns()
        held_us = max(0, now_ns - self._held_since_ns) // 1000
        if not self._ready_ns:
            return ReplicaTime(held_us=held_us, cold_us=held_us)
        cold_us = min(held_us, (self._ready_ns - self._held_since_ns) // 1000)
        attributed_us = min(self._attributed_us, held_us - cold_us)
        idle_us = min(self._idle_ns // 1000, held_us - cold_us - attributed_us)
        return ReplicaTime(
            held_us=held_us,
            cold_us=cold_us,
            attributed_us=attributed_us,
            idle_us=idle_us,
            overhead_us=held_us - cold_us - attributed_us - idle_us,
        )


class Stopwatch:
    """Collects stages: wall-clock begin for people, monotonic duration."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def run(self, name: str) -> _Running:
        return _Running(self, name)


class _Running:
    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name
        self.nbytes, self.tier, self.detail = 0, "", ""

    def __enter__(self) -> _Running:
        self._start_us = time.time_ns() // 1000
        self._begin_ns = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stages.append(
            Stage(
                name=self._name,
                start_us=self._start_us,
                duration_us=(time.monotonic_ns() - self._begin_ns) // 1000,
                nbytes=self.nbytes,
                tier=self.tier,
                detail=self.detail,
            )
        )
