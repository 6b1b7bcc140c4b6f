"""PostgreSQL through asyncpg, made synchronous: each session drives an event loop of its own inside its thread.

Functions that keep their conditions in their statements commit under READ COMMITTED, all others under SERIALIZABLE,
and whoever meets another writer is tried again. Each transaction that writes leaves its number in its writer's row of
`commit_marks`: a commit whose answer did not come is looked up there once the server is back, so that it is neither
lost nor done twice. A server that is away is asked again with growing pauses; until then everybody is refused at once.
NOTE: the server's own id of a transaction does not tell: what a crash took with it is given to the next transaction.
Limits: PostgreSQL 13 or newer. Prepared statements belong to a connection: a pooler between must keep sessions whole.
A session that stops inside a transaction (a stopped process) is ended by the server after `idle_transaction_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import asyncpg

from control_plane.database.connection import (
    Connection,
    DatabaseStats,
    Fault,
    Parameters,
    Readers,
    Row,
    Session,
    UnclearCommit,
)
from control_plane.database.placeholders import numbered
from control_plane.database.url import without_password
from control_plane.schema import POSTGRESQL, Dialect
from control_plane.settings import DatabaseSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATEMENTS: Final = 256
"""Prepared per session; the one that was not used for longest goes first."""
PAUSE_S: Final = 0.1
"""After the first connection that failed; it doubles with each further one."""
PAUSE_MAX_S: Final = 2.0
MIGRATION_LOCK: Final = 0x53746F6B6572
ONCE: Final = ("CREATE", "ALTER", "DROP", "SET", "LOCK")
"""Statements that are not worth preparing."""
MARKS: Final = """
CREATE TABLE IF NOT EXISTS commit_marks (
    writer TEXT PRIMARY KEY, mark BIGINT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now()
) WITH (fillfactor = 10)"""
"""Apart from the schema of what is kept: a driver's own, needed before the first migration."""
BEGIN_MARKING: Final = "INSERT INTO commit_marks (writer, mark) VALUES (?, 0) ON CONFLICT (writer) DO NOTHING"
FORGET_MARKS: Final = "DELETE FROM commit_marks WHERE at < now() - INTERVAL '7 days'"
COMMIT_MARKED: Final = """
INSERT INTO commit_marks (writer, mark) SELECT '{writer}', {mark} WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (writer) DO UPDATE SET mark = EXCLUDED.mark, at = now();
COMMIT"""
"""One way to the server. A transaction that wrote nothing has no id, and leaves no mark either."""
LAST_MARK: Final = "SELECT mark FROM commit_marks WHERE writer = ? FOR UPDATE"
"""Waits for a transaction whose server has not noticed yet that nobody listens any more."""
_BUSY: Final = frozenset({"40001", "40P01", "55P03"})
_LOST: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})
_STORAGE: Final = frozenset({"25006", "57014"})
_STORAGE_CLASSES: Final = ("53", "58", "XX")


class ConnectionLost(Exception):
    """In the middle of its work; what was not committed did not happen."""


