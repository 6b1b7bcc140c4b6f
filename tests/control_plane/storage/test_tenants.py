from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from control_plane.changes import Changes
from control_plane.database import Database
from control_plane.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthenticated
from control_plane.tenants import Keys, Role
from tests.control_plane.storage.builders import query


@pytest.fixture
async def keys(database: Database) -> Keys:
    return Keys(database)


async def test_a_key_opens_what_it_was_made_for(keys: Keys) -> None:
    key, secret = await keys.create("acme", "ci", Role.USER)
    assert secret.startswith("sk-stoker-") and len(secret) == len("sk-stoker-") + 43
    found = keys.authenticate(f"Bearer {secret}")
    assert found == key and (found.tenant, found.role) == ("acme", Role.USER)
    found.require(Role.USER)
    with pytest.raises(Forbidden):
        found.require(Role.ADMIN)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer sk-stoker-unknown", "sk-stoker", "Bearer \ud800"]
)
async def test_anything_else_is_refused(keys: Keys, header: str | None) -> None:
    await keys.create("acme", "ci")
    with pytest.raises(Unauthenticated):
        keys.authenticate(header)


async def test_the_secret_is_not_in_the_database(keys: Keys, database: Database) -> None:
    key, secret = await keys.create("acme", "ci")
    rows = await database.read(query("SELECT * FROM api_keys"))
    assert secret not in repr(rows) and secret[20:] not in repr(rows)
    assert key.display in repr(rows) and secret.startswith(key.display.removesuffix("..."))


async def test_a_revoked_key_is_refused_at_once_and_after_a_restart(keys: Keys, database: Database) -> None:
    key, secret = await keys.create("acme", "ci")
    with pytest.raises(NotFound):
        await keys.revoke(key.id, "other-tenant")
    revoked = await keys.revoke(key.id, "acme")
    assert await keys.revoke(key.id, "acme") == revoked
    fresh = Keys(database)
    await fresh.refresh()
    for each in (keys, fresh):
        assert each.lookup(secret) is None
    assert (await keys.list("acme"))[0].revoked_us is not None


async def test_keys_are_known_after_a_restart(keys: Keys, database: Database) -> None:
    _, secret = await keys.create("acme", "ci", Role.ADMIN)
    fresh = Keys(database)
    await fresh.refresh()
    assert fresh.authenticate(f"bearer {secret}").role is Role.ADMIN


async def test_the_local_admin_key_is_made_once_and_private(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    secret = await keys.ensure_admin_key(path)
    assert await keys.ensure_admin_key(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.authenticate(f"Bearer {secret}").role is Role.ADMIN
    assert len(await keys.list("default")) == 1


async def test_a_lost_or_foreign_admin_key_is_replaced(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_bytes(b"sk-stoker-from-another-database\xff")
    secret = await keys.ensure_admin_key(path)
    assert path.read_text().strip() == secret


async def test_internal_secrets_are_the_same_for_every_gateway(keys: Keys, database: Database) -> None:
    secret = await keys.internal_secret("agent")
    assert len(secret) == 32
    assert await Keys(database).internal_secret("agent") == secret
    assert await keys.internal_secret("other") != secret


async def test_tenants_have_kv_scopes_of_their_own(keys: Keys, database: Database) -> None:
    assert await keys.kv_scope("a") == await Keys(database).kv_scope("a")
    assert await keys.kv_scope("a") != await keys.kv_scope("b")


async def test_a_revocation_whose_client_left_holds(keys: Keys, database: Database) -> None:
    key, secret = await keys.create("acme", "ci")
    revoking = asyncio.ensure_future(keys.revoke(key.id, "acme"))
    await asyncio.sleep(0)
    revoking.cancel()
    await asyncio.wait({revoking})
    await database.write(lambda connection: None)
    assert keys.lookup(secret) is None


async def test_a_given_admin_key_opens_and_is_kept_in_the_file(keys: Keys, tmp_path: Path) -> None:
    given, path = "chosen-by-the-operator-0123", tmp_path / "admin.key"
    made = await keys.ensure_admin_key(path)
    for _ in range(2):
        assert await keys.ensure_admin_key(path, given) == given
    assert path.read_text().strip() == given
    assert keys.authenticate(f"Bearer {given}").role is Role.ADMIN
    assert keys.lookup(made) is not None
    assert all(given not in key.display for key in await keys.list("default"))


@pytest.mark.parametrize("given", ["short", "with spaces in the middle of it", "é" * 30])
async def test_a_given_admin_key_that_is_too_weak_is_refused_by_name(keys: Keys, tmp_path: Path, given: str) -> None:
    with pytest.raises(InvalidRequest, match="STOKER_ADMIN_KEY"):
        await keys.ensure_admin_key(tmp_path / "admin.key", given)


async def test_a_given_admin_key_that_was_revoked_stays_revoked(keys: Keys, tmp_path: Path) -> None:
    given, path = "chosen-by-the-operator-0123", tmp_path / "admin.key"
    await keys.ensure_admin_key(path, given)
    key = keys.lookup(given)
    assert key is not None
    await keys.revoke(key.id, "default")
    with pytest.raises(Conflict, match="STOKER_ADMIN_KEY"):
        await keys.ensure_admin_key(path, given)


async def test_a_key_made_while_the_keys_are_read_again_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, read = Keys(database), database.read
    made: list[str] = []

    async def slow(run: Any) -> Any:
        found = await read(run)
        if not made:
            made.append("")
            made[0] = (await keys.create("default", "new"))[1]  # after the read, before its answer is put in place
        return found

    monkeypatch.setattr(database, "read", slow)
    await keys.refresh()
    assert keys.lookup(made[0]) is not None


async def test_an_older_read_that_is_late_does_not_undo_a_newer_one(database: Database) -> None:
    changes, late = Changes(), asyncio.Event()
    reads = iter(["old", "new", "new"])

    async def read() -> str:
        found = next(reads)
        if found == "old":
            await late.wait()
        return found

    first = asyncio.ensure_future(changes.read(read))
    await asyncio.sleep(0)
    assert await changes.read(read) == "new"
    late.set()
    assert await first == "new"
