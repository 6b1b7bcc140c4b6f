"""The functions there are: specs by revision, their model names, and how far each revision's model has been imported.

All current functions are held in memory and looked up by tenant and model name; every change goes to the database
first and is then told to subscribers. The same spec again is the same revision; older revisions stay, for rollback.
`IMPORTING -> READY | FAILED`, and back to `IMPORTING` when tried again. Limits: changes made through another gateway
are seen here after the next `refresh`.
"""

from __future__ import annotations

import asyncio
import enum
import fnmatch
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from control_plane.changes import Changes
from control_plane.database import Connection, Database, to_the_end
from control_plane.errors import Conflict, InvalidRequest, NotFound, StokerError
from control_plane.model_names import check_names, note_names
from control_plane.settings import ModelSettings

if TYPE_CHECKING:
    from control_plane.spec import FunctionSpec

logger = logging.getLogger(__name__)
T = TypeVar("T")
NATIVE: Final = "native"


class ImportState(enum.StrEnum):
    IMPORTING = "importing"
    """Wanted, not there yet; also what a restart finds unfinished."""
    READY = "ready"
    FAILED = "failed"


TRANSITIONS: Final[dict[ImportState, frozenset[ImportState]]] = {
    ImportState.IMPORTING: frozenset({ImportState.READY, ImportState.FAILED}),
    ImportState.READY: frozenset({ImportState.IMPORTING, ImportState.FAILED}),
    ImportState.FAILED: frozenset({ImportState.IMPORTING}),
}
"""`READY -> FAILED` is a checkpoint that its replicas found unusable."""


@dataclass(frozen=True, slots=True)
class RevisionError:
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Revision:
    tenant: str
    function: str
    revision: int
    spec: FunctionSpec
    created_us: int
    state: ImportState
    error: RevisionError | None = None
    identity: str | None = None
    """Checkpoint identity; known once imported."""
    manifest_path: str | None = None


@dataclass(frozen=True, slots=True)
class Function:
    tenant: str
    name: str
    created_us: int
    updated_us: int
    current: Revision

    @property
    def revision(self) -> int:
        return self.current.revision

    @property
    def spec(self) -> FunctionSpec:
        return self.current.spec


