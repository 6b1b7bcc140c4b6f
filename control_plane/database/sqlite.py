"""SQLite: one file, write-ahead log, one writer at a time.

`synchronous` follows the group: FULL when one of its functions asked for the disk, NORMAL (survives any death of a
process) else. The log is folded back beside the writer; only when that cannot keep up does the writer do the rest.
Limits: one machine. Several processes may share the file (tests do); a network file system may not hold it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias, cast

from control_plane.database.connection import Connection, DatabaseStats, Fault, Readers, Session, UnclearCommit
from control_plane.errors import StorageUnavailable
from control_plane.schema import SQLITE, Dialect
from control_plane.settings import DatabaseSettings

logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[], sqlite3.Connection]

_PAGE_BYTES: Final = 4096
_PROGRAMMING_ERRORS: Final = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_RANGE})


class SqliteSession:
    def __init__(self, raw: sqlite3.Connection) -> None:
        self.raw = raw
        self._synchronous = ""

    @property
    def connection(self) -> Connection:
        return cast(Connection, self.raw)

    def set_synchronous(self, level: str) -> None:
        if level != self._synchronous:
            self.raw.execute(f"PRAGMA synchronous = {level}")
            self._synchronous = level

    def begin(self, *, durable: bool, alone: bool) -> None:
        self.set_synchronous("FULL" if durable else "NORMAL")
        self.raw.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        try:
            self.raw.execute("COMMIT")
        except sqlite3.Error as error:
            # A failed sync leaves the commit in the log file, where a later open may find it whole.
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_FSYNC:
                raise UnclearCommit(error) from error
            raise

    def rollback(self) -> None:
        if self.raw.in_transaction:
            self.raw.execute("ROLLBACK")

    def savepoint(self) -> None:
        self.raw.execute("SAVEPOINT job")

    def release(self) -> None:
        self.raw.execute("RELEASE job")

    def back_to_savepoint(self) -> None:
        self.raw.execute("ROLLBACK TO job")

    def begin_reading(self) -> None:
        self.raw.execute("BEGIN")

    def end_reading(self) -> None:
        self.raw.execute("ROLLBACK")

    def lock_schema(self) -> None:
        """`BEGIN IMMEDIATE` holds it already."""

    def close(self) -> None:
        self.raw.close()


class SqliteDriver:
    dialect: Dialect = SQLITE
    one_writer = True
    probe_s: float | None = None

    def __init__(
        self, path: Path, settings: DatabaseSettings, stats: DatabaseStats, connect: Connect | None = None
    ) -> None:
        self.path = path
        self.stats = stats
        self._settings = settings
        self._connect = connect or self._connect_file
        self._checkpointing = threading.Event()
        self._wal_too_long = threading.Event()
        self._jobs_since_checkpoint = 0

    @property
    def label(self) -> str:
        return str(self.path)

    def prepare(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    # --- connections ------------------------------------------------------------------------------------------

    def _connect_file(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path,
            timeout=self._settings.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )

    def open_reader(self) -> SqliteSession:
        return SqliteSession(self._open(self._settings.cache_bytes // 4))

    def open_writer(self) -> SqliteSession:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        raw = self._open(self._settings.cache_bytes)
        session = SqliteSession(raw)
        try:
            raw.execute("PRAGMA journal_mode = WAL")
            raw.execute("PRAGMA wal_autocheckpoint = 0")
            # What is deleted (keys, prompts) is overwritten in the pages that are written anyway.
            raw.execute("PRAGMA secure_delete = FAST")
            raw.execute(f"PRAGMA journal_size_limit = {self._settings.wal_bytes}")
            session.set_synchronous("NORMAL")
        except sqlite3.Error:
            raw.close()
            raise
        return session

    def _open(self, cache_bytes: int) -> sqlite3.Connection:
        raw = self._connect()
        try:
            raw.execute(f"PRAGMA cache_size = -{max(cache_bytes // 1024, 256)}")
            raw.execute("PRAGMA temp_store = MEMORY")
        except sqlite3.Error:
            raw.close()
            raise
        return raw

    # --- faults -----------------------------------------------------------------------------------------------

    def fault(self, error: BaseException) -> Fault:
        if isinstance(error, UnclearCommit):
            return Fault.UNCLEAR
        if isinstance(error, OSError):
            return Fault.STORAGE
        if not isinstance(error, sqlite3.Error):
            return Fault.CALLER
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.InterfaceError):
            return Fault.CALLER
        code = getattr(error, "sqlite_errorcode", None)
        return Fault.CALLER if code is not None and (code & 0xFF) in _PROGRAMMING_ERRORS else Fault.STORAGE

    def was_committed(self, unclear: UnclearCommit) -> bool | None:
        return None

    # --- write-ahead log --------------------------------------------------------------------------------------

    def after_group(self, session: Session, jobs: int, readers: Readers) -> None:
        if self._wal_too_long.is_set():
            self._wal_too_long.clear()
            try:
                session.connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            except sqlite3.Error as error:
                logger.warning("event=checkpoint_failed error=%r", str(error))
        self._jobs_since_checkpoint += jobs
        if self._jobs_since_checkpoint < self._settings.checkpoint_jobs or self._checkpointing.is_set():
            return
        self._jobs_since_checkpoint = 0
        self._checkpointing.set()
        if not readers.on_a_reader(self._checkpoint):
            self._checkpointing.clear()

    def _checkpoint(self, session: Session) -> None:
        try:
            _, pages, _ = session.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self.stats.checkpoints += 1
            if pages * _PAGE_BYTES > self._settings.wal_bytes:
                self._wal_too_long.set()
        except (sqlite3.Error, StorageUnavailable) as error:
            logger.warning("event=checkpoint_failed error=%r", str(error))
        finally:
            self._checkpointing.clear()
