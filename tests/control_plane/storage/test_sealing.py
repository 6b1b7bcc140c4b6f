"""Tenants' keys: what is sealed opens with its key and place only, and with nothing once the key is deleted."""

from __future__ import annotations

import base64
import contextlib
import sqlite3
from pathlib import Path

import pytest

from control_plane.database import Database
from control_plane.errors import Damaged, InvalidRequest, KeyDeleted, StorageUnavailable
from control_plane.journal import Journal
from control_plane.sealing import MasterKey, TenantKeys, key_of
from control_plane.tenants import Keys
from tests.control_plane.storage.builders import done, new_request, query, used
from tests.control_plane.storage.test_journal import running, write

OWN = bytes(range(32))


@pytest.fixture
def master(tmp_path: Path) -> MasterKey:
    return MasterKey(tmp_path / "master.key")


@pytest.fixture
async def keys(database: Database, master: MasterKey) -> TenantKeys:
    return TenantKeys(database, Keys(database), master)


async def test_a_tenant_without_a_key_seals_nothing_and_needs_no_master_key(keys: TenantKeys, tmp_path: Path) -> None:
    await keys.refresh()
    assert keys.number("default") == 0
    assert (await keys.kv_access("default")).key == b""
    assert keys.seal_of("default", 0, "r") is None
    assert not (tmp_path / "master.key").exists()


async def test_what_is_sealed_opens_in_its_place_only(keys: TenantKeys) -> None:
    key = await keys.set("acme")
    seal = keys.seal_of("acme", key.number, "chatcmpl-1")
    assert seal is not None
    sealed = seal.seal("prompt", b"secret words")
    assert b"secret" not in sealed
    assert seal.open("prompt", sealed) == b"secret words"
    other = keys.seal_of("acme", key.number, "chatcmpl-2")
    assert other is not None
    for attempt in (lambda: seal.open("params", sealed), lambda: other.open("prompt", sealed),
                    lambda: seal.open("prompt", sealed[:-1] + bytes([sealed[-1] ^ 1])),
                    lambda: seal.open("prompt", b"")):  # fmt: skip
        with pytest.raises(Damaged):
            attempt()


async def test_the_same_words_never_look_the_same_twice(keys: TenantKeys) -> None:
    await keys.set("acme", OWN)
    seal = keys.seal_of("acme", 1, "r")
    assert seal is not None
    assert seal.seal("prompt", b"x") != seal.seal("prompt", b"x")


async def test_after_a_new_key_what_the_earlier_one_sealed_is_still_read(
    keys: TenantKeys, database: Database, master: MasterKey
) -> None:
    await keys.set("acme", OWN)
    first = keys.seal_of("acme", 1, "r")
    assert first is not None
    sealed = first.seal("p", b"x")
    await keys.set("acme")
    assert keys.number("acme") == 2
    elsewhere = TenantKeys(database, Keys(database), master)
    await elsewhere.refresh()
    again = elsewhere.seal_of("acme", 1, "r")
    assert again is not None and again.open("p", sealed) == b"x"
    now, then = await elsewhere.kv_access("acme"), await elsewhere.kv_access("acme", 1)
    assert now == await keys.kv_access("acme")
    assert len({now.key, then.key, b""}) == 3
    assert now.scope != then.scope


async def test_deleting_the_key_deletes_what_it_sealed(keys: TenantKeys, database: Database, master: MasterKey) -> None:
    await keys.set("acme")
    await keys.set("other")
    elsewhere = TenantKeys(database, Keys(database), master)
    await elsewhere.refresh()
    assert await keys.delete("acme") == 1
    assert await keys.delete("acme") == 0
    await elsewhere.refresh()
    for each in (keys, elsewhere):
        assert each.current("acme") is None
        with pytest.raises(KeyDeleted):
            each.seal_of("acme", 1, "r")
        assert each.seal_of("other", 1, "r") is not None
    (left,) = await database.read(
        lambda connection: connection.execute("SELECT wrapped FROM tenant_keys WHERE tenant = 'acme'").fetchone()
    )
    assert left is None
    assert (await keys.set("acme")).number == 2


