"""A disk that is full: new requests are told so, what was accepted is kept and delivered when it is back."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from typing import Any

import pytest

from control_plane.cli.replicas import reason_of, store_note
from control_plane.database import Database
from control_plane.records import RequestState
from function_runtime.protocol import Settled, StoreTotals
from model_loader.errors import StoreProblem, StoreRefused
from model_loader.objects import ObjectStore
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text


class FullDisk:
    """Makes every transaction of a database fail while `full`."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        transact = database._transact

        def failing(group: list[Any]) -> None:
            if self.full:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL  # type: ignore[misc]
                raise error
            transact(group)

        monkeypatch.setattr(database, "_transact", failing)


async def test_new_requests_get_503_with_the_reason_and_service_returns_by_itself(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await plane.deploy()
    disk = FullDisk(plane.context.db, monkeypatch)
    disk.full = True
    async with plane.post(body()) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "storage_unavailable")
    assert "full" in error["message"]
    assert int(response.headers["Retry-After"]) >= 1
    async with plane.get("/health/ready") as response:
        assert response.status == 503
    disk.full = False
    async with plane.post(body()) as response:
        assert response.status == 200
    async with plane.get("/health/ready") as response:
        assert response.status == 200


async def test_what_could_not_be_accepted_is_taken_back_from_the_replica_that_began_with_it(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    replica = plane.slot.living[0]
    await until(lambda: not plane.context.dispatcher.requests)
    plane.slot.behaviour.token_s = 0.01
    disk = FullDisk(plane.context.db, monkeypatch)
    disk.full = True
    plane.hold_headers()
    async with plane.post(body(stream=True, max_tokens=200)) as response:
        assert response.status == 503
    begun = replica.works[-1].request_id
    await until(lambda: any(isinstance(word, Settled) and word.request_id == begun for word in replica.words))
    lane = next(iter(plane.context.dispatcher.lanes))
    assert (lane.in_flight, lane.entering, plane.context.dispatcher.requests) == (0, 0, {})
    disk.full = False
    async with plane.post(body()) as response:
        assert response.status == 200
    async with plane.get(f"/v1/completions/{begun}") as response:
        assert response.status == 404


async def test_an_end_that_every_reader_may_see_waits_for_no_outcome(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens and the end of every choice are committed: a disk that fills up then delays only the accounts."""
    await plane.deploy()
    disk = FullDisk(plane.context.db, monkeypatch)
    finish = plane.context.journal.finish

    def filling(request_id: str, epoch: int, outcome: Any) -> Any:
        disk.full = True
        return finish(request_id, epoch, outcome)

    monkeypatch.setattr(plane.context.journal, "finish", filling)
    async with plane.post(body()) as response:
        assert (response.status, (await response.json())["usage"]["completion_tokens"]) == (200, 5)
    assert disk.full
    monkeypatch.undo()
    async with plane.get("/v1/organization/usage/completions?start_time=1&bucket_width=1d&limit=1") as response:
        assert response.status == 200
    await until(lambda: not plane.context.dispatcher.requests)


async def test_tokens_of_accepted_requests_wait_for_the_disk_and_none_is_lost(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.slot.behaviour.token_s = 0.005
    await plane.deploy()
    disk = FullDisk(plane.context.db, monkeypatch)
    async with plane.post(body(stream=True, max_tokens=60)) as response:
        stream = Stream(response)
        events = []
        async for event in stream.events():
            events.append(event)
            if event[0] == 10:
                disk.full = True
                break
        await asyncio.sleep(0.3)
        live = next(iter(plane.context.dispatcher.requests.values()))
        assert live.log.last_seq < 60
        disk.full = False
        events += await stream.all()
    assert text_of(events) == "".join(token_text(7, 0, position) for position in range(60))
    assert [place for place, _ in events] == [*range(1, 61), 60]
    await until(lambda: not plane.context.dispatcher.requests)


async def test_a_reader_that_waited_long_enough_is_told_how_to_come_back_and_gets_the_rest(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.slot.behaviour.token_s = 0.005
    await plane.deploy()
    database = plane.context.db
    monkeypatch.setattr(database, "settings", dataclasses.replace(database.settings, patience_s=0.3))
    disk = FullDisk(database, monkeypatch)
    async with plane.post(body(stream=True, max_tokens=60)) as response:
        stream = Stream(response)
        events = []
        async for event in stream.events():
            events.append(event)
            if event[0] == 10:
                disk.full = True
                break
        events += await stream.all()
    error = events[-2][1]["error"]
    live = next(iter(plane.context.dispatcher.requests.values()))
    assert error["code"] == "storage_unavailable"
    assert f"/v1/completions/{live.request_id}/stream and Last-Event-ID: {live.log.last_seq}" in error["message"]
    cursor = max(place for place, _ in events)
    assert cursor == live.log.last_seq < 60
    disk.full = False
    headers = {"Last-Event-ID": str(cursor)}
    await until(lambda: live.log.paused is None)
    async with plane.get(f"/v1/completions/{live.request_id}/stream", **headers) as response:
        rest = await Stream(response).all()
    assert text_of(events) + text_of(rest) == "".join(token_text(7, 0, position) for position in range(60))
    await until(lambda: not plane.context.dispatcher.requests)


async def test_without_a_log_a_function_still_answers_and_a_death_is_an_honest_error(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(durability="off")
    async with plane.post(body(stream=True)) as response:
        assert text_of(await Stream(response).all()) == "".join(token_text(7, 0, p) for p in range(5))
    response = await plane.post(body(stream=True, max_tokens=100))
    request_id = response.headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests)
    await plane.restart()
    async with plane.get(f"/v1/completions/{request_id}/stream") as response:
        text = await response.text()
    assert "gateway_lost" in text
    assert "durability: off" in text


@pytest.mark.parametrize("what", ["append", "finish", "assign"])
async def test_a_fault_that_nobody_foresaw_loses_no_request(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Once, instead of the write, something that is no storage fault by its class; the request is not let go."""
    await plane.deploy()
    journal, raised = plane.context.journal, []
    write = getattr(journal, what)

    def failing(*given: Any, **named: Any) -> Any:
        if raised:
            return write(*given, **named)
        raised.append(what)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(RuntimeError("the driver says something new"))
        return future

    async def failing_coroutine(*given: Any, **named: Any) -> Any:
        return await failing(*given, **named)

    monkeypatch.setattr(journal, what, failing if what == "append" else failing_coroutine)
    async with plane.post(body(stream=True)) as response:
        assert text_of(await Stream(response).all()) == "".join(token_text(7, 0, p) for p in range(5))
    await until(lambda: not plane.context.dispatcher.requests)
    assert raised == [what]
    (record,) = await journal.recent("fn")
    assert record.state is RequestState.DONE


async def test_while_the_object_store_is_away_it_is_told_which_functions_lack_it(plane: Plane) -> None:
    await plane.deploy("needs", kv_store="required")
    await plane.deploy("runs")
    await plane.deploy("keeps-no-log", durability="off")
    store = plane.context.store

    def refuse(uri: str) -> ObjectStore:
        raise StoreRefused("there is no bucket x: create it", StoreProblem.MISSING_BUCKET)

    async with plane.get("/api/v1/replicas") as response:
        told = (await response.json())["object_store"]
    assert told["functions"] == {"refused": [], "without": []} and store_note(told) == ""
    store._opener = refuse
    await store.check()
    async with plane.get("/api/v1/replicas") as response:
        told = (await response.json())["object_store"]
    assert told["functions"] == {"refused": ["needs"], "without": ["runs"]}
    note = store_note(told)
    assert "missing_bucket" in note and "create it" in note
    assert note.splitlines()[-2:] == [
        "Refuse new requests (kv_store: required): needs",
        "Run without it, what a replica that dies had computed is computed again: runs",
    ]
    async with plane.post(body(model="needs")) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "object_store_unavailable") and "create it" in error["message"]
    async with plane.client.post("/api/v1/kv/gc", headers=plane.headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "object_store_error") and "create it" in error["message"]


async def test_a_new_installation_is_not_ready_without_its_bucket_and_one_that_serves_is(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plane.context.store

    def refuse(uri: str) -> ObjectStore:
        raise StoreRefused("there is no bucket x: create it", StoreProblem.MISSING_BUCKET)

    async def ready() -> tuple[int, str]:
        async with plane.get("/health/ready") as response:
            return response.status, await response.text()

    store._opener = refuse
    await store.check()
    assert (await ready())[0] == 200, "nobody looks after it: who started it has been told"
    monkeypatch.setenv("STOKER_REQUIRED", '{"HOME": "the container"}')
    status, told = await ready()
    assert status == 503 and "there is no bucket x: create it" in told and "missing_bucket" in told
    await plane.deploy()
    assert (await ready())[0] == 200, "its requests run without stored KV"


async def test_a_replica_that_cannot_reach_the_store_says_so_though_its_gateway_can(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    (replica_id,) = plane.slot.statuses
    plane.slot._tell(replica_id, store=StoreTotals(reads=7, breaker_open=True))
    async with plane.get("/api/v1/replicas") as response:
        (told,) = (await response.json())["data"]
    assert (told["store"]["reads"], reason_of(told)) == (7, "leaves the object store alone, after failures")
