"""The index made again from what lies in the store: pack headers and chunk headers say everything it needs.

Whose a chunk is, its scope tells: scopes are computed for every tenant and function there is and compared. Limits: what
a reuse saves, how often a chunk was used, and the function of a chunk that its tenant shares are not in the store and
begin anew; a scope that is nobody's any more is left to the collection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from control_plane.context import AppContext
from control_plane.database import Connection
from control_plane.kv_desk import function_scope
from control_plane.kv_index import Keeper
from control_plane.kv_tool import Line, run_tool
from control_plane.sealing import EVERYBODY
from function_runtime.protocol import KvChunk

TOKEN_US: Final = 500.0
"""What a token is taken to save until its chunk is kept anew by a replica that measured it."""


async def rebuild(context: AppContext) -> AsyncIterator[Line]:
    """Progress, `bad` packs, and at the end `rebuilt` with what was found. What the index has already stays as it
    is: quarantined packs stay quarantined."""
    owners = await _scopes(context)
    counts = {"packs": 0, "chunks": 0, "new": 0, "strangers": 0, "bad": 0}
    async for line in run_tool("scan", context.kv_collection.store_uri, (), context.tenant_keys.kv_keys()):
        if line["event"] == "bad":
            counts["bad"] += 1
            yield line
        elif line["event"] == "progress":
            yield line
        elif line["event"] == "pack":
            keeper = owners.get(line["chunks"][0]["scope"])
            if keeper is None:
                counts["strangers"] += 1
                continue
            counts["packs"] += 1
            counts["chunks"] += len(line["chunks"])
            counts["new"] += await _keep(context, keeper, line)
    yield {"event": "rebuilt", **counts}


async def _keep(context: AppContext, keeper: Keeper, line: Line) -> int:
    by_identity: dict[str, list[KvChunk]] = {}
    for found in line["chunks"]:
        if found["whole"]:
            by_identity.setdefault(found["identity"], []).append(_chunk(line["pack"], found))
    new = 0
    for identity, chunks in by_identity.items():
        new += await context.kv_index.keep(keeper, identity, chunks, {line["pack"]: line["nbytes"]}, TOKEN_US)
    return new


def _chunk(pack: str, found: dict[str, Any]) -> KvChunk:
    return KvChunk(
        0,
        found["start"],
        found["end"],
        pack,
        found["offset"],
        found["nbytes"],
        found["digest"],
        found["chain"],
        found["parent"],
        found["form"],
    )


async def _scopes(context: AppContext) -> dict[str, Keeper]:
    def run(connection: Connection) -> list[Any]:
        return connection.execute("SELECT tenant FROM api_keys UNION SELECT tenant FROM functions").fetchall()

    price = context.settings.kv.device_microusd_per_hour
    common = await context.keys.kv_scope(EVERYBODY)
    owners = {common: Keeper(EVERYBODY, "", common, "", price)}
    for (tenant,) in await context.db.read(run):
        numbers = context.tenant_keys.numbers(str(tenant))
        for scope, function in (await scopes_of(context, str(tenant), numbers)).items():
            owners[scope] = Keeper(str(tenant), function, scope, "", price)
    return owners


async def scopes_of(context: AppContext, tenant: str, numbers: Iterable[int]) -> dict[str, str]:
    """Under which scopes KV of a tenant may lie that is sealed with these keys (0: not at all), its functions' own
    among them, deleted ones too; with the function's name where it is one's."""

    def run(connection: Connection) -> list[Any]:
        return connection.execute("SELECT name FROM functions WHERE tenant = :tenant", {"tenant": tenant}).fetchall()

    names = [str(name) for (name,) in await context.db.read(run)]
    scopes: dict[str, str] = {}
    for number in numbers:
        scope = await context.keys.kv_scope(tenant, number)
        scopes[scope] = ""
        scopes |= {function_scope(scope, name): name for name in names}
    return scopes
