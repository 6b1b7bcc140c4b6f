from __future__ import annotations

import asyncio
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.accounts import PRICE_UNIT_US, apportion, cost_microusd
from control_plane.database import Database
from control_plane.journal import Journal
from control_plane.ledger import Ledger
from function_runtime.protocol import DeviceTime, ReplicaTime
from tests.control_plane.storage.builders import done, new_request, query, replica_status, set_price, used


async def sums(database: Database, replica_id: str = "rep-1") -> tuple[int, int]:
    rows = await database.read(
        query("SELECT SUM(device_us), SUM(cost_microusd) FROM ledger WHERE replica_id = ?", replica_id)
    )
    return rows[0][0] or 0, rows[0][1] or 0


async def stages(database: Database, replica_id: str = "rep-1") -> dict[tuple[str, str], int]:
    rows = await database.read(
        query("SELECT kind, stage, SUM(device_us) FROM ledger WHERE replica_id = ? GROUP BY kind, stage", replica_id)
    )
    return {(kind, stage): device_us for kind, stage, device_us in rows}


async def serve(journal: Journal, device: DeviceTime, replica_id: str = "rep-1") -> None:
    request_id = (await journal.accept(new_request())).record.id
    epoch = await journal.assign(request_id, replica_id, "slot-0")
    await journal.finish(request_id, epoch, done(device=device))


async def test_a_clean_life_is_accounted_for_without_a_rest(journal: Journal, database: Database) -> None:
    await set_price(database, 3_600_000)
    await serve(journal, used(1_000_000, 2_000_000))
    await Ledger(database).close_replica(
        replica_status(time=ReplicaTime(10_000_000, 2_000_000, 3_000_000, 4_000_000, 1_000_000))
    )
    assert await stages(database) == {
        ("request", "prefill"): 1_000_000,
        ("request", "decode"): 2_000_000,
        ("replica", "cold_start"): 2_000_000,
        ("replica", "idle"): 4_000_000,
        ("replica", "overhead"): 1_000_000,
        ("replica", "attributed"): 0,
    }
    assert await sums(database) == (10_000_000, 10_000)


async def test_after_a_kill_what_nobody_reported_is_unreported(journal: Journal, database: Database) -> None:
    await serve(journal, used(100, 200))
    await Ledger(database).close_replica(replica_status(time=ReplicaTime(1_000, 50, 400, 100, 20)))
    assert (await stages(database))["replica", "unreported"] == 1_000 - 300 - 50 - 100 - 20
    assert (await sums(database))[0] == 1_000


async def test_time_that_requests_know_of_and_the_replica_does_not_is_corrected(
    journal: Journal, database: Database
) -> None:
    await serve(journal, used(500, 500))
    await Ledger(database).close_replica(replica_status(time=ReplicaTime(1_200, 100, 800, 200, 100)))
    assert (await stages(database))["correction", "unreported"] == 1_200 - 1_000 - 400
    assert (await sums(database))[0] == 1_200


async def test_a_request_that_ends_after_its_replica_moves_time_out_of_unreported(
    journal: Journal, database: Database
) -> None:
    await set_price(database, 7_777_777)
    request_id = (await journal.accept(new_request())).record.id
    await journal.assign(request_id, "rep-1", "slot-0")
    await Ledger(database).close_replica(replica_status(time=ReplicaTime(1_000_000, 100, 0, 200, 300)))
    before = await sums(database)
    await journal.finish(request_id, 1, done(device=used(123_456, 7)))
    found = await stages(database)
    assert found["replica", "unreported"] + found["correction", "unreported"] == 1_000_000 - 600 - 123_463
    assert await sums(database) == before


async def test_closing_twice_adds_nothing(journal: Journal, database: Database) -> None:
    status = replica_status(time=ReplicaTime(1_000, 100, 0, 200, 300))
    ledger = Ledger(database)
    await ledger.close_replica(status)
    rows = await ledger.of_replica("rep-1")
    await ledger.close_replica(status)
    assert await ledger.of_replica("rep-1") == rows


async def test_a_report_that_the_end_overtook_changes_nothing(journal: Journal, database: Database) -> None:
    ledger = Ledger(database)
    await ledger.report_replica(replica_status(time=ReplicaTime(500, 100, 0, 300, 100)))
    await ledger.close_replica(replica_status(time=ReplicaTime(1_000, 100, 0, 600, 200)))
    await ledger.report_replica(replica_status(time=ReplicaTime(900, 100, 0, 500, 200)))
    held = await database.read(query("SELECT held_us FROM replica_accounts WHERE closed_us IS NOT NULL"))
    assert [tuple(row) for row in held] == [(1_000,)]
    assert (await sums(database))[0] == 1_000


async def test_reports_of_a_living_replica_are_charged_once(journal: Journal, database: Database) -> None:
    ledger = Ledger(database)
    await ledger.report_replica(replica_status(time=ReplicaTime(500, 100, 0, 300, 100)))
    assert await ledger.open_replicas() == ["rep-1"]
    await ledger.report_replica(replica_status(time=ReplicaTime(900, 100, 0, 600, 200)))
    assert (await sums(database))[0] == 900
    await ledger.close_replica(replica_status(time=ReplicaTime(1_000, 100, 0, 600, 200)))
    assert (await stages(database)) == {
        ("replica", "cold_start"): 100,
        ("replica", "idle"): 600,
        ("replica", "overhead"): 200,
        ("replica", "unreported"): 100,
        ("replica", "attributed"): 0,
    }
    assert await ledger.open_replicas() == []


