"""Budgets of tenants and keys: one over all gateways, over deaths and restarts, until the period ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane.budgets import Budget, Budgets, Kind, Period
from control_plane.database import Database
from control_plane.errors import BudgetExceeded, RateExceeded, Saturated
from control_plane.gateways import Gateways
from control_plane.settings import GatewaySettings
from control_plane.shares import Shares
from tests.control_plane.gateway.conftest import body, until
from tests.control_plane.gateways.conftest import Gateway
from tests.control_plane.gateways.test_leases import LEASE_S, RENEW_S, Clock, clock, database, turns

__all__ = ["clock", "database"]

MINUTE_US = 60_000_000
STEP = 1 / 16


class Payer:
    """A gateway with budgets, by a clock of the test's own."""

    def __init__(self, database: Database, name: str, clock: Clock, *, alone: bool = False) -> None:
        settings = GatewaySettings(lease_s=LEASE_S)
        self.gateways = Gateways(database, name, settings, alone=alone, clock=clock)
        self.shares = Shares(database, self.gateways)
        self.gateways.on_regained = self.shares.void
        self.clock = clock
        self.budgets = Budgets(database, self.shares, lambda: round(clock.now_s * 1e6))

    async def start(self) -> None:
        await self.gateways.start(f"http://{self.gateways.id}")
        await self.budgets.refresh()

    async def take(self, key: str = "k", tokens: int = 1) -> bool:
        try:
            await self.budgets.take("acme", key, tokens)
        except Saturated:
            return False
        return True

    async def take_all(self, count: int, key: str = "k", tokens: int = 1) -> int:
        return sum(await asyncio.gather(*(self.take(key, tokens) for _ in range(count))))


async def set_budget(payers: tuple[Payer, ...], amount: int, kind: Kind, period: Period, key: str = "") -> Budget:
    budget = Budget("acme", key, kind, period, amount)
    await payers[0].budgets.put(budget)
    for payer in payers:
        await payer.budgets.refresh()
    return budget


@pytest.fixture
async def two(database: Database, clock: Clock) -> AsyncIterator[tuple[Payer, Payer]]:
    payers = Payer(database, "gw-1", clock), Payer(database, "gw-2", clock)
    for payer in payers:
        await payer.start()
    await turns(clock, RENEW_S, *(payer.gateways for payer in payers))
    yield payers


async def test_without_a_budget_nothing_is_asked_and_nothing_refused(two: tuple[Payer, Payer]) -> None:
    assert await two[0].take_all(100) == 100
    assert two[0].shares.claims == 0


async def test_requests_in_a_minute_are_one_bound_over_all_gateways(two: tuple[Payer, Payer]) -> None:
    await set_budget(two, 100, Kind.REQUESTS, Period.MINUTE)
    taken = await asyncio.gather(*(payer.take_all(100) for payer in two))
    assert 100 - 2 * 100 * STEP <= sum(taken) <= 100


async def test_one_gateway_may_spend_all_of_it_with_few_ways_to_the_database(two: tuple[Payer, Payer]) -> None:
    await set_budget(two, 160, Kind.REQUESTS, Period.MINUTE)
    assert await two[0].take_all(200) == 160
    assert two[0].shares.claims <= 17
    assert not await two[1].take()


async def test_the_next_period_begins_with_all_of_it(two: tuple[Payer, Payer], clock: Clock) -> None:
    await set_budget(two, 10, Kind.REQUESTS, Period.MINUTE)
    clock.now_s = 6000.0
    assert await two[0].take_all(20) == 10
    clock.now_s = 6059.0
    with pytest.raises(RateExceeded) as refused:
        await two[1].budgets.take("acme", "k", 1)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    assert (refused.value.http_status, refused.value.retry) == (429, True)
    clock.now_s = 6060.0
    assert await two[1].take_all(20) == 10


async def test_tokens_are_counted_at_acceptance_and_at_the_end(two: tuple[Payer, Payer]) -> None:
    first, second = two
    await set_budget(two, 1000, Kind.TOKENS, Period.DAY)
    assert await first.take(tokens=300)
    first.budgets.ended("acme", "k", 650)
    await first.budgets.settle()
    assert not await second.take(tokens=51)
    assert await second.take(tokens=50)
    with pytest.raises(BudgetExceeded, match="1000 tokens in a day") as refused:
        await first.budgets.take("acme", "k", 1)
    assert refused.value.retry is False


