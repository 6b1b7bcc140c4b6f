from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control_plane.database import Connection, Database
from control_plane.errors import Fenced, LeaseLapsed, NotFound, StorageUnavailable, Unprocessable
from control_plane.journal import Journal, Outcome, OutcomeError, RequestState, StageTimes, pack_tokens, unpack_tokens
from control_plane.ledger import Ledger
from control_plane.records import LIVE_STATES, TRANSITIONS
from control_plane.settings import RetentionSettings
from function_runtime.protocol import Accepted as Taken
from function_runtime.protocol import Begun, DeviceTime, FinishReason, KvChunk, TokenEvent, TokenLogprob
from tests.control_plane.storage.builders import chunk, database_path, done, events, new_request, query, used
from tests.control_plane.storage.test_database import FaultPlan


async def running(journal: Journal, **given: Any) -> str:
    request_id = (await journal.accept(new_request(**given))).record.id
    await journal.assign(request_id, "rep-1", "slot-0")
    return request_id


async def write(journal: Journal, request_id: str, first: int, count: int, epoch: int = 1, **given: Any) -> bool:
    payload, _ = events(first, count)
    device = given.pop("device", DeviceTime())
    return await journal.append(request_id, epoch, first, payload, count, device, given.pop("cached", 0), **given)


def test_tokens_are_packed_four_bytes_each() -> None:
    tokens = (0, 1, 49151, 2**32 - 1)
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert pack_tokens((1,)) == b"\x01\0\0\0"


def test_ended_states_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    for state, nexts in TRANSITIONS.items():
        assert bool(nexts) == (state in LIVE_STATES) == (not state.ended)


async def test_an_accepted_request_is_read_back_whole(journal: Journal) -> None:
    new = new_request(idempotency_key="k", body_hash=b"h", prompt=pack_tokens((7, 8)), params=b"\x81")
    accepted = await journal.accept(new)
    assert not accepted.attached
    assert await journal.get(new.id) == accepted.record
    assert await journal.get(new.id, "default") == accepted.record
    assert await journal.get(new.id, "other") is None
    assert (accepted.record.state, accepted.record.input_tokens) == (RequestState.QUEUED, 2)


async def test_tokens_of_a_request_that_began_with_its_acceptance_are_written_behind_it(journal: Journal) -> None:
    """Also when appends of another request wait in the writer's queue already, ready to take more."""
    other = await running(journal)
    entered, leave = threading.Event(), threading.Event()

    def hold(connection: Connection) -> None:
        entered.set()
        leave.wait(10.0)

    held = asyncio.ensure_future(journal._database.write(hold))
    await asyncio.to_thread(entered.wait, 10.0)
    waiting = asyncio.ensure_future(write(journal, other, 1, 2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    new = new_request()
    accepted = asyncio.ensure_future(journal.accept(new, ("rep-1", "slot-0")))
    begun = asyncio.ensure_future(write(journal, new.id, 1, 3))
    await asyncio.sleep(0)
    leave.set()
    await held
    assert (await waiting, (await accepted).attached, await begun) == (True, False, True)
    record = await journal.get(new.id)
    assert record is not None and (record.state, record.epoch, record.last_seq) == (RequestState.RUNNING, 1, 3)
    assert [attempt.epoch for attempt in await journal.attempts(new.id)] == [1]


async def test_the_same_idempotency_key_attaches_also_after_the_end(journal: Journal) -> None:
    first = (await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))).record
    again = await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))
    assert again.attached and again.record == first
    await journal.assign(first.id, "rep-1", "slot-0")
    await journal.finish(first.id, 1, done(0))
    ended = await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))
    assert ended.attached and ended.record.state is RequestState.DONE


async def test_concurrent_posts_under_one_key_become_one_request(journal: Journal, database: Database) -> None:
    accepted = await asyncio.gather(
        *(journal.accept(new_request(idempotency_key="k", body_hash=b"h")) for _ in range(8))
    )
    assert len({each.record.id for each in accepted}) == 1
    assert sum(not each.attached for each in accepted) == 1
    assert await database.read(query("SELECT COUNT(*) FROM request_inputs")) == [(1,)]


async def test_the_same_key_with_another_body_is_refused(journal: Journal) -> None:
    await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))
    with pytest.raises(Unprocessable) as caught:
        await journal.accept(new_request(idempotency_key="k", body_hash=b"other"))
    assert caught.value.param == "Idempotency-Key"


