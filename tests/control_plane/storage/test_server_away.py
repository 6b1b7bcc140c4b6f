"""PostgreSQL as a database of several writers that can go away: what is retried, what is refused, what comes back."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from control_plane.database import Connection, Database
from control_plane.errors import StorageUnavailable
from control_plane.journal import Journal, RequestState
from control_plane.schema import MIGRATIONS
from control_plane.settings import DatabaseSettings
from tests.control_plane.storage.builders import done, events, new_request, query, used
from tests.control_plane.storage.test_database import names, put
from tests.support import postgres as postgresql
from tests.support.patience import PATIENCE_S
from tests.support.postgres import PostgresServer

QUICK = DatabaseSettings(connect_timeout_s=1.0, statement_timeout_s=1.0, idle_transaction_s=1.0, unclear_s=3.0)


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """Stopped and killed here, so not the one that others use."""
    if (reason := postgresql.missing()) is not None:
        pytest.skip(reason)
    with postgresql.server() as server:
        yield server


@pytest.fixture
async def away(own_server: PostgresServer) -> AsyncIterator[tuple[Database, PostgresServer]]:
    with own_server.database() as url:
        database = await Database.open(url, QUICK)
        yield database, own_server
        await database.close()


@pytest.fixture
async def two(postgres: PostgresServer) -> AsyncIterator[tuple[Database, Database]]:
    """Two gateways' databases."""
    async with AsyncExitStack() as stack:
        url = stack.enter_context(postgres.database())
        made = [await Database.open(url, QUICK) for _ in range(2)]
        for database in made:
            stack.push_async_callback(database.close)
        yield made[0], made[1]


