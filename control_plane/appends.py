"""Appends of all streams, gathered: what arrives while a commit is under way goes with the next one, by one statement.

The event loop fills a batch until the writer begins with it, so that batches grow with the load and not by waiting.
The writer's time per batch hardly depends on its size; the interpreter's lock is free while the database works.
Limits: a second append of a request in one batch goes in a second round, behind the first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec

from control_plane.database import Connection, Database
from control_plane.log_statements import NEXT_LOG_ID, POSTGRESQL_LOG, SQLITE_LOG, LogStatements
from control_plane.schema import SQLITE, Dialect

_encode_json: Final = msgspec.json.Encoder().encode


class AppendRow(NamedTuple):
    """Tokens of one stream at one place of its log."""

    request_id: str
    epoch: int
    first_seq: int
    last_seq: int
    payload: bytes
    prefill_us: int
    decode_us: int
    cached_tokens: int | None = None
    """This and what follows: told with the first tokens of a request, kept as it is when None."""
    at_us: int | None = None
    prefill_ends: bytes | None = None
    begun: str | None = None


class _Batch:
    __slots__ = ("durable", "futures", "handed_over", "rows")

    def __init__(self, durable: bool) -> None:
        self.rows: list[AppendRow] = []
        self.futures: list[asyncio.Future[bool]] = []
        self.durable = durable
        self.handed_over = False


class Appends:
    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        self._batches: dict[bool, _Batch] = {}
        self._lock = threading.Lock()

    def add(self, row: AppendRow, *, durable: bool) -> asyncio.Future[bool]:
        """True once it is committed, or was already; False: epoch or owner are no longer valid, or there is a gap."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        with self._lock:
            batch = self._batches.get(durable)
            opened = batch is None
            if batch is None:
                batch = self._batches[durable] = _Batch(durable)
            batch.rows.append(row)
            batch.futures.append(future)
        if opened:
            # The rest of this turn of the loop (tokens of other streams in the same frame) still joins.
            loop.call_soon(self._hand_over, batch)
        return future

    def hand_over(self) -> None:
        """What is submitted next comes after every append before it: an end must not overtake its last tokens."""
        for batch in list(self._batches.values()):
            self._hand_over(batch)

    def close(self) -> None:
        """Appends that come from now on are written behind what is submitted next: a batch that waits in the writer's
        queue would still take them, and come before it."""
        self.hand_over()
        with self._lock:
            self._batches.clear()

    def _hand_over(self, batch: _Batch) -> None:
        """Give a batch to the writer, once; it takes more rows until the writer begins with it."""
        if batch.handed_over:
            return
        batch.handed_over = True
        dialect, owner = self._database.driver.dialect, self._owner

        def run(connection: Connection) -> list[bool] | None:
            self._seal(batch)
            return write_appends(connection, dialect, owner, batch.rows)

        def settle(done: asyncio.Future[list[bool] | None]) -> None:
            self._seal(batch)
            error = done.exception()
            granted = None if error is not None else done.result()
            for place, future in enumerate(batch.futures):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(granted is None or granted[place])

        self._database.submit(run, durable=batch.durable, guarded=False).add_done_callback(settle)

    def _seal(self, batch: _Batch) -> None:
        with self._lock:
            if self._batches.get(batch.durable) is batch:
                del self._batches[batch.durable]


def log_statements(dialect: Dialect) -> LogStatements:
    return SQLITE_LOG if dialect.name == SQLITE.name else POSTGRESQL_LOG


def write_appends(connection: Connection, dialect: Dialect, owner: str, rows: Sequence[AppendRow]) -> list[bool] | None:
    """Which of them are in the log now; None: all."""
    rounds = _rounds(rows)
    if rounds is None:
        return _write_round(connection, dialect, owner, rows)
    granted = [True] * len(rows)
    for places in rounds:
        answers = _write_round(connection, dialect, owner, [rows[place] for place in places])
        for place, answer in zip(places, answers or (), strict=False):
            granted[place] = answer
    return granted


def _rounds(rows: Sequence[AppendRow]) -> list[list[int]] | None:
    """Places of the rows, so that each round has a request once; None: one round will do."""
    if len({row.request_id for row in rows}) == len(rows):
        return None
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, row in enumerate(rows):
        number = seen[row.request_id] = seen.get(row.request_id, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(place)
    return rounds


def _write_round(connection: Connection, dialect: Dialect, owner: str, rows: Sequence[AppendRow]) -> list[bool] | None:
    statements = log_statements(dialect)
    if statements is SQLITE_LOG:
        values = _as_json(rows)
        (values["base"],) = connection.execute(NEXT_LOG_ID).fetchone()
    else:
        values = _as_arrays(rows)
    values["me"] = owner
    for statement in statements.append:
        result = connection.execute(statement, values)
    moved = result.rowcount if statements is SQLITE_LOG else result.fetchone()[0]
    if moved == len(rows):
        return None
    have = {place for (place,) in connection.execute(statements.have, values).fetchall()}
    return [place in have for place in range(len(rows))]


def _as_json(rows: Sequence[AppendRow]) -> dict[str, Any]:
    """Places in the blob count from 1, as `substr` does."""
    payloads = [row.payload for row in rows]
    ends = [row.prefill_ends for row in rows if row.prefill_ends is not None]
    starts = list(accumulate(map(len, payloads), initial=1))
    ends_start = starts[-1]
    table: list[tuple[Any, ...]] = []
    for row, start in zip(rows, starts, strict=False):
        known: tuple[Any, ...] = ()
        if row.at_us is not None:
            known = (row.cached_tokens, row.at_us)
            if row.prefill_ends is not None:
                known = (*known, ends_start, len(row.prefill_ends), row.begun)
                ends_start += len(row.prefill_ends)
        table.append((row[0], row[1], row[2], row[3], start, len(row[4]), row[5], row[6], *known))
    return {"rows": _encode_json(table).decode(), "payloads": b"".join((*payloads, *ends))}


def _as_arrays(rows: Sequence[AppendRow]) -> dict[str, Any]:
    names = ("ids", "epochs", "firsts", "lasts", "payloads", "prefills", "decodes", "cached", "at", "ends",
             "begun")  # fmt: skip
    return dict(zip(names, (list(column) for column in zip(*rows, strict=True)), strict=True))