async def test_another_or_a_missing_master_key_is_said(keys: TenantKeys, database: Database, tmp_path: Path) -> None:
    await keys.set("acme")
    other = base64.b64encode(b"o" * 32).decode()
    with pytest.raises(StorageUnavailable, match="master key"):
        await TenantKeys(database, Keys(database), MasterKey(tmp_path / "none", other)).refresh()
    with pytest.raises(StorageUnavailable, match="STOKER_MASTER_KEY"):
        await TenantKeys(database, Keys(database), MasterKey(tmp_path / "none")).refresh()


async def test_the_keys_are_nowhere_in_the_database_in_the_clear(keys: TenantKeys, database: Database) -> None:
    await keys.set("acme", OWN)
    rows = await database.read(lambda connection: connection.execute("SELECT * FROM tenant_keys").fetchall())
    assert rows and not any(isinstance(cell, bytes) and OWN in cell for row in rows for cell in row)


async def test_a_deleted_key_is_overwritten_where_it_lay(tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    database = await Database.open(path)
    keys = TenantKeys(database, Keys(database), MasterKey(tmp_path / "master.key"))
    await keys.set("acme")
    ((wrapped,),) = await database.read(query("SELECT wrapped FROM tenant_keys"))

    def folded() -> bytes:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return path.read_bytes()

    assert bytes(wrapped) in folded()
    await keys.delete("acme")
    assert bytes(wrapped)[16:] not in folded()
    await database.close()


async def test_the_master_key_is_its_owners_only(keys: TenantKeys, tmp_path: Path) -> None:
    await keys.set("acme")
    assert (tmp_path / "master.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "x", "not base64!", base64.b64encode(b"short").decode()])
def test_a_key_has_32_bytes_in_base64(text: str) -> None:
    with pytest.raises(InvalidRequest, match="32 bytes"):
        key_of(text, "key")


async def test_a_key_set_through_another_gateway_is_read_before_anything_counts_as_deleted(
    keys: TenantKeys, database: Database, master: MasterKey
) -> None:
    elsewhere = TenantKeys(database, Keys(database), master)
    await elsewhere.refresh()
    former, heir = Journal(database, "gw-1", tenant_keys=keys), Journal(database, "gw-2", tenant_keys=elsewhere)
    await keys.set("default")
    new = new_request(params=b"\x81", prompt=b"\1\0\0\0")
    await former.accept(new)
    (record,) = [await heir.opened(each) for each in await heir.adopt()]
    assert (record.sealed, record.params, record.prompt) == (1, new.params, new.prompt)


async def test_one_record_that_does_not_open_stops_none_of_those_that_were_read_with_it(
    keys: TenantKeys, database: Database
) -> None:
    await keys.set("default")
    journal = Journal(database, "gw-1", tenant_keys=keys)
    whole, altered = new_request(), new_request()
    for new in (whole, altered):
        await journal.accept(new)
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE request_inputs SET prompt = :prompt WHERE request_id = :id",
                {"id": altered.id, "prompt": b"x" * 40},
            ).rowcount
        )
    )
    listed = {record.id: record for record in await journal.recent(whole.function)}
    assert (listed[whole.id].prompt, listed[whole.id].damaged) == (whole.prompt, "")
    assert (listed[altered.id].prompt, listed[altered.id].params) == (b"", b"")
    assert "does not open" in listed[altered.id].damaged
    heir = Journal(database, "gw-2", tenant_keys=keys)
    taken = {record.id: await heir.opened(record) for record in await heir.take_over(["gw-1"])}
    assert taken[whole.id].prompt == whole.prompt
    assert taken[altered.id].damaged


async def test_a_row_that_cannot_be_read_stops_no_adoption(database: Database) -> None:
    journal = Journal(database, "gw-1")
    whole, altered = new_request(), new_request()
    for new in (whole, altered):
        await journal.accept(new)
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE requests SET prefill_ends = :ends WHERE id = :id", {"id": altered.id, "ends": b"\xc1\xc1"}
            ).rowcount
        )
    )
    taken = {record.id: record for record in await Journal(database, "gw-2").take_over(["gw-1"])}
    assert not taken[whole.id].damaged
    assert taken[altered.id].damaged


