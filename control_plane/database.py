"""SQLite behind one writer thread: whoever wants to write hands over a function, and functions that arrive while a
commit is under way share the next one. A write resolves after its commit, or raises and has changed nothing.

Each function runs under a savepoint, so that one that raises does not harm its group. A fault of the storage itself
(full disk, unwritable directory) rolls the group back and gives every function one more try alone; what still fails
raises `StorageUnavailable`, and the next group starts on a fresh connection, so that service returns by itself.
NOTE: a function may therefore run twice; its only effect must be on its connection and its result.
Limits: statements are portable text with `:name` parameters, run by the driver itself: importing SQLAlchemy would take
a fifth of the second and a ninth of the memory that the control plane may use. A wait that is cancelled does not take
its write back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from control_plane.errors import StorageUnavailable
from control_plane.schema import MIGRATIONS, SQLITE, Migration
from control_plane.settings import DatabaseSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Parameters: TypeAlias = Mapping[str, Any] | Sequence[Any]

_PAGE_BYTES = 4096
_PROGRAMMING_ERRORS = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_RANGE})


class Result(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """What a function of `write` or `read` is given. Transactions are not its business."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Result: ...
    def executemany(self, sql: str, parameters: Any, /) -> Result: ...


Connect: TypeAlias = Callable[[], sqlite3.Connection]


@dataclass(slots=True)
class DatabaseStats:
    commits: int = 0
    writes: int = 0
    largest_group: int = 0
    commit_s: float = 0.0
    """Seconds from the begin to the end of transactions, summed."""
    storage_failures: int = 0
    checkpoints: int = 0


class _Job:
    __slots__ = ("durable", "error", "fn", "future", "guarded", "value")

    def __init__(
        self, fn: Callable[[Connection], Any], future: asyncio.Future[Any], durable: bool, guarded: bool
    ) -> None:
        self.fn = fn
        self.future = future
        self.durable = durable
        self.guarded = guarded
        self.value: Any = None
        self.error: BaseException | None = None


def is_storage_fault(error: sqlite3.Error) -> bool:
    """Whether the storage failed, as opposed to a statement or a constraint."""
    if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or (code & 0xFF) not in _PROGRAMMING_ERRORS