async def test_keys_of_different_tenants_do_not_meet(journal: Journal) -> None:
    await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))
    other = await journal.accept(new_request(idempotency_key="k", body_hash=b"x", tenant="other"))
    assert not other.attached


async def test_a_refused_request_gives_its_key_free_for_a_retry(journal: Journal) -> None:
    first = (await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))).record
    await journal.finish(first.id, 0, Outcome(RequestState.REFUSED))
    assert not (await journal.accept(new_request(idempotency_key="k", body_hash=b"h"))).attached


async def test_the_log_gives_the_rest_and_only_the_rest(journal: Journal) -> None:
    request_id = await running(journal)
    for first, count in ((1, 3), (4, 1), (5, 4)):
        assert await write(journal, request_id, first, count)
    for after in range(9):
        assert [event.token_id for event in await journal.log(request_id, after)] == list(range(after + 1, 9))


async def test_events_come_back_with_everything_they_had(journal: Journal) -> None:
    request_id = await running(journal)
    made = [
        TokenEvent(0, 5, "a", logprob=-0.5, top=(TokenLogprob(5, "a", -0.5),), token_text="a"),
        TokenEvent(1, 6, "", FinishReason.STOP, stop_reason="\n"),
        TokenEvent(0, 7, "ü", FinishReason.STOP, stop_reason=7),
    ]
    await journal.append(request_id, 1, 1, msgspec.msgpack.encode(made), 3, DeviceTime(), 0)
    assert await journal.log(request_id) == made


async def test_appends_of_many_streams_share_a_commit(journal: Journal, database: Database) -> None:
    requests = [await running(journal) for _ in range(20)]
    commits = database.stats.commits
    assert all(await asyncio.gather(*(write(journal, request_id, 1, 1) for request_id in requests)))
    assert database.stats.commits == commits + 1


async def test_an_append_repeated_after_an_unclear_answer_is_granted_and_written_once(journal: Journal) -> None:
    request_id = await running(journal)
    assert await write(journal, request_id, 1, 3)
    assert await write(journal, request_id, 1, 3)
    assert not await write(journal, request_id, 2, 3)
    assert len(await journal.log(request_id)) == 3


async def test_a_gap_is_refused(journal: Journal) -> None:
    request_id = await running(journal)
    assert not await write(journal, request_id, 2, 1)
    assert await journal.log(request_id) == []


async def test_tokens_of_an_older_epoch_are_refused(journal: Journal) -> None:
    request_id = await running(journal)
    assert await write(journal, request_id, 1, 2)
    assert await journal.requeue(request_id, 1, "replica lost")
    assert not await write(journal, request_id, 3, 1, epoch=1)
    assert await journal.assign(request_id, "rep-2", "slot-0") == 2
    assert not await write(journal, request_id, 3, 1, epoch=1)
    assert await write(journal, request_id, 3, 1, epoch=2)


async def test_what_the_first_attempt_did_is_remembered_by_later_ones(journal: Journal) -> None:
    request_id = await running(journal)
    begun = Begun((16, 40), "native-2/cpu")
    await write(journal, request_id, 1, 1, cached=16, prefill_ends=(16, 100), begun=begun, device=used(5, 1))
    await journal.assign(request_id, "rep-2", "slot-0")
    await write(journal, request_id, 2, 1, epoch=2, cached=90, prefill_ends=(0, 100))
    record = await journal.get(request_id)
    assert record is not None
    assert (record.cached_tokens, record.prefill_ends, record.last_seq, record.epoch) == (16, (16, 100), 2, 2)
    assert record.begun == begun
    assert record.first_token_us is not None


async def test_an_ended_request_takes_nothing_more(journal: Journal) -> None:
    request_id = await running(journal)
    await write(journal, request_id, 1, 1)
    assert await journal.finish(request_id, 1, done(1))
    assert not await write(journal, request_id, 2, 1)
    assert not await journal.requeue(request_id, 1, "late")
    with pytest.raises(Fenced):
        await journal.assign(request_id, "rep-2", "slot-0")
    with pytest.raises(NotFound):
        await journal.assign("chatcmpl-none", "rep-2", "slot-0")


