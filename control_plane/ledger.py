"""Who used which device for how long, and what that costs: rows that are only ever added.

For every replica the `device_us` of all rows that name it sum to what it has been held, and their `cost_microusd` to
that time's price rounded once, at any moment: an account per replica carries both sums, and each new set of rows gets
the difference, cut by largest remainder. Attributed time is charged to requests (stages prefill and decode of each
attempt), the rest to the replica (cold_start, idle, overhead, unreported). What comes late moves by a correction row.
Limits: a request's other stages and its `total` say how long it waited and how many tokens it had, and cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from function_runtime.protocol import DeviceTime, ReplicaStatus

PRICE_UNIT_US: Final = 3_600_000_000
"""Prices are micro-dollars per device hour."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a row is about."""

    tenant: str
    function: str
    revision: int
    key_id: str | None = None
    model: str | None = None
    request_id: str | None = None
    epoch: int | None = None
    replica_id: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    """request | replica | correction"""
    stage: str
    wall_us: int
    device_us: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LedgerRow:
    id: int
    at_us: int
    kind: str
    tenant: str
    key_id: str | None
    function: str
    revision: int
    model: str | None
    request_id: str | None
    epoch: int | None
    replica_id: str | None
    stage: str
    wall_us: int
    device_us: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    price_microusd_per_hour: int
    cost_microusd: int


_COLUMNS: Final = (
    "id, at_us, kind, tenant, key_id, function, revision, model, request_id, epoch, replica_id, stage, wall_us, "
    "device_us, input_tokens, cached_tokens, output_tokens, price_microusd_per_hour, cost_microusd"
)
_INSERT: Final = """
INSERT INTO ledger (at_us, kind, tenant, key_id, function, revision, model, request_id, epoch, replica_id, stage,
    wall_us, device_us, input_tokens, cached_tokens, output_tokens, price_microusd_per_hour, cost_microusd)
VALUES (:at_us, :kind, :tenant, :key_id, :function, :revision, :model, :request_id, :epoch, :replica_id, :stage,
    :wall_us, :device_us, :input_tokens, :cached_tokens, :output_tokens, :price, :cost)"""
_OPEN: Final = """
INSERT INTO replica_accounts (replica_id, tenant, function, revision, price_microusd_per_hour, reported_us)
SELECT :replica_id, :tenant, :function, :revision, COALESCE((SELECT price_microusd_per_hour FROM revisions
    WHERE tenant = :tenant AND function = :function AND revision = :revision), 0), :now
ON CONFLICT (replica_id) DO NOTHING"""
_ACCOUNT: Final = """
UPDATE replica_accounts SET reported_us = reported_us WHERE replica_id = :replica_id
RETURNING price_microusd_per_hour, charged_us, charged_microusd, attributed_us, cold_us, idle_us, overhead_us,
    unreported_us, closed_us"""
_CHARGE: Final = """
UPDATE replica_accounts SET charged_us = :charged_us, charged_microusd = :charged_microusd,
    attributed_us = :attributed_us, cold_us = :cold_us, idle_us = :idle_us, overhead_us = :overhead_us,
    unreported_us = :unreported_us, reported_us = :reported_us, held_us = :held_us, closed_us = :closed_us
WHERE replica_id = :replica_id"""


@dataclass(slots=True)
class _Account:
    """What has been charged of a replica so far. The parts sum to `charged_us`."""

    price: int
    charged_us: int
    charged_microusd: int
    attributed_us: int
    cold_us: int
    idle_us: int
    overhead_us: int
    unreported_us: int
    closed_us: int | None


def cost_microusd(device_us: int, price_microusd_per_hour: int) -> int:
    """Rounded half up; the only rounding of money there is."""
    return (2 * device_us * price_microusd_per_hour + PRICE_UNIT_US) // (2 * PRICE_UNIT_US)


