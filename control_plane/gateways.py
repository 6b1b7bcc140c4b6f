"""Which gateways live, which of them leads the control loop, and whether this one may act: leases in the database.

A gateway renews its row every `renew_s`, and the leader the lease `loop` with it, which is shorter (`lead_s`). Nobody
compares clocks: a row is alive while it keeps changing, by the watcher's own monotonic clock, and a gateway holds what
it renewed for a little less than the lease from the moment before the renewal was sent. So a holder stops before
anybody takes over, whatever wall clocks do; a watcher that was itself away (stopped, without its database) begins to
count anew.
Limits: a gateway that starts watches a whole lease before it takes over from one that died earlier; monotonic clocks
may differ in speed by `MARGIN`. With a database of its own a gateway is alone: it always holds and always leads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from control_plane.errors import LeaseLapsed, StokerError
from control_plane.settings import GatewaySettings

logger = logging.getLogger(__name__)

LOOP: Final = "loop"
MARGIN: Final = 0.05
"""Share of a lease by which its holder stops before anybody else may begin."""
_SLACK_S: Final = 0.002

_RENEW: Final = """
INSERT INTO gateways (id, host, pid, started_us, lease_until_us, url) VALUES (:id, :host, :pid, :now, :mark, :url)
ON CONFLICT (id) DO UPDATE SET lease_until_us = excluded.lease_until_us, url = excluded.url"""
_ROWS: Final = "SELECT id, url, started_us, lease_until_us FROM gateways ORDER BY started_us, id"
_OWNERS: Final = "SELECT DISTINCT owner FROM requests WHERE state IN ('queued', 'running')"
_RENEW_LOOP: Final = "UPDATE leases SET until_us = :mark WHERE name = :name AND holder = :id"
_LOOP: Final = "SELECT holder, epoch, until_us FROM leases WHERE name = :name"
_FIRST_LOOP: Final = """
INSERT INTO leases (name, holder, until_us, epoch) VALUES (:name, :id, :mark, 1) ON CONFLICT (name) DO NOTHING"""
_TAKE_LOOP: Final = """
UPDATE leases SET holder = :id, until_us = :mark, epoch = epoch + 1
WHERE name = :name AND holder = :holder AND epoch = :epoch AND until_us = :seen"""
_FORGET: Final = "DELETE FROM gateways WHERE id = :id AND lease_until_us = :mark"
_FORGET_SHARES: Final = """
DELETE FROM shares WHERE gateway = :id AND until_us IS NULL AND NOT EXISTS (SELECT 1 FROM gateways WHERE id = :id)"""
_LEAVE: Final = "DELETE FROM gateways WHERE id = :id"
_LEAVE_LOOP: Final = "UPDATE leases SET holder = '' WHERE name = :name AND holder = :id"


@dataclass(frozen=True, slots=True)
class Peer:
    """A living gateway."""

    id: str
    url: str
    started_us: int


@dataclass(frozen=True, slots=True)
class _Loop:
    holder: str
    epoch: int
    mark: int


@dataclass(frozen=True, slots=True)
class _Seen:
    peers: dict[str, tuple[Peer, int]]
    """Others' rows with their marks."""
    loop: _Loop | None
    owners: frozenset[str]