async def test_an_outcome_is_kept_as_told(journal: Journal) -> None:
    request_id = await running(journal)
    outcome = Outcome(
        RequestState.FAILED,
        last_seq=0,
        input_tokens=3,
        output_tokens=0,
        finish_reasons=(FinishReason.ERROR,),
        error=OutcomeError(503, "model_unusable", "corrupt"),
        device=used(1, 2),
        stages=StageTimes(1, 2, 3, 4, 5, 6),
    )
    assert await journal.finish(request_id, 1, outcome)
    record = await journal.get(request_id)
    assert record is not None and record.outcome == outcome and record.state is RequestState.FAILED


async def test_ending_twice_the_same_counts_once(journal: Journal, database: Database) -> None:
    request_id = await running(journal)
    assert await journal.finish(request_id, 1, done(0))
    assert await journal.finish(request_id, 1, done(0))
    assert await database.read(query("SELECT COUNT(*) FROM ledger WHERE stage = 'total'")) == [(1,)]


async def test_an_end_submitted_with_the_last_tokens_follows_them(journal: Journal) -> None:
    request_id = await running(journal)
    payload, _ = events(1, 2)
    written = journal.append(request_id, 1, 1, payload, 2, DeviceTime(), 0)
    ended = asyncio.ensure_future(journal.finish(request_id, 1, done(2)))
    assert await written and await ended
    assert len(await journal.log(request_id)) == 2


async def test_an_end_does_not_overtake_tokens_that_storage_refused(tmp_path: Path) -> None:
    path = database_path(tmp_path)
    path.parent.mkdir()
    plan = FaultPlan(path)
    database = await Database.open(path, connect=plan.connect)
    journal = Journal(database, "gw-1")
    request_id = await running(journal)
    plan.full_on = "INSERT INTO token_log"
    refused, early = await asyncio.gather(
        write(journal, request_id, 1, 2), journal.finish(request_id, 1, done(2)), return_exceptions=True
    )
    assert isinstance(refused, StorageUnavailable) and isinstance(early, StorageUnavailable)
    plan.full_on = None
    assert await write(journal, request_id, 1, 2)
    assert await journal.finish(request_id, 1, done(2))
    assert len(await journal.log(request_id)) == 2
    await database.close()


async def test_a_full_disk_refuses_new_requests_and_keeps_the_accepted(tmp_path: Path) -> None:
    path = database_path(tmp_path)
    path.parent.mkdir()
    plan = FaultPlan(path)
    database = await Database.open(path, connect=plan.connect)
    journal = Journal(database, "gw-1")
    request_id = await running(journal)
    plan.full_on = "COMMIT"
    with pytest.raises(StorageUnavailable) as caught:
        await journal.accept(new_request())
    assert caught.value.http_status == 503 and "full" in caught.value.message
    plan.full_on = None
    assert await database.read(query("SELECT id FROM requests")) == [(request_id,)]
    assert await write(journal, request_id, 1, 1)
    await database.close()


async def test_a_successor_adopts_what_was_unfinished_and_fences_the_former_owner(database: Database) -> None:
    former = Journal(database, "gw-1")
    request_id, queued = await running(former), (await former.accept(new_request(created_us=5))).record.id
    ended = await running(former)
    await write(former, request_id, 1, 2, device=used(3, 4))
    await former.finish(ended, 1, done(0))
    successor = Journal(database, "gw-2")
    records = {record.id: record for record in await successor.adopt({"gw-2"})}
    assert set(records) == {request_id, queued}
    record = records[request_id]
    assert (record.owner, record.epoch, record.last_seq, record.device) == ("gw-2", 1, 2, used(3, 4))
    assert unpack_tokens(record.prompt) == (1, 2, 3) and record.params == b"params"
    assert not await write(former, request_id, 3, 1)
    assert not await former.finish(request_id, 1, done(2))
    with pytest.raises(Fenced):
        await former.assign(queued, "rep-2", "slot-0")
    assert await write(successor, request_id, 3, 1)


