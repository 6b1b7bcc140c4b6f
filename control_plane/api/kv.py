"""`/api/v1/kv`: stored KV as the index knows it, looked into, verified, collected, and its index made again.

A tenant sees and verifies its own packs; collecting and rebuilding concern the whole installation and need an admin of
the tenant `default`. What takes long answers with a line of JSON per pack (NDJSON). Limits: packs are shown newest
first, at most `SHOWN_MAX`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.errors import InvalidRequest, NotFound, StokerError, Unavailable
from control_plane.kv_rebuild import rebuild
from control_plane.kv_tool import Line, run_tool
from control_plane.sealing import EVERYBODY
from control_plane.tenants import DEFAULT_TENANT, ApiKey, Role
from model_loader.errors import LoaderError

if TYPE_CHECKING:
    from control_plane.context import AppContext

SHOWN_MAX: Final = 1000
_NAME: Final = re.compile(r"(kv/packs/([0-9a-f]{16}/)?[0-9a-f]{2}/)?[0-9a-f]{4,64}")


class VerifyBody(msgspec.Struct, forbid_unknown_fields=True):
    packs: list[str] = []


def routes(context: AppContext) -> list[web.RouteDef]:
    index, collection = context.kv_index, context.kv_collection

    def caller(request: web.Request, role: Role = Role.USER) -> ApiKey:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(role)
        return key

    def operator(request: web.Request) -> ApiKey:
        key = caller(request, Role.ADMIN)
        key.require_operator()
        return key

    def visible(tenant: str) -> tuple[str, ...]:
        """Whose packs a tenant's keys see: what is shared with all is the operator's to look after."""
        return (tenant, EVERYBODY) if tenant == DEFAULT_TENANT else (tenant,)

    async def named_pack(name: str, tenant: str) -> str:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("name a pack or a chain by at least four hexadecimal digits", param="name")
        found = {pack for each in visible(tenant) if (pack := await index.pack_of(each, name)) is not None}
        if len(found) != 1:
            raise NotFound(f"there is no stored KV that {name} names alone", param="name")
        return found.pop()

    async def show(request: web.Request) -> web.Response:
        tenant = caller(request).tenant
        totals: dict[str, dict[str, Any]] = {}
        packs: list[dict[str, Any]] = []
        for each in visible(tenant):
            packs += await index.packs(each, SHOWN_MAX)
            for total in await index.totals(each):
                known = totals.setdefault(total["state"], {"state": total["state"], "packs": 0, "nbytes": 0})
                known["packs"] += total["packs"]
                known["nbytes"] += total["nbytes"]
        body = {
            "object": "kv",
            "totals": [totals[state] for state in sorted(totals)],
            "reuse": [
                {"function": function, "keyed": keyed, **asdict(counts)}
                for (of, function, keyed), counts in (await index.reuse()).items()
                if of == tenant
            ],
            "data": sorted(packs, key=lambda pack: (-pack["created_us"], pack["pack"]))[:SHOWN_MAX],
        }
        return web.json_response(body)

    async def inspect(request: web.Request) -> web.Response:
        tenant = caller(request, Role.ADMIN).tenant
        pack = await named_pack(request.match_info["name"], tenant)
        (known,) = [
            item for each in visible(tenant) for item in await index.packs(each, 1 << 31) if item["pack"] == pack
        ]
        found: Line = {}
        async for line in run_tool("inspect", collection.store_uri, [pack], context.tenant_keys.kv_keys()):
            if line["event"] in ("pack", "bad"):
                found = line
        return web.json_response({"object": "kv_pack", "index": known, "store": found})

    async def verify(request: web.Request) -> web.StreamResponse:
        tenant = caller(request, Role.ADMIN).tenant
        asked = decode(await read_body(request), VerifyBody).packs if request.can_read_body else []
        packs = [await named_pack(name, tenant) for name in asked] or [
            pack for each in visible(tenant) for pack in await index.live_packs(each)
        ]

        async def lines() -> AsyncIterator[Line]:
            async for line in run_tool("verify", collection.store_uri, packs, context.tenant_keys.kv_keys()):
                if line["event"] == "bad":
                    await index.quarantine(line["pack"], tenant, f"verified: {line['reason']}")
                    context.decisions.record(
                        "kv_quarantined", reason=line["reason"], inputs={"pack": line["pack"]}, tenant=tenant
                    )
                    context.kv_desk.counts.quarantined += 1
                yield line

        return await _told(request, lines())

    async def again(request: web.Request) -> web.StreamResponse:
        operator(request)
        return await _told(request, rebuild(context))

    async def collect(request: web.Request) -> web.Response:
        operator(request)
        try:
            done = await collection.collect()
        except (LoaderError, OSError) as error:
            raise Unavailable(f"the store cannot be worked on: {error}", code="object_store_error") from error
        return web.json_response({"object": "kv_collection", **asdict(done)})

    return [
        web.get("/api/v1/kv", show),
        web.post("/api/v1/kv/verify", verify),
        web.post("/api/v1/kv/rebuild-index", again),
        web.post("/api/v1/kv/gc", collect),
        web.get("/api/v1/kv/packs/{name:.+}", inspect),
    ]


async def _told(request: web.Request, lines: AsyncIterator[Line]) -> web.StreamResponse:
    """One line of JSON each, as they come; an error after the first is the last line."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    encode: Any = msgspec.json.encode
    try:
        async for line in lines:
            if not response.prepared:
                await response.prepare(request)
            await response.write(encode(line) + b"\n")
    except StokerError as error:
        if not response.prepared:
            raise
        await response.write(encode({"event": "error", "message": str(error)}) + b"\n")
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof()
    return response
