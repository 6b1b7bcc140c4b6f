"""What a function of `Database.write` or `read` is given, and what the two drivers do for the group commit.

A driver opens sessions; a session is a connection with its transactions, used by one thread at a time. A driver says
of every error what it means for the transaction it ended (`Fault`): that is all the group commit knows of databases.
Limits: synchronous; a driver whose library is asynchronous drives a loop of its own inside the thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from control_plane.schema import Dialect

Row: TypeAlias = tuple[Any, ...]
Parameters: TypeAlias = Mapping[str, Any] | Sequence[Any]


class Result(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    """What a function of `write` or `read` is given. Transactions are not its business."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Result: ...
    def executemany(self, sql: str, parameters: Any, /) -> Result:
        """Its `rowcount` means nothing: PostgreSQL's driver does not say."""
        ...


class Fault(enum.Enum):
    """What an error means for the transaction that it ended."""

    CALLER = "caller"
    """A statement, a constraint, the function itself: whoever wrote it is told."""
    BUSY = "busy"
    """It met another writer (deadlock, serialisation): nothing happened, again at once."""
    LOST = "lost"
    """The connection is gone: nothing happened, again on a fresh one."""
    STORAGE = "storage"
    """The database cannot do it now: nothing happened, and everybody is told so."""
    UNCLEAR = "unclear"
    """It went away during the commit: only the driver can find out, later, whether that took effect."""


class UnclearCommit(Exception):
    """The answer to a commit did not come. `mark` is what the driver recognises the transaction by."""

    def __init__(self, error: BaseException, mark: str | None = None) -> None:
        super().__init__(str(error))
        self.mark = mark


class Session(Protocol):
    """A connection and its transactions, for one thread at a time."""

    @property
    def connection(self) -> Connection: ...
    def begin(self, *, durable: bool, alone: bool) -> None:
        """Begin to write. `durable`: the commit reaches the disk (and a synchronous standby); `alone`: as if no other
        writer existed, else only what each statement says about itself holds."""
        ...

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def savepoint(self) -> None: ...
    def release(self) -> None: ...
    def back_to_savepoint(self) -> None: ...
    def begin_reading(self) -> None:
        """Every statement until `end_reading` sees one state of everything."""
        ...

    def end_reading(self) -> None: ...
    def lock_schema(self) -> None:
        """Inside a transaction: nobody else migrates until its end."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class DatabaseStats:
    commits: int = 0
    writes: int = 0
    largest_group: int = 0
    commit_s: float = 0.0
    """Seconds from the begin to the end of transactions, summed."""
    storage_failures: int = 0
    checkpoints: int = 0
    retries: int = 0
    """Transactions tried again: after meeting another writer, or on a fresh connection."""


class Driver(Protocol):
    dialect: Dialect
    one_writer: bool
    """Whether writers exclude each other, so that functions of every kind may share a transaction."""
    probe_s: float | None
    """Pause after which a writer without work looks whether a database that was away is back."""
    stats: DatabaseStats

    @property
    def label(self) -> str:
        """Which database, for people: without a password."""
        ...

    def prepare(self) -> None:
        """Make what a first connection needs to exist."""
        ...

    def open_writer(self) -> Session: ...
    def open_reader(self) -> Session: ...
    def fault(self, error: BaseException) -> Fault: ...
    def was_committed(self, unclear: UnclearCommit) -> bool | None:
        """Whether that commit took effect; None when nobody can say, at least now."""
        ...

    def after_group(self, session: Session, jobs: int, readers: Readers) -> None:
        """Upkeep between two groups, in the writer's thread."""
        ...


class Readers(Protocol):
    """What a driver may use of the database: a reader's thread."""

    def on_a_reader(self, work: Any) -> bool:
        """Have `work(session)` run on a reader's thread; False when the database is closing."""
        ...
