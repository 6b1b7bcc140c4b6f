"""One writer thread: whoever wants to write hands over a function, and functions that arrive while a commit is under
way share the next one. A write resolves after its commit, or raises and has changed nothing.

Each function runs under a savepoint, so that one that raises does not harm its group. A fault of the storage itself
(full disk, a database that is away) rolls the group back and gives every function one more try alone; what still fails
raises `StorageUnavailable`, and the next group starts on a fresh connection, so that service returns by itself.
NOTE: a function may therefore run twice; its only effect must be on its connection and its result.
Limits: statements are portable text with `:name` parameters, run by the driver itself: importing SQLAlchemy would take
a fifth of the second and a ninth of the memory that the control plane may use. A wait that is cancelled does not take
its write back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from control_plane.database.clock import Clock
from control_plane.database.connection import Connection, DatabaseStats, Driver, Fault, Session, UnclearCommit
from control_plane.database.migrating import migrate
from control_plane.database.url import is_postgresql, sqlite_path
from control_plane.errors import StorageUnavailable
from control_plane.schema import POSTGRESQL
from control_plane.settings import DatabaseSettings

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES: Final = 12
"""Of a transaction that keeps meeting another writer."""
PAUSE_S: Final = 0.002
"""Before the second try; it doubles, and a random part of it is waited, so that two that met do not meet again."""
PAUSE_MAX_S: Final = 0.2


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


class Database:
    """Open it with `await Database.open(where)`, close it with `await close()`. Belongs to one event loop."""

    def __init__(self, driver: Driver, settings: DatabaseSettings) -> None:
        self.settings = settings
        self.stats = driver.stats
        self.driver = driver
        self.clock = Clock(asks=driver.dialect.name == POSTGRESQL.name)
        self.fault: str | None = None
        """Why the last group failed, None while the storage works: what readiness reports."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._writer: Session | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._reader_sessions: list[Session] = []
        self._closed = False

    @classmethod
    async def open(
        cls,
        where: Path | str,
        settings: DatabaseSettings | None = None,
        *,
        connect: Callable[[], sqlite3.Connection] | None = None,
    ) -> Database:
        """Create or migrate the database; raises `StorageUnavailable` when it cannot be used. `where`: a path,
        `sqlite:///PATH` or `postgresql://USER@HOST:PORT/NAME`. `connect`: how to connect to a file, for tests."""
        settings = settings or DatabaseSettings()
        database = cls(_driver(where, settings, connect), settings)
        database._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(database._prepare)
        except BaseException as error:
            if database._writer is not None:
                await asyncio.to_thread(database._writer.close)
            raise database._as_caller_sees(error) from error
        database._readers = ThreadPoolExecutor(settings.reader_threads, thread_name_prefix="db-read")
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
        """`write` without waiting. `guarded=False` is for a function that raises nothing but faults of the database
        (which then take its whole group back for a try each alone) and whose statements hold their own conditions:
        it saves the savepoint and, where there are several writers, the proof that it ran as if alone."""
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
        await asyncio.to_thread(self._close_readers)

    def _close_readers(self) -> None:
        for session in self._reader_sessions:
            session.close()

    def _prepare(self) -> None:
        self.driver.prepare()
        self._writer = self.driver.open_writer()
        migrate(self._writer, self.driver.dialect)

    # --- writer thread ----------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        stopping = False
        while not stopping:
            group, stopping = self._next_group()
            if group:
                self._commit_group(group)
                self._deliver(group)
                if self._writer is not None:
                    self.driver.after_group(self._writer, len(group), self)
        if self._writer is not None:
            self._writer.close()

    def _next_group(self) -> tuple[list[_Job], bool]:
        """What waits, and whether that is the last."""
        jobs, limit, group = self._jobs, self.settings.group_jobs, list[_Job]()
        probe_s = self.driver.probe_s if self.fault is not None else None
        try:
            job = jobs.get(timeout=probe_s)
            while job is not None:
                group.append(job)
                if len(group) >= limit:
                    return group, False
                job = jobs.get_nowait()
        except queue.Empty:
            if not group:
                self._probe()
            return group, False
        return group, True

    def _probe(self) -> None:
        """Nobody writes to a database that is away: look whether it is back, or readiness would never return."""
        try:
            if self._writer is None:
                self._writer = self.driver.open_writer()
            self.fault = None
            logger.info("event=storage_back database=%s", self.driver.label)
        except Exception as error:
            self._note(error)

    def _commit_group(self, group: list[_Job]) -> None:
        began = time.monotonic()
        for part in self._parts(group):
            error = self._try(part)
            if error is not None and (len(part) == 1 or self.driver.fault(error) is Fault.UNCLEAR):
                for job in part:
                    job.error = self._as_caller_sees(error)
            elif error is not None:
                self._retry_alone(part)
            self.stats.commits += 1
        stats = self.stats
        stats.writes += len(group)
        stats.largest_group = max(stats.largest_group, len(group))
        stats.commit_s += time.monotonic() - began

    def _parts(self, group: list[_Job]) -> Iterator[list[_Job]]:
        """Where several write at once, functions that want to be alone do not share a transaction with the others."""
        if self.driver.one_writer:
            yield group
            return
        for _, part in itertools.groupby(group, lambda job: job.guarded):
            yield list(part)

    def _retry_alone(self, group: list[_Job]) -> None:
        for job in group:
            error = self._try([job])
            job.error = job.error if error is None else self._as_caller_sees(error)

    def _try(self, group: list[_Job]) -> Exception | None:
        """One transaction, again as long as a further try can help; why it failed."""
        reopened = False
        for tries in range(TRIES):
            for job in group:
                job.value = job.error = None
            try:
                self._transact(group)
                self.fault = None
                return None
            except Exception as error:
                failed, fault = error, self.driver.fault(error)
            if fault is Fault.BUSY:
                self._take_back()
                time.sleep(random.uniform(0.0, min(PAUSE_S * 2**tries, PAUSE_MAX_S)))
            elif fault is Fault.LOST and not reopened:
                self._drop_writer()
                reopened = True
            else:
                self._drop_writer()
                if isinstance(failed, UnclearCommit) and (settled := self.driver.was_committed(failed)) is not None:
                    if settled:
                        self.fault = None
                        return None
                else:
                    self._note(failed)
                    return failed
            self.stats.retries += 1
        self._note(failed)
        return failed

    def _transact(self, group: list[_Job]) -> None:
        session = self._writer
        if session is None:
            session = self._writer = self.driver.open_writer()
        guarded, one_writer = group[0].guarded, self.driver.one_writer
        session.begin(durable=any(job.durable for job in group), alone=guarded)
        if guarded and not one_writer and len(group) == 1:
            self._run_alone(session, group[0])
            return
        connection = session.connection
        for job in group:
            if job.guarded:
                self._run_guarded(session, job)
            else:
                job.value = job.fn(connection)
        session.commit()

    def _run_guarded(self, session: Session, job: _Job) -> None:
        session.savepoint()
        try:
            job.value = job.fn(session.connection)
        except BaseException as error:
            if self.driver.fault(error) is not Fault.CALLER:
                raise
            job.error = error
            session.back_to_savepoint()
        session.release()

    def _run_alone(self, session: Session, job: _Job) -> None:
        """Its transaction is its savepoint: each statement is a way to the server and back."""
        try:
            job.value = job.fn(session.connection)
        except BaseException as error:
            if self.driver.fault(error) is not Fault.CALLER:
                raise
            session.rollback()
            job.error = error
            return
        session.commit()

    def _take_back(self) -> None:
        try:
            if self._writer is not None:
                self._writer.rollback()
        except Exception:
            self._drop_writer()

    def _drop_writer(self) -> None:
        """The group is off, and with it the connection, whose state nobody knows for certain any more."""
        session, self._writer = self._writer, None
        if session is not None:
            try:
                session.close()
            except Exception:
                logger.warning("event=close_failed", exc_info=True)

    def _note(self, error: Exception) -> None:
        if self.driver.fault(error) is Fault.CALLER:
            return
        self.stats.storage_failures += 1
        if self.fault is None:
            logger.error("event=storage_fault database=%s error=%r", self.driver.label, str(error))
        self.fault = str(error) or type(error).__name__

    def _as_caller_sees(self, error: BaseException) -> BaseException:
        fault = self.driver.fault(error)
        if fault is Fault.CALLER:
            return error
        unavailable = StorageUnavailable(
            f"the database cannot be written or read now ({error}); what was accepted is kept. Free disk space or "
            "restore access to the data directory or the database server, service then returns by itself"
        )
        unavailable.unclear = fault is Fault.UNCLEAR
        unavailable.__cause__ = error
        return unavailable

    def _deliver(self, group: list[_Job]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(_resolve, group)
        except RuntimeError:
            logger.debug("event=loop_closed writes=%d", len(group))

    # --- reader threads ---------------------------------------------------------------------------------------

    def on_a_reader(self, work: Callable[[Session], None]) -> bool:
        """For the driver's upkeep: `work` on a reader's thread, outside of a transaction."""
        if self._readers is None or self._closed:
            return False
        try:
            self._readers.submit(lambda: work(self._reader()))
        except RuntimeError:
            return False
        return True

    def _reader(self) -> Session:
        session: Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self.driver.open_reader()
            self._local.session = session
            self._reader_sessions.append(session)
        return session

    def _drop_reader(self) -> None:
        session: Session | None = getattr(self._local, "session", None)
        self._local.session = None
        if session is not None:
            self._reader_sessions.remove(session)
            session.close()

    def _read(self, fn: Callable[[Connection], T]) -> T:
        for tries in range(TRIES):
            try:
                session = self._reader()
                session.begin_reading()
                try:
                    return fn(session.connection)
                finally:
                    session.end_reading()
            except Exception as error:
                fault = self.driver.fault(error)
                if fault is Fault.CALLER:
                    raise
                self._drop_reader()
                if fault is Fault.STORAGE or tries > 0:
                    raise self._as_caller_sees(error) from error
        raise AssertionError("unreachable")


def _driver(where: Path | str, settings: DatabaseSettings, connect: Callable[[], sqlite3.Connection] | None) -> Driver:
    stats = DatabaseStats()
    if is_postgresql(where):
        from control_plane.database.postgresql import PostgresDriver

        return PostgresDriver(str(where), settings, stats)
    from control_plane.database.sqlite import SqliteDriver

    return SqliteDriver(sqlite_path(where), settings, stats, connect)


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