def apportion(total_microusd: int, device_us: Sequence[int], price_microusd_per_hour: int) -> list[int]:
    """Cut a sum of money over times (which may be negative), exactly: the floor of each share, and what is left one by
    one to the largest remainders. `total_microusd` is the sum of the exact shares, rounded down or up."""
    shares = [divmod(each * price_microusd_per_hour, PRICE_UNIT_US) for each in device_us]
    costs = [whole for whole, _ in shares]
    left = total_microusd - sum(costs)
    for i in sorted(range(len(shares)), key=lambda i: (-shares[i][1], i))[:left]:
        costs[i] += 1
    return costs


def _account(connection: Connection, subject: Subject, at_us: int) -> _Account:
    values = {
        "replica_id": subject.replica_id,
        "tenant": subject.tenant,
        "function": subject.function,
        "revision": subject.revision,
        "now": at_us,
    }
    row = connection.execute(_ACCOUNT, values).fetchone()
    if row is None:
        connection.execute(_OPEN, values)
        row = connection.execute(_ACCOUNT, values).fetchone()
    return _Account(*row)


def _write(
    connection: Connection, subject: Subject, entries: Sequence[Entry], costs: Sequence[int], price: int, at_us: int
) -> None:
    connection.executemany(
        _INSERT,
        [
            {
                "at_us": at_us,
                "kind": entry.kind,
                "tenant": subject.tenant,
                "key_id": subject.key_id if entry.kind == "request" else None,
                "function": subject.function,
                "revision": subject.revision,
                "model": subject.model if entry.kind == "request" else None,
                "request_id": subject.request_id if entry.kind == "request" else None,
                "epoch": subject.epoch if entry.kind == "request" and entry.device_us else None,
                "replica_id": subject.replica_id if entry.device_us or entry.kind != "request" else None,
                "stage": entry.stage,
                "wall_us": entry.wall_us,
                "device_us": entry.device_us,
                "input_tokens": entry.input_tokens,
                "cached_tokens": entry.cached_tokens,
                "output_tokens": entry.output_tokens,
                "price": price,
                "cost": cost,
            }
            for entry, cost in zip(entries, costs, strict=True)
        ],
    )


def _charge(
    connection: Connection, subject: Subject, account: _Account, entries: Sequence[Entry], at_us: int
) -> None:
    """Write the rows with their shares of what the account's cost grows by."""
    times = [entry.device_us for entry in entries]
    account.charged_us += sum(times)
    total = cost_microusd(account.charged_us, account.price)
    costs = apportion(total - account.charged_microusd, times, account.price)
    account.charged_microusd = total
    _write(connection, subject, entries, costs, account.price, at_us)


def _save(connection: Connection, replica_id: str | None, account: _Account, reported_us: int, held_us: int) -> None:
    connection.execute(
        _CHARGE,
        {
            "replica_id": replica_id,
            "charged_us": account.charged_us,
            "charged_microusd": account.charged_microusd,
            "attributed_us": account.attributed_us,
            "cold_us": account.cold_us,
            "idle_us": account.idle_us,
            "overhead_us": account.overhead_us,
            "unreported_us": account.unreported_us,
            "reported_us": reported_us,
            "held_us": held_us,
            "closed_us": account.closed_us,
        },
    )


def charge_attempt(
    connection: Connection,
    subject: Subject,
    device: DeviceTime,
    at_us: int,
    prefill_wall_us: int = 0,
    decode_wall_us: int = 0,
) -> None:
    """The device time of one attempt, once, when it ends. If its replica's account is closed already, the time was
    counted there as unreported, and a correction takes it away again."""
    entries = [
        Entry("request", "prefill", prefill_wall_us, device.prefill_us),
        Entry("request", "decode", decode_wall_us, device.decode_us),
    ]
    used_us = device.prefill_us + device.decode_us
    if used_us == 0 or subject.replica_id is None:
        waited = [entry for entry in entries if entry.wall_us]
        if waited:
            _write(connection, subject, waited, [0] * len(waited), 0, at_us)
        return
    account = _account(connection, subject, at_us)
    entries = [entry for entry in entries if entry.wall_us or entry.device_us]
    if account.closed_us is not None:
        entries.append(Entry("correction", "unreported", -used_us, -used_us))
        account.unreported_us -= used_us
    account.attributed_us += used_us
    _charge(connection, subject, account, entries, at_us)
    connection.execute(
        """UPDATE replica_accounts SET charged_us = :charged_us, charged_microusd = :charged_microusd,
            attributed_us = :attributed_us, unreported_us = :unreported_us WHERE replica_id = :replica_id""",
        {
            "charged_us": account.charged_us,
            "charged_microusd": account.charged_microusd,
            "attributed_us": account.attributed_us,
            "unreported_us": account.unreported_us,
            "replica_id": subject.replica_id,
        },
    )


