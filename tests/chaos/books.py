"""What the journal and the ledger say, read from the database itself: who works on what, where its KV lies, what
became of every request.

`Books` reads (and, for one kind of fault, rewrites) one database while the service may be running or dead; the audits
raise nothing and give what does not add up, in words. Limits: a busy file is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from control_plane.database.placeholders import numbered
from control_plane.history import decode_chunks
from control_plane.records import Outcome
from function_runtime.protocol import KvChunk

ENDED = frozenset({"done", "cancelled", "refused", "failed"})
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


@dataclass(frozen=True, slots=True)
class Ended:
    """A request as the journal has it at the end."""

    state: str
    last_seq: int
    error_code: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One attempt at a request."""

    request_id: str
    epoch: int
    replica_id: str
    after_seq: int
    last_seq: int | None
    loaded_tokens: int | None
    exact: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class StoredKv:
    """One row of a request's KV records."""

    request_id: str
    epoch: int
    """The request's, now."""
    replica_id: str
    number: int
    chunks: tuple[KvChunk, ...]


class Books:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=20.0)) as connection:
            yield connection

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._open() as connection:
            return connection.execute(statement, values).fetchall()

    def write(self, statement: str, values: Sequence[Any]) -> None:
        with self._open() as connection, connection:
            connection.execute(statement, values)

    # --- while it runs --------------------------------------------------------------------------------------------

    def live_kv(self, function: str) -> list[StoredKv]:
        """The KV that unfinished requests would resume from."""
        return [
            StoredKv(request_id, epoch, replica_id or "", number, tuple(decode_chunks(chunks)))
            for request_id, epoch, replica_id, number, chunks in self.rows(
                "SELECT k.request_id, r.epoch, r.replica_id, k.number, k.chunks FROM request_kv k "
                "JOIN requests r ON r.id = k.request_id WHERE k.counted = 1 AND r.state IN ('queued', 'running') "
                "AND r.function = ? AND r.tenant = 'default' ORDER BY r.created_us, r.id, k.number",
                (function,),
            )
        ]

    def forge(self, row: StoredKv, chunks: tuple[KvChunk, ...]) -> None:
        self.write(
            "UPDATE request_kv SET chunks = ? WHERE request_id = ? AND number = ?",
            (msgspec.msgpack.encode(chunks), row.request_id, row.number),
        )

    # --- at the end -----------------------------------------------------------------------------------------------

    def ends(self) -> dict[str, Ended]:
        found: dict[str, Ended] = {}
        for request_id, state, last_seq, outcome in self.rows("SELECT id, state, last_seq, outcome FROM requests"):
            error = _decode_outcome(outcome).error if outcome else None
            found[request_id] = Ended(state, last_seq, error.code if error is not None else "")
        return found

    def turns(self) -> list[Turn]:
        return [
            Turn(
                request_id, epoch, replica_id, after, last, loaded, None if exact is None else bool(exact), detail or ""
            )
            for request_id, epoch, replica_id, after, last, loaded, exact, detail in self.rows(
                "SELECT request_id, epoch, replica_id, after_seq, last_seq, loaded_tokens, exact, detail FROM attempts "
                "ORDER BY request_id, epoch"
            )
        ]

    def log_faults(self) -> list[str]:
        """Logs with a gap or a double, or that are not as long as their request says."""
        faults: list[str] = []
        expected: dict[str, int] = {}
        for request_id, first_seq, last_seq in self.rows(
            "WITH RECURSIVE chain (request_id, previous, first_seq, last_seq) AS ("
            "SELECT r.id, t.previous, t.first_seq, t.last_seq FROM requests r JOIN token_log t ON t.id = r.log_head "
            "UNION ALL SELECT c.request_id, t.previous, t.first_seq, t.last_seq "
            "FROM token_log t JOIN chain c ON t.id = c.previous) "
            "SELECT request_id, first_seq, last_seq FROM chain ORDER BY request_id, first_seq"
        ):
            if first_seq != expected.get(request_id, 0) + 1:
                faults.append(f"the log of {request_id} has a gap or a double at {first_seq}")
            expected[request_id] = last_seq
        for request_id, ended in self.ends().items():
            if request_id in expected and expected[request_id] != ended.last_seq:
                faults.append(f"{request_id} has {ended.last_seq} tokens, its log {expected[request_id]}")
        return faults

    def ledger_faults(self) -> list[str]:
        """Attributed + cold start + idle + overhead + unreported = held, for every replica, each account closed; and
        every token of a request charged once."""
        parts = dict(
            self.rows("SELECT replica_id, sum(device_us) FROM ledger WHERE replica_id IS NOT NULL GROUP BY replica_id")
        )
        faults: list[str] = []
        for replica_id, held, closed in self.rows("SELECT replica_id, held_us, closed_us FROM replica_accounts"):
            if closed is None:
                faults.append(f"the account of {replica_id} is still open")
            elif parts.get(replica_id) != held:
                faults.append(f"{replica_id}: its parts sum to {parts.get(replica_id)} us, held were {held}")
        charged = self.rows(
            "SELECT r.id, r.last_seq, COALESCE(SUM(l.output_tokens), 0) FROM requests r "
            "LEFT JOIN ledger l ON l.request_id = r.id WHERE r.state IN ('done', 'cancelled', 'failed') "
            "GROUP BY r.id, r.last_seq"
        )
        wrong = [f"{name} has {tokens} tokens, charged were {paid}" for name, tokens, paid in charged if tokens != paid]
        return faults + wrong

    def known_packs(self) -> set[str]:
        """Packs that a request's record names, or the index of stored KV."""
        pinned = {c.pack for (chunks,) in self.rows("SELECT chunks FROM request_kv") for c in decode_chunks(chunks)}
        return pinned | {str(pack) for (pack,) in self.rows("SELECT pack FROM kv_packs")}


class PostgresBooks(Books):
    """The same of a PostgreSQL database; one connection for each look."""

    def __init__(self, url: str) -> None:
        self._url = url

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return asyncio.run(self._rows(statement, values))

    def write(self, statement: str, values: Sequence[Any]) -> None:
        asyncio.run(self._rows(statement, values))

    async def _rows(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        import asyncpg

        connection = await asyncpg.connect(self._url, timeout=20)
        try:
            return [tuple(row) for row in await connection.fetch(numbered(statement)[0], *values)]
        finally:
            await connection.close()
