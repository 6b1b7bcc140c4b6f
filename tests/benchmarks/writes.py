"""What is written to a SQLite database, by table: rows that statements changed, for benchmarks that count.

Limits: of this process, from `watch` on; rows that triggers or cascades change are not told apart.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from typing import Any, Final

from control_plane.database.sqlite import SqliteDriver

_TABLE: Final = re.compile(r"\s*(?:INSERT\s+(?:OR\s+\w+\s+)?INTO|UPDATE|DELETE\s+FROM)\s+(\w+)", re.IGNORECASE)


class Writes:
    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        """Changed, by table."""
        self.statements = 0
        self.read = 0
        """Rows that were fetched as a whole."""
        self._before = SqliteDriver._connect_file

    def watch(self) -> None:
        """Every database that is opened from now on."""
        counts = self

        class Cursor(sqlite3.Cursor):
            def fetchall(self) -> list[Any]:
                rows = super().fetchall()
                counts.read += len(rows)
                return rows

        class Counted(sqlite3.Connection):
            def execute(self, sql: str, *parameters: Any) -> Any:
                return counts._note(sql, self.cursor(Cursor).execute(sql, *parameters))

            def executemany(self, sql: str, *parameters: Any) -> Any:
                return counts._note(sql, self.cursor(Cursor).executemany(sql, *parameters))

        def connect(driver: SqliteDriver) -> sqlite3.Connection:
            settings = driver._settings
            return sqlite3.connect(
                driver.path, timeout=settings.busy_timeout_s, isolation_level=None, check_same_thread=False,
                cached_statements=256, factory=Counted,
            )  # fmt: skip

        SqliteDriver._connect_file = connect  # type: ignore[method-assign]

    def _note(self, sql: str, cursor: sqlite3.Cursor) -> sqlite3.Cursor:
        self.statements += 1
        table = _TABLE.match(sql)
        if table is not None and cursor.rowcount > 0:
            self.rows[table[1].lower()] += cursor.rowcount
        return cursor

    def close(self) -> None:
        SqliteDriver._connect_file = self._before  # type: ignore[method-assign]
