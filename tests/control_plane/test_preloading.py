"""The leader's words to the pools: what is likely, and what is to be loaded ahead."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.preloading import HOLDS_S, Preloading
from function_runtime.protocol import PoolEntry, SlotState


class Fleet:
    def __init__(self, *entries: PoolEntry, used_bytes: int = 0) -> None:
        self.in_sight = True
        self.pools = self
        state = SlotState("s0", 1, "i", True, 0, 0, 1000, used_bytes, pool=entries)
        self.slots = {"s0": state}
        self.told: list[tuple[dict[str, float], float]] = []
        self.warmed: list[tuple[str, tuple[str, ...]]] = []
        self.workers: list[dict[str, int]] = []
        measured = SimpleNamespace(fork_s=1.5)
        self.placing = SimpleNamespace(chances={}, measured=measured, expected=lambda key, horizon_s: self.expected)
        self.expected = 0.0

    def living(self, key: tuple[str, str]) -> list[object]:
        return []

    async def expect(self, chances: dict[str, float], holds_s: float) -> None:
        self.told.append((dict(chances), holds_s))

    async def warm_more(self, workers: dict[str, int]) -> None:
        self.workers.append(workers)

    async def load(self, path: str, identity: str, dtype: str, slot_ids: list[str]) -> dict[str, str]:
        self.warmed.append((identity, tuple(slot_ids)))
        return {}


class Lane:
    waiting = ()

    def __init__(self, idle_s: float, gap_s: float) -> None:
        self.gaps_s = deque([gap_s] * 20)
        self._idle_s = idle_s

    def last_activity_s(self, now_s: float) -> float:
        return now_s - self._idle_s


def context_of(fleet: Fleet, lane: Lane, *, leads: bool = True, engine: str = "native") -> Any:
    spec = SimpleNamespace(engine=engine, dtype="auto")
    current = SimpleNamespace(identity="c0ffee", manifest_path="/m", spec=spec, function="f", tenant="default")
    function = SimpleNamespace(tenant="default", name="f", current=current)
    elsewhere = SimpleNamespace(last_activity_s=0.0, gaps_s=())
    recorded: list[tuple[Any, ...]] = []
    return SimpleNamespace(
        gateways=SimpleNamespace(leads=leads),
        fleet=fleet,
        functions=SimpleNamespace(list=lambda: [function]),
        dispatcher=SimpleNamespace(lanes=SimpleNamespace(find=lambda key, identity: lane)),
        loop=SimpleNamespace(demand=SimpleNamespace(elsewhere=lambda key: elsewhere)),
        decisions=SimpleNamespace(record=lambda *a, **k: recorded.append(a), recorded=recorded),
    )


async def test_a_habit_keeps_a_model_in_the_pools_and_brings_it_back() -> None:
    fleet = Fleet()
    context = context_of(fleet, Lane(30, 60))
    await Preloading(context).look()
    assert fleet.told == [({"c0ffee": pytest.approx(20 / 21)}, HOLDS_S)]
    assert fleet.warmed == [("c0ffee", ("s0",))]
    assert context.decisions.recorded[0][0] == "preload"
    assert fleet.placing.chances == fleet.told[0][0], "what ending one would lose is judged by the same"


async def test_a_forecast_has_a_model_loaded_and_workers_waiting_before_anybody_asks() -> None:
    fleet = Fleet()
    fleet.expected = 3.0
    await Preloading(context_of(fleet, Lane(1000, 60))).look()
    assert fleet.warmed == [("c0ffee", ("s0",))]
    assert fleet.workers == [{"s0": 1}]


async def test_what_is_there_is_not_loaded_again_and_a_full_pool_takes_nothing_ahead() -> None:
    for fleet in (Fleet(PoolEntry("k", "c0ffee", "ready", 10)), Fleet(used_bytes=900)):
        await Preloading(context_of(fleet, Lane(30, 60))).look()
        assert fleet.told and fleet.warmed == []


@pytest.mark.parametrize("why", ["follows", "broken habit", "another engine", "not in sight"])
async def test_nothing_is_loaded_where_it_is_not_likely_or_not_ours_to_say(why: str) -> None:
    fleet = Fleet()
    fleet.in_sight = why != "not in sight"
    lane = Lane(1000 if why == "broken habit" else 30, 60)
    engine = "stub" if why == "another engine" else "native"
    await Preloading(context_of(fleet, lane, leads=why != "follows", engine=engine)).look()
    assert fleet.warmed == []
