"""Windows of several gateways become a function's history, which outlives the leader that gathered it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from autoscaler.start_times import END, TOTAL
from control_plane.database import Database
from control_plane.load_store import DAY_S, LoadStore
from control_plane.load_windows import SLOTS, STORED, ClosedWindow, FunctionWindow
from control_plane.observations import Observations
from control_plane.slot_load import slot_load
from function_runtime.protocol import EngineOptions, ReplicaSpec, ReplicaState, ReplicaStatus, Stage

KEY = ("default", "smol")
T0 = 1_700_000_400.0
"""A multiple of 600."""


class Functions:
    def __init__(self) -> None:
        self.known = [SimpleNamespace(tenant=KEY[0], name=KEY[1], created_us=(T0 - DAY_S) * 1e6)]

    def list(self) -> list[Any]:
        return self.known

    def find(self, name: str, tenant: str) -> Any:
        return next((each for each in self.known if (each.tenant, each.name) == (tenant, name)), None)


class Plane:
    """What a leader has around it; the clock is moved by hand."""

    def __init__(self, database: Database, name: str = "gw-1") -> None:
        self.now_s = T0
        self.meter = SimpleNamespace(clock_jumps=0)
        self.gateways = SimpleNamespace(id=name, peers={})
        self.functions = Functions()
        meter: Any = self.meter
        gateways: Any = self.gateways
        functions: Any = self.functions
        self.observations = Observations(meter, gateways, functions, LoadStore(database, name), lambda: self.now_s)

    async def window(self, n: int, busy: tuple[tuple[float, float], ...] = (), **values: float) -> None:
        """Close the n-th window since T0 here, and count what can be counted."""
        self.now_s = T0 + 10 * (n + 1)
        self.observations.take(self.gateways.id, [closed(n, busy, **values)])
        await self.observations.settle()

    def arrivals(self, resolution_s: int, first: int, end: int) -> list[float]:
        load = self.observations.of(KEY)
        assert load is not None
        self.observations.catch_up(load, self.now_s)
        return load.history.arrivals(resolution_s, T0 + 10 * first, T0 + 10 * end)[1].tolist()


def closed(n: int, busy: tuple[tuple[float, float], ...] = (), whole: bool = True, **values: float) -> ClosedWindow:
    parts = ()
    if values or busy:
        intervals = tuple((T0 + since_s, T0 + until_s) for since_s, until_s in busy)
        parts = (FunctionWindow(*KEY, values=tuple(values.get(name, 0.0) for name in STORED), busy=intervals),)
    return ClosedWindow(T0 + 10 * n, whole, parts)


async def leading(database: Database, name: str = "gw-1", now_s: float = T0) -> Plane:
    plane = Plane(database, name)
    plane.now_s = now_s
    await plane.observations.restore()
    return plane


async def test_a_window_counts_once_every_gateway_has_told_of_it(database: Database) -> None:
    plane = await leading(database)
    plane.gateways.peers = {"gw-2": object()}
    await plane.window(0, arrivals=2)
    assert plane.observations.of(KEY) is None or math.isnan(plane.arrivals(10, 0, 1)[0])
    plane.observations.take("gw-2", [closed(0, arrivals=3)])
    await plane.observations.settle()
    assert plane.arrivals(10, 0, 1) == [5.0]


async def test_what_a_gateway_did_not_tell_of_in_time_was_not_seen(database: Database) -> None:
    plane = await leading(database)
    await plane.window(0, arrivals=1)
    plane.gateways.peers = {"gw-2": object()}
    await plane.window(1, arrivals=1)
    plane.gateways.peers = {}
    await plane.window(2, arrivals=1)
    assert plane.arrivals(10, 0, 3) == [1.0, 1.0, 1.0]
    plane.gateways.peers = {"gw-2": object()}
    await plane.window(3, arrivals=1)
    plane.now_s += 15
    await plane.observations.settle()
    assert math.isnan(plane.arrivals(10, 3, 4)[0])
    plane.observations.take("gw-2", [closed(3, arrivals=9)])
    assert plane.observations.refused == {"missed": 1, "late": 1}


async def test_told_twice_counts_once_and_what_is_no_number_does_not_count(database: Database) -> None:
    plane = await leading(database)
    plane.observations.take("gw-1", [closed(0, arrivals=1)])
    await plane.window(0, arrivals=1)
    await plane.window(1, arrivals=math.nan)
    await plane.window(2, arrivals=-3)
    plane.observations.take("gw-1", [ClosedWindow(T0 + 33.0, True)])
    counts = plane.arrivals(10, 0, 3)
    assert counts[0] == 1.0
    assert plane.observations.refused == {"duplicated": 1, "not_a_number": 1, "negative": 1, "uneven": 1}


async def test_the_window_a_leader_began_in_was_not_seen_as_a_whole(database: Database) -> None:
    plane = await leading(database)
    plane.now_s = T0 + 10
    plane.observations.take("gw-1", [closed(0, whole=False, arrivals=1)])
    await plane.observations.settle()
    await plane.window(1, arrivals=1)
    counts = plane.arrivals(10, 0, 2)
    assert math.isnan(counts[0])
    assert counts[1] == 1.0


async def test_gaps_are_between_activities_of_all_gateways_and_none_reaches_over_what_was_not_seen(
    database: Database,
) -> None:
    plane = await leading(database)
    plane.gateways.peers = {"gw-2": object()}
    for n, own, other in ((0, ((1, 2),), ((1.5, 4),)), (1, (), ()), (2, ((24, 30),), ()), (3, ((30, 31),), ())):
        plane.observations.take("gw-2", [closed(n, other, arrivals=1)])
        await plane.window(n, own, arrivals=1)
    load = plane.observations.of(KEY)
    assert load is not None
    assert load.history.gaps_s.tolist() == [20.0]
    plane.observations.take("gw-2", [closed(5), closed(6)])
    await plane.window(5, ((55, 56),), arrivals=1)
    await plane.window(6, ((60, 61),), arrivals=1)
    assert load.history.gaps_s.tolist() == [20.0, 4.0]


async def test_who_leads_next_goes_on_from_what_was_kept(database: Database) -> None:
    plane = await leading(database)
    for n in range(120):
        if n % 6 == 0:
            await plane.window(n, ((10 * n, 10 * n + 1),), arrivals=2, ended=1)
        else:
            await plane.window(n)
        await plane.observations.keep() if n % 3 == 0 else None
    plane.observations.started(status())
    await plane.observations.keep(whole=True)
    after = await leading(database, "gw-2", plane.now_s + 60)
    np.testing.assert_array_equal(after.arrivals(60, 0, 120), [2.0] * 20)
    assert after.arrivals(600, 0, 120) == [20.0, 20.0]
    assert math.isnan(after.arrivals(10, 120, 121)[0])
    load = after.observations.of(KEY)
    assert load is not None
    assert load.history.gaps_s.tolist() == [59.0] * 19
    assert load.active_until_s == T0 + 10 * 114 + 10
    assert load.starts.expected_s("disk") == 0.5
    await after.window(127, arrivals=7)
    assert after.arrivals(10, 127, 128) == [7.0]


async def test_the_load_of_a_slot_is_gathered_kept_and_given_up_when_nothing_runs_there(database: Database) -> None:
    values = tuple({"arrivals": 3.0, "peak_concurrency": 2.0, "output_tokens": 60.0}.get(name, 0.0) for name in STORED)

    def ran(n: int, gateway: str) -> ClosedWindow:
        busy = ((T0 + 10 * n, T0 + 10 * n + 5),)
        return ClosedWindow(T0 + 10 * n, True, (FunctionWindow(SLOTS, "slot-1", values, busy),))

    first = await leading(database)
    first.gateways.peers = {"gw-2": None}
    for n in range(7):
        first.now_s = T0 + 10 * (n + 1)
        for gateway in ("gw-1", "gw-2"):
            first.observations.take(gateway, [ran(n, gateway)])
        await first.observations.settle()
    told = slot_load(first.observations, "slot-1", first.now_s)
    assert told is not None and told["minute"]["requests"] == 36 and told["minute"]["output_tokens"] == 720
    assert slot_load(first.observations, "slot-2", first.now_s) is None
    await first.observations.keep(whole=True)
    second = await leading(database, "gw-2", first.now_s)
    again = slot_load(second.observations, "slot-1", second.now_s)
    assert again is not None and again["hour"] == told["hour"]
    second.now_s += 2 * DAY_S
    await second.observations.sweep()
    assert second.observations.on_slot("slot-1") is None


async def test_what_a_kill_takes_was_not_seen_and_is_not_quiet(database: Database) -> None:
    plane = await leading(database)
    for n in range(9):
        await plane.window(n, arrivals=1)
    await plane.observations.keep()
    after = await leading(database, "gw-2", plane.now_s)
    counts = after.arrivals(10, 0, 9)
    assert counts[:6] == [1.0] * 6
    assert np.isnan(counts[6:]).all()


async def test_a_day_later_the_coarse_windows_are_there_and_the_fine_ones_are_swept(database: Database) -> None:
    plane = await leading(database)
    for n in range(90):
        await plane.window(n, arrivals=1)
        if n == 70:
            await plane.observations.keep()
    await plane.observations.keep(whole=True)
    later_s = T0 + 2 * DAY_S
    store = LoadStore(database, "gw-2")
    while await store.sweep(later_s):
        pass
    after = await leading(database, "gw-2", later_s)
    load = after.observations.of(KEY)
    assert load is not None
    assert load.history.arrivals(600, T0, T0 + 1200)[1].tolist() == [60.0, 60.0]
    assert {row.length_s for row in await store.read(KEY, 0, later_s)} == {600}
    while await store.sweep(later_s + 14 * DAY_S):
        pass
    assert await store.read(KEY, 0, T0 + 3 * DAY_S) == []
    assert await store.spans(0) == []


async def test_a_function_made_anew_does_not_inherit_the_load_of_the_old_one(database: Database) -> None:
    plane = await leading(database)
    for n in range(12):
        await plane.window(n, arrivals=1)
    await plane.observations.keep(whole=True)
    plane.observations.forget(KEY)
    plane.functions.known[0].created_us = (T0 + 600) * 1e6
    await plane.observations.restore()
    assert np.isnan(plane.arrivals(10, 0, 12)).all()


async def test_a_clock_put_back_takes_what_lay_ahead_with_it_and_counting_goes_on(database: Database) -> None:
    plane = await leading(database)
    for n in range(60, 72):
        await plane.window(n, arrivals=1)
    plane.meter.clock_jumps = 1
    await plane.window(3, arrivals=5)
    await plane.window(4, arrivals=5)
    assert plane.arrivals(10, 3, 5) == [5.0, 5.0]
    load = plane.observations.of(KEY)
    assert load is not None
    assert load.history.observed_until_s == T0 + 50


def status() -> ReplicaStatus:
    spec = ReplicaSpec("rep-1", KEY[1], 1, KEY[0], "", "", EngineOptions())
    stages = (Stage("prepare", 0, 300_000, tier="disk"), Stage("map", 300_000, 100_000, tier="pool"))
    return ReplicaStatus("rep-1", KEY[1], 1, ReplicaState.READY, spec, created_us=1, ready_us=500_001, stages=stages)


async def test_a_start_stands_under_the_farthest_tier_that_it_needed(database: Database) -> None:
    plane = await leading(database)
    plane.observations.started(status())
    load = plane.observations.of(KEY)
    assert load is not None
    assert load.starts.tiers == ("disk",)
    assert load.starts.expected_s("disk", "prepare") == 0.3
    assert load.starts.expected_s(None, TOTAL) == 0.5


async def test_what_a_process_took_to_go_is_no_start(database: Database) -> None:
    plane = await leading(database)
    plane.observations.started(status())
    leaving = (Stage("drain", 0, 9_000_000), Stage("flush", 0, 100_000), Stage("exit", 0, 300_000))
    plane.observations.ended(msgspec.structs.replace(status(), state=ReplicaState.ENDED, stages=leaving))
    load = plane.observations.of(KEY)
    assert load is not None
    assert load.starts.expected_s(None, END) == pytest.approx(0.4), "what it still ran is not its end"
    assert load.starts.expected_s(None, TOTAL) == 0.5 and load.starts.tiers == ("disk",)


async def test_a_start_before_the_histories_are_restored_is_not_lost(database: Database) -> None:
    plane = Plane(database)
    plane.observations.started(status())
    await plane.observations.restore()
    load = plane.observations.of(KEY)
    assert load is not None
    assert load.starts.measured == 1
