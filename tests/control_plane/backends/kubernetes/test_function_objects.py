"""Function objects and functions of the API, kept in step both ways; status that is written when it changes only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.backends.kubernetes.agreeing import (
    ObjectFacts,
    Step,
    decide,
    key_of,
    new_object,
    object_spec,
    spec_of,
)
from control_plane.backends.kubernetes.api import FUNCTIONS, LEASES, SLOT_POOLS, ApiError, ApiRefused
from control_plane.backends.kubernetes.bonds import Bond, Bonds
from control_plane.backends.kubernetes.function_objects import FunctionObjects
from control_plane.backends.kubernetes.lease import mirror_lead
from control_plane.backends.kubernetes.pool_file import FROM_FILE, PoolFile, read_pools
from control_plane.backends.kubernetes.status import Condition, status_patch
from control_plane.backends.kubernetes.watching import Watching
from control_plane.database import Database
from control_plane.functions import Function, FunctionStore
from control_plane.settings import DatabaseSettings
from control_plane.spec import parse_mapping
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, slot_pool
from tests.control_plane.backends.town import until

KEY = ("default", "chat")
BOND = Bond("chat", "u", 3, "d1")
RULE: dict[str, tuple[ObjectFacts | None, str | None, Bond | None, Step]] = {
    "an object is made": (ObjectFacts("u", 1, "d1"), None, None, Step.DEPLOY),
    "an object is changed": (ObjectFacts("u", 4, "d2"), "d1", BOND, Step.DEPLOY),
    "the API is told something": (ObjectFacts("u", 3, "d1"), "d2", BOND, Step.WRITE),
    "both are changed: the object's generation wins": (ObjectFacts("u", 4, "d2"), "d3", BOND, Step.DEPLOY),
    "both say the same": (ObjectFacts("u", 4, "d2"), "d2", BOND, Step.NOTE),
    "nothing happened": (ObjectFacts("u", 3, "d1"), "d1", BOND, Step.NOTHING),
    "an object that cannot be": (ObjectFacts("u", 4, None), "d1", BOND, Step.REFUSE),
    "an object is deleted": (None, "d1", BOND, Step.DELETE_FUNCTION),
    "an object is deleted and made again": (ObjectFacts("v", 1, "d1"), "d1", BOND, Step.NOTE),
    "the API deletes": (ObjectFacts("u", 3, "d1"), None, BOND, Step.DELETE_OBJECT),
    "the API deletes what was changed meanwhile": (ObjectFacts("u", 4, "d2"), None, BOND, Step.DEPLOY),
    "both are gone": (None, None, BOND, Step.FORGET),
    "a function of the API alone": (None, "d1", None, Step.NOTHING),
}


@pytest.mark.parametrize(("found", "digest", "bond", "step"), RULE.values(), ids=RULE)
def test_one_rule_says_who_follows_whom(
    found: ObjectFacts | None, digest: str | None, bond: Bond | None, step: Step
) -> None:
    assert decide(found, digest, bond, make_objects=False) is step


def test_a_function_of_the_api_gets_an_object_where_the_setting_says_so() -> None:
    assert decide(None, "d1", None, make_objects=True) is Step.CREATE_OBJECT
    assert decide(None, "d1", BOND, make_objects=True) is Step.DELETE_FUNCTION, "its object was deleted"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"scaling": {"keep_alive": 1.5, "target_concurrency": None, "max_replicas": 3}},
        {"scaling": {"keep_alive": 20}, "aliases": ["a", "b"], "env": {"A": "1"}},
        {"pod": {"devices": {"nvidia.com/gpu": 1}, "tolerations": [{"key": "spot", "operator": "Exists"}]}},
    ],
)
def test_a_spec_goes_into_an_object_and_comes_back_the_same(more: dict[str, Any]) -> None:
    spec = parse_mapping({"name": "chat", "model": "file:///m", **more})
    for key in (KEY, ("acme", "chat")):
        found = new_object(spec, key, "rel")
        assert parse_mapping(spec_of(found)).digest() == spec.digest()
        assert key_of(found) == key
    keep_alive = object_spec(spec, "default", "chat").get("scaling", {}).get("keep_alive", "auto")
    assert isinstance(keep_alive, int | str), "an object's schema knows no fractions there"


def test_a_status_that_says_the_same_is_not_written() -> None:
    conditions = (Condition("Ready", True, "Serving", "well"),)
    found: dict[str, Any] = {"metadata": {"generation": 2}, "status": {}}
    patch = status_patch(found, {"ready": 1, "phases": {"ready": 1}}, conditions, "2026-01-01T00:00:00Z")
    assert patch is not None
    found["status"] = patch["status"]
    assert status_patch(found, {"ready": 1, "phases": {"ready": 1}}, conditions, "2026-01-02T00:00:00Z") is None
    worse = (Condition("Ready", True, "AtZero", "idle"),)
    patch = status_patch(found, {"phases": {"coming": 2}}, worse, "2026-01-03T00:00:00Z")
    assert patch is not None
    assert patch["status"]["phases"] == {"ready": None, "coming": 2}, "a merge patch keeps what it does not name"
    (condition,) = patch["status"]["conditions"]
    assert condition["lastTransitionTime"] == "2026-01-01T00:00:00Z", "it is true since then"


class Office:
    """API server, database and the controller between them."""

    def __init__(self, database: Database, *, make_objects: bool = False) -> None:
        self.api = FakeApi()
        self.database = database
        self.functions = FunctionStore(database)
        self.functions.slots_are_pods = True
        self.leads = True
        self.replicas: dict[str, int] = {}
        self.objects = self._objects(make_objects)

    def _objects(self, make_objects: bool) -> FunctionObjects:
        made = FunctionObjects(
            self.functions,
            Bonds(self.database),
            lambda: self.leads,
            self._status,
            release="rel",
            make_objects=make_objects,
        )
        self.unsubscribe = self.functions.subscribe(
            lambda change: made.mark((change.function.tenant, change.function.name))
        )
        return made

    def _status(self, function: Function) -> tuple[dict[str, Any], tuple[Condition, ...]]:
        replicas = self.replicas.get(function.name, 0)
        ready = Condition("Ready", True, "Serving" if replicas else "AtZero", "so it is")
        return {"revision": function.revision, "replicas": replicas, "state": ready.reason}, (ready,)

    async def restart(self) -> None:
        await self.objects.close()
        self.unsubscribe()
        self.objects = self._objects(False)
        self.objects.start(self.api)

    def put(self, called: str = "chat", **spec: Any) -> None:
        metadata = (self.api.objects.get("functions", {}).get(called) or {}).get("metadata") or {"name": called}
        self.api.put(FUNCTIONS, {"metadata": dict(metadata), "spec": {"model": "file:///m", **spec}})

    def found(self, name: str = "chat") -> dict[str, Any] | None:
        return self.api.objects.get("functions", {}).get(name)

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = self.found(name) or {}
        conditions = (found.get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if each["type"] == kind), {})


@pytest_asyncio.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    made = Office(database)
    made.objects.start(made.api)
    yield made
    await made.objects.close()
    await database.close()


async def test_an_object_is_deployed_changed_and_deleted_like_over_the_api(office: Office) -> None:
    office.put(scaling={"max_replicas": 2})
    await until(lambda: office.functions.find("chat", "default") is not None)
    await until(lambda: office.condition("chat", "Accepted").get("status") == "True")
    office.put(scaling={"max_replicas": 3})
    await until(lambda: office.functions.get("chat", "default").spec.scaling.max_replicas == 3)
    await until(lambda: (office.found() or {}).get("status", {}).get("revision") == 2)
    office.api.remove(FUNCTIONS, "chat")
    await until(lambda: office.functions.find("chat", "default") is None)


async def test_a_change_does_not_wait_for_a_status_that_may_be_late(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.backends.kubernetes.function_objects.SETTLE_S", 3600.0)
    office.put(scaling={"max_replicas": 2})
    await until(lambda: office.condition("chat", "Accepted").get("status") == "True")
    written = office.objects.writes
    office.put(scaling={"max_replicas": 3})
    await until(lambda: office.functions.get("chat", "default").spec.scaling.max_replicas == 3)
    await until(lambda: KEY in office.objects._restated and not office.objects._due.is_set())
    assert office.objects.writes == written, "its status is written with what else comes until then"


async def test_a_status_that_somebody_overwrote_is_made_good(office: Office) -> None:
    office.put()
    await until(lambda: office.condition("chat", "Accepted").get("status") == "True")
    found = office.found() or {}
    office.api.change(FUNCTIONS, "chat", status={**found["status"], "state": "Nonsense"})
    await until(lambda: (office.found() or {})["status"]["state"] == "AtZero")


async def test_what_the_api_is_told_is_written_into_the_object(office: Office) -> None:
    office.put()
    await until(lambda: office.functions.find("chat", "default") is not None)
    await until(lambda: office.objects._bonds.of(KEY) is not None)
    await office.functions.put(parse_mapping({"name": "chat", "model": "file:///other"}), "default")
    await until(lambda: (office.found() or {})["spec"]["model"] == "file:///other")
    await until(lambda: (office.found() or {}).get("status", {}).get("revision") == 2)
    await office.functions.delete("chat", "default")
    await until(lambda: office.found() is None)


async def test_an_object_that_cannot_be_says_why_and_what_runs_stays(office: Office) -> None:
    office.put()
    await until(lambda: office.functions.find("chat", "default") is not None)
    office.put(scaling={"min_replicas": 5, "max_replicas": 2})
    await until(lambda: office.condition("chat", "Accepted").get("status") == "False")
    assert "min_replicas (5) is above max_replicas (2)" in office.condition("chat", "Accepted")["message"]
    assert office.functions.get("chat", "default").spec.scaling.max_replicas == 1
    office.put(scaling={"min_replicas": 1, "max_replicas": 2})
    await until(lambda: office.condition("chat", "Accepted").get("status") == "True")


async def test_of_two_objects_for_one_function_the_older_has_it(office: Office) -> None:
    office.put("chat")
    await until(lambda: office.functions.find("chat", "default") is not None)
    office.put("other", name="chat", aliases=["x"])
    await until(lambda: office.condition("other", "Accepted").get("reason") == "NameTaken")
    assert office.functions.get("chat", "default").spec.aliases == ()
    office.api.remove(FUNCTIONS, "chat")
    await until(lambda: office.functions.get("chat", "default").spec.aliases == ("x",))


async def test_an_object_that_was_deleted_while_nobody_watched_takes_its_function_along(office: Office) -> None:
    office.put()
    await until(lambda: office.objects._bonds.of(KEY) is not None)
    await office.objects.close()
    office.api.remove(FUNCTIONS, "chat")
    await office.functions.put(parse_mapping({"name": "api-only", "model": "file:///m"}), "default")
    await office.restart()
    await until(lambda: office.functions.find("chat", "default") is None)
    assert office.functions.find("api-only", "default") is not None, "it never had an object"


async def test_functions_of_the_api_get_objects_where_the_setting_says_so(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    office = Office(database, make_objects=True)
    office.objects.start(office.api)
    await office.functions.put(parse_mapping({"name": "chat", "model": "file:///m"}), "acme")
    await until(lambda: office.found("chat.acme") is not None)
    assert key_of(office.found("chat.acme") or {}) == ("acme", "chat")
    await office.objects.close()
    await database.close()


async def test_who_does_not_lead_writes_nothing(office: Office) -> None:
    office.leads = False
    office.put()
    office.objects.poke()
    await until(lambda: office.objects.objects is not None and "chat" in office.objects.objects.objects)
    await office.objects.look()
    assert office.functions.find("chat", "default") is None
    office.leads = True
    office.objects.poke()
    await until(lambda: office.functions.find("chat", "default") is not None)


async def test_a_fault_of_the_api_server_is_made_good(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.backends.kubernetes.function_objects.AGAIN_S", 0.01)
    office.api.faults += [("patch functions", ApiError("connection reset"))] * 3
    office.put()
    await until(lambda: office.condition("chat", "Accepted").get("status") == "True")
    assert office.api.faults == []


async def test_a_change_by_somebody_else_in_the_same_moment_is_not_overwritten(office: Office) -> None:
    office.put()
    await until(lambda: office.objects._bonds.of(KEY) is not None)
    real = office.api.replace

    async def replace(resource: Any, name: str, body: Any) -> Any:
        office.api.replace = real  # type: ignore[method-assign]
        office.put(aliases=["by-hand"])
        return await real(resource, name, body)

    office.api.replace = replace  # type: ignore[method-assign]
    await office.functions.put(parse_mapping({"name": "chat", "model": "file:///api"}), "default")
    await until(lambda: office.functions.get("chat", "default").spec.aliases == ("by-hand",))
    assert (office.found() or {})["spec"]["aliases"] == ["by-hand"]


# --- what the chart cannot make, and who leads ---


async def test_slot_pools_of_the_file_are_made_changed_and_deleted(tmp_path: Path) -> None:
    api = FakeApi()
    watch = Watching(api, SLOT_POOLS, lambda *changed: None)
    watch.start()
    await watch.synced.wait()
    path = tmp_path / "pools.yaml"
    path.write_text("default: {most: 2}\ngpu: {most: 1, devices: {nvidia.com/gpu: 1}}\n")
    used = {"gpu"}
    api.put(SLOT_POOLS, slot_pool("by-hand"))
    assert await PoolFile(read_pools(str(path)), "rel", used.__contains__).settle(api, watch)
    await until(lambda: len(watch.objects) == 3)
    writes = api.writes
    assert await PoolFile(read_pools(str(path)), "rel", used.__contains__).settle(api, watch)
    assert api.writes == writes, "nothing changed"
    api.change(SLOT_POOLS, "default", spec={"most": 7})
    await until(lambda: watch.objects["default"]["spec"]["most"] == 7)
    assert await PoolFile(read_pools(str(path)), "rel", used.__contains__).settle(api, watch)
    assert api.objects["slotpools"]["default"]["spec"] == {"most": 7}, "kept until the file says something new"
    path.write_text("default: {most: 3}\n")
    pools = PoolFile(read_pools(str(path)), "rel", used.__contains__)
    assert not await pools.settle(api, watch), "something runs on what is to go"
    assert api.objects["slotpools"]["default"]["spec"] == {"most": 3}
    used.clear()
    assert await pools.settle(api, watch)
    assert set(api.objects["slotpools"]) == {"default", "by-hand"}
    assert FROM_FILE in api.objects["slotpools"]["default"]["metadata"]["annotations"]
    await watch.close()


async def test_who_leads_is_mirrored_and_written_at_a_change_only() -> None:
    api = FakeApi()
    assert await mirror_lead(api, "rel-control-loop", "pod-1") and await mirror_lead(api, "rel-control-loop", "pod-1")
    assert api.writes == 1
    assert await mirror_lead(api, "rel-control-loop", "pod-2")
    spec = api.objects[LEASES.plural]["rel-control-loop"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("pod-2", 1)
    api.faults.append(("get leases", ApiRefused(500, "InternalError", "no")))
    assert not await mirror_lead(api, "rel-control-loop", "pod-1")