async def test_what_is_taken_over_is_returned_to_one_only(database: Database) -> None:
    former, heirs = Journal(database, "gw-1"), [Journal(database, f"gw-{number}") for number in (2, 3)]
    ids = [(await former.accept(new_request())).record.id for _ in range(3)]
    taken = await asyncio.gather(*(heir.take_over(("gw-1", "gw-9")) for heir in heirs))
    assert sorted(record.id for records in taken for record in records) == sorted(ids)
    assert {record.owner for records in taken for record in records} <= {"gw-2", "gw-3"}
    whose = await heirs[0].whose([*ids, "cmpl-unknown"])
    assert set(whose) == set(ids)
    assert all(owner != "gw-1" and state is RequestState.QUEUED for owner, _, state in whose.values())


async def test_without_its_lease_a_gateway_writes_nothing(journal: Journal) -> None:
    record = (await journal.accept(new_request())).record
    epoch = await journal.assign(record.id, "rep-1", "slot-0")
    journal.may_write = lambda: False
    with pytest.raises(LeaseLapsed):
        await journal.accept(new_request())
    with pytest.raises(LeaseLapsed):
        await journal.assign(record.id, "rep-2", "slot-0")
    with pytest.raises(LeaseLapsed):
        await journal.append(record.id, epoch, 1, events(1, 1)[0], 1, used(1, 1), 0)
    with pytest.raises(LeaseLapsed):
        await journal.finish(record.id, epoch, done(0))
    journal.may_write = lambda: True
    assert await journal.append(record.id, epoch, 1, events(1, 1)[0], 1, used(1, 1), 0)


async def test_without_durability_tokens_are_granted_from_memory_and_in_order(
    journal: Journal, database: Database
) -> None:
    request_id = await running(journal, durability="off")
    commits = database.stats.commits
    assert await write(journal, request_id, 1, 2)
    assert not await write(journal, request_id, 4, 1)
    assert not await write(journal, request_id, 3, 1, epoch=2)
    assert await write(journal, request_id, 3, 1)
    assert database.stats.commits == commits
    assert await journal.finish(request_id, 1, done(3, output_tokens=3, device=used(1, 2)))
    assert await journal.log(request_id) == []


async def test_with_durability_host_tokens_reach_the_disk_before_they_are_granted(
    journal: Journal, database: Database, where: Path | str
) -> None:
    levels: list[Any] = []
    level = "PRAGMA synchronous" if isinstance(where, Path) else "SHOW synchronous_commit"
    submit = database.submit

    def spying(fn: Any, *, durable: bool = False, guarded: bool = True) -> Any:
        def run(connection: Any) -> Any:
            levels.append(connection.execute(level).fetchone()[0])
            return fn(connection)

        return submit(run, durable=durable, guarded=guarded)

    database.submit = spying  # type: ignore[method-assign]
    request_id = await running(journal, durability="host")
    await write(journal, request_id, 1, 1)
    await journal.finish(request_id, 1, done(1))
    assert levels == [2 if isinstance(where, Path) else "on"] * 4


async def test_attempts_tell_what_each_replica_did(journal: Journal) -> None:
    request_id = await running(journal)
    await write(journal, request_id, 1, 2, device=used(10, 5))
    await journal.requeue(request_id, 1, "replica lost")
    await journal.assign(request_id, "rep-2", "slot-0")
    assert (
        await journal.taken(Taken(request_id, 2, loaded_tokens=64, recomputed_tokens=9, exact=True, load_us=700)) == 2
    )
    again = Taken(request_id, 2, loaded_tokens=32, recomputed_tokens=41, exact=True, load_us=900)
    assert await journal.taken(again) is None, "what was written first stands"
    await write(journal, request_id, 3, 1, epoch=2, device=used(1, 2))
    await journal.finish(request_id, 2, done(3, device=used(1, 3)))
    first, second = await journal.attempts(request_id)
    assert (first.replica_id, first.reason, first.last_seq, first.device) == ("rep-1", "replica lost", 2, used(10, 5))
    assert (second.after_seq, second.loaded_tokens, second.recomputed_tokens, second.exact) == (2, 64, 9, True)
    assert (second.reason, second.device) == ("done", used(1, 3))
    assert await journal.attempts_of_replica("rep-2") == [(request_id, 2)]


