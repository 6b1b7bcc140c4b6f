"""Which KV is in the store for whoever comes next: chunks by (identity, scope, chain), and the packs they lie in.

    pack:  live -> retiring -> deleting -> gone;   live | retiring -> quarantined -> deleting

Only chunks of live packs are ever handed out, and always as a run without a gap from the first token on. Every change
is one transaction, so that a death in between leaves either state. Limits: only a hint, replicas verify every byte; a
use counts when a chunk is handed out, whatever became of it.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from function_runtime.protocol import KvChunk

CHAINS_AT_ONCE: Final = 64
"""Chains per query: its text is always the same, so that it is prepared once."""
COUNTS_MAX: Final = 20_000
"""Observed chunks of a function at which both counts are halved, so that old habits are forgotten."""


class PackState(enum.StrEnum):
    LIVE = "live"
    RETIRING = "retiring"
    """Nothing is handed out of it any more; it goes when nobody has named it for a grace."""
    DELETING = "deleting"
    """Its object is being deleted; it cannot come back."""
    QUARANTINED = "quarantined"
    """Its bytes were not what its records say; kept for a look, never handed out again."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """Whose chunks these are, and what reusing them is worth."""

    tenant: str
    function: str
    scope: str
    conversation: str = ""
    """Name of the conversation (from `prompt_cache_key`), empty where there is none."""
    price_microusd_per_hour: int = 0
    owner: str = ""
    """Whose quota the packs count against; empty: the tenant's."""

    @property
    def counted_for(self) -> str:
        return self.owner or self.tenant