async def test_what_goes_over_a_budget_at_the_end_is_what_was_under_way(two: tuple[Payer, Payer]) -> None:
    first, second = two
    await set_budget(two, 100, Kind.TOKENS, Period.DAY)
    assert await first.take(tokens=90)
    first.budgets.ended("acme", "k", 500)
    assert not await first.take(tokens=1)
    await first.budgets.settle()
    assert not await second.take(tokens=1)
    (told,) = await second.budgets.of("acme")
    assert told[1] == 590


async def test_money_refuses_once_it_is_spent_and_is_not_known_before(two: tuple[Payer, Payer]) -> None:
    first, second = two
    await set_budget(two, 1_000_000, Kind.MICROUSD, Period.MONTH)
    assert await first.take_all(50) == 50
    first.budgets.charged("acme", "k", 999_999)
    assert await first.take()
    first.budgets.charged("acme", None, 1)  # a replica's idle time
    assert not await first.take()
    await first.budgets.settle()
    assert not await second.take()


async def test_a_keys_budget_bounds_that_key_only_and_a_tenants_all(two: tuple[Payer, Payer]) -> None:
    first, _ = two
    await set_budget(two, 10, Kind.REQUESTS, Period.HOUR, key="k1")
    await set_budget(two, 25, Kind.REQUESTS, Period.HOUR)
    assert await first.take_all(20, "k1") == 10
    assert await first.take_all(20, "k2") == 15
    first.budgets.charged("acme", None, 5)


async def test_what_is_refused_by_one_budget_is_taken_from_none(two: tuple[Payer, Payer]) -> None:
    first, _ = two
    await set_budget(two, 5, Kind.REQUESTS, Period.HOUR, key="k1")
    await set_budget(two, 20, Kind.REQUESTS, Period.HOUR)
    assert await first.take_all(50, "k1") == 5
    assert await first.take_all(50, "k2") == 15


async def test_what_was_not_accepted_is_put_back(two: tuple[Payer, Payer]) -> None:
    first, _ = two
    await set_budget(two, 1, Kind.REQUESTS, Period.HOUR)
    for _ in range(3):
        spent = await first.budgets.take("acme", "k", 1)
        with pytest.raises(RuntimeError), spent.unless_refused():
            raise RuntimeError("the queue is full")
    assert await first.take()
    assert not await first.take()


async def test_what_a_killed_gateway_spent_stays_spent(two: tuple[Payer, Payer], clock: Clock) -> None:
    first, second = two
    await set_budget(two, 160, Kind.REQUESTS, Period.MONTH)
    assert await first.take_all(100) == 100
    await turns(clock, 2 * LEASE_S, second.gateways)
    await second.shares.sweep(round(clock.now_s * 1e6))
    assert second.gateways.peers == {}
    assert 60 - 160 * STEP <= await second.take_all(160) <= 60


async def test_a_service_that_is_alone_remembers_over_a_restart(database: Database, clock: Clock) -> None:
    first = Payer(database, "gw-1", clock, alone=True)
    await first.start()
    await set_budget((first,), 100, Kind.REQUESTS, Period.MONTH)
    assert await first.take_all(40) == 40
    await first.budgets.settle()
    await first.budgets.settle()  # a second in which nothing came: what was claimed ahead is given back
    again = Payer(database, "gw-2", clock, alone=True)
    await again.start()
    assert await again.take_all(100) == 60


async def test_what_is_claimed_and_not_used_is_another_gateways_a_second_later(two: tuple[Payer, Payer]) -> None:
    first, second = two
    await set_budget(two, 160, Kind.REQUESTS, Period.HOUR)
    assert await first.take()
    for _ in range(2):
        await first.budgets.settle()
    assert await second.take_all(200) == 159


