"""Bounds over all gateways: claims never exceed one together, follow the traffic, and outlive no gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from control_plane.database import Database
from control_plane.errors import Saturated, StorageUnavailable
from control_plane.gateways import Gateways
from control_plane.lanes import Lanes
from control_plane.live_request import LiveRequest
from control_plane.queue_shares import QueueShares
from control_plane.settings import QueueSettings
from control_plane.shares import Shares, Want
from tests.control_plane.gateway.conftest import body, until, until_read
from tests.control_plane.gateways.conftest import Gateway, Town
from tests.control_plane.gateways.test_leases import LEASE_S, RENEW_S, Clock, clock, database, turns

__all__ = ["clock", "database"]

KEY = ("default", "fn")
BOUND = 160
BYTES = 16_000


class Queue:
    """A gateway's queue of one function, without requests in it: places are taken and left by number."""

    def __init__(self, database: Database, name: str, clock: Clock) -> None:
        from control_plane.settings import GatewaySettings

        self.gateways = Gateways(database, name, GatewaySettings(lease_s=LEASE_S), alone=False, clock=clock)
        bounds = QueueSettings(max_requests=BOUND, max_bytes=BYTES)
        self.lanes = Lanes(bounds)
        self.shares = Shares(database, self.gateways)
        self.queue = QueueShares(self.shares, self.lanes, bounds, clock)
        self.lanes.granted = self.queue.granted
        self.gateways.on_regained = self.shares.void
        self.lane = self.lanes.of(KEY, "identity")
        self.places: list[Any] = []

    async def enter(self, nbytes: int = 10) -> bool:
        if not self.gateways.held:
            return False
        await self.queue.ensure(KEY, nbytes)
        place = self.lanes.room(KEY, "identity", nbytes)
        try:
            place.__enter__()
        except Saturated:
            return False
        self.places.append(place)
        return True

    async def enter_all(self, count: int) -> int:
        return sum(await asyncio.gather(*(self.enter() for _ in range(count))))

    def leave(self, count: int) -> None:
        for _ in range(count):
            self.places.pop().__exit__(None, None, None)

    @property
    def waiting(self) -> int:
        return self.lane.entering


@pytest.fixture
async def two(database: Database, clock: Clock) -> AsyncIterator[tuple[Queue, Queue]]:
    queues = Queue(database, "gw-1", clock), Queue(database, "gw-2", clock)
    for queue in queues:
        await queue.gateways.start(f"http://{queue.gateways.id}")
    await turns(clock, RENEW_S, *(queue.gateways for queue in queues))
    yield queues


async def test_a_gateway_that_gets_all_the_traffic_may_use_the_whole_bound(two: tuple[Queue, Queue]) -> None:
    busy, idle = two
    assert await busy.enter_all(BOUND + 20) == BOUND
    assert not await idle.enter()
    assert busy.shares.claims <= 20, "it asked the database for more than steps"


async def test_two_that_are_busy_at_once_never_have_more_than_the_bound(two: tuple[Queue, Queue]) -> None:
    taken = await asyncio.gather(*(queue.enter_all(BOUND) for queue in two))
    assert sum(taken) <= BOUND
    assert sum(taken) >= BOUND - 2 * BOUND // 16