class Watched:
    """Things that live as long as their marks change, by one monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._since: dict[str, tuple[int, float]] = {}

    def see(self, marks: dict[str, int], now_s: float, *, anew: bool) -> None:
        """`anew`: nobody looked for a while, so that an unchanged mark says nothing yet."""
        before = {} if anew else self._since
        self._since = {
            name: before[name] if name in before and before[name][0] == mark else (mark, now_s)
            for name, mark in marks.items()
        }

    def lapsed(self, name: str, now_s: float) -> bool:
        """A name without a row has given itself up."""
        known = self._since.get(name)
        return known is None or now_s - known[1] >= self._lease_s

    def next_s(self, now_s: float) -> float:
        """Until the first of those alive now would lapse."""
        left = [since + self._lease_s - now_s for _, since in self._since.values()]
        return min((each for each in left if each > 0), default=self._lease_s)


class Gateways:
    """Use `start`, then `run` as a task; `close` gives everything up."""

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        settings: GatewaySettings,
        *,
        alone: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self.id = gateway_id
        self.alone = alone
        self.url = ""
        self.peers: dict[str, Peer] = {}
        """The others that live, oldest first."""
        self.leader = gateway_id if alone else ""
        """Who holds the lease of the control loop, as last seen."""
        self.dead: frozenset[str] = frozenset()
        """Gateways that have a row and do not live any more: each has stopped by itself before."""
        self.orphaned: frozenset[str] = frozenset()
        """Owners of unfinished requests that do not live: what those need is nobody's demand until it is adopted."""
        self.started_us = 0
        self._held_until_s = 0.0
        self._leads_until_s = float("inf") if alone else 0.0
        self._looked_s = float("-inf")
        self._gateways = Watched(settings.lease_s)
        self._loops = Watched(settings.lead_s)
        self._wake = asyncio.Event()
        self._moved: list[asyncio.Future[None]] = []
        self._closed = False
        self.on_change: Callable[[], None] = lambda: None
        """Told when a peer came or went, or the lead did, or what nobody owns."""
        self.on_orphans: Callable[[tuple[str, ...]], None] = lambda owners: None
        """Told of owners of unfinished requests that do not live (any more)."""
        self.on_regained: Callable[[], None] = lambda: None
        """Told when the lease is held again after it was not: others may have taken over meanwhile."""

    # --- what follows from it ---

    @property
    def held(self) -> bool:
        """Whether this gateway may accept and commit."""
        return self.alone or self._clock() < self._held_until_s

    @property
    def leads(self) -> bool:
        return self.leads_for_s > 0

    @property
    def leads_for_s(self) -> float:
        """How much longer this gateway leads by its own clock, if nothing is renewed; 0: it does not."""
        if self.leader != self.id:
            return 0.0
        if self.alone:
            return float("inf")
        return max(min(self._held_until_s, self._leads_until_s) - self._clock(), 0.0)

    def require(self) -> None:
        if not self.held:
            raise LeaseLapsed()

    def url_of(self, gateway_id: str) -> str:
        """Empty if it does not live."""
        peer = self.peers.get(gateway_id)
        return peer.url if peer is not None else ""

    async def moved(self) -> None:
        """Returns at the next change of who lives."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._moved.append(waiter)
        await waiter

    # --- life ---

    async def start(self, url: str = "", predecessor: str = "") -> None:
        """`predecessor`: a gateway that is known to be dead, as this one holds the lock of its data directory."""
        self.url = url or self.url
        self.started_us = time.time_ns() // 1000
        if predecessor and not self.alone:
            await self._leave(predecessor)
        await self.look()

    def look_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.look()
            except StokerError as error:
                logger.warning("event=lease_not_renewed error=%s", error)
                if not self.held or (self.leader == self.id and not self.leads):
                    self._tell()

    def _pause_s(self) -> float:
        if self.alone:
            return self._settings.renew_s
        now_s = self._clock()
        soonest = min(self._gateways.next_s(now_s), self._loops.next_s(now_s)) + _SLACK_S
        return min(self._settings.renew_s, soonest)

    async def look(self) -> None:
        """Renew, and see who else did."""
        sent_s, was_held, led, first = self._clock(), self.held, self.leads, self._held_until_s == 0.0
        mark = time.time_ns() // 1000 + round(self._settings.lease_s * 1e6)
        seen = await self._database.write(lambda connection: self._exchange(connection, mark))
        self._held_until_s = sent_s + self._settings.lease_s * (1 - MARGIN)
        if self.alone:
            return
        now_s = self._clock()
        # NOTE: counted from the look before; a failed one leaves the gap open.
        away_s = now_s - self._looked_s
        self._looked_s = now_s
        marks = {name: row[1] for name, row in seen.peers.items()}
        self._gateways.see(marks, now_s, anew=away_s > self._settings.lease_s * 0.75)
        loop = {LOOP: seen.loop.mark} if seen.loop is not None else {}
        self._loops.see(loop, now_s, anew=away_s > self._settings.lead_s * 0.75)
        before = (set(self.peers), self.leader, self.orphaned, was_held, led)
        self.peers = {name: peer for name, (peer, _) in seen.peers.items() if not self._gateways.lapsed(name, now_s)}
        self.dead = frozenset(seen.peers.keys() - self.peers.keys())
        self.leader = await self._follow_loop(seen, now_s, mark)
        if self.leader == self.id:
            self._leads_until_s = sent_s + self._settings.lead_s * (1 - MARGIN)
        self.orphaned = frozenset(
            owner for owner in seen.owners if owner != self.id and self._gateways.lapsed(owner, now_s)
        )
        if before != (set(self.peers), self.leader, self.orphaned, True, self.leads):
            logger.info("event=gateways living=%d leader=%s", len(self.peers) + 1, self.leader or "-")
            self._tell()
        if not (was_held or first) and self.held:
            self.on_regained()
        if self.orphaned:
            self.on_orphans(tuple(self.orphaned))
        await self._forget_dead(seen, now_s)

    def _exchange(self, connection: Connection, mark: int) -> _Seen:
        values: dict[str, Any] = {
            "id": self.id,
            "host": platform.node(),
            "pid": os.getpid(),
            "now": self.started_us,
            "mark": mark,
            "url": self.url,
            "name": LOOP,
        }
        connection.execute(_RENEW, values)
        if self.alone:
            return _Seen({}, None, frozenset())
        self._database.clock.ask(connection)
        connection.execute(_RENEW_LOOP, values)
        rows = connection.execute(_ROWS).fetchall()
        loop = connection.execute(_LOOP, values).fetchone()
        owners = connection.execute(_OWNERS).fetchall()
        return _Seen(
            {row[0]: (Peer(row[0], row[1], row[2]), row[3]) for row in rows if row[0] != self.id},
            None if loop is None else _Loop(*loop),
            frozenset(str(owner) for (owner,) in owners),
        )

    async def _follow_loop(self, seen: _Seen, now_s: float, mark: int) -> str:
        """Who leads now; takes the lead where nobody does."""
        loop = seen.loop
        values: dict[str, Any] = {"name": LOOP, "id": self.id, "mark": mark}
        if loop is None:
            statement = _FIRST_LOOP
        elif loop.holder == self.id:
            return self.id
        elif loop.holder in seen.peers and not self._loops.lapsed(LOOP, now_s):
            return loop.holder
        else:
            statement = _TAKE_LOOP
            values |= {"holder": loop.holder, "epoch": loop.epoch, "seen": loop.mark}
        taken = await self._database.write(lambda connection: connection.execute(statement, values).rowcount == 1)
        if taken:
            logger.info("event=lead_taken gateway=%s before=%s", self.id, loop.holder if loop is not None else "-")
        # Whoever was quicker is seen at the next look.
        return self.id if taken else ""

    async def _forget_dead(self, seen: _Seen, now_s: float) -> None:
        """Rows of the dead go once they own nothing; one that was only asleep writes its row anew."""
        dead = [
            {"id": name, "mark": mark}
            for name, (_, mark) in seen.peers.items()
            if self._gateways.lapsed(name, now_s) and name not in seen.owners
        ]
        if dead:
            await self._database.write(lambda connection: _forget(connection, dead))

    def _tell(self) -> None:
        moved, self._moved = self._moved, []
        for waiter in moved:
            if not waiter.done():
                waiter.set_result(None)
        self.on_change()

    async def close(self) -> None:
        """Give the leases up at a clean end, so that the requests parked here are adopted at once."""
        self._closed = True
        self._wake.set()
        self._held_until_s = 0.0

        await self._leave(self.id)

    async def _leave(self, gateway_id: str) -> None:
        def run(connection: Connection) -> int:
            values = {"id": gateway_id, "name": LOOP}
            connection.execute(_LEAVE_LOOP, values)
            left = connection.execute(_LEAVE, values).rowcount
            connection.execute(_FORGET_SHARES, values)
            return left

        await self._database.write(run)


def _forget(connection: Connection, dead: list[dict[str, Any]]) -> None:
    connection.executemany(_FORGET, dead)
    for values in dead:
        connection.execute(_FORGET_SHARES, {"id": values["id"]})


def internal_token(secret: bytes) -> str:
    """What gateways show one another; the secret never leaves the database."""
    return hmac.new(secret, b"stoker-internal-v1", hashlib.sha256).hexdigest()