async def until_written(database: Database, name: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await database.write(put(name))
                return
            except StorageUnavailable:
                await asyncio.sleep(0.05)


# --- several writers --------------------------------------------------------------------------------------------


async def test_two_gateways_that_start_at_once_migrate_once(postgres: PostgresServer) -> None:
    with postgres.database(empty=True) as url:
        made = await asyncio.gather(*(Database.open(url) for _ in range(4)))
        rows = await made[0].read(query("SELECT number FROM migrations ORDER BY number"))
        assert [row[0] for row in rows] == [migration.number for migration in MIGRATIONS]
        for database in made:
            await database.close()


async def test_functions_that_read_and_then_write_lose_nothing_to_each_other(two: tuple[Database, Database]) -> None:
    """Each adds one to what it read: as if one after the other, whichever gateway they come from."""

    def one_more(connection: Connection) -> None:
        (value,) = connection.execute("SELECT created_us FROM secrets WHERE name = 'n'").fetchone()
        connection.execute("UPDATE secrets SET created_us = :to WHERE name = 'n'", {"to": value + 1})

    await two[0].write(put("n"))

    async def many(database: Database) -> None:
        for _ in range(25):
            await database.write(one_more)

    await asyncio.gather(*(many(database) for database in two))
    assert await two[0].read(query("SELECT created_us FROM secrets")) == [(50,)]


async def test_two_that_wait_for_each_other_are_both_done_in_the_end(two: tuple[Database, Database]) -> None:
    await two[0].write(put("a"))
    await two[0].write(put("b"))
    barrier = threading.Barrier(2)

    def touching(*order: str) -> Any:
        def run(connection: Connection) -> None:
            for place, name in enumerate(order):
                connection.execute("UPDATE secrets SET created_us = created_us + 1 WHERE name = :name", {"name": name})
                if place == 0 and not barrier.broken:
                    try:
                        barrier.wait(5)
                    except threading.BrokenBarrierError:
                        pass
            barrier.abort()

        return run

    await asyncio.gather(
        two[0].submit(touching("a", "b"), guarded=False), two[1].submit(touching("b", "a"), guarded=False)
    )
    assert await two[0].read(query("SELECT created_us FROM secrets")) == [(2,), (2,)]
    assert two[0].stats.retries + two[1].stats.retries >= 1


async def test_a_gateway_that_stops_inside_a_transaction_holds_no_lock_for_long(two: tuple[Database, Database]) -> None:
    stopped, heir = two
    await heir.write(put("a"))
    holding, leave = threading.Event(), threading.Event()

    def stand_still(connection: Connection) -> None:
        connection.execute("UPDATE secrets SET created_us = 1 WHERE name = 'a'")
        holding.set()
        leave.wait(20)

    former = stopped.submit(stand_still, guarded=False)
    await asyncio.to_thread(holding.wait, 10)
    async with asyncio.timeout(PATIENCE_S):
        await until_done(heir, "UPDATE secrets SET created_us = 2 WHERE name = 'a'")
    leave.set()
    await asyncio.wait({former})
    assert (await heir.read(query("SELECT created_us FROM secrets")))[0][0] in (1, 2)


async def until_done(database: Database, sql: str) -> None:
    while True:
        try:
            await database.submit(lambda connection: connection.execute(sql).rowcount, guarded=False)
            return
        except StorageUnavailable:
            await asyncio.sleep(0.05)


async def test_values_come_back_as_from_sqlite(database: Database) -> None:
    await database.write(put("a", b"\x00\xff"))
    ((value, total, yes, no, nothing),) = await database.read(
        query("SELECT value, (SELECT SUM(created_us + 3) FROM secrets), 1 = 1, 1 = 2, NULL FROM secrets")
    )
    assert (value, total, yes, no, nothing) == (b"\x00\xff", 3, 1, 0, None)
    assert (type(value), type(total), type(yes)) == (bytes, int, int)


async def test_a_function_that_ignored_a_failed_statement_is_told_that_nothing_was_written(
    two: tuple[Database, Database],
) -> None:
    def careless(connection: Connection) -> None:
        put("lost")(connection)
        try:
            connection.execute("SELECT * FROM nowhere")
        except Exception:
            pass

    with pytest.raises(RuntimeError, match="had failed"):
        await two[0].submit(careless, guarded=False)
    assert await names(two[0]) == []


# --- a server that goes away --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before the commit", "between two statements"])
async def test_a_connection_that_closes_between_two_calls_of_the_driver_costs_nobody_an_error(
    two: tuple[Database, Database], place: str
) -> None:
    database, tries = two[0], 0

    def closing(connection: Any) -> int:
        nonlocal tries
        tries += 1
        put("a")(connection)
        if tries == 1:
            connection._raw.terminate()
            if place == "between two statements":
                put("b")(connection)
        return tries

    assert await database.write(closing) == 2


async def test_a_restarted_server_costs_nobody_an_error(away: tuple[Database, PostgresServer]) -> None:
    database, server = away
    await database.write(put("a"))
    assert await names(database) == ["a"]
    server.stop()
    server.start()
    await database.write(put("b"))
    assert await names(database) == ["a", "b"]
    assert database.fault is None


async def test_while_the_server_is_away_work_is_refused_and_service_returns_without_any(
    away: tuple[Database, PostgresServer],
) -> None:
    database, server = away
    await database.write(put("a"))
    server.stop()
    with pytest.raises(StorageUnavailable) as refused:
        await database.write(put("b"))
    assert refused.value.http_status == 503 and "restore access" in refused.value.message
    with pytest.raises(StorageUnavailable):
        await names(database)
    assert database.fault is not None
    server.start()
    async with asyncio.timeout(20):
        while database.fault is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await until_written(database, "c")
    assert await names(database) == ["a", "c"]


async def test_a_server_that_was_killed_has_what_was_granted(away: tuple[Database, PostgresServer]) -> None:
    database, server = away
    journal = Journal(database, "gw-1")
    await journal.accept(new_request(id="r"))
    epoch = await journal.assign("r", "rep-1", "slot-0")
    assert await journal.append("r", epoch, 1, events(1, 2)[0], 2, used(1, 1), 0)
    server.kill()
    server.start()
    assert await journal.append("r", epoch, 1, events(1, 2)[0], 2, used(1, 1), 0)
    assert await journal.append("r", epoch, 3, events(3, 1)[0], 1, used(1, 2), 0)
    assert await journal.finish("r", epoch, done(3, device=used(1, 2)))
    assert [event.token_id for event in await journal.log("r")] == [1, 2, 3]


async def test_a_server_that_hangs_counts_as_away_and_comes_back(away: tuple[Database, PostgresServer]) -> None:
    database, server = away
    await database.write(put("a"))
    server.signal_all(signal.SIGSTOP)
    try:
        with pytest.raises(StorageUnavailable):
            await database.write(put("b"))
    finally:
        server.signal_all(signal.SIGCONT)
    await until_written(database, "c")
    assert "c" in await names(database)


def is_commit(work: Any) -> bool:
    return str(work.cr_frame.f_locals.get("query")).endswith("COMMIT") and "CREATE" not in str(work.cr_frame.f_locals)


class Cut:
    """Breaks the connection once, during a commit: behind its effect, or before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, committed: bool) -> None:
        from control_plane.database import postgresql as driver

        self.done = False
        self.armed = True
        run = driver.PostgresSession._run

        def breaking(session: Any, work: Any) -> Any:
            if self.done or not self.armed or not is_commit(work):
                return run(session, work)
            self.done = True
            if committed:
                run(session, work)
            else:
                work.close()
            session._raw.terminate()
            session._lost = True
            raise driver.ConnectionLost("cut")

        monkeypatch.setattr(driver.PostgresSession, "_run", breaking)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_without_an_answer_is_looked_up_and_done_exactly_once(
    away: tuple[Database, PostgresServer], committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks during the commit, behind or before its effect; the caller sees neither."""
    database, _ = away
    runs: list[str] = []
    cut = Cut(monkeypatch, committed=committed)

    def insert(connection: Connection) -> str:
        put("a")(connection)
        runs.append("insert")
        return "done"

    assert await database.write(insert) == "done"
    assert cut.done and len(runs) == (1 if committed else 2)
    assert await names(database) == ["a"]


async def test_what_a_crash_took_is_not_mistaken_for_another_transaction_with_its_id(
    away: tuple[Database, PostgresServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies with a commit on the way, and gives the lost transaction's id to the next one that comes."""
    from control_plane.database import postgresql as driver

    database, server = away
    await database.write(put("before"))
    run, ids, crashed = driver.PostgresSession._run, list[str](), list[bool]()
    name = database.driver.label.rpartition("/")[2]  # type: ignore[attr-defined]

    def crashing(session: Any, work: Any) -> Any:
        if crashed or not is_commit(work):
            return run(session, work)
        crashed.append(True)
        work.close()
        (mine,) = run(session, session._raw.fetchrow("SELECT CAST(pg_current_xact_id() AS TEXT)"))
        server.kill()
        server.start()
        for number in range(3):
            server.run(f"INSERT INTO secrets (name, value, created_us) VALUES ('x{number}', '', 0)", name)
        others = server.fetch("SELECT CAST(xmin AS TEXT) FROM secrets WHERE name LIKE 'x%'", name)
        ids.extend([mine, *(row[0] for row in others)])
        session._lost = True
        raise driver.ConnectionLost("the server is gone")

    monkeypatch.setattr(driver.PostgresSession, "_run", crashing)
    await database.write(put("a"))
    assert crashed and ids[0] in ids[1:], "the id was given away again, which is what this is about"
    assert "a" in await names(database)


@pytest.mark.parametrize("committed", [True, False])
async def test_an_acceptance_nobody_can_look_up_is_refused_and_withdrawn_if_it_took_effect(
    away: tuple[Database, PostgresServer], committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was told 503: it must not stay behind as a request that nobody works on."""
    database, _ = away
    journal = Journal(database, "gw-1")
    monkeypatch.setattr(database.driver, "was_committed", lambda unclear: None)
    cut = Cut(monkeypatch, committed=committed)
    with pytest.raises(StorageUnavailable) as refused:
        await journal.accept(new_request(id="r"), ("rep-1", "slot-0"))
    assert cut.done and refused.value.unclear
    await journal.tidy()
    record = await journal.get("r")
    assert (record is not None) == committed
    assert record is None or record.state is RequestState.REFUSED
    assert await journal.adopt() == []


async def test_a_database_that_cannot_be_reached_at_the_start_says_which_and_hides_the_password() -> None:
    with pytest.raises(StorageUnavailable) as refused:
        await Database.open("postgresql://stoker:s3cret@127.0.0.1:1/stoker", QUICK)
    assert "postgresql://stoker@127.0.0.1:1/stoker" in refused.value.message
    assert "s3cret" not in refused.value.message
