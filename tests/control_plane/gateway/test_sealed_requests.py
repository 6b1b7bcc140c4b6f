"""A tenant with a key: nothing of its requests lies in the clear, everything works, and deleting the key deletes it."""

from __future__ import annotations

from typing import Any

from control_plane.errors import StorageUnavailable
from control_plane.journal import Journal
from control_plane.kv_desk import function_scope
from control_plane.kv_index import Keeper
from control_plane.records import RequestState
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text
from tests.control_plane.storage.test_kv_index import IDENTITY, chains, run_of

SECRET = "the merger is on friday"


def whole(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


async def set_key(plane: Plane, **given: Any) -> dict[str, Any]:
    async with plane.client.put("/api/v1/encryption", json=given, headers=plane.headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def delete_key(plane: Plane) -> dict[str, Any]:
    async with plane.client.delete("/api/v1/encryption", headers=plane.headers) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def cells(plane: Plane) -> list[bytes]:
    """Everything the database holds of requests, as bytes."""

    def run(connection: Any) -> list[bytes]:
        found: list[bytes] = []
        for table in ("requests", "request_inputs", "token_log", "decisions", "attempts", "ledger"):
            for row in connection.execute(f"SELECT * FROM {table}").fetchall():
                found += [cell if isinstance(cell, bytes) else str(cell).encode() for cell in row]
        return found

    return await plane.context.db.read(run)


async def test_nothing_of_a_sealed_request_is_stored_in_the_clear(plane: Plane) -> None:
    await plane.deploy()
    assert (await set_key(plane))["number"] == 1
    async with plane.post(body(prompt=SECRET, echo=True, stop=["unsayable"])) as response:
        assert SECRET in (await response.json())["choices"][0]["text"]
    await until(lambda: not plane.context.dispatcher.requests)
    stored = await cells(plane)
    tokens = plane.slot.living[0].works[0].prompt
    assert len(tokens) > 3
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    for words in (SECRET.encode(), b"unsayable", token_text(7, 0, 0).strip().encode(), packed):
        assert not any(words in cell for cell in stored)
    work = plane.slot.living[0].works[0]
    assert len(work.kv_key) == 32


async def test_a_sealed_request_is_read_again_and_resumed(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    await set_key(plane)
    response = await plane.post(body(stream=True, max_tokens=40))
    request_id = response.headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests[request_id].log.last_seq > 5)
    before = plane.slot.living[0].works[0]
    await plane.die()
    await plane.slot.kill(plane.slot.living[0])
    await plane.start()
    async with plane.get(f"/v1/completions/{request_id}/stream") as again:
        events = await Stream(again).all()
    assert text_of(events) == whole(40)
    work = plane.slot.living[0].works[0]
    assert (work.epoch, work.prompt) == (2, before.prompt)
    assert (work.kv_scope, work.kv_key) == (before.kv_scope, before.kv_key)
    await until(lambda: not plane.context.dispatcher.requests)
    async with plane.get(f"/v1/completions/{request_id}") as response:
        assert (await response.json())["choices"][0]["text"] == whole(40)


async def test_a_new_key_leaves_earlier_requests_readable(plane: Plane) -> None:
    await plane.deploy()
    ids = []
    for given in (None, {}, {}):
        if given is not None:
            await set_key(plane, **given)
        async with plane.post(body()) as response:
            ids.append((await response.json())["id"])
    await until(lambda: not plane.context.dispatcher.requests)
    await plane.restart()
    scopes = {work.kv_scope for replica in plane.slot.replicas.values() for work in replica.works}
    assert len(scopes) == 3
    for request_id in ids:
        async with plane.get(f"/v1/completions/{request_id}") as response:
            assert (await response.json())["choices"][0]["text"] == whole(5)


async def test_deleting_the_key_deletes_what_was_stored(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    await set_key(plane)
    async with plane.post(body()) as response:
        ended = (await response.json())["id"]
    running = (await plane.post(body(stream=True, max_tokens=200))).headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests[running].log.last_seq > 2)
    assert (await delete_key(plane))["deleted_keys"] == 1
    await plane.restart()
    for request_id in (ended, running):
        async with plane.get(f"/v1/completions/{request_id}") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (410, "key_deleted")
    record = await plane.context.journal.get(running)
    assert record is not None and record.state is RequestState.FAILED
    assert record.outcome is not None and record.outcome.error is not None
    assert record.outcome.error.code == "key_deleted"
    async with plane.post(body()) as response:
        assert response.status == 200


async def alter(plane: Plane, table: str, column: str, where: str, request_id: str) -> None:
    def run(connection: Any) -> None:
        (known,) = connection.execute(f"SELECT {column} FROM {table} WHERE {where}", {"id": request_id}).fetchone()
        altered = bytes(known[:-1]) + bytes([known[-1] ^ 1])
        connection.execute(
            f"UPDATE {table} SET {column} = :altered WHERE {where}", {"id": request_id, "altered": altered}
        )

    await plane.context.db.write(run)


async def test_altered_bytes_end_their_own_request_with_the_reason_and_the_others_are_adopted(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    await set_key(plane)
    ids = [(await plane.post(body(stream=True, max_tokens=60))).headers["x-request-id"] for _ in range(4)]
    live = plane.context.dispatcher.requests
    await until(lambda: all(live[request_id].log.last_seq > 5 for request_id in ids))
    await alter(plane, "request_inputs", "prompt", "request_id = :id", ids[0])
    await alter(plane, "token_log", "payload", "id = (SELECT log_head FROM requests WHERE id = :id)", ids[1])
    await alter(plane, "request_inputs", "params", "request_id = :id", ids[2])
    await plane.restart()
    for request_id in ids[:3]:
        record = await plane.context.journal.get(request_id)
        assert record is not None and record.state is RequestState.REFUSED
        assert record.outcome is not None and record.outcome.error is not None
        assert record.outcome.error.code == "stored_data_damaged"
    async with plane.get(f"/v1/completions/{ids[3]}/stream") as again:
        assert text_of(await Stream(again).all()) == whole(60)
    for request_id in ids[:3]:
        async with plane.get(f"/v1/completions/{request_id}") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (500, "stored_data_damaged")


async def test_an_adoption_that_the_storage_refuses_is_tried_again(plane: Plane, monkeypatch: Any) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    request_id = (await plane.post(body(stream=True, max_tokens=40))).headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests[request_id].log.last_seq > 2)
    refusals = [StorageUnavailable("away"), RuntimeError("a fault of ours")]
    log = Journal.log

    async def away(self: Journal, *given: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await log(self, *given)

    monkeypatch.setattr(Journal, "log", away)
    await plane.restart()
    await until(lambda: request_id in plane.context.dispatcher.requests)
    async with plane.get(f"/v1/completions/{request_id}/stream") as again:
        assert text_of(await Stream(again).all()) == whole(40)


async def test_deleting_the_key_takes_what_it_sealed_out_of_the_index(plane: Plane) -> None:
    await plane.deploy()
    index, keys = plane.context.kv_index, plane.context.tenant_keys
    clear = (await keys.kv_access("default")).scope
    await set_key(plane)
    sealed = (await keys.kv_access("default")).scope
    scopes = {"a": sealed, "b": function_scope(sealed, "fn"), "c": clear}
    for name, scope in scopes.items():
        await index.keep(Keeper("default", "fn", scope), IDENTITY, run_of(name, 1))
    await delete_key(plane)
    found = {name: len(await index.known(IDENTITY, scope, chains(name, 1))) for name, scope in scopes.items()}
    assert found == {"a": 0, "b": 0, "c": 1}
    assert {(pack["state"], pack["reason"]) for pack in await index.packs("default")} == {
        ("live", ""), ("retiring", "its key was deleted"),
    }  # fmt: skip
