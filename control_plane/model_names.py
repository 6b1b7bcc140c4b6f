"""Which model names mean which function, as rows: a name is looked up where a put would have to read every spec.

A function's names are rows of `model_names` as of `functions.named_revision`. A gateway of an earlier release writes
neither, so that a function whose revision is another than that is read and named by the next put of its tenant: an
index has these and no others. Limits: one whose spec cannot be read here (a newer release's) is asked for at every put,
and its names count as free, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from control_plane.database import Connection
from control_plane.errors import Conflict

_UNNAMED: Final = """
SELECT f.name, f.revision, v.spec FROM functions f
JOIN revisions v ON v.tenant = f.tenant AND v.function = f.name AND v.revision = f.revision
WHERE f.tenant = :tenant AND f.named_revision <> f.revision AND f.deleted_us IS NULL"""
_DROP: Final = "DELETE FROM model_names WHERE tenant = :tenant AND function = :name"
_PUT: Final = "INSERT INTO model_names (tenant, function, model) VALUES (:tenant, :name, :model)"
_NAMED: Final = "UPDATE functions SET named_revision = :revision WHERE tenant = :tenant AND name = :name"
_TAKEN: Final = """
SELECT n.function FROM model_names n JOIN functions f ON f.tenant = n.tenant AND f.name = n.function
WHERE n.tenant = :tenant AND n.model = :model AND n.function <> :name AND f.deleted_us IS NULL LIMIT 1"""

NamesOf = Callable[[str], Sequence[str] | None]
"""The names that a stored spec gives its function; None: it cannot be read."""


def check_names(connection: Connection, tenant: str, name: str, wanted: Iterable[str], names_of: NamesOf) -> None:
    """A model name means one function of a tenant. Checked inside the transaction, against what is stored."""
    for other, revision, spec in connection.execute(_UNNAMED, {"tenant": tenant}).fetchall():
        found = names_of(spec)
        if found is not None:
            note_names(connection, tenant, other, revision, found)
    for model in sorted(set(wanted)):
        values: dict[str, Any] = {"tenant": tenant, "name": name, "model": model}
        taken = connection.execute(_TAKEN, values).fetchone()
        if taken is not None:
            field = "name" if model == name else "aliases"
            raise Conflict(
                f"{field}: the model name {model!r} belongs to the function {taken[0]} already",
                param=field,
                code="name_taken",
            )


def note_names(connection: Connection, tenant: str, name: str, revision: int, names: Iterable[str]) -> None:
    """What this revision of a function, which is current, is called."""
    values: dict[str, Any] = {"tenant": tenant, "name": name, "revision": revision}
    connection.execute(_DROP, values)
    for model in sorted(set(names)):
        connection.execute(_PUT, {**values, "model": model})
    connection.execute(_NAMED, values)
