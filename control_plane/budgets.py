"""What a tenant, or one of its keys, may spend in a minute, an hour, a day or a month: requests, tokens, money.

A budget is a bound over all gateways: each claims a part of it ahead of spending it (`control_plane.shares`), so that a
request within what is claimed costs no way to the database. Requests and the tokens of prompts are counted when a
request is accepted, generated tokens when it ends, money whenever the ledger is charged (a key's: by its requests; a
tenant's: by its replicas' starts and idle time, too). Once nothing is left new requests are refused until the period is
over; what is under way goes on. Periods are those of the database's clock.
Limits: what is known only afterwards goes over a budget by the requests in flight when it was used up, and by what the
other gateways have ended in the last second; a gateway that is killed takes up to a sixteenth of a budget with it, for
that period.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from control_plane.changes import Changes
from control_plane.database import Connection, Database
from control_plane.errors import BudgetExceeded, RateExceeded, Saturated
from control_plane.shares import Shares, Want

STEPS: Final = 16
LATE_US: Final = 3_600_000_000
"""How long after its period what was spent stays written down: a request that ends then is not counted in the next."""
_ALL: Final = "SELECT tenant, key_id, kind, period, amount FROM budgets"
_PUT: Final = """
INSERT INTO budgets (tenant, key_id, kind, period, amount, changed_us)
VALUES (:tenant, :key_id, :kind, :period, :amount, :now)
ON CONFLICT (tenant, key_id, kind, period) DO UPDATE SET amount = excluded.amount, changed_us = excluded.changed_us"""
_DROP: Final = """
DELETE FROM budgets WHERE tenant = :tenant AND key_id = :key_id AND kind = :kind AND period = :period"""
_CLAIMED: Final = "SELECT COALESCE(SUM(amount), 0) FROM shares WHERE resource = :resource"


class Kind(enum.StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    """Of prompts and answers."""
    MICROUSD = "microusd"


class Period(enum.StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"

    def window(self, now_us: int) -> tuple[int, int]:
        """Which one this moment is in, and when it ends; months are those of UTC's calendar."""
        if self is Period.MONTH:
            at = datetime.datetime.fromtimestamp(now_us / 1e6, datetime.UTC)
            number = at.year * 12 + at.month - 1
            end = datetime.datetime((number + 1) // 12, (number + 1) % 12 + 1, 1, tzinfo=datetime.UTC)
            return number, round(end.timestamp() * 1e6)
        length_us = _LENGTH_US[self]
        return now_us // length_us, (now_us // length_us + 1) * length_us


_LENGTH_US: Final = {Period.MINUTE: 60_000_000, Period.HOUR: 3_600_000_000, Period.DAY: 86_400_000_000}


@dataclass(frozen=True, slots=True)
class Budget:
    tenant: str
    key_id: str
    """Empty: of all the tenant's keys together."""
    kind: Kind
    period: Period
    amount: int

    @property
    def whose(self) -> str:
        return f"key {self.key_id}" if self.key_id else f"tenant {self.tenant}"

    def resource(self, window: int) -> str:
        return f"spent/{self.tenant}/{self.key_id}/{self.kind}/{self.period}/{window}"


class _Meter:
    """What this gateway has spent of one budget in the present period."""

    __slots__ = ("budget", "end_us", "moved", "resource", "spent")

    def __init__(self, budget: Budget, now_us: int) -> None:
        self.budget = budget
        self.begin(now_us)

    def begin(self, now_us: int) -> None:
        window, self.end_us = self.budget.period.window(now_us)
        self.resource = self.budget.resource(window)
        self.spent = 0
        self.moved = False
        """Since the last look."""

    def add(self, amount: int) -> None:
        self.spent += amount
        self.moved = True

    def want(self, amount: int) -> Want:
        bound = self.budget.amount
        return Want(self.resource, min(amount, bound), bound, must=self.spent, until_us=self.end_us + LATE_US)


class Budgets:
    """`clock_us`: instead of the database's."""

    def __init__(self, database: Database, shares: Shares, clock_us: Callable[[], int] | None = None) -> None:
        self._database = database
        self._shares = shares
        self.now_us = clock_us or database.clock.now_us
        self._changes = Changes()
        self._meters: dict[Budget, _Meter] = {}
        self._of: dict[tuple[str, str], list[_Meter]] = {}

    # --- which there are ---

    async def refresh(self) -> None:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(_ALL).fetchall()

        rows = await self._changes.read(lambda: self._database.read(run))
        kinds, periods = set(Kind), set(Period)
        # One that only a newer release knows is that release's to keep.
        found = {
            Budget(tenant, key_id, Kind(kind), Period(period), amount)
            for tenant, key_id, kind, period, amount in rows
            if kind in kinds and period in periods
        }
        self._have(found)

    def _have(self, budgets: Iterable[Budget]) -> None:
        before = {(m.budget.tenant, m.budget.key_id, m.budget.kind, m.budget.period): m for m in self._meters.values()}
        self._meters, self._of = {}, {}
        for budget in budgets:
            meter = before.get((budget.tenant, budget.key_id, budget.kind, budget.period))
            if meter is None:
                meter = _Meter(budget, self.now_us())
            meter.budget = budget
            self._meters[budget] = meter
            self._of.setdefault((budget.tenant, budget.key_id), []).append(meter)

    async def put(self, budget: Budget) -> None:
        values = {**_columns(budget), "amount": budget.amount, "now": self.now_us()}
        await self._database.write(lambda connection: connection.execute(_PUT, values).rowcount)
        self._changes.note()
        await self.refresh()

    async def drop(self, budget: Budget) -> bool:
        """Whatever its amount."""
        dropped = await self._database.write(lambda c: c.execute(_DROP, _columns(budget)).rowcount)
        self._changes.note()
        await self.refresh()
        return dropped > 0

    async def of(self, tenant: str) -> list[tuple[Budget, int, int]]:
        """Each with what is spent of it or claimed to be spent, over all gateways, and when its period ends."""
        await self.refresh()
        await self.settle()
        meters = [self._now(meter) for meter in self._meters.values() if meter.budget.tenant == tenant]
        names = [{"resource": meter.resource} for meter in meters]

        def run(connection: Connection) -> list[int]:
            return [int(connection.execute(_CLAIMED, name).fetchone()[0]) for name in names]

        claimed = await self._database.read(run)
        found = [(meter.budget, spent, meter.end_us) for meter, spent in zip(meters, claimed, strict=True)]
        return sorted(found, key=lambda each: (each[0].key_id, each[0].kind, _LENGTH_US.get(each[0].period, 1 << 62)))

    # --- spending ---

    def _now(self, meter: _Meter) -> _Meter:
        now_us = self.now_us()
        window, _ = meter.budget.period.window(now_us)
        if meter.budget.resource(window) != meter.resource:
            meter.begin(now_us)
        return meter

    def _meters_of(self, tenant: str, key_id: str | None) -> list[_Meter]:
        found = self._of.get((tenant, ""), [])
        if key_id and (own := self._of.get((tenant, key_id))):
            found = found + own
        return [self._now(meter) for meter in found]

    async def take(self, tenant: str, key_id: str, prompt_tokens: int) -> Spent:
        """Count a request that is about to be accepted. Raises `Saturated` where a budget has too little left."""
        if not self._of:
            return NOTHING_SPENT
        while True:
            meters = self._meters_of(tenant, key_id)
            costs = [(meter, _at_acceptance(meter.budget.kind, prompt_tokens)) for meter in meters]
            short = [(meter, cost) for meter, cost in costs if not self._fits(meter, cost)]
            if not short:
                break
            await self._claim(short)
        for meter, cost in costs:
            meter.add(cost)
        return Spent(tuple((meter, meter.resource, cost) for meter, cost in costs))

    def _fits(self, meter: _Meter, cost: int) -> bool:
        # Money is known afterwards: something must be left.
        have = min(self._shares.granted(meter.resource), meter.budget.amount)
        return meter.spent + max(cost, 1) <= have

    async def _claim(self, short: Sequence[tuple[_Meter, int]]) -> None:
        async with self._shares.lock:
            lacking = [(self._now(meter), max(cost, 1)) for meter, cost in short if not self._fits(meter, cost)]
            for meter, cost in lacking:
                if meter.spent + cost > meter.budget.amount:
                    raise self._exceeded(meter)
            await self._shares.claim(
                [meter.want(meter.spent + cost + max(meter.budget.amount // STEPS, 1)) for meter, cost in lacking]
            )
            for meter, cost in lacking:
                if not self._fits(meter, cost):
                    raise self._exceeded(meter)

    def _exceeded(self, meter: _Meter) -> Saturated:
        budget = meter.budget
        left_s = max((meter.end_us - self.now_us()) / 1e6, 0.001)
        message = (
            f"{budget.whose} may spend {budget.amount} {budget.kind} in a {budget.period}, and has (or the prompt is "
            f"longer than what is left); it goes on in {left_s:.0f} s"
        )
        of_a_minute = budget.period is Period.MINUTE
        return (RateExceeded if of_a_minute else BudgetExceeded)(message, retry_after_s=left_s)

    def ended(self, tenant: str, key_id: str, output_tokens: int) -> None:
        self._note(tenant, key_id, Kind.TOKENS, output_tokens)

    def charged(self, tenant: str, key_id: str | None, microusd: int) -> None:
        self._note(tenant, key_id, Kind.MICROUSD, microusd)

    def _note(self, tenant: str, key_id: str | None, kind: Kind, amount: int) -> None:
        if amount and self._of:
            for meter in self._meters_of(tenant, key_id):
                if meter.budget.kind is kind:
                    meter.add(amount)

    async def settle(self) -> None:
        """Others see what was spent, and may have what is claimed and was not used of late."""
        async with self._shares.lock:
            wants: list[Want] = []
            for meter in map(self._now, list(self._meters.values())):
                granted = self._shares.granted(meter.resource)
                ahead = 0 if not meter.moved else max(meter.budget.amount // STEPS, 1)
                wanted = max(min(granted, meter.spent + 2 * ahead), meter.spent)
                meter.moved = False
                if wanted != granted or meter.resource in self._shares.unclear:
                    wants.append(meter.want(wanted))
            await self._shares.claim(wants)


class Spent:
    """What a request has taken of budgets when it was accepted, to be put back if it is not."""

    __slots__ = ("_taken",)

    def __init__(self, taken: tuple[tuple[_Meter, str, int], ...] = ()) -> None:
        self._taken = taken

    def put_back(self) -> None:
        for meter, resource, cost in self._taken:
            if meter.resource == resource:
                meter.spent -= cost

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.put_back()
            raise


NOTHING_SPENT: Final = Spent()


def _at_acceptance(kind: Kind, prompt_tokens: int) -> int:
    return {Kind.REQUESTS: 1, Kind.TOKENS: prompt_tokens, Kind.MICROUSD: 0}[kind]


def _columns(budget: Budget) -> dict[str, Any]:
    return {
        "tenant": budget.tenant,
        "key_id": budget.key_id,
        "kind": budget.kind.value,
        "period": budget.period.value,
    }