async def test_a_tenants_damaged_key_costs_no_other_tenant_anything(
    keys: TenantKeys, database: Database, master: MasterKey
) -> None:
    await keys.set("acme")
    await keys.set("other")
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE tenant_keys SET wrapped = :wrapped WHERE tenant = 'acme'", {"wrapped": b"w" * 60}
            ).rowcount
        )
    )
    elsewhere = TenantKeys(database, Keys(database), master)
    await elsewhere.refresh()
    assert elsewhere.seal_of("other", 1, "r") is not None
    assert elsewhere.number("acme") == 1  # nothing new of it may lie in the clear
    with pytest.raises(Damaged, match="set a new one"):
        elsewhere.seal_of("acme", 1, "r")
    with pytest.raises(Damaged):
        await elsewhere.kv_access("acme")
    await elsewhere.set("acme")
    assert elsewhere.seal_of("acme", 2, "r") is not None


async def test_a_death_while_the_master_key_is_made_leaves_none_or_a_whole_one(
    keys: TenantKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(descriptor: int, data: bytes) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.write", dying)
        with pytest.raises(KeyboardInterrupt):
            await keys.set("acme")
    assert not (tmp_path / "master.key").exists()
    assert (await keys.set("acme")).number == 1


async def test_several_control_planes_need_one_master_key_given_to_all(database: Database) -> None:
    keys = TenantKeys(database, Keys(database), MasterKey(None))
    with pytest.raises(StorageUnavailable, match="STOKER_MASTER_KEY, the same for every"):
        await keys.set("acme")
    given = base64.b64encode(b"m" * 32).decode()
    assert (await TenantKeys(database, Keys(database), MasterKey(None, given)).set("acme")).number == 1


async def test_a_sealed_log_is_compacted_sealed_again_and_reads_the_same(keys: TenantKeys, database: Database) -> None:
    await keys.set("default")
    journal = Journal(database, "gw-1", tenant_keys=keys)
    request_id = await running(journal)
    for number in range(20):
        assert await write(journal, request_id, 3 * number + 1, 3)
    assert await journal.finish(request_id, 1, done(60, output_tokens=60, device=used(1, 2)))
    before = await journal.log(request_id)
    assert await journal.tidy() == 1
    rows = query(
        "SELECT last_seq, payload FROM token_log WHERE id = (SELECT log_head FROM requests WHERE id = ?)", request_id
    )
    ((last_seq, payload),) = await database.read(rows)
    assert last_seq == 60
    for after in (0, 1, 30, 59, 60):
        assert await journal.log(request_id, after) == before[after:]
    (seal,) = [keys.seal_of("default", 1, request_id)]
    assert seal is not None and seal.open("log/1", bytes(payload)) not in bytes(payload)
    await keys.delete("default")
    assert await journal.log(request_id) == []


async def test_a_sealed_log_whose_key_is_gone_or_whose_bytes_are_altered_stays_and_stops_no_other(
    keys: TenantKeys, database: Database
) -> None:
    await keys.set("default")
    journal = Journal(database, "gw-1", tenant_keys=keys)
    ids = []
    for _ in range(2):
        request_id = await running(journal)
        for number in range(3):
            assert await write(journal, request_id, number + 1, 1)
        assert await journal.finish(request_id, 1, done(3, output_tokens=3, device=used(1, 2)))
        ids.append(request_id)
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE token_log SET payload = :payload WHERE id = (SELECT log_head FROM requests WHERE id = :id)",
                {"id": ids[0], "payload": b"x" * 40},
            ).rowcount
        )
    )
    assert await journal.tidy() == 2
    heads = [
        (await database.read(query("SELECT log_head = log_tail FROM requests WHERE id = ?", each)))[0][0]
        for each in ids
    ]
    assert [bool(each) for each in heads] == [False, True]
    assert len(await journal.log(ids[1])) == 3