class ServerAway(Exception):
    """No connection can be had now."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    statement: Any
    names: tuple[str, ...] | None


class PostgresResult:
    __slots__ = ("_rows", "_status")

    def __init__(self, rows: list[Any], status: str | None) -> None:
        self._rows = rows
        self._status = status

    @property
    def rowcount(self) -> int:
        last = (self._status or "").rpartition(" ")[2]
        return int(last) if last.isdecimal() else -1

    def fetchone(self) -> Row | None:
        return tuple(self._rows.pop(0)) if self._rows else None

    def fetchall(self) -> list[Row]:
        rows, self._rows = self._rows, []
        return [tuple(row) for row in rows]


class Marks:
    """What one driver's transactions are told apart by; used by one thread at a time."""

    def __init__(self) -> None:
        self.writer: Final = uuid.uuid4().hex
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class PostgresSession:
    def __init__(self, loop: asyncio.AbstractEventLoop, raw: Any, process_commit: str, marks: Marks) -> None:
        self._loop = loop
        self._raw = raw
        self._process_commit = process_commit
        self._marks = marks
        self._statements: OrderedDict[str, _Prepared] = OrderedDict()
        self._lost = False

    @property
    def connection(self) -> Connection:
        return self

    # --- statements -------------------------------------------------------------------------------------------

    def execute(self, sql: str, parameters: Parameters = (), /) -> PostgresResult:
        if not parameters and sql.lstrip().startswith(ONCE):
            return PostgresResult([], self._run(self._raw.execute(sql)))
        prepared = self._prepared(sql)
        with self._watched():  # the driver looks at the connection also where it asks nothing of the server
            rows: list[Any] = self._run(prepared.statement.fetch(*_arguments(prepared, parameters)))
            return PostgresResult(rows, prepared.statement.get_statusmsg())

    def executemany(self, sql: str, parameters: Any, /) -> PostgresResult:
        """All of them on one way to the server."""
        prepared = self._prepared(sql)
        with self._watched():
            self._run(prepared.statement.executemany([_arguments(prepared, each) for each in parameters]))
        return PostgresResult([], None)

    def _prepared(self, sql: str) -> _Prepared:
        found = self._statements.get(sql)
        if found is None:
            text, names = numbered(sql)
            found = self._statements[sql] = _Prepared(self._run(self._raw.prepare(text)), names)
            if len(self._statements) > STATEMENTS:
                self._statements.popitem(last=False)
        else:
            self._statements.move_to_end(sql)
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._watched():
            return self._loop.run_until_complete(work)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A connection that is gone is said in one way."""
        try:
            yield
        except (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError) as error:
            # A statement that timed out leaves a server that may answer later, or never: not on this connection.
            if isinstance(error, TimeoutError) or self._raw.is_closed() or isinstance(error, OSError):
                self._lost = True
                raise ConnectionLost(str(error) or "the database server does not answer") from error
            raise

    # --- transactions -----------------------------------------------------------------------------------------

    def begin(self, *, durable: bool, alone: bool) -> None:
        level = "SERIALIZABLE" if alone else "READ COMMITTED"
        commit = "on" if durable else self._process_commit
        self._run(self._raw.execute(f"BEGIN ISOLATION LEVEL {level}; SET LOCAL synchronous_commit TO {commit}"))

    def commit(self) -> None:
        mark = self._marks.next()
        try:
            self._run(self._raw.execute(COMMIT_MARKED.format(writer=self._marks.writer, mark=mark)))
        except asyncpg.InFailedSQLTransactionError as error:
            raise RuntimeError("a function went on after a statement of its transaction had failed") from error
        except ConnectionLost as error:
            raise UnclearCommit(error, str(mark)) from error

    def begin_marking(self) -> None:
        """From here on this writer's row is there to be locked."""
        if self.execute("SELECT to_regclass('commit_marks') IS NULL").fetchall() != [(0,)]:
            self._run(self._raw.execute(f"BEGIN; SELECT pg_advisory_xact_lock({MIGRATION_LOCK}); {MARKS}; COMMIT"))
        self.execute(FORGET_MARKS)
        self.execute(BEGIN_MARKING, (self._marks.writer,))

    def rollback(self) -> None:
        self._run(self._raw.execute("ROLLBACK"))

    def savepoint(self) -> None:
        self._run(self._raw.execute("SAVEPOINT job"))

    def release(self) -> None:
        self._run(self._raw.execute("RELEASE SAVEPOINT job"))

    def back_to_savepoint(self) -> None:
        self._run(self._raw.execute("ROLLBACK TO SAVEPOINT job"))

    def begin_reading(self) -> None:
        self._run(self._raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))

    def end_reading(self) -> None:
        self.rollback()

    def lock_schema(self) -> None:
        self.execute("SELECT pg_advisory_xact_lock(?)", (MIGRATION_LOCK,))

    def close(self) -> None:
        self._statements.clear()
        try:
            if self._lost:
                self._raw.terminate()
            else:
                self._loop.run_until_complete(self._raw.close(timeout=1.0))
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._raw.terminate()
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


def _arguments(prepared: _Prepared, parameters: Mapping[str, Any] | Sequence[Any]) -> Sequence[Any]:
    if prepared.names is None:
        return () if isinstance(parameters, Mapping) else parameters
    if not isinstance(parameters, Mapping):
        raise TypeError("a statement with names takes a mapping")
    return [parameters[name] for name in prepared.names]


