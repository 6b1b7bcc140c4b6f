"""An account per replica: how much of its time has been charged, for what, and for how much money.

`charge` writes ledger rows and moves the account in one transaction, so that at any moment the rows that name a replica
sum to the account: `device_us` to the time charged, `cost_microusd` to that time's price rounded once. Each set of rows
gets the difference, cut by largest remainder. Limits: runs inside somebody's transaction; an account that another
gateway moves at the same moment is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from control_plane.database import Connection
from control_plane.errors import StorageUnavailable
from function_runtime.protocol import ReplicaStatus

Charged: TypeAlias = Callable[[str, str | None, int], None]
"""Told, after the commit, of a tenant, a key where a request was charged, and by how many micro-dollars."""


def nobody_charged(tenant: str, key_id: str | None, microusd: int) -> None:
    """Nobody wants to know."""


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


@dataclass(slots=True)
class Account:
    """What has been charged of a replica so far. The parts sum to `charged_us`."""

    version: int
    price_microusd_per_hour: int
    charged_us: int
    charged_microusd: int
    attributed_us: int
    cold_us: int
    idle_us: int
    overhead_us: int
    unreported_us: int
    held_us: int
    reported_us: int
    closed_us: int | None


_COLUMNS: Final = (
    "stage", "kind", "wall_us", "device_us", "input_tokens", "cached_tokens", "output_tokens", "cost_microusd",
    "model", "request_id", "epoch", "replica_id", "key_id", "price_microusd_per_hour",
)  # fmt: skip
_SHARED_COLUMNS: Final = ("at_us", "tenant", "function", "revision")
_OPEN: Final = """
INSERT INTO replica_accounts (replica_id, tenant, function, revision, price_microusd_per_hour, reported_us)
SELECT :replica_id, :tenant, :function, :revision, COALESCE((SELECT price_microusd_per_hour FROM revisions
    WHERE tenant = :tenant AND function = :function AND revision = :revision), 0), :now
ON CONFLICT (replica_id) DO NOTHING"""
_READ: Final = """
SELECT version, price_microusd_per_hour, charged_us, charged_microusd, attributed_us, cold_us, idle_us, overhead_us,
    unreported_us, held_us, reported_us, closed_us
FROM replica_accounts WHERE replica_id = :replica_id"""
_MOVE: Final = """
UPDATE replica_accounts SET version = version + 1, charged_us = :charged_us, charged_microusd = :charged_microusd,
    attributed_us = :attributed_us, cold_us = :cold_us, idle_us = :idle_us, overhead_us = :overhead_us,
    unreported_us = :unreported_us, held_us = :held_us, reported_us = :reported_us, closed_us = :closed_us
