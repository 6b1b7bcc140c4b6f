from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.database import Database
from control_plane.journal import Journal
from tests.control_plane.storage.builders import database_path


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(database_path(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
async def journal(database: Database) -> Journal:
    made = Journal(database, "gw-1")
    await made.register()
    return made