class PostgresDriver:
    dialect: Dialect = POSTGRESQL
    one_writer = False
    probe_s: float | None = 0.5

    def __init__(self, url: str, settings: DatabaseSettings, stats: DatabaseStats) -> None:
        self.stats = stats
        self._url = url
        self._settings = settings
        self._lock = threading.Lock()
        self._failures = 0
        self._again_at = 0.0
        self._last_error = ""
        self._marks = Marks()

    @property
    def label(self) -> str:
        return without_password(self._url)

    def prepare(self) -> None:
        """The database and its role are the operator's to make."""

    # --- connections ------------------------------------------------------------------------------------------

    def open_writer(self) -> PostgresSession:
        session = self._open()
        try:
            session.begin_marking()
        except BaseException:
            session.close()
            raise
        return session

    def open_reader(self) -> PostgresSession:
        return self._open()

    def _open(self) -> PostgresSession:
        """Refused at once, with the last reason, while the pause after a failure lasts."""
        with self._lock:
            if time.monotonic() < self._again_at:
                raise ServerAway(self._last_error)
        loop = _new_loop()
        try:
            raw = loop.run_until_complete(self._connect())
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            loop.close()
            with self._lock:
                self._last_error = f"{self.label}: {str(error) or type(error).__name__}"
                pause_s = min(PAUSE_S * 2**self._failures, PAUSE_MAX_S)
                self._failures = min(self._failures + 1, 16)
                self._again_at = time.monotonic() + pause_s
            raise ServerAway(self._last_error) from error
        with self._lock:
            self._failures, self._again_at = 0, 0.0
        return PostgresSession(loop, raw, self._settings.process_commit, self._marks)

    async def _connect(self) -> Any:
        settings = self._settings
        raw = await asyncpg.connect(
            self._url,
            timeout=settings.connect_timeout_s,
            command_timeout=settings.statement_timeout_s,
            server_settings={
                "application_name": "stoker",
                "jit": "off",
                "lock_timeout": f"{round(settings.statement_timeout_s * 500)}",
                "idle_in_transaction_session_timeout": f"{round(settings.idle_transaction_s * 1000)}",
            },
        )
        try:
            # As SQLite gives them: truth values are 0 and 1, and a sum of integers is one.
            await raw.set_type_codec(
                "bool", schema="pg_catalog", format="binary",
                encoder=lambda value: b"\x01" if value else b"\x00", decoder=lambda value: value[0],
            )  # fmt: skip
            await raw.set_type_codec("numeric", schema="pg_catalog", format="text", encoder=str, decoder=_number)
        except BaseException:
            raw.terminate()
            raise
        return raw

    # --- faults -----------------------------------------------------------------------------------------------

    def fault(self, error: BaseException) -> Fault:
        if isinstance(error, UnclearCommit):
            return Fault.UNCLEAR
        if isinstance(error, ConnectionLost):
            return Fault.LOST
        if isinstance(error, ServerAway):
            return Fault.STORAGE
        if isinstance(error, asyncpg.InvalidCachedStatementError):
            return Fault.LOST
        if not isinstance(error, asyncpg.PostgresError):
            return Fault.CALLER
        state = str(error.sqlstate or "")
        if state in _BUSY:
            return Fault.BUSY
        if state in _LOST or state.startswith("08"):
            return Fault.LOST
        return Fault.STORAGE if state in _STORAGE or state.startswith(_STORAGE_CLASSES) else Fault.CALLER

    def was_committed(self, unclear: UnclearCommit) -> bool | None:
        """What the last transaction that took effect has left. Tried for a moment only: the writer waits."""
        until = time.monotonic() + self._settings.unclear_s
        while time.monotonic() < until:
            try:
                session = self._open()
            except ServerAway:
                time.sleep(PAUSE_S)
                continue
            try:
                row = session.execute(LAST_MARK, (self._marks.writer,)).fetchone()
            except (ConnectionLost, asyncpg.PostgresError) as error:
                logger.warning("event=unclear_commit error=%r", str(error))
                time.sleep(PAUSE_S)
                continue
            finally:
                session.close()
            # Without its row (another database has taken this one's place, say) nobody can tell.
            committed = None if row is None else str(row[0]) == unclear.mark
            logger.warning("event=unclear_commit committed=%s", committed)
            return committed
        return None

    def after_group(self, session: Session, jobs: int, readers: Readers) -> None:
        """Nothing to do: the server looks after its log."""


def _number(text: str) -> int | float:
    return float(text) if "." in text or not text.lstrip("-").isdecimal() else int(text)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
