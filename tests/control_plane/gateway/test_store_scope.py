"""What a slot's token opens of the store that a control plane serves: its tenant's KV and its checkpoint, while it
works for that tenant there."""

from __future__ import annotations

from typing import Any

import google_crc32c
import pytest

from control_plane.store_tokens import STEP_S, StoreTokens, place_of
from tests.control_plane.gateway.conftest import Plane, body

OBJECTS = "/internal/v1/store/objects/"
PRIVATE = "c" * 64
OLD = f"kv/packs/ab/{'ab' * 32}"


class Slot:
    """Asks the store as a slot does."""

    def __init__(self, plane: Plane, token: str) -> None:
        self._plane = plane
        self._headers = {"Authorization": f"Bearer {token}"}

    async def get(self, key: str) -> tuple[int, Any]:
        async with self._plane.client.get(OBJECTS + key, headers=self._headers) as response:
            return response.status, await (response.json() if response.status >= 400 else response.read())

    async def put(self, key: str, content: bytes) -> int:
        headers = {**self._headers, "x-stoker-crc32c": str(google_crc32c.value(content))}
        async with self._plane.client.put(OBJECTS + key, data=content, headers=headers) as response:
            return response.status


def key_of(tenant: str) -> str:
    return f"kv/packs/{place_of(tenant)}/ab/x"


@pytest.fixture
async def busy(plane: Plane) -> Plane:
    """A replica of the tenant `default` runs at slot-0."""
    await plane.deploy()
    assert (await plane.post(body())).status == 200
    return plane


async def test_a_tenants_slot_reads_nothing_of_anothers(busy: Plane) -> None:
    tokens, identity = busy.context.slot_files.tokens, busy.checkpoint[1]
    slot = Slot(busy, tokens.of("slot-0", "default", identity))
    assert await slot.put(key_of("default"), b"mine") == 204
    assert await slot.get(key_of("default")) == (200, b"mine")
    for key in (key_of("other"), f"checkpoints/{PRIVATE}/0", f"models/{PRIVATE}/w"):
        status, told = await slot.get(key)
        assert (status, told["error"]["code"]) == (403, "forbidden"), told
        assert (
            f"slot-0 for tenant default and checkpoint {identity[:16]} does not read {key}" in told["error"]["message"]
        )
        assert await slot.put(key, b"x") == 403
    assert (await slot.get(f"checkpoints/{identity}/0"))[0] in (200, 404)  # its own: there, or not on this machine


async def test_a_token_is_void_where_nothing_of_its_tenant_runs(busy: Plane) -> None:
    tokens, identity = busy.context.slot_files.tokens, busy.checkpoint[1]
    status, told = await Slot(busy, tokens.of("slot-0", "other", identity)).get(key_of("other"))
    assert (status, told["error"]["code"]) == (503, "tenant_not_there")
    status, told = await Slot(busy, tokens.of("slot-9", "default", identity)).get(key_of("default"))
    assert (status, told["error"]["code"]) == (503, "slot_unknown")
    forged = StoreTokens(b"guess").of("slot-0", "default", identity)
    assert (await Slot(busy, forged).get(key_of("default")))[0] == 401


async def test_a_token_that_ran_out_says_so(busy: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = busy.context.slot_files.tokens
    token = tokens.of("slot-0", "default", busy.checkpoint[1])
    later_s = tokens._now_s() + 3 * STEP_S
    monkeypatch.setattr(tokens, "_now_s", lambda: later_s)
    status, told = await Slot(busy, token).get(key_of("default"))
    assert status == 401 and "has run out" in told["error"]["message"]


@pytest.mark.parametrize(("owner", "status"), [("default", 200), ("other", 403)])
async def test_a_pack_whose_name_has_no_tenant_is_its_owners(busy: Plane, owner: str, status: int) -> None:
    def note(connection: Any) -> None:
        connection.execute(
            "INSERT INTO kv_packs (pack, nbytes, state, tenant, reason, created_us, changed_us) "
            "VALUES (:pack, 1, 'live', :tenant, '', 1, 1)",
            {"pack": OLD, "tenant": owner},
        )

    await busy.context.db.write(note)
    await busy.context.store.run(lambda store: store.put(OLD, b"old"))
    slot = Slot(busy, busy.context.slot_files.tokens.of("slot-0", "default", busy.checkpoint[1]))
    assert (await slot.get(OLD))[0] == status
    assert await slot.put(OLD, b"new") == 403


async def test_work_says_where_its_tenants_kv_lies(busy: Plane) -> None:
    work = busy.slot.living[0].works[0]
    assert work.kv_place == place_of("default")


async def test_what_runs_is_given_newer_tokens(busy: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, list[str]]] = []

    async def renew(slot_id: str, specs: Any) -> None:
        given.append((slot_id, [spec.replica_id for spec in specs]))

    monkeypatch.setattr(busy.slot, "renew_store", renew)
    await busy.context.fleet.renew_store("slot-0")
    assert given == [("slot-0", [busy.slot.living[0].spec.replica_id])]