def _may_have_committed(error: Exception) -> bool:
    """A failed sync leaves the commit in the log file, where a later open may find it whole: no second try then."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_FSYNC


def _unavailable(error: BaseException) -> StorageUnavailable:
    return StorageUnavailable(
        f"the database cannot be written or read now ({error}); what was accepted is kept. Free disk space or restore "
        "access to the data directory, service then returns by itself"
    )


class Database:
    """Open it with `await Database.open(path)`, close it with `await close()`. Belongs to one event loop."""

    def __init__(self, path: Path, settings: DatabaseSettings | None = None, *, connect: Connect | None = None) -> None:
        self.path = path
        self.settings = settings or DatabaseSettings()
        self.stats = DatabaseStats()
        self.fault: str | None = None
        """Why the last group failed, None while the storage works: what readiness reports."""
        self._connect = connect or self._connect_file
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._writer: sqlite3.Connection | None = None
        self._synchronous = ""
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []
        self._checkpointing = threading.Event()
        self._wal_too_long = threading.Event()
        self._jobs_since_checkpoint = 0
        self._closed = False

    @classmethod
    async def open(
        cls, path: Path, settings: DatabaseSettings | None = None, *, connect: Connect | None = None
    ) -> Database:
        """Create or migrate the file; raises `StorageUnavailable` when it cannot be used."""
        database = cls(path, settings, connect=connect)
        database._loop = asyncio.get_running_loop()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(database._migrate)
        except BaseException as error:
            if database._writer is not None:
                database._writer.close()
            if isinstance(error, sqlite3.Error | OSError):
                raise _unavailable(error) from error
            raise
        database._readers = ThreadPoolExecutor(database.settings.reader_threads, thread_name_prefix="db-read")
        database._thread = threading.Thread(target=database._write_loop, name="db-write", daemon=True)
        database._thread.start()
        return database

    # --- callers' side (event loop) ---------------------------------------------------------------------------

    async def write(self, fn: Callable[[Connection], T], *, durable: bool = False) -> T:
        """Run `fn` in the next group; returns its result after the commit. `durable`: after the commit reached the
        disk itself (it then survives power loss), else after it survives any death of a process."""
        result: T = await self.submit(fn, durable=durable)
        return result

    def submit(
        self, fn: Callable[[Connection], T], *, durable: bool = False, guarded: bool = True
    ) -> asyncio.Future[T]:
        """`write` without waiting. `guarded=False` saves the savepoint of a function that raises nothing but faults
        of the database, which then take its whole group back for a try each alone."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the database is not open")
        future: asyncio.Future[T] = loop.create_future()
        if self._closed:
            future.set_exception(StorageUnavailable("the control plane is shutting down"))
        else:
            self._jobs.put(_Job(fn, future, durable, guarded))
        return future

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on a reader's connection, in one read transaction: it sees one state of everything."""
        if self._loop is None or self._readers is None or self._closed:
            raise StorageUnavailable("the control plane is shutting down")
        return await self._loop.run_in_executor(self._readers, self._read, fn)

    async def close(self) -> None:
        """What was handed over is still written."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._readers is not None:
            await asyncio.to_thread(self._readers.shutdown)
        for connection in self._reader_connections:
            connection.close()

    # --- connections ------------------------------------------------------------------------------------------

    def _connect_file(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path,
            timeout=self.settings.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )

    def _open_connection(self, cache_bytes: int) -> sqlite3.Connection:
        connection = self._connect()
        try:
            connection.execute(f"PRAGMA cache_size = -{max(cache_bytes // 1024, 256)}")
            connection.execute("PRAGMA temp_store = MEMORY")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _open_writer(self) -> sqlite3.Connection:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = self._open_connection(self.settings.cache_bytes)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute(f"PRAGMA journal_size_limit = {self.settings.wal_bytes}")
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error:
            connection.close()
            raise
        self._synchronous = "NORMAL"
        self._writer = connection
        return connection

    def _migrate(self) -> None:
        connection = self._open_writer()
        migrate(connection)

    # --- writer thread ----------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        jobs = self._jobs
        limit = self.settings.group_jobs
        stopping = False
        while not stopping:
            first = jobs.get()
            group: list[_Job] = []
            job = first
            while True:
                if job is None:
                    stopping = True
                    break
                group.append(job)
                if len(group) >= limit:
                    break
                try:
                    job = jobs.get_nowait()
                except queue.Empty:
                    break
            if group:
                self._commit_group(group)
                self._deliver(group)
                self._keep_wal_short(len(group))
        if self._writer is not None:
            self._writer.close()

    def _commit_group(self, group: list[_Job]) -> None:
        began = time.monotonic()
        try:
            self._transact(group)
            self.fault = None
        except Exception as error:
            self._after_fault(error)
            if len(group) == 1 or _may_have_committed(error):
                for job in group:
                    job.error = self._as_caller_sees(error)
            else:
                self._retry_alone(group)
        stats = self.stats
        stats.commits += 1
        stats.writes += len(group)
        stats.largest_group = max(stats.largest_group, len(group))
        stats.commit_s += time.monotonic() - began

    def _retry_alone(self, group: list[_Job]) -> None:
        for job in group:
            job.value = job.error = None
            try:
                self._transact([job])
                self.fault = None
            except Exception as error:
                self._after_fault(error)
                job.error = self._as_caller_sees(error)

    def _transact(self, group: list[_Job]) -> None:
        connection = self._writer or self._open_writer()
        synchronous = "FULL" if any(job.durable for job in group) else "NORMAL"
        if synchronous != self._synchronous:
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            self._synchronous = synchronous
        connection.execute("BEGIN IMMEDIATE")
        for job in group:
            if job.guarded:
                self._run_guarded(connection, job)
            else:
                job.value = job.fn(connection)
        connection.execute("COMMIT")

    @staticmethod
    def _run_guarded(connection: sqlite3.Connection, job: _Job) -> None:
        connection.execute("SAVEPOINT job")
        try:
            job.value = job.fn(connection)
        except BaseException as error:
            if isinstance(error, sqlite3.Error) and is_storage_fault(error):
                raise
            job.error = error
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")

    def _after_fault(self, error: Exception) -> None:
        """The group is off, and with it the connection, whose state nobody knows for certain any more."""
        connection, self._writer = self._writer, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                logger.warning("event=close_failed", exc_info=True)
        if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and is_storage_fault(error)):
            self.stats.storage_failures += 1
            if self.fault is None:
                logger.error("event=storage_fault error=%r", str(error))
            self.fault = str(error)

    @staticmethod
    def _as_caller_sees(error: Exception) -> Exception:
        if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and is_storage_fault(error)):
            unavailable = _unavailable(error)
            unavailable.__cause__ = error
            return unavailable
        return error

    def _deliver(self, group: list[_Job]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(_resolve, group)
        except RuntimeError:
            logger.debug("event=loop_closed writes=%d", len(group))

    # --- write-ahead log --------------------------------------------------------------------------------------

    def _keep_wal_short(self, jobs: int) -> None:
        """Fold the log back beside the writer; only when that cannot keep up does the writer do the rest itself."""
        if self._wal_too_long.is_set() and self._writer is not None:
            self._wal_too_long.clear()
            try:
                self._writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            except sqlite3.Error as error:
                logger.warning("event=checkpoint_failed error=%r", str(error))
        self._jobs_since_checkpoint += jobs
        if self._jobs_since_checkpoint < self.settings.checkpoint_jobs or self._checkpointing.is_set():
            return
        self._jobs_since_checkpoint = 0
        if self._readers is None or self._closed:
            return
        self._checkpointing.set()
        try:
            self._readers.submit(self._checkpoint)
        except RuntimeError:
            self._checkpointing.clear()

    def _checkpoint(self) -> None:
        try:
            connection = self._reader()
            _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self.stats.checkpoints += 1
            if pages * _PAGE_BYTES > self.settings.wal_bytes:
                self._wal_too_long.set()
        except (sqlite3.Error, StorageUnavailable) as error:
            logger.warning("event=checkpoint_failed error=%r", str(error))
        finally:
            self._checkpointing.clear()

    # --- reader threads ---------------------------------------------------------------------------------------

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._open_connection(self.settings.cache_bytes // 4)
            self._local.connection = connection
            self._reader_connections.append(connection)
        return connection

    def _read(self, fn: Callable[[Connection], T]) -> T:
        try:
            connection = self._reader()
            connection.execute("BEGIN")
            try:
                return fn(connection)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            if not is_storage_fault(error):
                raise
            self._local.connection = None
            raise _unavailable(error) from error


async def to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """Run a change that has a second half in memory; if the caller is cancelled (its client left), both are still
    done."""
    return await asyncio.shield(asyncio.ensure_future(change))


def _resolve(group: list[_Job]) -> None:
    for job in group:
        future = job.future
        if future.done():
            continue
        if job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.value)


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the schema forward, all or nothing; a database of a later release is refused."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (number BIGINT PRIMARY KEY, why TEXT NOT NULL, "
            "applied_us BIGINT NOT NULL)"
        )
        (applied,) = connection.execute("SELECT COALESCE(MAX(number), 0) FROM migrations").fetchone()
        if applied > migrations[-1].number:
            raise StorageUnavailable(
                f"the database is at migration {applied}, this release knows {migrations[-1].number}: run the release "
                "that wrote it, or a later one"
            )
        for migration in migrations:
            if migration.number <= applied:
                continue
            for statement in migration.statements:
                connection.execute(SQLITE.render(statement))
            connection.execute(
                "INSERT INTO migrations (number, why, applied_us) VALUES (?, ?, ?)",
                (migration.number, migration.why, time.time_ns() // 1000),
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