async def test_a_budget_that_is_lowered_holds_at_once_and_one_that_is_raised_gives_more(
    two: tuple[Payer, Payer],
) -> None:
    first, _ = two
    await set_budget(two, 100, Kind.REQUESTS, Period.HOUR)
    assert await first.take_all(20) == 20
    await set_budget(two, 10, Kind.REQUESTS, Period.HOUR)
    assert not await first.take()
    await set_budget(two, 30, Kind.REQUESTS, Period.HOUR)
    assert await first.take_all(30) == 10
    assert await first.budgets.drop(Budget("acme", "", Kind.REQUESTS, Period.HOUR, 0))
    assert await first.take_all(30) == 30


async def test_a_gateways_own_clock_does_not_decide_which_period_it_is(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.driver.dialect.name == "sqlite":
        pytest.skip("one machine, one clock")
    payer = Payer(database, "gw-1", clock)
    budgets = Budgets(database, payer.shares)
    monkeypatch.setattr("control_plane.database.clock.time.time_ns", lambda: 7_000_000_000)
    assert budgets.now_us() == 7_000_000
    await payer.gateways.start()
    (told,) = await database.read(lambda c: c.execute("SELECT CAST(EXTRACT(EPOCH FROM now()) AS BIGINT)").fetchone())
    assert abs(budgets.now_us() / 1e6 - told) < 60


@pytest.mark.parametrize(
    ("period", "now_us", "end_us"),
    [
        (Period.MINUTE, 61_500_000, 120_000_000),
        (Period.HOUR, 0, 3_600_000_000),
        (Period.DAY, 86_400_000_000 - 1, 86_400_000_000),
        (Period.MONTH, 0, 31 * 86_400_000_000),
        (Period.MONTH, 334 * 86_400_000_000, 365 * 86_400_000_000),
    ],
)
def test_periods_follow_each_other_without_a_gap(period: Period, now_us: int, end_us: int) -> None:
    window, end = period.window(now_us)
    assert end == end_us
    assert period.window(end_us - 1)[0] == window
    assert period.window(end_us)[0] == window + 1


# --- whole gateways ---------------------------------------------------------------------------------------------------


async def ask(gateway: Gateway, **given: Any) -> tuple[int, str]:
    async with gateway.post(body(**given)) as response:
        answer = await response.json()
        return response.status, answer["error"]["code"] if "error" in answer else ""


async def put(gateway: Gateway, **fields: Any) -> None:
    async with gateway.client.put("/api/v1/budgets", json=fields, headers=gateway.headers) as response:
        assert response.status == 200, await response.text()


async def test_a_budget_set_at_one_gateway_holds_at_both(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    await put(leader, kind="requests", period="day", amount=6)
    await until(lambda: other.context.budgets._of)
    answers = [await ask(pair[number % 2]) for number in range(14)]
    accepted = sum(status == 200 for status, _ in answers)
    assert 4 <= accepted <= 6
    assert set(answers) == {(200, ""), (429, "budget_exceeded")}
    async with other.get("/api/v1/budgets") as response:
        (told,) = (await response.json())["data"]
    assert (told["kind"], told["amount"]) == ("requests", 6) and accepted <= told["spent"] <= 6


async def test_tokens_and_money_of_a_request_are_counted(pair: tuple[Gateway, Gateway]) -> None:
    leader, _ = pair
    for kind in ("tokens", "microusd"):
        await put(leader, kind=kind, period="month", amount=10**12)
    async with leader.post(body(max_tokens=7)) as response:
        used = (await response.json())["usage"]["total_tokens"]
    await until(lambda: not leader.context.dispatcher.requests)

    async def spent() -> dict[str, int]:
        async with leader.get("/api/v1/budgets") as response:
            return {each["kind"]: each["spent"] for each in (await response.json())["data"]}

    for _ in range(2):
        await leader.context.budgets.settle()
    assert (await spent())["tokens"] == used
    leader.context.journal.on_charged("default", "k", 1234)
    leader.context.ledger.on_charged("default", None, 766)
    assert (await spent())["microusd"] == 2000


async def test_a_known_idempotency_key_costs_no_budget(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    await put(leader, kind="requests", period="day", amount=1)
    await until(lambda: other.context.budgets._of)
    for gateway in (leader, leader, other):
        async with gateway.post(body(), Idempotency_Key="once") as response:
            assert response.status == 200
    assert (await ask(leader))[0] == 429