async def test_a_replica_of_an_unknown_function_costs_nothing_and_is_still_accounted_for(database: Database) -> None:
    await Ledger(database).close_replica(replica_status(function="gone", time=ReplicaTime(1_000, 1_000, 0, 0, 0)))
    assert await sums(database) == (1_000, 0)


async def test_the_price_is_that_of_the_revision_that_ran(journal: Journal, database: Database) -> None:
    await set_price(database, PRICE_UNIT_US, revision=1)
    await set_price(database, 2 * PRICE_UNIT_US, revision=2)
    ledger = Ledger(database)
    await ledger.close_replica(replica_status("rep-1", revision=1, time=ReplicaTime(10, 10, 0, 0, 0)))
    await ledger.close_replica(replica_status("rep-2", revision=2, time=ReplicaTime(10, 10, 0, 0, 0)))
    assert await sums(database, "rep-1") == (10, 10)
    assert await sums(database, "rep-2") == (10, 20)


async def test_a_thousand_tiny_requests_are_not_all_rounded_away(journal: Journal, database: Database) -> None:
    """100,000 micro-dollars an hour is 0.14 for 5 ms: each alone would round to nothing."""
    await set_price(database, 100_000)
    for _ in range(100):
        await serve(journal, used(0, 5_000))
    device_us, microusd = await sums(database)
    assert (device_us, microusd) == (500_000, cost_microusd(500_000, 100_000)) == (500_000, 14)


@given(
    st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=8),
    st.integers(0, 10**10),
    st.sampled_from([0, 1]),
)
def test_money_is_apportioned_exactly_and_nobody_is_a_micro_dollar_off(times: list[int], price: int, up: int) -> None:
    exact = Fraction(sum(times) * price, PRICE_UNIT_US)
    total = exact.numerator // exact.denominator + (up if exact.denominator != 1 else 0)
    costs = apportion(total, times, price)
    assert sum(costs) == total
    for cost, device_us in zip(costs, times, strict=True):
        assert abs(cost - Fraction(device_us * price, PRICE_UNIT_US)) < 1


@given(st.integers(0, 10**15), st.integers(0, 10**9))
def test_costs_are_rounded_half_up(device_us: int, price: int) -> None:
    exact = Fraction(device_us * price, PRICE_UNIT_US)
    assert abs(cost_microusd(device_us, price) - exact) <= Fraction(1, 2)


part = st.integers(0, 50_000_000)
lives = st.lists(
    st.tuples(st.sampled_from(["serve", "lose", "report", "kill", "late"]), st.integers(0, 1), part, part),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize(
    ("kind", "price"), [*(("sqlite", price) for price in (0, 1, 123_457, 98_000_000)), ("postgresql", 123_457)]
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=lives, slack=st.integers(-1_000_000, 1_000_000))
def test_every_device_second_is_charged_once_whatever_happens(
    request: pytest.FixtureRequest, kind: str, price: int, steps: list[tuple[str, int, int, int]], slack: int
) -> None:
    """Two replicas live, serve, lose requests, report, are killed and closed; requests end before and after.
    Sum of device time = time held, sum of cost = its price rounded once, for each, also after late ends."""

    async def run(where: Path | str) -> None:
        database = await Database.open(where)
        journal, ledger = Journal(database, "gw-1"), Ledger(database)
        await set_price(database, price)
        told: list[dict[str, int]] = [dict.fromkeys(("cold", "attributed", "idle", "overhead"), 0) for _ in range(2)]
        held: list[int | None] = [None, None]
        late: list[tuple[str, int, DeviceTime]] = []
        try:
            for what, number, first, second in steps:
                replica_id = f"rep-{number}"
                if held[number] is not None and what != "late":
                    continue
                if what in ("serve", "lose", "late"):
                    request_id = (await journal.accept(new_request())).record.id
                    epoch = await journal.assign(request_id, replica_id, "slot-0")
                    device = DeviceTime(first, second)
                    told[number]["attributed"] += first + second
                    if what == "serve":
                        await journal.finish(request_id, epoch, done(device=device))
                    elif what == "lose":
                        await journal.requeue(request_id, epoch, "lost", device)
                    else:
                        late.append((request_id, epoch, device))
                elif what == "report":
                    told[number]["idle"] += first
                    told[number]["overhead"] += second
                    await ledger.report_replica(_status(replica_id, told[number], 0))
                else:
                    held[number] = max(0, sum(told[number].values()) + slack)
                    await ledger.close_replica(_status(replica_id, told[number], held[number]))
                    assert await sums(database, replica_id) == (held[number], cost_microusd(held[number], price))
            for number in range(2):
                if held[number] is None:
                    told[number]["cold"] += 17
                    held[number] = sum(told[number].values())
                    await ledger.close_replica(_status(f"rep-{number}", told[number], held[number]))
            for request_id, epoch, device in late:
                await journal.finish(request_id, epoch, done(device=device))
            for number in range(2):
                assert await sums(database, f"rep-{number}") == (held[number], cost_microusd(held[number] or 0, price))
        finally:
            await database.close()

    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(run(Path(directory) / "stoker.db"))
    else:
        with request.getfixturevalue("postgres").database() as url:
            asyncio.run(run(url))


def _status(replica_id: str, told: dict[str, int], held_us: int | None) -> Any:
    return replica_status(
        replica_id, time=ReplicaTime(held_us or 0, told["cold"], told["attributed"], told["idle"], told["overhead"])
    )
