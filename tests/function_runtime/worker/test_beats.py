"""How often a replica says that it lives: to its agent every second, to gateways as it works, and less without work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from function_runtime import serving
from function_runtime.protocol import HEARTBEAT_S, IDLE_TOLD_S, Progress, ReplicaTime


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


def test_gateways_hear_little_of_a_replica_without_work_and_at_once_of_the_end_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told, mentioned = Clock(), list[Progress](), list[Any]()
    monkeypatch.setattr(serving, "time", clock)
    replica: Any = serving.Serving.__new__(serving.Serving)
    replica._next_beat_ns = replica._next_told_ns = replica._lease_ns = replica._last_ping_ns = replica._steps = 0
    replica._was_busy, replica._kv = False, None
    replica._links = [SimpleNamespace(welcome=True, send=told.append)]
    replica._held = SimpleNamespace(any_live=False, expired=lambda now_ns: (), live_of_others=lambda link: 0)
    stats = SimpleNamespace(running=0, waiting=0, kv_used_blocks=0, kv_total_blocks=8)
    replica._engine, replica._clock = SimpleNamespace(stats=stats), SimpleNamespace(read=ReplicaTime)
    replica._agent = SimpleNamespace(mention=mentioned.append)

    def beats(seconds: float) -> tuple[int, int]:
        told.clear()
        mentioned.clear()
        until_s = clock.now_s + seconds
        while clock.now_s < until_s:
            replica._beat()
            clock.now_s += 0.05
        return len(told), len(mentioned)

    to_gateways, to_agent = beats(5 * IDLE_TOLD_S)
    assert to_gateways == 5 and to_agent >= 4 * IDLE_TOLD_S
    replica._held.any_live = True
    to_gateways, _ = beats(4.0)
    assert to_gateways >= 4.0 / HEARTBEAT_S - 1
    replica._held.any_live = False
    assert beats(1.5)[0] == 1, "that it has no work any more, and then silence"