def record_stages(connection: Connection, subject: Subject, entries: Sequence[Entry], at_us: int) -> None:
    """Stages of a request that hold no device."""
    _write(connection, subject, entries, [0] * len(entries), 0, at_us)


def settle_replica(connection: Connection, status: ReplicaStatus, at_us: int, *, final: bool) -> None:
    """Charge what a replica's own time has grown by. `final`: nothing more will come, what no part explains is
    unreported. Settling twice the same adds nothing."""
    subject = Subject(status.spec.tenant, status.function, status.revision, replica_id=status.replica_id)
    account, told = _account(connection, subject, at_us), status.time
    grown = {
        "cold_start": told.cold_us - account.cold_us,
        "idle": told.idle_us - account.idle_us,
        "overhead": told.overhead_us - account.overhead_us,
    }
    account.cold_us, account.idle_us, account.overhead_us = told.cold_us, told.idle_us, told.overhead_us
    entries: list[Entry] = []
    if final:
        grown["unreported"] = told.held_us - account.charged_us - sum(grown.values())
        account.unreported_us += grown["unreported"]
        if account.closed_us is None:
            account.closed_us = at_us
            entries.append(Entry("replica", "attributed", account.attributed_us))
    entries += [
        Entry("replica" if grown_us > 0 else "correction", stage, grown_us, grown_us)
        for stage, grown_us in grown.items()
        if grown_us
    ]
    if entries:
        _charge(connection, subject, account, entries, at_us)
    _save(connection, status.replica_id, account, at_us, told.held_us)


class Ledger:
    """The ledger's own writes and what `stoker why` reads of it. Requests are charged by the journal, in the
    transaction of their outcome."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def report_replica(self, status: ReplicaStatus) -> None:
        """Charge a living replica's time so far; once a minute is often enough, and when it becomes ready."""
        await self._settle(status, final=False)

    async def close_replica(self, status: ReplicaStatus) -> None:
        """A replica has ended: account for all the time it was held. Idempotent."""
        await self._settle(status, final=True)

    async def _settle(self, status: ReplicaStatus, *, final: bool) -> None:
        at_us = time.time_ns() // 1000
        await self._database.write(lambda connection: settle_replica(connection, status, at_us, final=final))

    async def open_replicas(self) -> list[str]:
        """Replicas whose account is still open: after a restart, those that are gone must be closed."""

        def run(connection: Connection) -> list[str]:
            rows = connection.execute("SELECT replica_id FROM replica_accounts WHERE closed_us IS NULL").fetchall()
            return [str(row[0]) for row in rows]

        return await self._database.read(run)

    async def of_request(self, request_id: str) -> list[LedgerRow]:
        return await self._rows("request_id", request_id)

    async def of_replica(self, replica_id: str) -> list[LedgerRow]:
        return await self._rows("replica_id", replica_id)

    async def _rows(self, column: str, value: str) -> list[LedgerRow]:
        def run(connection: Connection) -> list[LedgerRow]:
            rows: list[Any] = connection.execute(
                f"SELECT {_COLUMNS} FROM ledger WHERE {column} = :value ORDER BY id", {"value": value}
            ).fetchall()
            return [LedgerRow(*row) for row in rows]

        return await self._database.read(run)
