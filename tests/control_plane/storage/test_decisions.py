from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.database import Database
from control_plane.decisions import Decisions
from tests.control_plane.storage.builders import database_path
from tests.control_plane.storage.test_database import FaultPlan


async def test_decisions_are_found_by_what_they_concern_oldest_first(database: Database) -> None:
    decisions = Decisions(database)
    for number in range(3):
        decisions.record("scale", "smol", reason=f"r{number}", inputs={"running": number, "path": Path("/x")})
    decisions.record("placement", "smol", "rep-1", "chatcmpl-1", "least loaded")
    assert [each.reason for each in await decisions.of_function("smol")] == ["r0", "r1", "r2", "least loaded"]
    assert [each.reason for each in await decisions.of_function("smol", 2)] == ["r2", "least loaded"]
    assert [each.kind for each in await decisions.of_replica("rep-1")] == ["placement"]
    assert [each.kind for each in await decisions.of_request("chatcmpl-1")] == ["placement"]
    assert (await decisions.of_function("smol"))[1].inputs == {"running": 1, "path": "/x"}
    await decisions.close()


async def test_recording_costs_no_commit_of_its_own(database: Database) -> None:
    decisions = Decisions(database)
    commits = database.stats.commits
    for number in range(50):
        decisions.record("scale", "smol", reason=str(number))
    await decisions.close()
    assert database.stats.commits == commits + 1


async def test_decisions_wait_while_storage_is_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = database_path(tmp_path)
    path.parent.mkdir()
    plan = FaultPlan(path)
    database = await Database.open(path, connect=plan.connect)
    decisions = Decisions(database)
    decisions.record("scale", "smol", reason="first")
    plan.full_on = "COMMIT"
    await decisions.flush()
    decisions.record("scale", "smol", reason="second")
    plan.full_on = None
    assert [each.reason for each in await decisions.of_function("smol")] == ["first", "second"]
    await decisions.close()
    await database.close()


async def test_old_decisions_are_swept(database: Database) -> None:
    decisions = Decisions(database)
    decisions.record("scale", "smol", reason="old")
    await decisions.flush()
    assert await decisions.sweep(3600.0) == 0
    assert await decisions.sweep(-1.0) == 1
    assert await decisions.of_function("smol") == []
    await decisions.close()