@dataclass(frozen=True, slots=True)
class Counts:
    kept: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks of one identity and scope, and the packs that hold them."""

    identity: str
    scope: str
    packs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bad:
    """What is known of a chunk that was quarantined."""

    tenant: str
    function: str
    chunks: int
    """Chunks of the index that are out of reach now."""


class KvIndex:
    def __init__(self, database: Database) -> None:
        self._database = database

    # --- asked by replicas ---

    async def known(self, identity: str, scope: str, chains: Sequence[str]) -> tuple[KvChunk, ...]:
        """The longest run of stored chunks from token 0 on whose ends are among `chains`; each counts as used."""

        def run(connection: Connection) -> list[Any]:
            found: list[Any] = []
            for at in range(0, len(chains), CHAINS_AT_ONCE):
                batch = chains[at : at + CHAINS_AT_ONCE]
                values = {f"c{i}": batch[i] if i < len(batch) else "" for i in range(CHAINS_AT_ONCE)}
                rows = connection.execute(_KNOWN, {**values, "identity": identity, "scope": scope}).fetchall()
                run = _gapless(rows, found[-1] if found else None)
                found += run
                if not run:
                    break
            return found

        rows = await self._database.read(run)
        if rows:
            await self._used(identity, scope, rows)
        return tuple(_chunk(row) for row in rows)

    async def _used(self, identity: str, scope: str, rows: Sequence[Any]) -> None:
        """Written behind the answer's back: a refused write costs only the memory of a use."""
        now = self._database.clock.now_us()
        uses = [{"identity": identity, "scope": scope, "chain": row[0], "now": now} for row in rows]

        def run(connection: Connection) -> None:
            firsts: dict[tuple[str, str, int], int] = {}
            for row, values in zip(rows, uses, strict=True):
                if row[9] == 0 and connection.execute(_USED_FIRST, values).rowcount == 1:
                    key = (row[10], row[11], int(bool(row[12])))
                    firsts[key] = firsts.get(key, 0) + 1
            connection.executemany(_USED, uses)
            for (tenant, function, keyed), count in firsts.items():
                _count(connection, tenant, function, keyed, 0, count)

        self._database.submit(run).add_done_callback(lambda done: done.cancelled() or done.exception())

    # --- told by replicas ---

    async def keep(
        self,
        keeper: Keeper,
        identity: str,
        chunks: Sequence[KvChunk],
        packs: Mapping[str, int] | None = None,
        token_us: float = 0.0,
    ) -> int:
        """Remember chunks; how many are new. One that is known already keeps its place; the pack of a chunk that was
        not needed is retired. A pack that is being deleted, or quarantined, takes nothing."""
        sizes = dict(packs or {})

        def run(connection: Connection) -> int:
            now = self._database.clock.now_us()
            states = _states(connection, {chunk.pack for chunk in chunks})
            standing = _standing(connection, identity, keeper.scope, [chunk.chain for chunk in chunks])
            new: dict[str, list[KvChunk]] = {}
            for chunk in chunks:
                if standing.get(chunk.chain) != PackState.LIVE and states.get(chunk.pack) not in _LOST:
                    new.setdefault(chunk.pack, []).append(chunk)
            for pack, held in new.items():
                nbytes = sizes.get(pack) or sum(chunk.nbytes for chunk in held)
                values = {"pack": pack, "nbytes": nbytes, "tenant": keeper.counted_for, "now": now}
                connection.execute(_PACK_LIVE, values)
                connection.executemany(_KEEP, [_row(keeper, identity, chunk, token_us, now) for chunk in held])
            for pack, nbytes in sizes.items():
                if pack not in new and pack not in states:
                    retire(connection, pack, nbytes, keeper.counted_for, "its chunks are stored elsewhere", now)
            count = sum(len(held) for held in new.values())
            if count:
                _count(connection, keeper.tenant, keeper.function, int(bool(keeper.conversation)), count, 0)
            return count

        return await self._database.write(run)

    async def quarantine(self, pack: str, tenant: str, reason: str) -> Bad | None:
        """Hand nothing out of this pack again. None: it was quarantined (or is being deleted) already."""

        def run(connection: Connection) -> Bad | None:
            values = {"pack": pack, "tenant": tenant, "reason": reason[:500], "now": self._database.clock.now_us()}
            if connection.execute(_QUARANTINE, values).rowcount != 1:
                return None
            rows = connection.execute(_OF_PACK, {"pack": pack}).fetchall()
            return Bad(rows[0][0] if rows else tenant, rows[0][1] if rows else "", len(rows))

        return await self._database.write(run)

    # --- observed reuse ---

    async def reuse(self) -> dict[tuple[str, str, bool], Counts]:
        """By (tenant, function, whether in a named conversation): chunks kept, and those that came to use."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute("SELECT tenant, function, keyed, kept, reused FROM kv_reuse").fetchall()

        rows = await self._database.read(run)
        return {(tenant, function, bool(keyed)): Counts(kept, reused) for tenant, function, keyed, kept, reused in rows}

    # --- looked at by people ---

    async def packs(self, tenant: str, limit: int = 1000) -> list[dict[str, Any]]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(_PACKS, {"tenant": tenant, "limit": limit}).fetchall()

        names = ("pack", "state", "nbytes", "reason", "created_us", "changed_us", "chunks", "tokens", "uses", "used_us",
                 "function", "form")  # fmt: skip
        return [dict(zip(names, row, strict=True)) for row in await self._database.read(run)]

    async def totals(self, tenant: str) -> list[dict[str, Any]]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(_TOTALS, {"tenant": tenant}).fetchall()

        names = ("state", "packs", "nbytes")
        return [dict(zip(names, row, strict=True)) for row in await self._database.read(run)]

    async def pack_of(self, tenant: str, name: str) -> str | None:
        """The pack that a pack's name, its beginning, or a chunk's chain means."""
        values = {"tenant": tenant, "name": name, "like": f"%/{name.rpartition('/')[2]}%"}

        def run(connection: Connection) -> list[Any]:
            return connection.execute(_NAMED, values).fetchall()

        rows = await self._database.read(run)
        return str(rows[0][0]) if len(rows) == 1 else None

    async def owner_of(self, pack: str) -> str | None:
        """The tenant whose quota a pack counts against; None: the index does not have it."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute("SELECT tenant FROM kv_packs WHERE pack = :pack", {"pack": pack}).fetchall()

        rows = await self._database.read(run)
        return str(rows[0][0]) if rows else None

    async def chunks_of(self, pack: str) -> list[KvChunk]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(_CHUNKS_OF_PACK, {"pack": pack}).fetchall()

        return [_chunk(row) for row in await self._database.read(run)]

    async def places(self, tenant: str, scopes: Container[str]) -> list[Place]:
        """Where KV of a tenant lies under these scopes: read beside the writer, for it looks through all there is."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute(_PLACES, {"tenant": tenant}).fetchall()

        found: dict[tuple[str, str], list[str]] = {}
        for identity, scope, pack in await self._database.read(run):
            if scope in scopes:
                found.setdefault((str(identity), str(scope)), []).append(str(pack))
        return [Place(identity, scope, tuple(packs)) for (identity, scope), packs in found.items()]

    async def live_packs(self, tenant: str | None = None) -> list[str]:
        def run(connection: Connection) -> list[Any]:
            if tenant is None:
                return connection.execute("SELECT pack FROM kv_packs WHERE state = 'live' ORDER BY pack").fetchall()
            return connection.execute(
                "SELECT pack FROM kv_packs WHERE state = 'live' AND tenant = :tenant ORDER BY pack", {"tenant": tenant}
            ).fetchall()

        return [str(pack) for (pack,) in await self._database.read(run)]


# --- inside a transaction ---


def retire(connection: Connection, pack: str, nbytes: int, tenant: str, reason: str, now: int) -> bool:
    """Begin to let a pack go: from here on nobody is told of it. False: it is on its way (or quarantined) already."""
    values = {"pack": pack, "nbytes": nbytes, "tenant": tenant, "reason": reason[:500], "now": now}
    return connection.execute(_RETIRE, values).rowcount == 1


def drop(connection: Connection, places: Iterable[Place], tenant: str, reason: str, now_us: int) -> int:
    """Nothing of these identities and scopes is handed out any more, and their packs begin to go; how many packs. What
    was added to them since they were looked up goes too, its packs with the next collection."""
    count = 0
    for place in places:
        values = {"identity": place.identity, "scope": place.scope}
        connection.execute("DELETE FROM kv_chunks WHERE identity = :identity AND scope = :scope", values)
        count += sum(retire(connection, pack, 0, tenant, reason, now_us) for pack in place.packs)
    return count


def _count(connection: Connection, tenant: str, function: str, keyed: int, kept: int, reused: int) -> None:
    values = {"tenant": tenant, "function": function, "keyed": keyed, "kept": kept, "reused": reused}
    connection.execute(_COUNT, values)
    connection.execute(_FORGET, {"tenant": tenant, "function": function, "keyed": keyed, "limit": COUNTS_MAX})


def _states(connection: Connection, packs: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pack in packs:
        row = connection.execute("SELECT state FROM kv_packs WHERE pack = :pack", {"pack": pack}).fetchone()
        if row is not None:
            found[pack] = row[0]
    return found


def _standing(connection: Connection, identity: str, scope: str, chains: Sequence[str]) -> dict[str, str]:
    """The state of the pack that holds each chain now."""
    found: dict[str, str] = {}
    for at in range(0, len(chains), CHAINS_AT_ONCE):
        batch = chains[at : at + CHAINS_AT_ONCE]
        values = {f"c{i}": batch[i] if i < len(batch) else "" for i in range(CHAINS_AT_ONCE)}
        rows = connection.execute(_STANDING, {**values, "identity": identity, "scope": scope}).fetchall()
        found.update({str(chain): str(state) for chain, state in rows})
    return found


def _gapless(rows: Sequence[Any], last: Any) -> list[Any]:
    """Of rows (chain, parent, first, end, ...) the run after `last`, each step to the furthest end; a step follows
    only what it was computed after."""
    by_start: dict[int, list[Any]] = {}
    for row in rows:
        by_start.setdefault(row[2], []).append(row)
    run: list[Any] = []
    while True:
        at, parent = (last[3], last[0]) if last is not None else (0, None)
        following = [row for row in by_start.get(at, ()) if parent is None or row[1] == parent]
        if not following:
            return run
        last = max(following, key=lambda row: row[3])
        run.append(last)


def _chunk(row: Sequence[Any]) -> KvChunk:
    chain, parent, first, end, pack, offset, nbytes, digest, form = row[:9]
    return KvChunk(0, first, end, pack, offset, nbytes, digest, chain, parent, form)


def _row(keeper: Keeper, identity: str, chunk: KvChunk, token_us: float, now: int) -> dict[str, Any]:
    return {
        "identity": identity,
        "scope": keeper.scope,
        "chain": chunk.chain,
        "parent": chunk.parent,
        "first_token": chunk.start,
        "end_token": chunk.end,
        "pack": chunk.pack,
        "pack_offset": chunk.offset,
        "nbytes": chunk.nbytes,
        "digest": chunk.digest,
        "form": chunk.form,
        "tenant": keeper.tenant,
        "function": keeper.function,
        "conversation": keeper.conversation,
        "saved_us": round(token_us * (chunk.end - chunk.start)),
        "price": keeper.price_microusd_per_hour,
        "now": now,
    }


_LOST: Final = (PackState.DELETING, PackState.QUARANTINED)
_CHAINS: Final = ", ".join(f":c{i}" for i in range(CHAINS_AT_ONCE))
_FIELDS: Final = """c.chain, c.parent, c.first_token, c.end_token, c.pack, c.pack_offset, c.nbytes, c.digest, c.form,
    c.uses, c.tenant, c.function, c.conversation"""

_KNOWN: Final = f"""
SELECT {_FIELDS} FROM kv_chunks c JOIN kv_packs p ON p.pack = c.pack
WHERE c.identity = :identity AND c.scope = :scope AND p.state = 'live' AND c.chain IN ({_CHAINS})"""

_STANDING: Final = f"""
SELECT c.chain, p.state FROM kv_chunks c JOIN kv_packs p ON p.pack = c.pack
WHERE c.identity = :identity AND c.scope = :scope AND c.chain IN ({_CHAINS})"""

_USED: Final = """
UPDATE kv_chunks SET uses = uses + 1, used_us = :now
WHERE identity = :identity AND scope = :scope AND chain = :chain"""

_USED_FIRST: Final = """
UPDATE kv_chunks SET uses = uses
WHERE identity = :identity AND scope = :scope AND chain = :chain AND uses = 0"""

_PACK_LIVE: Final = """
INSERT INTO kv_packs (pack, nbytes, state, tenant, reason, created_us, changed_us)
VALUES (:pack, :nbytes, 'live', :tenant, '', :now, :now)
ON CONFLICT (pack) DO UPDATE SET state = 'live', reason = '', changed_us = excluded.changed_us
WHERE kv_packs.state = 'retiring'"""

_KEEP: Final = """
INSERT INTO kv_chunks (identity, scope, chain, parent, first_token, end_token, pack, pack_offset, nbytes, digest, form,
    tenant, function, conversation, saved_us, price_microusd_per_hour, uses, created_us, used_us)
