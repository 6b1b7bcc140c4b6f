"""A thousand functions, two hundred slots, two thousand replicas: while nothing changes nothing is written, and what
changes is one write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from control_plane.backends.kubernetes.api import FUNCTIONS, PODS, SLOT_POOLS
from control_plane.backends.kubernetes.bonds import Bonds
from control_plane.backends.kubernetes.function_objects import FunctionObjects
from control_plane.backends.kubernetes.pool_status import PoolStatus
from control_plane.backends.kubernetes.status import Condition
from control_plane.backends.kubernetes.tending import Tending
from control_plane.database import Connection, Database
from control_plane.functions import Function, FunctionStore
from control_plane.settings import DatabaseSettings
from control_plane.spec import FunctionSpec, parse_mapping
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, backend_of, running, slot_pool
from tests.control_plane.backends.town import Listener, until

FUNCTION_COUNT, SLOTS, REPLICAS = 1000, 200, 2000


async def deployed(database: Database, functions: FunctionStore) -> None:
    """As after so many deployments, one of which is a row and not a wait."""
    await functions.put(spec_of_number(0), "default")

    def run(connection: Connection) -> None:
        for number in range(1, FUNCTION_COUNT):
            spec = spec_of_number(number)
            values = {"name": spec.name, "spec": spec.canonical(), "digest": spec.digest()}
            connection.execute(
                """INSERT INTO revisions (tenant, function, revision, spec, digest, price_microusd_per_hour, created_us,
                state) VALUES ('default', :name, 1, :spec, :digest, 0, 1, 'importing')""",
                values,
            )
            connection.execute(
                """INSERT INTO functions (tenant, name, revision, created_us, updated_us)
                VALUES ('default', :name, 1, 1, 1)""",
                values,
            )

    await database.write(run)
    await functions.refresh()


def spec_of_number(number: int) -> FunctionSpec:
    return parse_mapping({"name": f"f-{number}", "model": "file:///m", "engine": "stub"})


async def test_at_rest_nothing_is_written_whatever_there_is(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("control_plane.backends.kubernetes.backend.KubernetesBackend._link", lambda *args: None)
    for pause in ("GATHER_S", "SETTLE_S"):
        monkeypatch.setattr(f"control_plane.backends.kubernetes.function_objects.{pause}", 0.0)
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    api, functions = FakeApi(), FunctionStore(database)
    for number in range(FUNCTION_COUNT):
        api.put(FUNCTIONS, {"metadata": {"name": f"f-{number}"}, "spec": {"model": "file:///m", "engine": "stub"}})
    await deployed(database, functions)
    api.put(SLOT_POOLS, slot_pool(most=SLOTS))
    backend = backend_of(api)
    await backend.start(Listener())
    await until(lambda: bool(backend.classes) and backend.synced)
    on: dict[str, list[str]] = {}
    for number in range(SLOTS):
        name = f"slot-{number}"
        labels = {
            "app.kubernetes.io/instance": "rel",
            "app.kubernetes.io/component": "slot",
            "stoker.dev/slot-pool": "default",
            "stoker.dev/class": backend.classes[0].name,
        }
        api.put(
            PODS,
            {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": "n"}, "status": running(ready=True)},
        )
        on[name] = [f"rep-{number}-{each}" for each in range(REPLICAS // SLOTS)]
    await until(lambda: len(backend.progress) == SLOTS)
    for name in on:
        backend.answers(name, True)
    in_flight = {replica: 2 for replicas in on.values() for replica in replicas}
    serving = {f"f-{number}": 2 for number in range(FUNCTION_COUNT)}

    def status_of(function: Function) -> tuple[dict[str, Any], tuple[Condition, ...]]:
        ready = Condition("Ready", True, "Serving", "requests are answered at once")
        return {"revision": function.revision, "replicas": serving[function.name], "state": "Serving"}, (ready,)

    objects = FunctionObjects(functions, Bonds(database), lambda: True, status_of, release="rel", make_objects=False)
    functions.subscribe(lambda change: objects.mark((change.function.tenant, change.function.name)))
    tending = Tending(backend, lambda: True, lambda slot_id: on[slot_id], lambda: in_flight)
    pools = PoolStatus(backend, lambda: True, lambda slot_id: on[slot_id])
    objects.start(api)
    await until(lambda: len(functions.list()) == FUNCTION_COUNT, within_s=150)
    await tending.look()
    assert await pools.look()

    def settled() -> bool:
        return all("status" in found for found in api.objects["functions"].values())

    await until(settled, within_s=150)
    await until(lambda: not objects._marked and not objects._restated, within_s=150)
    assert json.dumps(api.objects["slotpools"]["default"]["status"]["phases"]) == json.dumps({"ready": SLOTS})

    before = api.writes
    for key in [(function.tenant, function.name) for function in functions.list()]:
        objects.mark(key)
        objects.restate(key)
    await objects.look()
    for _ in range(10):
        await tending.look()
        assert await pools.look()
    assert api.writes == before

    serving["f-7"] = 0
    objects.restate(("default", "f-7"))
    await objects.look()
    assert api.writes == before + 1
    await objects.close()
    await backend.close(end_agents=False, grace_s=0)
    await database.close()


async def test_objects_found_together_are_deployed_together_and_each_once(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    api, functions, count = FakeApi(), FunctionStore(database), 40
    for number in range(count):
        api.put(FUNCTIONS, {"metadata": {"name": f"f-{number}"}, "spec": {"model": "file:///m", "engine": "stub"}})
    condition = Condition("Ready", True, "AtZero", "nobody calls it")
    objects = FunctionObjects(
        functions, Bonds(database), lambda: True, lambda function: ({"state": "AtZero"}, (condition,)),
        release="rel", make_objects=False,
    )  # fmt: skip
    before = database.stats.commits
    objects.start(api)
    await until(lambda: all("status" in found for found in api.objects["functions"].values()), within_s=150)
    assert len(functions.list()) == count and api.calls["patch functions"] == count
    assert database.stats.commits - before < count, "each is two writes: they wait together"
    await objects.close()
    await database.close()
