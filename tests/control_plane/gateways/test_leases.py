"""Who lives and who leads, by a clock of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from control_plane.database import Database
from control_plane.gateways import Gateways
from control_plane.settings import GatewaySettings

LEASE_S = 15.0
SETTINGS = GatewaySettings(lease_s=LEASE_S)
RENEW_S = SETTINGS.renew_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = await Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def open_gateway(database: Database, name: str, clock: Clock) -> Gateways:
    gateways = Gateways(database, name, SETTINGS, alone=False, clock=clock)
    await gateways.start(f"http://{name}")
    return gateways


async def turns(clock: Clock, seconds: float, *living: Gateways) -> None:
    """Time passes; those that live look at their pace."""
    while seconds > 0:
        step_s = min(RENEW_S, seconds)
        clock.pass_s(step_s)
        seconds -= step_s
        for gateways in living:
            await gateways.look()


async def accept(database: Database, owner: str, request_id: str = "cmpl-1") -> None:
    columns = "id, tenant, key_id, function, revision, endpoint, model, durability, on_disconnect, stream, input_tokens"
    await database.write(
        lambda connection: (
            connection.execute(
                f"INSERT INTO requests ({columns}, created_us, state, owner) VALUES "
                "(:id, 't', 'k', 'f', 1, 'chat', 'm', 'process', 'cancel', 0, 1, 1, 'running', :owner)",
                {"id": request_id, "owner": owner},
            ).rowcount
        )
    )


async def test_a_gateway_lives_as_long_as_its_row_changes(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await first.look()
    await turns(clock, 5 * LEASE_S, first, second)
    assert set(first.peers) == {"gw-2"}
    assert set(second.peers) == {"gw-1"}
    await turns(clock, LEASE_S, first)
    assert set(first.peers) == {"gw-2"}
    await turns(clock, RENEW_S, first)
    assert first.peers == {}


async def test_a_dead_gateways_requests_are_told_within_the_stated_time_and_not_before_it_stopped(
    database: Database, clock: Clock
) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-2")
    told: list[tuple[float, bool]] = []
    first.on_orphans = lambda owners: told.append((clock.now_s, second.held))
    await turns(clock, LEASE_S, first, second)
    died_s = clock.now_s
    await turns(clock, 2 * LEASE_S, first)
    at_s, still_held = told[0]
    assert at_s - died_s <= SETTINGS.adopt_within_s
    assert not still_held


async def test_wall_clocks_that_jump_kill_nobody_and_revive_nobody(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-2")
    orphans: list[tuple[str, ...]] = []
    first.on_orphans = second.on_orphans = orphans.append
    wall_ns = 1_700_000_000_000_000_000
    for jump_ns in (3_600_000_000_000, -7_200_000_000_000, 10**15, -(10**15)):
        wall_ns += jump_ns
        monkeypatch.setattr("control_plane.gateways.time.time_ns", lambda now=wall_ns: now)
        await turns(clock, RENEW_S, first, second)
        wall_ns += 5_000_000_000
        assert (set(first.peers), set(second.peers), orphans) == ({"gw-2"}, {"gw-1"}, [])
        assert first.leads and not second.leads
    # One that wrote a time far ahead and died is dead all the same.
    monkeypatch.setattr("control_plane.gateways.time.time_ns", lambda: wall_ns + 10**18)
    await second.look()
    await turns(clock, LEASE_S + RENEW_S, first)
    assert first.peers == {}
    assert orphans[0] == ("gw-2",)


async def test_a_gateway_that_cannot_renew_stops_before_another_begins(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await first.look()
    assert first.leads
    leading_s = 0.0
    while not second.leads:
        clock.pass_s(1.0)
        leading_s += 1.0
        await second.look()
        assert not (first.leads and second.leads)
        assert leading_s <= SETTINGS.lead_within_s
    assert first.held  # its requests are its own for longer than the lead was
    clock.pass_s(LEASE_S)
    assert not first.held
    # It wakes up, and finds that it leads no more.
    await first.look()
    assert first.held and not first.leads


async def test_the_lead_passes_on_long_before_a_dead_leader_is_buried(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-1")
    orphans: list[tuple[str, ...]] = []
    second.on_orphans = orphans.append
    await turns(clock, LEASE_S, first, second)
    assert first.leads and not second.leads
    await turns(clock, SETTINGS.lead_within_s, second)
    assert second.leads and not first.leads
    assert (set(second.peers), orphans) == ({"gw-1"}, [])  # it may only have stalled
    await first.look()
    assert first.held and not first.leads and first.leader == "gw-2"
    await turns(clock, LEASE_S, first, second)
    assert second.leads and not first.leads


async def test_a_leader_that_stalls_shorter_than_its_lease_goes_on_leading(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await turns(clock, LEASE_S, first, second)
    for _ in range(5):
        clock.pass_s(SETTINGS.lead_s * 0.9)
        assert first.leads
        await second.look()
        await first.look()
        assert first.leads and not second.leads


async def test_how_long_the_lead_lasts_is_known_and_no_longer_than_others_wait(
    database: Database, clock: Clock
) -> None:
    """By which what a leader has under way is given up."""
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await turns(clock, RENEW_S, first, second)
    assert first.leads and 0 < first.leads_for_s < SETTINGS.lead_s and second.leads_for_s == 0
    left_s = first.leads_for_s
    clock.pass_s(left_s / 2)
    assert first.leads_for_s == pytest.approx(left_s / 2)
    clock.pass_s(left_s / 2 + 0.001)
    assert first.leads_for_s == 0 and not first.leads
    await second.look()
    assert second.leader == "gw-1", "nobody has taken over yet"
    alone = Gateways(database, "gw-3", SETTINGS, alone=True, clock=clock)
    assert alone.leads_for_s == float("inf")


async def test_it_is_told_that_it_holds_its_lease_again(database: Database, clock: Clock) -> None:
    first = await open_gateway(database, "gw-1", clock)
    regained: list[bool] = []
    first.on_regained = lambda: regained.append(first.held)
    await turns(clock, LEASE_S, first)
    assert regained == []
    clock.pass_s(LEASE_S)
    assert not first.held
    await first.look()
    assert regained == [True]


async def test_a_watcher_that_was_away_counts_anew(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-2")
    orphans: list[tuple[str, ...]] = []
    first.on_orphans = orphans.append
    await turns(clock, LEASE_S, first, second)
    # The database was away for both: whoever is back first must not bury the other.
    clock.pass_s(10 * LEASE_S)
    await first.look()
    assert (set(first.peers), orphans) == ({"gw-2"}, [])
    await second.look()
    await turns(clock, LEASE_S, first, second)
    assert (set(first.peers), orphans) == ({"gw-2"}, [])


async def test_a_clean_end_is_seen_at_once(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-1")
    orphans: list[tuple[str, ...]] = []
    second.on_orphans = orphans.append
    await first.close()
    await second.look()
    assert (second.peers, second.leads, orphans) == ({}, True, [("gw-1",)])


async def test_whoever_holds_a_data_directory_knows_that_its_predecessor_is_dead(
    database: Database, clock: Clock
) -> None:
    await open_gateway(database, "gw-1", clock)
    await accept(database, "gw-1")
    heir = Gateways(database, "gw-2", SETTINGS, alone=False, clock=clock)
    orphans: list[tuple[str, ...]] = []
    heir.on_orphans = orphans.append
    await heir.start("http://gw-2", predecessor="gw-1")
    assert (heir.leads, orphans) == (True, [("gw-1",)])


async def test_only_one_of_many_takes_the_lead(database: Database, clock: Clock) -> None:
    many = [await open_gateway(database, f"gw-{number}", clock) for number in range(5)]
    await turns(clock, LEASE_S, *many)
    assert sum(gateways.leads for gateways in many) == 1
    survivors = [gateways for gateways in many if not gateways.leads]
    await turns(clock, 2 * LEASE_S, *survivors)
    assert sum(gateways.leads for gateways in survivors) == 1
    assert len({gateways.leader for gateways in survivors}) == 1


async def test_the_row_of_a_dead_gateway_goes_once_it_owns_nothing(database: Database, clock: Clock) -> None:
    first, second = await open_gateway(database, "gw-1", clock), await open_gateway(database, "gw-2", clock)
    await accept(database, "gw-2")

    async def rows() -> set[str]:
        found = await database.read(lambda connection: connection.execute("SELECT id FROM gateways").fetchall())
        return {name for (name,) in found}

    await turns(clock, 2 * LEASE_S, first)
    assert await rows() == {"gw-1", "gw-2"}
    await database.write(lambda connection: connection.execute("UPDATE requests SET owner = 'gw-1'").rowcount)
    await first.look()
    assert await rows() == {"gw-1"}
    await second.look()
    assert await rows() == {"gw-1", "gw-2"}
