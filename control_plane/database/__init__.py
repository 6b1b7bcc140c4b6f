"""The database behind one interface: SQLite (one machine) or PostgreSQL (several gateways), chosen by URL.

    groups      the one writer thread: functions that arrive during a commit share the next one; readers
    connection  what a function is given, and what a driver must do
    sqlite, postgresql   the two drivers; the second is imported only when its URL is used
    migrating   numbered migrations, forward only
    clock       the time that is written down, the same at every gateway

Callers know `Database` and hand over functions of a `Connection`; which database it is they cannot tell. Limits: one
SQL text for both (`control_plane.schema`, `control_plane.statements`), with `:name` parameters.
"""

from control_plane.database.connection import Connection, DatabaseStats, Parameters, Result, Row
from control_plane.database.groups import Database, to_the_end
from control_plane.database.migrating import migrate

__all__ = [
    "Connection",
    "Database",
    "DatabaseStats",
    "Parameters",
    "Result",
    "Row",
    "migrate",
    "to_the_end",
]
