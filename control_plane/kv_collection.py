"""Letting stored KV go: what nothing leads to, what is not worth its bytes, what is over quota, what nobody names.

    decide -> retire (one transaction) -> a grace in which nobody names it -> claim -> delete the object -> forget

A pack that any unfinished request names is not deleted however it stands, and its grace begins anew. The grace is
longer than a replica remembers a name and far longer than a read may take, so nothing is deleted under a reader. Each
arrow is one transaction or one idempotent deletion: a kill anywhere leaves what the next run carries on. Several
gateways may collect at once; a claim has one winner. Limits: decides over one tenant's chunks in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from control_plane import statements as sql
from control_plane.database import Connection, Database
from control_plane.history import decode_chunks
from control_plane.journal import Journal
from control_plane.kv_index import retire
from control_plane.kv_lifetimes import OVER_QUOTA, UNREACHABLE, WORTHLESS, Departures, Limits, StoredChunk, departures
from control_plane.quotas import quota_of
from control_plane.settings import KvSettings
from model_loader.errors import LoaderError

if TYPE_CHECKING:
    from model_loader.objects import ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

PACKS: Final = "kv/packs/"
BATCH: Final = 200
"""Packs per deletion round."""
ROWS: Final = 2000
"""Rows of ended requests looked at at once."""
LOST_AT_ONCE: Final = 16
"""More live packs than that, and a store that shows none of what the index has: that is a folder which is not mounted,
or another bucket, and no reason to give them up. Readers find out what is not there."""
ROUNDS: Final = 100
"""Most rounds of either in one run: what a busy installation ends in the minute between two runs has to fit in."""


@dataclass(slots=True)
class Collected:
    """What was done, summed over the life of this process or of one run."""

    unreachable_chunks: int = 0
    worthless_chunks: int = 0
    over_quota_chunks: int = 0
    retired_packs: int = 0
    deleted_packs: int = 0
    deleted_bytes: int = 0
    orphans: int = 0
    """Packs in the store that nothing named."""
    orphan_bytes: int = 0
    lost_packs: int = 0
    """Packs of the index that were not in the store."""
    failures: int = 0
    """Deletions that the store refused; they are tried again."""

    def add(self, other: Collected) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class KvCollection:
    def __init__(
        self,
        database: Database,
        journal: Journal,
        settings: KvSettings,
        store_uri: str,
        clock_us: Callable[[], int] | None = None,
        *,
        opener: Callable[[], ObjectStore] | None = None,
    ) -> None:
        self._opener = opener
        self._database = database
        self._journal = journal
        self._settings = settings
        self._clock_us = clock_us or database.clock.now_us
        self._store: ObjectStore | None = None
        self.store_uri = store_uri
        self._busy = asyncio.Lock()
        self._looked_s: float | None = None
        self.total = Collected()

    async def sweep(self) -> Collected:
        """What upkeep does now and then; the store is listed for orphans only every `orphan_s`, and again with the next
        sweep where it could not be."""
        now_s = time.monotonic()
        if self._looked_s is None:
            self._looked_s = now_s
        look = now_s - self._looked_s >= self._settings.orphan_s
        try:
            done = await self.collect(orphans=look)
        except (LoaderError, OSError) as error:
            logger.warning("event=kv_not_collected uri=%s error=%s", self.store_uri, error)
            return Collected()
        if look:
            self._looked_s = now_s
        return done

    async def collect(self, *, orphans: bool = True) -> Collected:
        """All of it once. What was retired just now is deleted by a run a grace later."""
        async with self._busy:
            done = Collected()
            try:
                await self._retire_over(done)
                await self._evict(done)
                if orphans:
                    await self._find_orphans(done)
                for _ in range(ROUNDS):
                    if not await self._delete_due(done):
                        break
            finally:
                self.total.add(done)
            if done != Collected():
                told = " ".join(f"{f.name}={getattr(done, f.name)}" for f in fields(done) if getattr(done, f.name))
                logger.info("event=kv_collected %s", told)
            return done

    # --- retire ---

    async def _retire_over(self, done: Collected) -> None:
        """Packs of requests that are over, where the index does not have them."""
        for _ in range(ROUNDS):
            retired = await self._journal.retired_kv(ROWS)
            # In small steps: tokens of others wait for the writer, too.
            for at in range(0, len(retired.packs), BATCH):
                done.retired_packs += await self._retire_of_ended(retired.packs[at : at + BATCH])
            await self._journal.forget_kv(retired)
            if len(retired.rows) < ROWS:
                break

    async def _retire_of_ended(self, packs: Sequence[str]) -> int:
        def run(connection: Connection) -> int:
            now = self._clock_us()
            count = 0
            for pack in packs:
                row = connection.execute("SELECT 1 FROM kv_packs WHERE pack = :pack", {"pack": pack}).fetchone()
                if row is None:
                    count += retire(connection, pack, 0, "", "its request is over", now)
            return count

        return await self._database.write(run)

    async def _evict(self, done: Collected) -> None:
        for tenant in await self._tenants():
            await self._evict_of(tenant, done)

    async def _tenants(self) -> list[str]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute("SELECT DISTINCT tenant FROM kv_packs WHERE state = 'live'").fetchall()

        return [str(tenant) for (tenant,) in await self._database.read(run)]

    async def _evict_of(self, tenant: str, done: Collected) -> None:
        def read(connection: Connection) -> tuple[list[Any], list[Any], int | None]:
            values = {"tenant": tenant}
            return (
                connection.execute(_CHUNKS, values).fetchall(),
                connection.execute(_LIVE_PACKS, values).fetchall(),
                quota_of(connection, tenant),
            )

        rows, packs, own = await self._database.read(read)
        chunks = [StoredChunk((row[0], row[1], row[2]), *row[3:]) for row in rows]
        quota_bytes = self._settings.quota_bytes if own is None else int(own)
        limits = Limits(quota_bytes, self._settings.storage_microusd_per_gib_month)
        sizes = {str(pack): int(nbytes) for pack, nbytes in packs}
        going = await asyncio.to_thread(departures, chunks, sizes, limits, self._clock_us())
        if not going.chunks and not going.packs:
            return
        done.retired_packs += await self._database.write(lambda connection: self._leave(connection, tenant, going))
        done.unreachable_chunks += going.count(UNREACHABLE)
        done.worthless_chunks += going.count(WORTHLESS)
        done.over_quota_chunks += going.count(OVER_QUOTA)

    def _leave(self, connection: Connection, tenant: str, going: Departures) -> int:
        """Chunks may have been added meanwhile: a pack is retired only when nothing of the index is left in it, and
        what then continues a chunk that went is found unreachable by the next run."""
        now = self._clock_us()
        names = [{"identity": n[0], "scope": n[1], "chain": n[2]} for n in going.chunks]
        connection.executemany(
            "DELETE FROM kv_chunks WHERE identity = :identity AND scope = :scope AND chain = :chain", names
        )
        count = 0
        for pack, reason in going.packs.items():
            held = connection.execute("SELECT 1 FROM kv_chunks WHERE pack = :pack LIMIT 1", {"pack": pack}).fetchone()
            if held is None:
                count += retire(connection, pack, 0, tenant, reason, now)
        return count

    # --- what nothing names ---

    async def _find_orphans(self, done: Collected) -> None:
        listed = await asyncio.to_thread(self._list)
        before_us = self._clock_us() - round(self._settings.grace_s * 1e6)

        def read(connection: Connection) -> tuple[dict[str, tuple[str, int, int]], set[str]]:
            rows = connection.execute("SELECT pack, state, created_us, nbytes FROM kv_packs").fetchall()
            named = connection.execute("SELECT chunks FROM request_kv").fetchall()
            known = {str(pack): (str(state), int(created), int(nbytes)) for pack, state, created, nbytes in rows}
            return known, {chunk.pack for (payload,) in named for chunk in decode_chunks(payload)}

        # NOTE: read after the list: what was written and named in between is named, not an orphan.
        known, named = await self._database.read(read)
        orphans = [
            info
            for key, info in listed.items()
            if key not in known and key not in named and info.modified_s * 1e6 < before_us
        ]
        lost = [
            key
            for key, (state, created, _) in known.items()
            if state == "live" and created < before_us and key not in listed
        ]
        sizes = [
            {"pack": key, "nbytes": info.nbytes}
            for key, info in listed.items()
            if key in known and known[key][2] != info.nbytes
        ]
        if len(lost) > LOST_AT_ONCE and known.keys().isdisjoint(listed):
            logger.error("event=kv_store_empty uri=%s packs=%d hint=is another store in its place?", self.store_uri,
                         len(lost))  # fmt: skip
            lost = []

        def run(connection: Connection) -> None:
            now = self._clock_us()
            for info in orphans:
                retire(connection, info.key, info.nbytes, "", "nothing names it", now)
            connection.executemany(_SIZE, sizes)
            connection.executemany(_LOSE, [{"pack": key, "now": now} for key in lost])

        if orphans or lost or sizes:
            await self._database.write(run)
        done.orphans += len(orphans)
        done.orphan_bytes += sum(info.nbytes for info in orphans)
        done.lost_packs += len(lost)

    def _list(self) -> dict[str, ObjectInfo]:
        return {info.key: info for info in self._opened().list(PACKS)}

    # --- delete ---

    async def _delete_due(self, done: Collected) -> bool:
        """One round; whether another one may find more."""
        now = self._clock_us()
        values = {
            "retired": now - round(self._settings.grace_s * 1e6),
            "quarantined": now - round(self._settings.quarantine_s * 1e6),
            "limit": BATCH,
        }

        def read(connection: Connection) -> tuple[list[Any], set[str]]:
            due = connection.execute(_DUE, values).fetchall()
            if not due:
                return [], set()
            live = connection.execute(sql.LIVE_KV).fetchall()
            return due, {chunk.pack for (payload,) in live for chunk in decode_chunks(payload)}

        due, named = await self._database.read(read)

        def claim(connection: Connection) -> list[tuple[str, int]]:
            claimed: list[tuple[str, int]] = []
            for pack, state, nbytes, changed_us in due:
                seen = {"pack": pack, "state": state, "changed": changed_us, "now": now}
                if pack in named and state != "deleting":
                    connection.execute(_NAMED_AGAIN, seen)
                elif connection.execute(_CLAIM, seen).rowcount == 1:
                    connection.execute("DELETE FROM kv_chunks WHERE pack = :pack", {"pack": pack})
                    claimed.append((str(pack), int(nbytes)))
            return claimed

        if not due:
            return False
        gone = await asyncio.to_thread(self._delete, await self._database.write(claim), done)
        rows = [{"pack": pack} for pack in gone]
        await self._database.write(
            lambda connection: (
                connection.executemany("DELETE FROM kv_packs WHERE pack = :pack AND state = 'deleting'", rows).rowcount
            )
        )
        # A store that refuses is not asked again and again.
        return len(due) == BATCH and bool(gone)

    def _delete(self, packs: list[tuple[str, int]], done: Collected) -> list[str]:
        gone: list[str] = []
        for pack, nbytes in packs:
            try:
                self._opened().delete(pack)
            except (LoaderError, OSError) as error:
                done.failures += 1
                logger.warning("event=kv_not_deleted pack=%s error=%s", pack, error)
                continue
            gone.append(pack)
            done.deleted_packs += 1
            done.deleted_bytes += nbytes
        return gone

    def _opened(self) -> ObjectStore:
        if self._opener is not None:
            return self._opener()
        if self._store is None:
            from model_loader.objects import open_store

            self._store = open_store(self.store_uri)
        return self._store


_CHUNKS: Final = """
SELECT c.identity, c.scope, c.chain, c.parent, c.first_token, c.pack, c.nbytes, c.saved_us, c.price_microusd_per_hour,
    c.uses, c.created_us
FROM kv_chunks c JOIN kv_packs p ON p.pack = c.pack WHERE p.state = 'live' AND p.tenant = :tenant"""

_LIVE_PACKS: Final = "SELECT pack, nbytes FROM kv_packs WHERE state = 'live' AND tenant = :tenant"

_SIZE: Final = "UPDATE kv_packs SET nbytes = :nbytes WHERE pack = :pack AND nbytes <> :nbytes"

_LOSE: Final = """
UPDATE kv_packs SET state = 'quarantined', reason = 'its object is gone', changed_us = :now
WHERE pack = :pack AND state = 'live'"""

_DUE: Final = """
SELECT pack, state, nbytes, changed_us FROM kv_packs
WHERE (state = 'retiring' AND changed_us < :retired) OR (state = 'quarantined' AND changed_us < :quarantined)
    OR state = 'deleting'
ORDER BY changed_us LIMIT :limit"""

_NAMED_AGAIN: Final = """
UPDATE kv_packs SET changed_us = :now WHERE pack = :pack AND state = :state AND changed_us = :changed"""

_CLAIM: Final = """
UPDATE kv_packs SET state = 'deleting', changed_us = :now
WHERE pack = :pack AND state = :state AND changed_us = :changed"""