class ChangeKind(enum.StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    """Another revision is current: a new spec, or a rollback."""
    IMPORTED = "imported"
    """The import state of a revision changed."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class FunctionChange:
    kind: ChangeKind
    function: Function
    """As it is now; of a deleted one, as it was."""
    previous: Function | None = None
    revision: Revision | None = None
    """Of `IMPORTED`: the revision, which need not be the current one."""


Subscriber: TypeAlias = Callable[[FunctionChange], None]

_REVISION_COLUMNS: Final = (
    "v.tenant, v.function, v.revision, v.spec, v.created_us, v.state, v.error_code, v.error_message, v.identity, "
    "v.manifest_path"
)
_CURRENT: Final = f"""
SELECT f.created_us, f.updated_us, {_REVISION_COLUMNS} FROM functions f
JOIN revisions v ON v.tenant = f.tenant AND v.function = f.name AND v.revision = f.revision
WHERE f.deleted_us IS NULL"""
_PUT_FUNCTION: Final = """
INSERT INTO functions (tenant, name, revision, created_us, updated_us) VALUES (:tenant, :name, :revision, :now, :now)
ON CONFLICT (tenant, name) DO UPDATE SET revision = excluded.revision, updated_us = excluded.updated_us,
    created_us = CASE WHEN functions.deleted_us IS NULL THEN functions.created_us ELSE excluded.created_us END,
    deleted_us = NULL"""
_PUT_REVISION: Final = """
INSERT INTO revisions (tenant, function, revision, spec, digest, price_microusd_per_hour, created_us, state)
VALUES (:tenant, :name, :revision, :spec, :digest, :price, :now, 'importing')"""
_SET_STATE: Final = """
UPDATE revisions SET state = :state, error_code = :error_code, error_message = :error_message,
    identity = COALESCE(:identity, identity), manifest_path = COALESCE(:manifest_path, manifest_path)
WHERE tenant = :tenant AND function = :name AND revision = :revision"""


class FunctionStore:
    def __init__(self, database: Database, models: ModelSettings | None = None) -> None:
        self._database = database
        self._models = models or ModelSettings()
        self._functions: dict[tuple[str, str], Function] = {}
        self._by_model: dict[tuple[str, str], Function] = {}
        self._rows: dict[tuple[str, str], Sequence[Any]] = {}
        """As last read: a spec is only parsed anew where its row is another."""
        self._looking = asyncio.Lock()
        self._looks = 0
        """Refreshes that have begun."""
        self._sorted: list[Function] | None = None
        """By name; None: to be sorted anew."""
        self.natives = 0
        """Functions that the native engine serves."""
        self._subscribers: list[Subscriber] = []
        self._changes = Changes()
        self.slots_are_pods = False
        """Whether a spec may say what its slots' pods are."""
        self.check: Callable[[FunctionSpec, str], None] = lambda spec, tenant: None
        """Refuses what is known not to work of a spec that takes another's place."""

    # --- looking up -------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read all functions, and tell subscribers of what differs from before (at start, everything is new). One whose
        row cannot be read (damaged, or of a newer release) stays as it is known here, or unknown. Whoever asks while it
        is read is answered by one more look, however many ask."""
        asked = self._looks
        async with self._looking:
            if self._looks == asked:
                self._looks += 1
                await self._look()

    async def _look(self) -> None:
        def run(connection: Connection) -> list[Sequence[Any]]:
            return list(connection.execute(_CURRENT).fetchall())

        rows = await self._changes.read(lambda: self._database.read(run))
        there = {(str(row[2]), str(row[3])): row for row in rows}
        for key in [key for key in self._functions if key not in there]:
            self._forget(key)
        news = [row for key, row in there.items() if self._rows.get(key) != row]
        for function in _readable(_function, news):
            key = (function.tenant, function.name)
            if self._remember(function) == function:
                self._rows[key] = there[key]

    def resolve(self, model: str, tenant: str) -> Function:
        """The function a client means by a model name or alias."""
        function = self._by_model.get((tenant, model))
        if function is None:
            known = sorted(name for (owner, name) in self._functions if owner == tenant)
            there = f"there are {', '.join(known[:10])}" if known else "none is deployed yet"
            raise NotFound(f"the model {model[:200]!r} does not exist: {there}", param="model", code="model_not_found")
        return function

    def list(self, tenant: str | None = None) -> list[Function]:
        """By name; None: of all tenants."""
        if self._sorted is None:
            self._sorted = sorted(self._functions.values(), key=lambda each: (each.name, each.tenant))
        return [each for each in self._sorted if tenant is None or each.tenant == tenant]

    def get(self, name: str, tenant: str) -> Function:
        function = self._functions.get((tenant, name))
        if function is None:
            raise NotFound(f"there is no function {name[:60]!r}", param="name", code="function_not_found")
        return function

    def find(self, name: str, tenant: str) -> Function | None:
        return self._functions.get((tenant, name))

    async def revisions(self, name: str, tenant: str) -> Sequence[Revision]:
        """Oldest first; those of a deleted function too."""

        def run(connection: Connection) -> Sequence[Revision]:
            rows = connection.execute(
                f"SELECT {_REVISION_COLUMNS} FROM revisions v WHERE v.tenant = :tenant AND v.function = :name "
                "ORDER BY v.revision",
                {"tenant": tenant, "name": name},
            ).fetchall()
            return list(_readable(_revision, rows))

        found = await self._database.read(run)
        if not found:
            raise NotFound(f"there is no function {name[:60]!r}", param="name", code="function_not_found")
        return found

    async def revision(self, name: str, tenant: str, number: int) -> Revision | None:
        """One revision, current or not."""
        current = self._functions.get((tenant, name))
        if current is not None and current.revision == number:
            return current.current

        def run(connection: Connection) -> Revision | None:
            row = connection.execute(
                f"SELECT {_REVISION_COLUMNS} FROM revisions v WHERE v.tenant = :tenant AND v.function = :name "
                "AND v.revision = :revision",
                {"tenant": tenant, "name": name, "revision": number},
            ).fetchone()
            return None if row is None else _revision(row)

        return await self._database.read(run)

    # --- changing ---------------------------------------------------------------------------------------------

    async def put(self, spec: FunctionSpec, tenant: str) -> Function:
        """Create or update. The current spec again changes nothing, except that a failed import is tried again."""
        self._check_allowed(spec)
        text, digest = spec.canonical(), spec.digest()

        def run(connection: Connection) -> Function:
            values: dict[str, Any] = {"tenant": tenant, "name": spec.name, "now": self._database.clock.now_us()}
            check_names(connection, tenant, spec.name, spec.names(), _names_of)
            current = connection.execute(
                """SELECT v.digest FROM functions f JOIN revisions v
                ON v.tenant = f.tenant AND v.function = f.name AND v.revision = f.revision
                WHERE f.tenant = :tenant AND f.name = :name AND f.deleted_us IS NULL""",
                values,
            ).fetchone()
            if current is None or current[0] != digest:
                (highest,) = connection.execute(
                    "SELECT COALESCE(MAX(revision), 0) FROM revisions WHERE tenant = :tenant AND function = :name",
                    values,
                ).fetchone()
                values["revision"] = highest + 1
                connection.execute(
                    _PUT_REVISION,
                    {**values, "spec": text, "digest": digest, "price": spec.price_microusd_per_hour},
                )
                connection.execute(_PUT_FUNCTION, values)
                note_names(connection, tenant, spec.name, highest + 1, spec.names())
            return _load(connection, spec.name, tenant)

        async def change() -> Function:
            written = await self._database.write(run)
            self._changes.note()
            function = self._remember(written)
            if function.current.state is not ImportState.FAILED:
                return function
            await self.set_import(spec.name, tenant, function.revision, ImportState.IMPORTING)
            return self.get(spec.name, tenant)

        return await to_the_end(change())

    async def rollback(self, name: str, tenant: str, to: int | None = None) -> Function:
        """Make an earlier revision current: `to`, or the one before. Its spec becomes the newest revision again, so
        that revisions only ever grow."""
        current = self.get(name, tenant)
        known = {each.revision: each for each in await self.revisions(name, tenant)}
        if to is None:
            earlier = [
                number for number, each in known.items() if number < current.revision and each.spec != current.spec
            ]
            if not earlier:
                raise Conflict(
                    f"{name} has no revision before {current.revision} to go back to", code="no_earlier_revision"
                )
            to = max(earlier)
        if to not in known:
            there = ", ".join(str(number) for number in sorted(known))
            raise NotFound(f"{name} has no revision {to}: there are {there}", param="to", code="revision_not_found")
        return await self.put(known[to].spec, tenant)

    async def delete(self, name: str, tenant: str) -> Function:
        """The function is gone for clients at once; its revisions stay for the ledger's sake."""

        def run(connection: Connection) -> int:
            return connection.execute(
                "UPDATE functions SET deleted_us = :now WHERE tenant = :tenant AND name = :name AND deleted_us IS NULL",
                {"tenant": tenant, "name": name, "now": self._database.clock.now_us()},
            ).rowcount

        async def change() -> None:
            await self._database.write(run)
            self._changes.note()
            self._forget((tenant, name))

        function = self.get(name, tenant)
        await to_the_end(change())
        return function

    async def set_import(
        self,
        name: str,
        tenant: str,
        revision: int,
        state: ImportState,
        *,
        error: RevisionError | None = None,
        identity: str | None = None,
        manifest_path: str | None = None,
    ) -> Revision:
        """How far the model of a revision is; `READY` comes with identity and manifest, `FAILED` with the error."""

        def run(connection: Connection) -> Revision:
            values = {"tenant": tenant, "name": name, "revision": revision}
            before = connection.execute(
                "SELECT state FROM revisions WHERE tenant = :tenant AND function = :name AND revision = :revision",
                values,
            ).fetchone()
            if before is None:
                raise NotFound(f"{name} has no revision {revision}", code="revision_not_found")
            if state is not ImportState(before[0]) and state not in TRANSITIONS[ImportState(before[0])]:
                raise Conflict(f"revision {revision} of {name} cannot go from {before[0]} to {state}")
            connection.execute(
                _SET_STATE,
                {
                    **values,
                    "state": state.value,
                    "error_code": error.code if error else None,
                    "error_message": error.message if error else None,
                    "identity": identity,
                    "manifest_path": manifest_path,
                },
            )
            row = connection.execute(
                f"SELECT {_REVISION_COLUMNS} FROM revisions v WHERE v.tenant = :tenant AND v.function = :name "
                "AND v.revision = :revision",
                values,
            ).fetchone()
            return _revision(row)

        async def change() -> Revision:
            changed = await self._database.write(run)
            self._changes.note()
            function = self._functions.get((tenant, name))
            if function is not None:
                if function.revision == revision:
                    function = replace(function, current=changed)
                    self._index(function)
                self._tell(FunctionChange(ChangeKind.IMPORTED, function, revision=changed))
            return changed

        return await to_the_end(change())

    # --- telling ----------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Be called, on the event loop, after each change; returns how to stop that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def _tell(self, change: FunctionChange) -> None:
        for subscriber in list(self._subscribers):
            subscriber(change)

    # --- in memory --------------------------------------------------------------------------------------------

    def _remember(self, function: Function) -> Function:
        key = (function.tenant, function.name)
        previous = self._functions.get(key)
        if previous == function:
            return function
        if previous is not None and previous.revision > function.revision:
            return previous
        self._index(function)
        if previous is None:
            self._tell(FunctionChange(ChangeKind.CREATED, function))
        elif previous.revision != function.revision:
            self._tell(FunctionChange(ChangeKind.UPDATED, function, previous))
        else:
            self._tell(FunctionChange(ChangeKind.IMPORTED, function, previous, function.current))
        return function

    def _forget(self, key: tuple[str, str]) -> None:
        function = self._functions.pop(key, None)
        self._rows.pop(key, None)
        if function is not None:
            self._unindex(function)
            self._tell(FunctionChange(ChangeKind.DELETED, function))

    def _index(self, function: Function) -> None:
        key = (function.tenant, function.name)
        previous = self._functions.get(key)
        if previous is not None:
            self._unindex(previous)
        self._functions[key] = function
        self._rows.pop(key, None)
        self._sorted = None
        self.natives += function.spec.engine == NATIVE
        for model in function.spec.names():
            self._by_model[function.tenant, model] = function

    def _unindex(self, function: Function) -> None:
        self._sorted = None
        self.natives -= function.spec.engine == NATIVE
        for model in function.spec.names():
            if self._by_model.get((function.tenant, model)) is function:
                del self._by_model[function.tenant, model]

    # --- checking ---------------------------------------------------------------------------------------------

    def _check_allowed(self, spec: FunctionSpec) -> None:
        if spec.pod is not None and not self.slots_are_pods:
            raise InvalidRequest(
                "pod: the slots of this service are no pods; leave it out, or deploy on Kubernetes",
                param="pod",
                code="no_pods",
            )
        if not any(fnmatch.fnmatchcase(spec.model, pattern) for pattern in self._models.allowed):
            raise InvalidRequest(
                f"model: {spec.model} is not among what the administrator allows ({', '.join(self._models.allowed)})",
                param="model",
                code="model_not_allowed",
            )


def _load(connection: Connection, name: str, tenant: str) -> Function:
    values = {"tenant": tenant, "name": name}
    return _function(connection.execute(_CURRENT + " AND f.tenant = :tenant AND f.name = :name", values).fetchone())


def _readable(read: Callable[[Any], T], rows: Sequence[Sequence[Any]]) -> Iterator[T]:
    """What can be read of these rows: one that cannot be stops none of the others."""
    for row in rows:
        try:
            yield read(row)
        except (StokerError, ValueError) as error:
            logger.error("event=function_damaged row=%s error=%s", row[:5], error)


def _names_of(text: str) -> Sequence[str] | None:
    """The names that a stored spec gives its function; None: it cannot be read."""
    from control_plane.spec import parse_json

    return next((spec.names() for spec in _readable(parse_json, (text,))), None)


def _function(row: Sequence[Any]) -> Function:
    revision = _revision(row[2:])
    return Function(revision.tenant, revision.function, row[0], row[1], revision)


def _revision(row: Sequence[Any]) -> Revision:
    # Imported with the first function: pydantic costs a fifth of the second that a start may take.
    from control_plane.spec import parse_json

    return Revision(
        tenant=row[0],
        function=row[1],
        revision=row[2],
        spec=parse_json(row[3]),
        created_us=row[4],
        state=ImportState(row[5]),
        error=RevisionError(row[6], row[7]) if row[6] else None,
        identity=row[8],
        manifest_path=row[9],
    )
