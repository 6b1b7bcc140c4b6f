from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from control_plane.database import Database
from control_plane.journal import Journal
from tests.control_plane.storage.builders import database_path


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """A fresh database of either kind, as `Database.open` takes it."""
    if request.param == "sqlite":
        yield database_path(tmp_path)
        return
    with request.getfixturevalue("postgres").database() as url:
        yield url


@pytest.fixture
async def database(where: Path | str) -> AsyncIterator[Database]:
    opened = await Database.open(where)
    yield opened
    await opened.close()


@pytest.fixture
async def journal(database: Database) -> Journal:
    made = Journal(database, "gw-1")
    return made