async def test_each_attempt_is_charged_to_its_replica_and_a_request_shows_every_stage(
    journal: Journal, database: Database
) -> None:
    request_id = await running(journal)
    await write(journal, request_id, 1, 2, device=used(10, 5))
    await journal.requeue(request_id, 1, "lost", used(11, 4))
    await journal.assign(request_id, "rep-2", "slot-0")
    stages = StageTimes(queue_us=1, cold_start_us=2, load_kv_us=3, prefill_us=40, decode_us=50, total_us=100)
    await journal.finish(request_id, 2, done(2, input_tokens=3, cached_tokens=1, output_tokens=2, device=used(1, 2),
                                             stages=stages))  # fmt: skip
    rows = await Ledger(database).of_request(request_id)
    assert [(row.stage, row.replica_id, row.device_us) for row in rows if row.device_us] == [
        ("prefill", "rep-1", 11), ("decode", "rep-1", 5), ("prefill", "rep-2", 1), ("decode", "rep-2", 2),
    ]  # fmt: skip
    walls = {row.stage: row.wall_us for row in rows if row.wall_us}
    assert walls == {"queue": 1, "cold_start": 2, "load_kv": 3, "prefill": 40, "decode": 50, "total": 100}
    total = next(row for row in rows if row.stage == "total")
    assert (total.input_tokens, total.cached_tokens, total.output_tokens, total.device_us) == (3, 1, 2, 0)


async def test_only_what_the_current_epoch_sealed_counts(journal: Journal) -> None:
    request_id = await running(journal)
    assert await journal.seal_kv(request_id, 1, [chunk(0, 32, "a")])
    await journal.assign(request_id, "rep-2", "slot-0")
    assert not await journal.seal_kv(request_id, 1, [chunk(32, 64, "stale")])
    assert await journal.seal_kv(request_id, 2, [chunk(0, 32, "b"), chunk(32, 64, "b")])
    assert await journal.kv(request_id) == [chunk(0, 32, "b"), chunk(32, 64, "b")]


async def test_packs_are_retired_when_no_live_request_counts_on_them(journal: Journal) -> None:
    ended, live = await running(journal), await running(journal)
    await journal.seal_kv(ended, 1, [chunk(0, 32, "own"), chunk(32, 64, "shared")])
    await journal.seal_kv(live, 1, [chunk(0, 32, "shared")])
    assert (await journal.retired_kv()).packs == ()
    await journal.finish(ended, 1, done(0))
    assert not await journal.seal_kv(ended, 1, [chunk(64, 96, "late")])
    retired = await journal.retired_kv()
    assert retired.packs == ("kv/packs/late", "kv/packs/own")
    await journal.forget_kv(retired)
    assert (await journal.retired_kv()).packs == ()
    await journal.finish(live, 1, done(0))
    assert (await journal.retired_kv()).packs == ("kv/packs/shared",)


async def test_chunks_come_back_as_they_were(journal: Journal) -> None:
    request_id = await running(journal)
    made = KvChunk(1, 16, 40, "kv/packs/x", 4096, 123, "d" * 64, "c" * 64)
    await journal.seal_kv(request_id, 1, (made,))
    assert await journal.kv(request_id) == [made]


async def test_retention_drops_the_log_first_and_the_row_later(database: Database) -> None:
    journal = Journal(database, "gw-1", RetentionSettings(log_s=0.0, request_s=3600.0))
    request_id, live = await running(journal), await running(journal)
    await write(journal, request_id, 1, 1)
    await write(journal, live, 1, 1)
    await journal.finish(request_id, 1, done(1, output_tokens=1))
    await asyncio.sleep(0.001)
    assert await journal.sweep() == 1
    record = await journal.get(request_id)
    assert record is not None and record.outcome is not None and record.prompt == b""
    assert await journal.log(request_id) == []
    assert len(await journal.log(live)) == 1
    assert await journal.sweep() == 0


async def test_retention_of_nothing_forgets_the_request_but_not_the_ledger(database: Database) -> None:
    journal = Journal(database, "gw-1", RetentionSettings(log_s=0.0, request_s=0.0))
    request_id = await running(journal)
    await journal.finish(request_id, 1, done(0))
    await asyncio.sleep(0.001)
    assert await journal.sweep() == 1
    assert await journal.get(request_id) is None
    assert [row.stage for row in await Ledger(database).of_request(request_id)] == ["total"]


async def test_recent_requests_come_newest_first(journal: Journal) -> None:
    made = [(await journal.accept(new_request(created_us=number))).record.id for number in range(3)]
    assert [record.id for record in await journal.recent("smol", 2)] == [made[2], made[1]]
