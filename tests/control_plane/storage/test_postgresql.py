"""The same SQL text on PostgreSQL: every statement is prepared there, and the fence holds between its sessions."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from control_plane import accounts, decisions, functions, statements
from control_plane.appends import AppendRow, _as_arrays
from control_plane.costs import COST_FIELDS, Costs
from control_plane.database import Database
from control_plane.database.placeholders import numbered
from control_plane.decisions import Decisions
from control_plane.functions import FunctionStore, ImportState
from control_plane.journal import Journal
from control_plane.ledger import Ledger
from control_plane.log_statements import ENDED_LOG, NEXT_LOG_ID, POINT_AT, POSTGRESQL_LOG, SQLITE_LOG
from control_plane.spec import parse_mapping
from control_plane.tenants import Keys
from control_plane.usage import USAGE_FIELDS, RangeQuery, Usage
from function_runtime.protocol import ReplicaTime
from tests.control_plane.storage.builders import chunk, done, new_request, replica_status, used
from tests.support.postgres import PostgresServer

asyncpg = pytest.importorskip("asyncpg")


@pytest.fixture
async def sessions(postgres: PostgresServer) -> AsyncIterator[tuple[Any, Any]]:
    """Two sessions on a fresh database."""
    with postgres.database() as url:
        first, second = await asyncpg.connect(url), await asyncpg.connect(url)
        yield first, second
        await first.close()
        await second.close()


def placed(sql: str, values: dict[str, Any] | None = None) -> tuple[str, list[Any]]:
    text, names = numbered(sql)
    return text, [(values or {}).get(name) for name in names or ()]


async def run(session: Any, sql: str, values: dict[str, Any]) -> list[Any]:
    text, arguments = placed(sql, values)
    found: list[Any] = await session.fetch(text, *arguments)
    return found


async def count(session: Any, sql: str, values: dict[str, Any]) -> int:
    text, arguments = placed(sql, values)
    return int((await session.execute(text, *arguments)).rsplit(" ", 1)[1])


async def spoken(path: Path) -> set[str]:
    """Every statement that a tour of all stores runs."""
    heard: set[str] = set()

    class Recorder(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> Any:
            heard.add(sql)
            return super().execute(sql, *parameters)

        def executemany(self, sql: str, *parameters: Any) -> Any:
            heard.add(sql)
            return super().executemany(sql, *parameters)

    database = await Database.open(
        path, connect=lambda: sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Recorder)
    )
    heard.clear()
    journal, ledger, keys, store = Journal(database, "gw-1"), Ledger(database), Keys(database), FunctionStore(database)
    spec = {"name": "smol", "model": "pypi://x"}
    await store.put(parse_mapping(spec), "default")
    await store.put(parse_mapping({**spec, "drain_s": 1}), "default")
    await store.rollback("smol", "default")
    await store.set_import("smol", "default", 1, ImportState.READY, identity="i", manifest_path="/m")
    await store.revision("smol", "default", 1)
    await store.refresh()
    await store.delete("smol", "default")
    key, _ = await keys.create("default", "x")
    await keys.list("default")
    await keys.revoke(key.id, "default")
    await keys.refresh()
    await keys.kv_scope("default")
    new = new_request(idempotency_key="k", body_hash=b"h")
    await journal.accept(new)
    await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))
    await journal.assign(new.id, "rep-1", "slot-0")
    await journal.seal_kv(new.id, 1, [chunk(0, 32)])
    await journal.finish(new.id, 1, done(device=used(1, 2)))
    await journal.retired_kv()
    await ledger.report_replica(replica_status(time=ReplicaTime(9, 1, 3, 1, 1)))
    await ledger.close_replica(replica_status(time=ReplicaTime(9, 1, 3, 1, 1)))
    await ledger.open_replicas()
    await ledger.of_request(new.id)
    await ledger.of_replica("rep-1")
    made = Decisions(database)
    made.record("scale", "smol")
    await made.of_function("smol")
    await made.sweep(1.0)
    for fields, answer in ((USAGE_FIELDS, Usage(database).completions), (COST_FIELDS, Costs(database).costs)):
        filters = tuple((column, ("a", "b")) for column in ("tenant", "key_id", "function"))
        await answer(RangeQuery("default", 0, 86400, 3600, 24, tuple(fields), filters))
    await database.close()
    control = ("PRAGMA", "BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")
    return {sql for sql in heard if not sql.startswith(control)}


async def test_every_statement_is_understood(sessions: tuple[Any, Any], tmp_path: Path) -> None:
    texts = {
        text
        for module in (statements, accounts, functions, decisions)
        for text in vars(module).values()
        if isinstance(text, str) and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", text)
    }
    texts |= {text for text in await spoken(tmp_path / "stoker.db") if "json_each" not in text}
    texts -= {SQLITE_LOG.drop, NEXT_LOG_ID}
    texts |= {*POSTGRESQL_LOG.append, POSTGRESQL_LOG.have, POSTGRESQL_LOG.compacted, ENDED_LOG, POINT_AT}
    assert len(texts) > 60
    for text in sorted(texts):
        try:
            await sessions[0].prepare(placed(text)[0])
        except asyncpg.PostgresError as error:
            pytest.fail(f"{error}: {text}")


REQUEST = {
    "id": "chatcmpl-1", "tenant": "default", "key_id": "k", "function": "smol", "revision": 1, "endpoint": "chat",
    "model": "smol", "durability": "process", "on_disconnect": "cancel", "stream": 1, "idempotency_key": "key",
    "body_hash": b"h", "input_tokens": 3, "created_us": 1, "state": "queued", "me": "gw-old",
    "first_epoch": 0, "sealed": 0,
}  # fmt: skip


HOT = "SELECT pg_stat_get_xact_tuples_hot_updated(CAST('requests' AS regclass))"
(APPEND,) = POSTGRESQL_LOG.append


def tokens(first: int, owner: str = "gw-old") -> dict[str, Any]:
    rows = [AppendRow("chatcmpl-1", 1, first, first, b"p", 1, first)]
    return {**_as_arrays(rows), "me": owner}


async def append(session: Any, first: int, owner: str = "gw-old") -> int:
    return int((await run(session, APPEND, tokens(first, owner)))[0][0])


async def running_request(session: Any) -> None:
    assert await count(session, statements.ACCEPT, REQUEST) == 1
    assigned = {"id": "chatcmpl-1", "me": "gw-old", "epoch": 0, "replica_id": "r", "slot_id": "s", "now": 1}
    assert await count(session, statements.ASSIGN, assigned) == 1


async def test_an_append_that_waited_for_an_adoption_leaves_nothing(sessions: tuple[Any, Any]) -> None:
    former, heir = sessions
    await running_request(former)
    await heir.execute("BEGIN")
    assert await count(heir, statements.ADOPT, {"me": "gw-new", "owner": "gw-old"}) == 1
    appending = asyncio.ensure_future(append(former, 1))
    done_early, _ = await asyncio.wait({appending}, timeout=0.2)
    assert not done_early
    await heir.execute("COMMIT")
    assert await appending == 0
    assert await run(heir, "SELECT id FROM token_log", {}) == []
    assert await append(heir, 1, "gw-new") == 1


async def test_an_adoption_waits_for_an_append_that_came_first_and_sees_it(sessions: tuple[Any, Any]) -> None:
    former, heir = sessions
    await running_request(former)
    await former.execute("BEGIN")
    assert await append(former, 1) == 1
    adopting = asyncio.ensure_future(count(heir, statements.ADOPT, {"me": "gw-new", "owner": "gw-old"}))
    done_early, _ = await asyncio.wait({adopting}, timeout=0.2)
    assert not done_early
    await former.execute("COMMIT")
    assert await adopting == 1
    log = await run(heir, statements.READ_LOG, {"id": "chatcmpl-1", "after": 0})
    assert [tuple(row) for row in log] == [(1, b"p")]
    assert await append(former, 2) == 0


async def test_an_append_moves_its_request_without_touching_an_index(sessions: tuple[Any, Any]) -> None:
    session, _ = sessions
    await running_request(session)
    assert await append(session, 1) == 1
    async with session.transaction():  # the counters are this transaction's
        before = await run(session, HOT, {})
        for first in range(2, 10):
            assert await append(session, first) == 1
        after = await run(session, HOT, {})
    assert after[0][0] - before[0][0] == 8


async def test_two_gateways_that_accept_under_one_key_make_one_request(sessions: tuple[Any, Any]) -> None:
    first, second = sessions
    await first.execute("BEGIN")
    assert await count(first, statements.ACCEPT, REQUEST) == 1
    other = {**REQUEST, "id": "chatcmpl-2", "me": "gw-new"}
    accepting = asyncio.ensure_future(count(second, statements.ACCEPT, other))
    done_early, _ = await asyncio.wait({accepting}, timeout=0.2)
    assert not done_early
    await first.execute("COMMIT")
    assert await accepting == 0


async def test_an_account_moved_by_another_gateway_is_seen(sessions: tuple[Any, Any]) -> None:
    first, second = sessions
    opening = {"replica_id": "r", "tenant": "default", "function": "smol", "revision": 1, "now": 1}
    assert await count(first, accounts._OPEN, opening) == 1
    assert await count(second, accounts._OPEN, opening) == 0
    moved = {
        **dict.fromkeys(("charged_us", "charged_microusd", "attributed_us", "cold_us", "idle_us", "overhead_us"), 5),
        **dict.fromkeys(("unreported_us", "held_us", "reported_us", "closed_us"), 5),
        "replica_id": "r",
        "version": 0,
    }
    assert await count(first, accounts._MOVE, moved) == 1
    assert await count(second, accounts._MOVE, moved) == 0