WHERE replica_id = :replica_id AND version = :version"""
_TRIES: Final = 10


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


def charge_request(connection: Connection, subject: Subject, entries: Sequence[Entry], at_us: int) -> int:
    """The rows of a request; those with device time are charged to the replica of `subject`. If its account is closed
    already, that time was counted as unreported there, and a correction takes it away again. What it costs more now."""
    used_us = sum(entry.device_us for entry in entries)
    if used_us == 0 or subject.replica_id is None:
        _write(connection, subject, entries, [0] * len(entries), 0, at_us)
        return 0
    for _ in range(_TRIES):
        account = _read(connection, subject, at_us)
        rows = list(entries)
        if account.closed_us is not None:
            rows.append(Entry("correction", "unreported", -used_us, -used_us))
            account.unreported_us -= used_us
        account.attributed_us += used_us
        if (charged := _charge(connection, subject, account, rows, at_us)) is not None:
            return charged
    raise StorageUnavailable(f"the account of {subject.replica_id} is busy")


def settle_replica(connection: Connection, status: ReplicaStatus, at_us: int, *, final: bool) -> int:
    """Charge what a replica's own time has grown by. `final`: nothing more will come, what no part explains is
    unreported. Settling twice the same adds nothing; of one that has ended nothing but another end is taken: a report
    that was under way when it came knows less. What it costs more now."""
    subject = Subject(status.spec.tenant, status.function, status.revision, replica_id=status.replica_id)
    for _ in range(_TRIES):
        account = _read(connection, subject, at_us)
        if account.closed_us is not None and not final:
            return 0
        rows = _settled(account, status, at_us, final=final)
        if (charged := _charge(connection, subject, account, rows, at_us)) is not None:
            return charged
    raise StorageUnavailable(f"the account of {status.replica_id} is busy")


def _settled(account: Account, status: ReplicaStatus, at_us: int, *, final: bool) -> list[Entry]:
    """Bring the account to what the replica says; the rows that explain the difference."""
    told = status.time
    grown = {
        "cold_start": told.cold_us - account.cold_us,
        "idle": told.idle_us - account.idle_us,
        "overhead": told.overhead_us - account.overhead_us,
    }
    account.cold_us, account.idle_us, account.overhead_us = told.cold_us, told.idle_us, told.overhead_us
    account.held_us, account.reported_us = told.held_us, at_us
    rows: list[Entry] = []
    if final:
        grown["unreported"] = told.held_us - account.charged_us - sum(grown.values())
        account.unreported_us += grown["unreported"]
        if account.closed_us is None:
            account.closed_us = at_us
            rows.append(Entry("replica", "attributed", account.attributed_us))
    rows += [
        Entry("replica" if grown_us > 0 else "correction", stage, grown_us, grown_us)
        for stage, grown_us in grown.items()
        if grown_us
    ]
    return rows


def _read(connection: Connection, subject: Subject, at_us: int) -> Account:
    values = {"replica_id": subject.replica_id}
    row = connection.execute(_READ, values).fetchone()
    if row is None:
        opening = {"tenant": subject.tenant, "function": subject.function, "revision": subject.revision, "now": at_us}
        connection.execute(_OPEN, {**values, **opening})
        row = connection.execute(_READ, values).fetchone()
    return Account(*row)


def _charge(
    connection: Connection, subject: Subject, account: Account, rows: Sequence[Entry], at_us: int
) -> int | None:
    """Move the account as it was read, and write the rows with their shares of what its cost grows by. None: somebody
    else moved it in between."""
    times = [row.device_us for row in rows]
    account.charged_us += sum(times)
    total = cost_microusd(account.charged_us, account.price_microusd_per_hour)
    costs = apportion(total - account.charged_microusd, times, account.price_microusd_per_hour)
    account.charged_microusd = total
    values = {
        "replica_id": subject.replica_id,
        "version": account.version,
        "charged_us": account.charged_us,
        "charged_microusd": account.charged_microusd,
        "attributed_us": account.attributed_us,
        "cold_us": account.cold_us,
        "idle_us": account.idle_us,
        "overhead_us": account.overhead_us,
        "unreported_us": account.unreported_us,
        "held_us": account.held_us,
        "reported_us": account.reported_us,
        "closed_us": account.closed_us,
    }
    if connection.execute(_MOVE, values).rowcount != 1:
        return None
    _write(connection, subject, rows, costs, account.price_microusd_per_hour, at_us)
    return sum(costs)


def _write(
    connection: Connection, subject: Subject, rows: Sequence[Entry], costs: Sequence[int], price: int, at_us: int
) -> None:
    """A request's rows name the replica only where they hold its device; a replica's rows name no request."""
    if not rows:
        return
    values: dict[str, Any] = {
        "at_us": at_us, "tenant": subject.tenant, "function": subject.function, "revision": subject.revision,
    }  # fmt: skip
    for place, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        of_request, holds_device = row.kind == "request", row.device_us != 0
        cells = (
            row.stage,
            row.kind,
            row.wall_us,
            row.device_us,
            row.input_tokens,
            row.cached_tokens,
            row.output_tokens,
            cost,
            subject.model if of_request else None,
            subject.request_id if of_request else None,
            subject.epoch if of_request and holds_device else None,
            subject.replica_id if holds_device or not of_request else None,
            subject.key_id if of_request else None,
            price if holds_device else 0,
        )
        for column, cell in zip(_COLUMNS, cells, strict=True):
            values[f"{column}_{place}"] = cell
    connection.execute(_insert(len(rows)), values)


@cache
def _insert(rows: int) -> str:
    """One statement for all rows: each statement costs the writer a change of threads."""
    shared = ", ".join(f":{column}" for column in _SHARED_COLUMNS)
    tuples = (f"({shared}, {', '.join(f':{column}_{place}' for column in _COLUMNS)})" for place in range(rows))
    return f"INSERT INTO ledger ({', '.join((*_SHARED_COLUMNS, *_COLUMNS))}) VALUES {', '.join(tuples)}"
