"""What becomes of ended requests: compaction, partitions, deletion on request. And appends that share a batch."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from control_plane.database import Database
from control_plane.errors import Conflict, NotFound
from control_plane.journal import Journal
from control_plane.ledger import Ledger
from control_plane.log_partitions import keep
from control_plane.retention import joined
from control_plane.schema import LOG_SECOND_BITS
from control_plane.settings import RetentionSettings
from function_runtime.protocol import DeviceTime, TokenEvent
from tests.control_plane.storage.builders import chunk, done, events, new_request, query, used
from tests.control_plane.storage.test_journal import running, write
from tests.support.postgres import PostgresServer

HOUR_S = 3600


async def ended(journal: Journal, appends: int) -> str:
    request_id = await running(journal)
    for number in range(appends):
        assert await write(journal, request_id, 3 * number + 1, 3)
    assert await journal.finish(request_id, 1, done(3 * appends, output_tokens=3 * appends, device=used(1, 2)))
    return request_id


async def rows_of_log(database: Database) -> int:
    return int((await database.read(query("SELECT COUNT(*) FROM token_log")))[0][0])


# --- appends in one batch -----------------------------------------------------------------------------------------


async def test_two_appends_of_one_stream_in_one_batch_follow_each_other(journal: Journal) -> None:
    first, second = await running(journal), await running(journal)
    granted = await asyncio.gather(
        write(journal, first, 1, 2), write(journal, second, 1, 1), write(journal, first, 3, 1),
        write(journal, first, 5, 1), write(journal, second, 2, 3),
    )  # fmt: skip
    assert granted == [True, True, True, False, True]
    assert [event.token_id for event in await journal.log(first)] == [1, 2, 3]
    assert [event.token_id for event in await journal.log(second)] == [1, 2, 3, 4]


async def test_in_one_batch_each_append_has_its_own_answer(journal: Journal) -> None:
    there, fenced, gap, unknown = [await running(journal) for _ in range(3)] + ["chatcmpl-none"]
    await write(journal, there, 1, 2)
    await journal.assign(fenced, "rep-2", "slot-0")
    granted = await asyncio.gather(
        write(journal, there, 1, 2), write(journal, fenced, 1, 1, epoch=1), write(journal, gap, 2, 1),
        write(journal, unknown, 1, 1), write(journal, gap, 1, 4, cached=7, prefill_ends=(16, 20)),
    )  # fmt: skip
    assert granted == [True, False, False, False, True]
    assert [len(await journal.log(each)) for each in (there, fenced, gap)] == [2, 0, 4]
    record = await journal.get(gap)
    assert record is not None and (record.cached_tokens, record.prefill_ends) == (7, (16, 20))


async def test_many_streams_cost_the_writer_the_same_few_statements(journal: Journal, database: Database) -> None:
    requests = [await running(journal) for _ in range(60)]
    counted = 0
    submit = database.submit

    def counting(fn: Any, **given: Any) -> Any:
        def run(connection: Any) -> Any:
            class Counting:
                def execute(self, *words: Any) -> Any:
                    nonlocal counted
                    counted += 1
                    return connection.execute(*words)

            return fn(Counting())

        return submit(run, **given)

    database.submit = counting  # type: ignore[method-assign]
    assert all(await asyncio.gather(*(write(journal, request_id, 1, 2) for request_id in requests)))
    assert 1 <= counted <= 3


# --- compaction ---------------------------------------------------------------------------------------------------


async def test_an_ended_log_is_brought_into_one_row_and_reads_the_same(journal: Journal, database: Database) -> None:
    request_id, live = await ended(journal, 20), await running(journal)
    await write(journal, live, 1, 3)
    before = await journal.log(request_id)
    head = query("SELECT log_head, log_tail FROM requests WHERE id = ?", request_id)
    assert await journal.tidy() == 1
    ((log_head, log_tail),) = await database.read(head)
    assert log_head == log_tail
    assert await database.read(query("SELECT previous, last_seq FROM token_log WHERE id = ?", log_head)) == [(None, 60)]
    for after in (0, 1, 30, 59, 60):
        assert await journal.log(request_id, after) == before[after:]
    assert len(await journal.log(live)) == 3
    assert await journal.tidy() == 0
    assert await write(journal, live, 4, 1)


async def test_on_sqlite_the_rows_that_were_compacted_are_gone(
    journal: Journal, database: Database, where: Any
) -> None:
    await ended(journal, 5)
    await journal.tidy()
    expected = 6 if isinstance(where, str) else 1  # PostgreSQL drops them with their partition
    assert await rows_of_log(database) == expected


@pytest.mark.parametrize("counts", [(1,), (7, 8), (8, 8), (15, 1, 70_000), (300, 0, 5)])
def test_payloads_are_joined_without_being_read(counts: tuple[int, ...]) -> None:
    made = [events(1, count) for count in counts]
    whole = joined([payload for payload, _ in made])
    assert whole is not None
    assert msgspec.msgpack.decode(whole, type=list[TokenEvent]) == [event for _, each in made for event in each]


@pytest.mark.parametrize("odd", [[], [b""], [msgspec.msgpack.encode({"a": 1})], [msgspec.msgpack.encode([1]), b"x"]])
def test_what_is_no_list_is_left_as_it_is(odd: list[bytes]) -> None:
    assert joined(odd) is None


# --- deletion on request ------------------------------------------------------------------------------------------


async def test_a_tenant_deletes_its_ended_request_and_the_ledger_stays(journal: Journal, database: Database) -> None:
    request_id = await ended(journal, 2)
    other = await ended(journal, 2)
    await journal.tidy()
    with pytest.raises(NotFound):
        await journal.delete(request_id, "another")
    await journal.delete(request_id, "default")
    assert await journal.get(request_id) is None
    assert await journal.log(request_id) == []
    assert await journal.attempts(request_id) == []
    assert await database.read(query("SELECT request_id FROM request_inputs")) == [(other,)]
    assert [row.stage for row in await Ledger(database).of_request(request_id)] == ["prefill", "decode", "total"]
    assert len(await journal.log(other)) == 6
    with pytest.raises(NotFound):
        await journal.delete(request_id, "default")


async def test_kv_of_a_deleted_request_is_left_to_the_collection(journal: Journal) -> None:
    request_id = await running(journal)
    await journal.seal_kv(request_id, 1, [chunk(0, 32, "own")])
    assert await journal.finish(request_id, 1, done(0))
    await journal.delete(request_id, "default")
    assert (await journal.retired_kv()).packs == ("kv/packs/own",)


@pytest.mark.parametrize("state", ["queued", "running"])
async def test_what_still_runs_is_not_deleted(journal: Journal, state: str) -> None:
    request_id = await running(journal) if state == "running" else (await journal.accept(new_request())).record.id
    with pytest.raises(Conflict, match=state) as refused:
        await journal.delete(request_id, "default")
    assert refused.value.http_status == 409
    assert await journal.get(request_id) is not None


async def test_a_deleted_requests_idempotency_key_is_free_again(journal: Journal) -> None:
    first = (await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))).record
    await journal.finish(first.id, 0, done())
    await journal.delete(first.id, "default")
    assert not (await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))).attached


# --- partitions ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def partitioned(postgres: PostgresServer) -> Any:
    with postgres.database(empty=True) as url:
        database = await Database.open(url)
        yield database
        await database.close()


async def partitions(database: Database) -> list[str]:
    rows = await database.read(
        query(
            "SELECT CAST(c.relname AS TEXT) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = CAST('token_log' AS regclass) ORDER BY 1"
        )
    )
    return [name for (name,) in rows]


async def test_partitions_are_made_ahead_and_dropped_when_nobody_needs_them(partitioned: Database) -> None:
    database, now_s = partitioned, int(time.time())
    journal = Journal(database, "gw-1", RetentionSettings(log_s=0.0))
    await journal.prepare()
    begin_s = now_s - now_s % HOUR_S
    made = [f"token_log_{begin_s + n * HOUR_S}_{begin_s + (n + 1) * HOUR_S}" for n in range(3)]
    assert set(made) <= {*await partitions(database)} and "token_log_rest" in await partitions(database)
    request_id, live = await ended(journal, 3), await running(journal)
    await write(journal, live, 1, 1)
    assert await database.read(query("SELECT COUNT(*) FROM token_log_rest")) == [(0,)]

    async def keep_at(hours: int) -> list[str]:
        await database.write(lambda connection: keep(connection, now_s + hours * HOUR_S, HOUR_S))
        return await partitions(database)

    await journal.sweep()
    assert made[0] in await keep_at(3)  # the live request has a row there
    assert len(await journal.log(live)) == 1
    await journal.finish(live, 1, done(1))
    await asyncio.sleep(0.001)
    await journal.sweep()
    left = await keep_at(3)
    assert made[0] not in left and made[1] not in left
    assert f"token_log_{begin_s + 5 * HOUR_S}_{begin_s + 6 * HOUR_S}" in left
    assert await journal.log(request_id) == []
    record = await journal.get(request_id)
    assert record is not None and record.outcome is not None


async def test_where_no_partition_was_made_in_time_rows_go_to_the_rest_and_are_deleted_there(
    partitioned: Database,
) -> None:
    database, now_s = partitioned, int(time.time())
    journal = Journal(database, "gw-1", RetentionSettings(log_s=0.0))
    request_id = await ended(journal, 2)
    rest = query("SELECT COUNT(*) FROM token_log_rest")
    assert await database.read(rest) == [(2,)]
    await journal.prepare()  # the present hour's rows are in the rest: no partition can have them
    begin_s = now_s - now_s % HOUR_S
    assert f"token_log_{begin_s}_{begin_s + HOUR_S}" not in await partitions(database)
    assert len(await journal.log(request_id)) == 6
    await asyncio.sleep(0.001)
    await journal.sweep()
    await database.write(lambda connection: keep(connection, now_s + 2 * HOUR_S, HOUR_S))
    assert await database.read(rest) == [(0,)]


async def test_a_gateway_whose_clock_jumps_takes_nothing_of_the_present_for_past(
    partitioned: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being appended has the database's time: what a clock ahead of it would drop may be just written."""
    journal = Journal(partitioned, "gw-1")
    await journal.prepare()
    made = await partitions(partitioned)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
    await journal.prepare()
    assert set(made) <= {*await partitions(partitioned)}
    request_id = await running(journal)
    await write(journal, request_id, 1, 1)
    assert await partitioned.read(query("SELECT COUNT(*) FROM token_log_rest")) == [(0,)]


async def test_several_gateways_keep_partitions_at_once(partitioned: Database) -> None:
    journals = [Journal(partitioned, f"gw-{number}") for number in range(3)]
    await asyncio.gather(*(journal.prepare() for journal in journals))
    assert len(await partitions(partitioned)) == 4


async def test_ids_of_the_log_begin_with_the_second_they_were_made_in(partitioned: Database) -> None:
    journal = Journal(partitioned, "gw-1")
    request_id = await running(journal)
    began_s = int(time.time())
    await journal.append(request_id, 1, 1, events(1, 1)[0], 1, DeviceTime(), 0)
    ((log_id,),) = await partitioned.read(query("SELECT log_head FROM requests"))
    assert began_s - 1 <= log_id >> LOG_SECOND_BITS <= began_s + 5