async def test_the_share_follows_the_traffic(two: tuple[Queue, Queue], clock: Clock) -> None:
    first, second = two
    assert await first.enter_all(BOUND) == BOUND
    first.leave(BOUND)
    clock.pass_s(1.0)
    assert not await second.enter()
    for _ in range(2):  # the first look still sees that all of it was needed within the last second
        await first.queue.settle()
    clock.pass_s(1.0)
    assert await second.enter_all(BOUND) == BOUND
    second.leave(BOUND - 20)
    for _ in range(2):
        await second.queue.settle()
    clock.pass_s(1.0)
    assert await first.enter_all(BOUND) == BOUND - 20 - BOUND // 16


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_they_do_what_waits_with_all_of_them_stays_within_the_bound(
    two: tuple[Queue, Queue], clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(25):
        wanted = [chance.randrange(0, BOUND // 2) for _ in two]
        taken = await asyncio.gather(*(queue.enter_all(count) for queue, count in zip(two, wanted, strict=True)))
        refused += sum(wanted) - sum(taken)
        assert sum(queue.waiting for queue in two) <= BOUND
        assert sum(queue.lane.entering_bytes for queue in two) <= BYTES
        for queue in two:
            queue.leave(chance.randrange(0, queue.waiting + 1))
        if chance.random() < 0.5:
            await chance.choice(two).queue.settle()
        clock.pass_s(0.1)
        for queue in two:
            await queue.gateways.look()
    assert refused


async def test_bytes_are_bounded_over_all_gateways_too(two: tuple[Queue, Queue]) -> None:
    first, second = two
    assert [await first.enter(4000) for _ in range(3)] == [True] * 3
    # 16,000 may wait, and a sixteenth of that lies claimed ahead at the first.
    assert [await second.enter(2000), await second.enter(2000), await second.enter(1000)] == [True, False, True]


async def test_where_nothing_has_to_wait_the_database_is_not_asked(two: tuple[Queue, Queue]) -> None:
    class Free:
        room = 5

    first, _ = two
    first.lane.seats["rep"] = Free()  # type: ignore[assignment]
    assert await first.enter_all(5) == 5
    assert first.shares.claims == 0
    await first.enter()
    assert first.shares.claims == 1


async def test_a_dead_gateways_share_is_free_once_it_has_stopped_and_not_before(
    two: tuple[Queue, Queue], clock: Clock
) -> None:
    dead, heir = two
    assert await dead.enter_all(BOUND) == BOUND
    taken_s = None
    while taken_s is None:
        assert await dead.enter() is False
        if await heir.enter():
            taken_s = clock.now_s
            assert not dead.gateways.held, "it might have used what was taken from it"
        await turns(clock, RENEW_S, heir.gateways)
    assert await heir.enter_all(BOUND) == BOUND - 1


async def test_a_gateway_that_slept_through_its_lease_has_claimed_nothing(
    two: tuple[Queue, Queue], clock: Clock
) -> None:
    sleeper, heir = two
    assert await sleeper.enter_all(BOUND) == BOUND
    sleeper.leave(BOUND)
    await turns(clock, LEASE_S + 2 * RENEW_S, heir.gateways)
    assert await heir.enter_all(BOUND) == BOUND
    assert not await sleeper.enter()  # it does not know yet
    await sleeper.gateways.look()
    assert sleeper.gateways.held
    assert not await sleeper.enter()


async def test_wall_clocks_that_jump_move_no_share(
    two: tuple[Queue, Queue], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    assert await first.enter_all(100) == 100
    for at_ns in (10**18, 4 * 10**18, 10**9):
        monkeypatch.setattr("control_plane.gateways.time.time_ns", lambda at_ns=at_ns: at_ns)
        await turns(clock, RENEW_S, first.gateways, second.gateways)
        await first.shares.sweep(at_ns // 1000)
        await second.enter_all(BOUND)
        assert first.waiting + second.waiting <= BOUND


async def test_what_came_to_wait_without_asking_counts_against_everybodys_next_claim(
    two: tuple[Queue, Queue],
) -> None:
    adopter, other = two
    adopter.lane.entering += BOUND - 10
    await adopter.queue.settle()
    assert await other.enter_all(BOUND) == 10
    assert not await adopter.enter()
    adopter.lane.entering += 50  # more than there is
    await adopter.queue.settle()
    other.leave(10)
    for _ in range(2):
        await other.queue.settle()
    assert await other.enter_all(5) == 0


async def test_a_full_queue_costs_no_write_for_every_refusal(two: tuple[Queue, Queue], clock: Clock) -> None:
    first, second = two
    assert await first.enter_all(BOUND) == BOUND
    before = second.shares.claims
    assert await second.enter_all(50) == 0
    assert second.shares.claims == before + 1
    clock.pass_s(0.06)
    assert await second.enter_all(50) == 0
    assert second.shares.claims == before + 2


async def test_a_clean_end_gives_everything_back_at_once(two: tuple[Queue, Queue]) -> None:
    first, second = two
    assert await first.enter_all(BOUND) == BOUND
    await first.gateways.close()
    assert await second.enter_all(BOUND) == BOUND


async def test_a_claim_of_which_nothing_is_known_is_written_anew(
    two: tuple[Queue, Queue], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    assert await first.enter_all(BOUND) == BOUND
    first.leave(BOUND)
    await first.queue.settle()
    with monkeypatch.context() as away:

        async def lost(*given: Any, **options: Any) -> Any:
            raise StorageUnavailable("away")

        away.setattr(database, "write", lost)
        with pytest.raises(StorageUnavailable):
            await first.queue.settle()
        with pytest.raises(StorageUnavailable):
            await first.enter()
    await first.queue.settle()
    assert await second.enter_all(BOUND) == BOUND


async def test_what_is_claimed_for_good_outlives_its_gateway_and_no_longer_than_it_is_for(
    two: tuple[Queue, Queue], clock: Clock
) -> None:
    first, second = two
    spent = Want("spent", 60, 100, until_us=5_000_000)
    async with first.shares.lock:
        assert await first.shares.claim([spent]) == {"spent": 60}
    await turns(clock, 2 * LEASE_S, second.gateways)
    async with second.shares.lock:
        assert await second.shares.claim([Want("spent", 100, 100, until_us=5_000_000)]) == {"spent": 40}
    await second.shares.sweep(5_000_001)
    async with second.shares.lock:
        assert await second.shares.claim([Want("spent", 100, 100, until_us=9_000_000)]) == {"spent": 100}


# --- whole gateways ---------------------------------------------------------------------------------------------------


async def opened(town: Town, **queue: Any) -> list[Gateway]:
    gateways = [await town.open(**queue) for _ in range(2)]
    town.slot.behaviour.never_ready = True
    await gateways[0].deploy()
    gateways[0].context.peers.tell("functions")
    await until(lambda: gateways[1].context.functions.find("fn", "default"))
    return gateways


def requests_of(gateway: Gateway) -> list[LiveRequest]:
    return list(gateway.context.dispatcher.requests.values())


async def test_the_queues_bound_holds_over_all_gateways(town: Town) -> None:
    gateways = await opened(town, max_requests=5)
    tasks = [asyncio.ensure_future(gateway.post(body())) for gateway in gateways for _ in range(6)]
    await until(lambda: sum(task.done() for task in tasks) >= 7)
    assert {task.result().status for task in tasks if task.done()} == {429}
    await until(lambda: 3 <= sum(len(requests_of(gateway)) for gateway in gateways) <= 5)
    for task in tasks:
        task.cancel()
    await until(lambda: not any(requests_of(gateway) for gateway in gateways))


async def claimed_by(gateway: Gateway) -> int:
    row = await gateway.context.db.read(
        lambda c: c.execute("SELECT COALESCE(SUM(amount), 0) FROM shares WHERE gateway = :id", {"id": gateway.id})
        .fetchone()
    )  # fmt: skip
    return int(row[0])


async def test_one_of_two_may_use_the_whole_queue_and_then_the_other_may(town: Town) -> None:
    first, second = await opened(town, max_requests=16)
    tasks = [asyncio.ensure_future(second.post(body())) for _ in range(20)]
    await until(lambda: sum(task.done() for task in tasks) == 4 and len(requests_of(second)) == 16)
    for task in tasks:
        task.cancel()
    await until(lambda: not requests_of(second))
    await until(lambda: second.context.queue_shares.granted(KEY).requests == 0)
    # It has let go once it says so where the other looks.
    await until_read(lambda: claimed_by(second), lambda claimed: not claimed)
    tasks = [asyncio.ensure_future(first.post(body())) for _ in range(20)]
    await until(lambda: len(requests_of(first)) == 16)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.deaths
async def test_what_an_adopter_takes_over_fills_the_queue_for_everybody(town: Town) -> None:
    first, second = await opened(town, max_requests=8)
    tasks = [asyncio.ensure_future(first.post(body(), Idempotency_Key=f"k{place}")) for place in range(6)]
    await until(lambda: len(requests_of(first)) == 6)
    await first.die()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: second.context.adopting.adopted == 6, 20.0)
    await until(lambda: second.context.queue_shares.granted(KEY).requests == 6)
    more = [asyncio.ensure_future(second.post(body())) for _ in range(4)]
    await until(lambda: sum(task.done() for task in more) == 2 and len(requests_of(second)) == 8)
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)


async def test_places_that_an_objective_allows_are_one_bound_over_all_gateways_too(two: tuple[Queue, Queue]) -> None:
    for queue in two:
        queue.queue.most_waiting = lambda key: 20
    taken = await asyncio.gather(*(queue.enter_all(20) for queue in two))
    assert 18 <= sum(taken) <= 20
    second = two[1]
    await second.enter()
    assert second.queue.others(KEY) == two[0].shares.granted("queue/default/fn/requests")
    # The objective allows less now: nothing more is had, and what waits already is written down all the same.
    for queue in two:
        queue.queue.most_waiting = lambda key: 5
        await queue.queue.settle()
    assert [await queue.enter() for queue in two] == [False, False]
    # Work that no objective judges has the whole bound.
    await second.queue.ensure(KEY, 10, judged=False)
    assert await second.enter()
