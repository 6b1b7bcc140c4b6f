"""Bounds that hold over all gateways: each claims in the database a part of what is left, ahead of its use.

A claim is one row per resource and gateway, which only its gateway writes, in a transaction that runs as if alone: what
all of them have claimed never exceeds the bound. What is claimed is used without asking anybody, so that the database
is asked once for many requests and never where nothing has to wait. What a dead gateway had claimed counts for nothing
from the moment on at which it has stopped by itself (its lease: no clock is compared), and a gateway that slept through
its lease begins without any claim.
Limits: what is claimed and not used is not others' to use until it is given back; what came about without asking
(`must`) is written down whether or not it fits, and counts against everybody's next claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from control_plane.database import Connection, Database
from control_plane.gateways import Gateways

_OTHERS: Final = """
SELECT gateway, amount, until_us FROM shares WHERE resource = :resource AND gateway <> :me"""
_WRITE: Final = """
INSERT INTO shares (resource, gateway, amount, until_us) VALUES (:resource, :me, :amount, :until_us)
ON CONFLICT (resource, gateway) DO UPDATE SET amount = excluded.amount, until_us = excluded.until_us"""
_DROP: Final = "DELETE FROM shares WHERE resource = :resource AND gateway = :me"
_SWEEP: Final = """
DELETE FROM shares WHERE until_us < :now OR (until_us IS NULL AND gateway NOT IN (SELECT id FROM gateways))"""


@dataclass(frozen=True, slots=True)
class Want:
    resource: str
    amount: int
    """What this gateway would like to have of it, all together."""
    bound: int
    must: int = 0
    """What it has in any case, whether or not it fits."""
    until_us: int | None = None
    """Claimed for good until then (what is spent), whatever becomes of the gateway; None: as long as it lives."""


class Shares:
    def __init__(self, database: Database, gateways: Gateways) -> None:
        self._database = database
        self._gateways = gateways
        self._granted: dict[str, int] = {}
        self._others: dict[str, int] = {}
        self.lock: Final = asyncio.Lock()
        """Held over deciding and claiming: one claim of this gateway at a time."""
        self.unclear: set[str] = set()
        """Claims of which nobody knows what the database has: to be written anew."""
        self.claims = 0
        """Times that the database was asked."""

    def granted(self, resource: str) -> int:
        return self._granted.get(resource, 0)

    def others(self, resource: str) -> int:
        """What the other gateways had of it when this one last claimed."""
        return self._others.get(resource, 0)

    async def claim(self, wants: Iterable[Want]) -> Mapping[str, int]:
        """Have as much of each as there is; less than before gives the rest back at once. Under `lock`."""
        # In one order everywhere, so that two gateways that claim several never wait for each other.
        ordered = sorted(wants, key=lambda want: want.resource)
        if not ordered:
            return {}
        dead, me = self._gateways.dead, self._gateways.id
        for want in ordered:
            if want.amount < self.granted(want.resource):
                self._granted[want.resource] = want.amount  # not to be used any more while others are told

        def run(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
            granted: dict[str, int] = {}
            theirs: dict[str, int] = {}
            for want in ordered:
                values = {"resource": want.resource, "me": me}
                rows = connection.execute(_OTHERS, values).fetchall()
                others = sum(
                    amount for gateway, amount, until_us in rows if until_us is not None or gateway not in dead
                )
                amount = max(min(want.amount, want.bound - others), want.must, 0)
                if amount or want.until_us is not None:
                    connection.execute(_WRITE, {**values, "amount": amount, "until_us": want.until_us})
                else:
                    connection.execute(_DROP, values)
                granted[want.resource] = amount
                theirs[want.resource] = others
            return granted, theirs

        self.claims += 1
        self.unclear.update(want.resource for want in ordered)
        granted, theirs = await self._database.write(run)
        for resource, amount in theirs.items():
            if amount:
                self._others[resource] = amount
            else:
                self._others.pop(resource, None)
        self.unclear.difference_update(granted)
        for resource, amount in granted.items():
            if amount:
                self._granted[resource] = amount
            else:
                self._granted.pop(resource, None)
        return granted

    def void(self) -> None:
        """The lease had lapsed: others may have what was ours."""
        self._granted.clear()
        self._others.clear()

    async def sweep(self, now_us: int) -> None:
        """Rows of gateways that are gone, and of times that are over."""
        await self._database.write(lambda connection: connection.execute(_SWEEP, {"now": now_us}).rowcount)
