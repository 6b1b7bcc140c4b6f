"""Stored KV between tenants: one scope is all there is to share by, and what lies under another one cannot be named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from control_plane.cli.why import paragraphs
from control_plane.functions import ImportState
from control_plane.kv_index import Keeper
from control_plane.sealing import EVERYBODY
from control_plane.spec import parse_mapping
from function_runtime.protocol import PoolEntry, Work
from tests.control_plane.gateway.conftest import Plane, body, until
from tests.control_plane.storage.test_kv_index import IDENTITY, run_of


async def deploy(plane: Plane, tenant: str, shares: str) -> None:
    uri, identity, manifest = plane.checkpoint
    spec = parse_mapping({"name": f"to-{shares}", "model": uri, "engine": "stub", "share_prefixes": shares})
    function = await plane.context.functions.put(spec, tenant)
    await plane.context.functions.set_import(
        spec.name, tenant, function.revision, ImportState.READY, identity=identity, manifest_path=manifest
    )


def works(plane: Plane) -> list[Work]:
    return [work for replica in plane.slot.replicas.values() for work in replica.works]


async def post(plane: Plane, model: str, key: str, **fields: Any) -> Any:
    data, headers = json.dumps(body(model=model, **fields)), {"Authorization": f"Bearer {key}"}
    return await plane.client.post("/v1/completions", data=data, headers=headers)


async def scope(plane: Plane, model: str, key: str) -> str:
    response = await post(plane, model, key)
    request_id = (await response.json())["id"]
    return next(work.kv_scope for work in works(plane) if work.request_id == request_id)


@pytest.fixture
async def stranger(plane: Plane) -> str:
    """The key of another tenant; both have a function that shares with all, and one that does not."""
    for tenant in ("default", "acme"):
        for shares in ("all", "tenant"):
            await deploy(plane, tenant, shares)
    _, key = await plane.context.keys.create("acme", "x")
    return key


async def test_tenants_share_only_where_both_of_their_functions_say_so(plane: Plane, stranger: str) -> None:
    found = {
        (model, key): await scope(plane, model, key)
        for model in ("to-all", "to-tenant")
        for key in (plane.key, stranger)
    }
    assert found["to-all", plane.key] == found["to-all", stranger]
    assert len(set(found.values())) == 3
    await plane.context.tenant_keys.set("acme")
    sealed = await scope(plane, "to-all", stranger)
    assert sealed not in found.values(), "what is sealed with a tenant's key is nobody else's"
    assert sealed == await scope(plane, "to-tenant", stranger)


async def test_what_was_shared_with_all_is_found_again_by_the_next_gateway(plane: Plane, stranger: str) -> None:
    plane.slot.behaviour.token_s = 0.01
    response = await post(plane, "to-all", stranger, stream=True, max_tokens=60)
    request_id = response.headers["x-request-id"]
    await until(lambda: plane.context.dispatcher.requests[request_id].log.last_seq > 3)
    await plane.die()
    await plane.slot.kill(plane.slot.living[0])
    await plane.start()
    await until(lambda: [work for work in works(plane) if work.epoch == 2])
    first, second = [work for work in works(plane) if work.request_id == request_id]
    assert (first.epoch, second.epoch, first.kv_scope) == (1, 2, second.kv_scope)


async def test_what_is_shared_with_all_is_the_operators_to_look_after(plane: Plane, stranger: str) -> None:
    keeper = Keeper("acme", "to-all", "common", owner=EVERYBODY)
    (chunk,) = run_of("a", 1, pack="kv/packs/aa/" + "a" * 64)
    await plane.context.kv_index.keep(keeper, IDENTITY, (chunk,), {chunk.pack: 7})
    async with plane.get("/api/v1/kv") as response:
        told = await response.json()
    assert [pack["pack"] for pack in told["data"]] == [chunk.pack]
    assert told["totals"] == [{"state": "live", "packs": 1, "nbytes": 7}]
    async with plane.client.get("/api/v1/kv", headers={"Authorization": f"Bearer {stranger}"}) as response:
        told = await response.json()
    assert (told["data"], told["totals"]) == ([], [])


async def test_a_tenant_sees_of_a_slots_pool_what_its_own_functions_use(plane: Plane) -> None:
    """What others run, and how likely it is to be wanted, is theirs."""
    _, stranger = await plane.context.keys.create("acme", "x")
    await deploy(plane, "acme", "tenant")
    own = PoolEntry("a", plane.checkpoint[1], "ready", 1)
    state = plane.context.fleet.slots["slot-0"]
    plane.context.fleet.slots["slot-0"] = msgspec.structs.replace(
        state, pool=(own, PoolEntry("b", "1" * 64, "ready", 1))
    )
    for key, seen in ((plane.key, ["a", "b"]), (stranger, ["a"])):
        async with plane.client.get("/api/v1/slots", headers={"Authorization": f"Bearer {key}"}) as response:
            (slot,) = (await response.json())["data"]
        assert [entry["key"] for entry in slot["pool"]] == seen


async def test_why_tells_how_a_checkpoint_came_into_each_pool_and_not_who_else_uses_it(plane: Plane) -> None:
    """Also where it was loaded ahead, so that no replica waited for it."""
    await plane.deploy()
    how = "copied from peer: 900 bytes read, 3 MB/s; 2 chunks verified, 1 bad and fetched again; 1 ranges asked again"
    entry = PoolEntry("a", plane.checkpoint[1], "ready", 900, holders=("rep-of-another",), dtype="float32", load=how)
    state = plane.context.fleet.slots["slot-0"]
    plane.context.fleet.slots["slot-0"] = msgspec.structs.replace(
        state, pool=(entry, PoolEntry("b", "1" * 64, "ready", 1))
    )
    async with plane.get("/api/v1/why/fn") as response:
        why = await response.json()
    (told,) = why["pools"]
    assert (told["slot_id"], told["state"], told["nbytes"], told["load"]) == ("slot-0", "ready", 900, how)
    assert "rep-of-another" not in json.dumps(why)
    assert how in "\n".join(paragraphs(why))
