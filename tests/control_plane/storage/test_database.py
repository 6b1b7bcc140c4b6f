from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from control_plane.database import Connection, Database, migrate
from control_plane.database.sqlite import SqliteSession
from control_plane.errors import StorageUnavailable
from control_plane.schema import MIGRATIONS, POSTGRESQL, SQLITE, Migration
from control_plane.settings import DatabaseSettings
from tests.control_plane.storage.builders import database_path, query


def put(name: str, value: bytes = b"v") -> Any:
    return lambda connection: connection.execute("INSERT INTO secrets VALUES (?, ?, 0)", (name, value)).rowcount


async def names(database: Database) -> list[str]:
    return [row[0] for row in await database.read(query("SELECT name FROM secrets ORDER BY name"))]


class FaultyConnection:
    """A connection whose statements fail while `plan` says so."""

    def __init__(self, inner: sqlite3.Connection, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def execute(self, sql: str, *parameters: Any) -> Any:
        self._plan.check(sql)
        return self._inner.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultPlan:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.full_on: str | None = None
        self.code = sqlite3.SQLITE_FULL
        self.faults = 0

    def connect(self) -> Any:
        inner = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        return FaultyConnection(inner, self)

    def check(self, sql: str) -> None:
        if self.full_on is not None and self.full_on in sql:
            self.faults += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = self.code
            raise error


@pytest.fixture
async def faulty(tmp_path: Path) -> Any:
    path = database_path(tmp_path)
    path.parent.mkdir()
    plan = FaultPlan(path)
    database = await Database.open(path, connect=plan.connect)
    yield database, plan
    plan.full_on = None
    await database.close()


async def test_a_write_is_read_back_after_it_resolved(database: Database) -> None:
    assert await database.write(put("a")) == 1
    assert await names(database) == ["a"]


async def test_writes_that_arrive_during_a_commit_share_the_next_one(database: Database) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        entered.set()
        leave.wait(10)

    first = database.submit(slow)
    await asyncio.to_thread(entered.wait, 10)
    rest = [database.submit(put(f"n{number:02}")) for number in range(40)]
    before = database.stats.commits
    leave.set()
    await asyncio.gather(first, *rest)
    assert database.stats.commits - before <= 2
    assert database.stats.largest_group == 40


async def test_a_function_that_raises_leaves_its_group_alone_and_nothing_of_itself(database: Database) -> None:
    def half(connection: Connection) -> None:
        put("half")(connection)
        raise ValueError("no")

    outcomes = await asyncio.gather(
        database.submit(put("a")), database.submit(half), database.submit(put("b")), return_exceptions=True
    )
    assert outcomes[0] == outcomes[2] == 1
    assert isinstance(outcomes[1], ValueError)
    assert await names(database) == ["a", "b"]


async def test_an_unguarded_function_that_raises_does_not_take_its_group_along(database: Database) -> None:
    def wrong(connection: Connection) -> None:
        put("half")(connection)
        connection.execute("SELECT * FROM nowhere")

    outcomes = await asyncio.gather(
        database.submit(put("a")),
        database.submit(wrong, guarded=False),
        database.submit(put("b")),
        return_exceptions=True,
    )
    assert outcomes[0] == outcomes[2] == 1
    assert isinstance(outcomes[1], Exception) and not isinstance(outcomes[1], StorageUnavailable)
    assert await names(database) == ["a", "b"]
    assert database.fault is None


@pytest.mark.parametrize("where", ["INSERT INTO secrets", "COMMIT", "BEGIN IMMEDIATE", "SAVEPOINT"])
async def test_a_full_disk_refuses_writes_keeps_what_was_there_and_passes(faulty: Any, where: str) -> None:
    database, plan = faulty
    await database.write(put("before"))
    plan.full_on = where
    refused = await asyncio.gather(*(database.submit(put(f"r{n}")) for n in range(5)), return_exceptions=True)
    assert all(isinstance(each, StorageUnavailable) for each in refused)
    assert database.fault == "database or disk is full"
    assert await names(database) == ["before"] or where == "BEGIN IMMEDIATE"
    plan.full_on = None
    await database.write(put("after"))
    assert database.fault is None
    assert await names(database) == ["after", "before"]


async def test_a_write_too_large_for_the_disk_does_not_refuse_the_small_ones_beside_it(tmp_path: Path) -> None:
    await (await Database.open(database_path(tmp_path))).close()

    def limited() -> sqlite3.Connection:
        connection = sqlite3.connect(database_path(tmp_path), isolation_level=None, check_same_thread=False)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 8}")
        return connection

    database = await Database.open(database_path(tmp_path), connect=limited)
    outcomes = await asyncio.gather(
        database.submit(put("a")),
        database.submit(put("large", b"x" * 200_000)),
        database.submit(put("b")),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], StorageUnavailable)
    assert outcomes[0] == outcomes[2] == 1
    assert await names(database) == ["a", "b"]
    await database.close()


