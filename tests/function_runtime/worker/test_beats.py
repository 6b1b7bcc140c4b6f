"""How often a replica says that it lives: to its agent every second, to gateways as it works, and less without work."""

from __future__ import annotations

from function_runtime.beats import Beats
from function_runtime.protocol import HEARTBEAT_S, IDLE_TOLD_S

TICK_NS = 50_000_000


class Replica:
    def __init__(self) -> None:
        self.beats, self.now_ns = Beats(), 100 * 10**9

    def run(self, seconds: float, *, busy: bool) -> tuple[int, int]:
        """How often gateways were told, and how often the agent."""
        told = mentioned = 0
        for _ in range(round(seconds * 1e9 / TICK_NS)):
            if self.now_ns >= self.beats.next_ns:
                mentioned += 1
                told += self.beats.begin(self.now_ns, busy)
            self.now_ns += TICK_NS
        return told, mentioned


def test_gateways_hear_little_of_a_replica_without_work_and_at_once_of_the_end_of_work() -> None:
    replica = Replica()
    to_gateways, to_agent = replica.run(5 * IDLE_TOLD_S, busy=False)
    assert to_gateways == 5 and to_agent >= 4 * IDLE_TOLD_S
    replica.beats.soon(replica.now_ns)
    to_gateways, _ = replica.run(4.0, busy=True)
    assert to_gateways >= 4.0 / HEARTBEAT_S - 1
    assert replica.run(1.5, busy=False)[0] == 1, "that it has no work any more, and then silence"


def test_a_change_is_told_at_once_and_work_that_begins_soon() -> None:
    replica = Replica()
    replica.run(1.5, busy=False)
    replica.beats.at_once()
    assert replica.run(0.05, busy=False) == (1, 1)
    replica.beats.soon(replica.now_ns)
    assert replica.run(HEARTBEAT_S / 2 + 0.05, busy=True)[0] == 1
