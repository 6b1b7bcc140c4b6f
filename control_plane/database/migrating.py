"""Bringing the schema forward: numbered migrations, each once, all or nothing, one process at a time.

Limits: a database of a later release is refused; nothing is ever taken back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from control_plane.database.connection import Session
from control_plane.errors import StorageUnavailable
from control_plane.schema import MIGRATIONS, Dialect, Migration

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS migrations (number BIGINT PRIMARY KEY, why TEXT NOT NULL, applied_us BIGINT NOT NULL)"
)
_NOTE: Final = "INSERT INTO migrations (number, why, applied_us) VALUES (:number, :why, :now)"


def migrate(session: Session, dialect: Dialect, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Two gateways that start at once: the second waits and finds it done."""
    connection = session.connection
    session.begin(durable=False, alone=False)
    try:
        session.lock_schema()
        connection.execute(_TABLE)
        applied = {number for (number,) in connection.execute("SELECT number FROM migrations").fetchall()}
        latest = max(applied, default=0)
        if latest > migrations[-1].number:
            raise StorageUnavailable(
                f"the database is at migration {latest}, this release knows {migrations[-1].number}: run the release "
                "that wrote it, or a later one"
            )
        for migration in migrations:
            if migration.number in applied:
                continue
            for statement in dialect.statements(migration):
                connection.execute(statement)
            values = {"number": migration.number, "why": migration.why, "now": time.time_ns() // 1000}
            connection.execute(_NOTE, values)
        session.commit()
    except BaseException:
        session.rollback()
        raise
