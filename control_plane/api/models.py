"""`/api/v1/models`: imported checkpoints listed, looked into, imported, verified, removed.

Imports and verification answer with a line of JSON after another (NDJSON). All of it needs an admin key; a tenant other
than `default` sees the models that its own functions use, and removes none, since the models directory is shared. A
model that a function uses is not removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from control_plane.api.bodies import decode, read_body
from control_plane.backends.base import SlotUnavailable
from control_plane.errors import Conflict, Forbidden, Internal, InvalidRequest, NotFound, StokerError
from control_plane.functions import Function
from control_plane.model_tool import Line, run_import, run_verification
from control_plane.slot_pools import in_pools
from control_plane.tenants import DEFAULT_TENANT, ApiKey, Role
from model_loader.catalogue import KnownModel, find_model, list_models, remove_model
from model_loader.errors import LoaderError, SourceMissing, SourceRefused
from model_loader.sources import ModelUri, check_allowed

if TYPE_CHECKING:
    from control_plane.context import AppContext


class ImportBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str


class WarmBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    dtype: str = "auto"
    slot: str | None = None


class EvictBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    slot: str | None = None


class VerifyBody(msgspec.Struct, forbid_unknown_fields=True):
    models: list[str] = []


def routes(context: AppContext) -> list[web.RouteDef]:
    functions, settings = context.functions, context.settings
    models_dir: Path = settings.models_dir

    def admin(request: web.Request) -> ApiKey:
        key = context.keys.authenticate(request.headers.get("Authorization"))
        key.require(Role.ADMIN)
        return key

    def users(model: KnownModel, tenant: str | None = None) -> list[Function]:
        """Functions whose current revision is this model, or will be when its import is done."""
        return [
            each
            for each in functions.list(tenant)
            if each.current.identity == model.identity
            or (each.current.identity is None and each.spec.model in model.uris)
        ]

    def is_seen(model: KnownModel, tenant: str) -> bool:
        return tenant == DEFAULT_TENANT or bool(users(model, tenant))

    async def named(name: str, tenant: str) -> KnownModel:
        try:
            model = await asyncio.to_thread(find_model, models_dir, name)
        except SourceMissing as error:
            raise NotFound(str(error), param="model", code="model_not_found") from error
        except SourceRefused as error:
            raise InvalidRequest(str(error), param="model") from error
        if not is_seen(model, tenant):
            raise NotFound(f"no model {name[:200]} is used by a function of yours", param="model")
        return model

    def summary(model: KnownModel, tenant: str) -> dict[str, Any]:
        manifest = model.manifest
        shown: dict[str, Any] = {
            "object": "model",
            "identity": model.identity,
            "uris": list(model.uris),
            "state": model.state.value,
            "problem": model.problem or None,
            "kept_bytes": model.kept_bytes,
            "functions": sorted(each.name for each in users(model, tenant)),
        }
        if manifest is not None:
            shown |= {
                "pinned_uri": manifest.pinned_uri,
                "manifest_version": manifest.version,
                "format": manifest.format,
                "architecture": manifest.architecture,
                "dtype": manifest.config.dtype,
                "nbytes": sum(file.nbytes for file in manifest.files),
                "tensors": len(manifest.tensors),
                "context_length": manifest.context_length,
                "licence": manifest.licence,
            }
        return shown

    async def show(request: web.Request) -> web.Response:
        tenant = admin(request).tenant
        known = await asyncio.to_thread(list_models, models_dir)
        data = [summary(model, tenant) for model in known if is_seen(model, tenant)]
        return web.json_response({"object": "list", "data": data})

    async def inspect(request: web.Request) -> web.Response:
        tenant = admin(request).tenant
        model = await named(request.match_info["name"], tenant)
        return web.json_response(
            {**summary(model, tenant), **(details(model) if model.manifest else {}), "pools": pooled(model)}
        )

    async def bring(request: web.Request) -> web.StreamResponse:
        admin(request)
        uri = decode(await read_body(request), ImportBody).model
        try:
            check_allowed(uri, settings.models.allowed)
            ModelUri.parse(uri)
        except LoaderError as error:
            raise InvalidRequest(str(error), param="model", code=error.code) from error
        return await _told(request, run_import(uri, models_dir, settings.models.allowed))

    async def verify(request: web.Request) -> web.StreamResponse:
        tenant = admin(request).tenant
        asked = decode(await read_body(request), VerifyBody).models if request.can_read_body else []
        if asked:
            models: Sequence[KnownModel] = [await named(name, tenant) for name in asked]
        else:
            known = await asyncio.to_thread(list_models, models_dir)
            models = [model for model in known if is_seen(model, tenant)]
        damaged = [model for model in models if model.manifest is None]
        paths = [model.manifest.path for model in models if model.manifest is not None]

        async def lines() -> AsyncGenerator[Line, None]:
            for model in damaged:
                yield {"event": "bad", "identity": model.identity, "uri": "", "file": "", "offset": 0, "nbytes": 0,
                       "expected": "", "found": "", "message": model.problem}  # fmt: skip
            async for line in run_verification(paths):
                if line["event"] == "done":
                    line = {
                        **line,
                        "models": line["models"] + len(damaged),
                        "bad_models": line["bad_models"] + len(damaged),
                    }
                yield line

        return await _told(request, lines())

    def pooled(model: KnownModel) -> list[dict[str, Any]]:
        return in_pools(context.fleet.slots, model.identity)

    async def warm(request: web.Request) -> web.Response:
        """Into the pool of every slot, or of the one that is named."""
        key = admin(request)
        body = decode(await read_body(request), WarmBody)
        model = await named(body.model, key.tenant)
        if model.manifest is None:
            raise Conflict(f"the model {model.identity[:16]} is damaged: {model.problem}", code="model_damaged")
        slot_ids = list(context.fleet.slots) if body.slot is None else [body.slot]
        if unknown := [slot_id for slot_id in slot_ids if slot_id not in context.fleet.slots]:
            raise NotFound(f"there is no slot {unknown[0]}", param="slot", code="slot_not_found")
        refused = await context.fleet.pools.load(str(model.manifest.path), model.identity, body.dtype, slot_ids)
        if refused and len(refused) == len(slot_ids):
            slot_id, problem = next(iter(refused.items()))
            raise Conflict(f"{slot_id} did not take it: {problem}", code="pool_refused")
        return web.json_response(
            {
                "object": "model",
                "identity": model.identity,
                "warmed": [s for s in slot_ids if s not in refused],
                "refused": refused,
            }
        )

    async def evict(request: web.Request) -> web.Response:
        """Out of the pools of all slots, or of the one that is named; what a replica uses stays, and is told."""
        key = admin(request)
        if key.tenant != DEFAULT_TENANT:
            raise Forbidden(f"pools are shared by all tenants: it needs an admin key of the tenant {DEFAULT_TENANT}")
        body = decode(await read_body(request), EvictBody)
        model = await named(body.model, key.tenant)
        evicted: list[str] = []
        refused: dict[str, str] = {}
        freed_bytes = 0
        for entry in pooled(model):
            if entry["state"] == "absent" or body.slot not in (None, entry["slot_id"]):
                continue
            try:
                await context.fleet.pools.evict(entry["slot_id"], entry["key"])
            except SlotUnavailable as error:
                refused[entry["slot_id"]] = str(error)
                continue
            evicted.append(entry["slot_id"])
            freed_bytes += entry["nbytes"]
        if refused and not evicted:
            raise Conflict("; ".join(f"{slot_id}: {said}" for slot_id, said in refused.items()), code="pool_refused")
        return web.json_response(
            {
                "object": "model",
                "identity": model.identity,
                "evicted": evicted,
                "freed_bytes": freed_bytes,
                "refused": refused,
            }
        )

    async def remove(request: web.Request) -> web.Response:
        key = admin(request)
        if key.tenant != DEFAULT_TENANT:
            raise Forbidden(f"models are shared by all tenants: it needs an admin key of the tenant {DEFAULT_TENANT}")
        model = await named(request.match_info["name"], key.tenant)
        await functions.refresh()
        if using := users(model):
            names = ", ".join(sorted(f"{each.tenant}/{each.name}" for each in using)[:5])
            raise Conflict(
                f"the model {model.identity[:16]} is used by {names}: delete or change what uses it first",
                code="model_in_use",
            )
        try:
            removed = await asyncio.to_thread(remove_model, models_dir, model.identity)
        except LoaderError as error:
            raise Internal(str(error)) from error
        # Forms and compiled kernels of it in the object store; what the store refuses now, the sweep removes later.
        await context.fleet.pools.forget_checkpoint(model.identity)
        stored_bytes, stored_problem = 0, None
        try:
            stored_bytes = (await context.derived.forget(model.identity)).nbytes
        except LoaderError as error:
            stored_problem = str(error)
        return web.json_response(
            {
                "object": "model",
                "deleted": True,
                "uris": list(model.uris),
                **asdict(removed),
                "stored_freed_bytes": stored_bytes,
                "stored_problem": stored_problem,
            }
        )

    return [
        web.get("/api/v1/models", show),
        web.post("/api/v1/models/import", bring),
        web.post("/api/v1/models/verify", verify),
        web.post("/api/v1/models/warm", warm),
        web.post("/api/v1/models/evict", evict),
        web.get("/api/v1/models/{name:.+}", inspect),
        web.delete("/api/v1/models/{name:.+}", remove),
    ]


def details(model: KnownModel) -> dict[str, Any]:
    """What the manifest says in full."""
    manifest = model.manifest
    if manifest is None:
        return {}
    contents = manifest.contents or (None,) * len(manifest.files)
    return {
        "config": asdict(manifest.config),
        "chat_template": manifest.chat_template,
        "bos_token": manifest.bos_token,
        "eos_token": manifest.eos_token,
        "eos_token_ids": list(manifest.eos_token_ids),
        "manifest_path": str(manifest.path),
        "files": [
            {
                "path": file.path,
                "nbytes": file.nbytes,
                "sha256": content.sha256 if content else None,
                "origin": f"{content.origin} {content.key}" if content and content.origin else None,
                "unchanged": file.unchanged(),
            }
            for file, content in zip(manifest.files, contents, strict=True)
        ],
        "tensor_list": [asdict(entry) for entry in manifest.tensors],
    }


async def _told(request: web.Request, lines: AsyncGenerator[Line, None]) -> web.StreamResponse:
    """One line of JSON each, as they come; an error after the first is the last line."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    encode: Any = msgspec.json.encode
    await response.prepare(request)
    try:
        # Closed here and now where the reader leaves, so that the process behind the lines ends.
        async with contextlib.aclosing(lines):
            async for line in lines:
                await response.write(encode(line) + b"\n")
    except StokerError as error:
        await response.write(encode({"event": "error", "code": error.code, "message": str(error)}) + b"\n")
    await response.write_eof()
    return response