VALUES (:identity, :scope, :chain, :parent, :first_token, :end_token, :pack, :pack_offset, :nbytes, :digest, :form,
    :tenant, :function, :conversation, :saved_us, :price, 0, :now, :now)
ON CONFLICT (identity, scope, chain) DO UPDATE SET parent = excluded.parent, first_token = excluded.first_token,
    end_token = excluded.end_token, pack = excluded.pack, pack_offset = excluded.pack_offset,
    nbytes = excluded.nbytes, digest = excluded.digest, form = excluded.form"""

_RETIRE: Final = """
INSERT INTO kv_packs (pack, nbytes, state, tenant, reason, created_us, changed_us)
VALUES (:pack, :nbytes, 'retiring', :tenant, :reason, :now, :now)
ON CONFLICT (pack) DO UPDATE SET state = 'retiring', reason = excluded.reason, changed_us = excluded.changed_us
WHERE kv_packs.state = 'live'"""

_QUARANTINE: Final = """
INSERT INTO kv_packs (pack, nbytes, state, tenant, reason, created_us, changed_us)
VALUES (:pack, 0, 'quarantined', :tenant, :reason, :now, :now)
ON CONFLICT (pack) DO UPDATE SET state = 'quarantined', reason = excluded.reason, changed_us = excluded.changed_us
WHERE kv_packs.state IN ('live', 'retiring')"""

_COUNT: Final = """
INSERT INTO kv_reuse (tenant, function, keyed, kept, reused) VALUES (:tenant, :function, :keyed, :kept, :reused)
ON CONFLICT (tenant, function, keyed) DO UPDATE SET kept = kv_reuse.kept + excluded.kept,
    reused = kv_reuse.reused + excluded.reused"""

_FORGET: Final = """
UPDATE kv_reuse SET kept = kept / 2, reused = reused / 2
WHERE tenant = :tenant AND function = :function AND keyed = :keyed AND kept > :limit"""

_PLACES: Final = "SELECT DISTINCT identity, scope, pack FROM kv_chunks WHERE tenant = :tenant"

_OF_PACK: Final = "SELECT tenant, function FROM kv_chunks WHERE pack = :pack"

_CHUNKS_OF_PACK: Final = f"SELECT {_FIELDS} FROM kv_chunks c WHERE c.pack = :pack ORDER BY c.pack_offset"

_PACKS: Final = """
SELECT p.pack, p.state, p.nbytes, p.reason, p.created_us, p.changed_us, COUNT(c.chain),
    COALESCE(SUM(c.end_token - c.first_token), 0), COALESCE(SUM(c.uses), 0), COALESCE(MAX(c.used_us), 0),
    COALESCE(MAX(c.function), ''), COALESCE(MAX(c.form), '')
FROM kv_packs p LEFT JOIN kv_chunks c ON c.pack = p.pack
WHERE p.tenant = :tenant GROUP BY p.pack, p.state, p.nbytes, p.reason, p.created_us, p.changed_us
ORDER BY p.created_us DESC, p.pack LIMIT :limit"""

_TOTALS: Final = """
SELECT state, COUNT(*), COALESCE(SUM(nbytes), 0) FROM kv_packs WHERE tenant = :tenant GROUP BY state ORDER BY state"""

_NAMED: Final = """
SELECT DISTINCT pack FROM (
    SELECT pack FROM kv_packs WHERE tenant = :tenant AND pack LIKE :like
    UNION SELECT c.pack FROM kv_chunks c JOIN kv_packs p ON p.pack = c.pack
        WHERE p.tenant = :tenant AND c.chain = :name) named LIMIT 2"""