async def test_a_failed_sync_is_not_tried_again_since_it_may_have_been_written(faulty: Any) -> None:
    database, plan = faulty
    plan.full_on, plan.code = "COMMIT", sqlite3.SQLITE_IOERR_FSYNC
    outcomes = await asyncio.gather(database.submit(put("a")), database.submit(put("b")), return_exceptions=True)
    assert all(isinstance(each, StorageUnavailable) for each in outcomes)
    assert plan.faults == 1


async def test_a_data_directory_that_is_a_file_is_refused_at_opening(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(StorageUnavailable, match="data directory"):
        await Database.open(database_path(tmp_path))


async def test_a_file_that_is_no_database_is_refused_at_opening(tmp_path: Path) -> None:
    path = database_path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"this is not a database" * 500)
    with pytest.raises(StorageUnavailable, match="not a database"):
        await Database.open(path)


async def test_a_durable_write_makes_its_group_sync(database: Database, where: Path | str) -> None:
    on_file = isinstance(where, Path)
    level = query("PRAGMA synchronous" if on_file else "SHOW synchronous_commit")
    assert await database.write(lambda c: level(c)[0][0], durable=True) == (2 if on_file else "on")
    assert await database.write(lambda c: level(c)[0][0]) == (1 if on_file else "local")


async def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    await (await Database.open(database_path(tmp_path))).close()
    assert database_path(tmp_path).stat().st_mode & 0o777 == 0o600


async def test_closing_writes_what_was_handed_over_and_refuses_the_rest(where: Path | str) -> None:
    database = await Database.open(where)
    waiting = [database.submit(put(f"n{number}")) for number in range(10)]
    await database.close()
    assert [await each for each in waiting] == [1] * 10
    with pytest.raises(StorageUnavailable):
        await database.write(put("late"))
    with pytest.raises(StorageUnavailable):
        await database.read(query("SELECT 1"))


async def test_a_cancelled_wait_leaves_the_write_in_place(database: Database) -> None:
    waiting = asyncio.ensure_future(database.write(put("a")))
    await asyncio.sleep(0)
    waiting.cancel()
    await database.write(put("b"))
    assert await names(database) == ["a", "b"]


async def test_the_write_ahead_log_is_folded_back(tmp_path: Path) -> None:
    """400 writes of three pages each would leave 1200 pages in it."""
    settings = DatabaseSettings(checkpoint_jobs=20, wal_bytes=64 * 1024)
    database = await Database.open(database_path(tmp_path), settings)
    for number in range(400):
        await database.write(put(f"n{number}", b"x" * 2000))
    _, pages, _ = (await database.read(lambda c: c.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()))[0]
    # It runs beside the writer: how often, while this was written, is the machine's.
    assert database.stats.checkpoints > 0
    assert pages < 900
    await database.close()


async def test_a_reader_sees_one_state_of_everything(database: Database) -> None:
    entered, leave = threading.Event(), threading.Event()

    def twice(connection: Connection) -> tuple[int, int]:
        count = query("SELECT COUNT(*) FROM secrets")
        first = count(connection)[0][0]
        entered.set()
        leave.wait(10)
        return first, count(connection)[0][0]

    reading = asyncio.ensure_future(database.read(twice))
    await asyncio.to_thread(entered.wait, 10)
    await database.write(put("a"))
    leave.set()
    assert await reading == (0, 0)


def in_memory() -> SqliteSession:
    return SqliteSession(sqlite3.connect(":memory:", isolation_level=None))


NEXT = MIGRATIONS[-1].number + 1


def test_migrations_apply_once_and_in_order() -> None:
    session = in_memory()
    migrate(session, SQLITE)
    extra = Migration(NEXT, "one more", ("CREATE TABLE extra (a BIGINT)",))
    migrate(session, SQLITE, (*MIGRATIONS, extra))
    migrate(session, SQLITE, (*MIGRATIONS, extra))
    applied = [row[0] for row in session.raw.execute("SELECT number FROM migrations ORDER BY number")]
    assert applied == [*(migration.number for migration in MIGRATIONS), NEXT]


def test_a_migration_that_fails_leaves_nothing_behind() -> None:
    session = in_memory()
    migrate(session, SQLITE)
    bad = Migration(NEXT, "bad", ("CREATE TABLE extra (a BIGINT)", "CREATE TABLE extra (a BIGINT)"))
    with pytest.raises(sqlite3.OperationalError):
        migrate(session, SQLITE, (*MIGRATIONS, bad))
    assert session.raw.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'extra'").fetchone() == (0,)


def test_a_database_of_a_later_release_is_refused() -> None:
    session = in_memory()
    migrate(session, SQLITE)
    session.raw.execute("INSERT INTO migrations VALUES (99, 'future', 0)")
    with pytest.raises(StorageUnavailable, match="migration 99"):
        migrate(session, SQLITE)


def test_the_schema_renders_for_both_databases() -> None:
    for dialect in (SQLITE, POSTGRESQL):
        for migration in MIGRATIONS:
            for statement in dialect.statements(migration):
                assert "{" not in statement
