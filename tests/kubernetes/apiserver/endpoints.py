"""HTTP: what arrives becomes a `Call`, and what it makes becomes an answer.

Upstream: `apiserver/pkg/endpoints/installer.go` (which verbs a path takes), `handlers/negotiation`, `handlers/rest.go`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tests.kubernetes.apiserver import errors, tables
from tests.kubernetes.apiserver.access import POD_NAME, Access
from tests.kubernetes.apiserver.calls import Call, Target, User, options_of, parse_path, verb_of
from tests.kubernetes.apiserver.deletion import Deletion
from tests.kubernetes.apiserver.discovery import Discovery
from tests.kubernetes.apiserver.errors import ApiError, bad_request
from tests.kubernetes.apiserver.faults import HANG, RESET, Fault, Faults
from tests.kubernetes.apiserver.nodes import NodeProxy
from tests.kubernetes.apiserver.protobuf import read_protobuf
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.resources import CREATE_ONLY
from tests.kubernetes.apiserver.subresources import Subresources
from tests.kubernetes.apiserver.watches import Watches

Object = dict[str, Any]
_WRITES = {"create", "update", "patch", "delete", "deletecollection"}
_HEALTH = ("/healthz", "/livez", "/readyz")
# Calls remembered for tests that count them.
_REMEMBERED = 200_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call that was answered."""

    verb: str
    resource: str
    namespace: str
    name: str
    user: str
    code: int
    at_s: float
    pod: str = ""
    """Whose token it was, where it is bound to one."""

    @property
    def is_write(self) -> bool:
        return self.verb in _WRITES


class Endpoints:
    """The handler of every path."""

    def __init__(self, registry: Registry, access: Access, faults: Faults, watches: Watches) -> None:
        self._registry = registry
        self._access = access
        self._faults = faults
        self._watches = watches
        self._deletion = Deletion(registry)
        self._subresources = Subresources(registry, self._deletion, access)
        self._discovery = Discovery(registry.catalogue)
        self._nodes = NodeProxy(registry)
        self.recorded: deque[Recorded] = deque(maxlen=_REMEMBERED)
        self.counts: Counter[tuple[str, str]] = Counter()

    async def close(self) -> None:
        await self._nodes.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            user = self._access.user_of(request.headers.get("Authorization", ""))
            target = parse_path(request.path)
            if target is None:
                return self._described(request)
            return await self._resource(request, user, target)
        except ApiError as error:
            return _refused(error)

    def _described(self, request: web.Request) -> web.Response:
        if request.path in _HEALTH:
            return web.Response(text="ok")
        found = self._discovery.answer(request.path.rstrip("/"), request.headers.get("Accept", ""))
        if found is None:
            raise errors.unknown_path()
        kind, document = found
        return web.Response(body=msgspec.json.encode(document), headers={"Content-Type": kind})

    async def _resource(self, request: web.Request, user: User, target: Target) -> web.StreamResponse:
        resource = self._registry.catalogue.find(target.group, target.version, target.plural)
        if resource is None or (target.subresource and target.subresource not in resource.subresources):
            raise errors.unknown_path()
        if target.subresource in ("log", "portforward") and not target.name:
            raise errors.unknown_path()
        if resource.namespaced and target.name and not target.namespace:
            raise errors.unknown_path()
        call = Call(
            verb_of(request.method, target, request.query),
            target,
            resource,
            user,
            request.query,
            request.headers.get("User-Agent", ""),
            request.headers.get("Content-Type", "application/json"),
        )
        code = 500
        try:
            self._access.require(call)
            fault = self._faults.take(call)
            if fault is not None and not fault.lost:
                await self._suffer(request, fault)
            response = await self._answered(request, call)
            if fault is not None and fault.lost:
                await self._suffer(request, fault)
            code = response.status
            return response
        except ApiError as error:
            code = error.code
            raise
        finally:
            self._record(call, code)

    def _record(self, call: Call, code: int) -> None:
        plural = call.target.plural + (f"/{call.subresource}" if call.subresource else "")
        at_s = asyncio.get_running_loop().time()
        (pod,) = call.user.extra.get(POD_NAME) or [""]
        self.recorded.append(Recorded(call.verb, plural, call.namespace, call.name, call.user.name, code, at_s, pod))
        self.counts[call.verb, plural] += 1

    async def _suffer(self, request: web.Request, fault: Fault) -> None:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.outcome == HANG:
            # Handlers are cancelled when their client goes.
            await asyncio.Event().wait()
        if fault.outcome in (RESET, HANG):
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("cut by the test")
        if fault.outcome is not None:
            raise fault.error()

    async def _answered(self, request: web.Request, call: Call) -> web.StreamResponse:
        accept = request.headers.get("Accept", "")
        if call.subresource == "log":
            return await self._nodes.log(request, call)
        if call.subresource == "portforward":
            return await self._nodes.port_forward(request, call)
        if call.verb not in call.resource.verbs and not call.subresource:
            raise errors.method_not_allowed()
        if call.verb == "watch":
            return await self._watched(request, call, accept)
        if call.verb == "list":
            return self._listed(call, accept)
        if call.verb == "get":
            if call.subresource == "scale":
                return _answer(call, 200, self._subresources.scale_of(call))
            value = self._registry.get(call.resource, call.namespace, call.name)
            return _shaped(call, self._registry.as_version(call.resource, value), accept)
        body = await _body(request, call)
        code, value = self._written(call, body)
        if "as=Table" in accept and value.get("kind") == call.resource.kind:
            return _shaped(call, value, accept, code)
        return _answer(call, code, value)

    def _written(self, call: Call, body: Any) -> tuple[int, Object]:
        """One write, start to end without a pause: this is what makes it atomic."""
        if call.resource.verbs == CREATE_ONLY:
            return 201, self._subresources.review(call, body)
        match call.verb:
            case "create":
                if call.subresource:
                    return self._subresources.create(call, body)
                return 201, self._registry.create(call, body)
            case "update" | "patch":
                if call.subresource == "scale":
                    return 200, self._rescaled(call, body)
                if call.subresource == "finalize":
                    return 200, self._finalized(call, body)
                if call.verb == "update":
                    return 200, self._registry.update(call, body)
                existed = self._registry.store.get(call.resource.key, call.namespace, call.name) is not None
                return (200 if existed else 201), self._registry.patch(call, body)
            case "delete":
                return self._deletion.delete(call, options_of(body, call.query))
            case "deletecollection":
                return 200, self._emptied(call, body)
        raise errors.method_not_allowed()

    def _rescaled(self, call: Call, body: Any) -> Object:
        if call.verb == "patch":
            from tests.kubernetes.apiserver.patches import json_patch, merge_patch

            scale = self._subresources.scale_of(call)
            body = json_patch(scale, body) if "json-patch" in call.content_type else merge_patch(scale, body)
        return self._subresources.rescale(call, body)

    def _finalized(self, call: Call, body: Object) -> Object:
        """The last word of the namespace controller (`pkg/registry/core/namespace/storage`, FinalizeREST)."""
        value = self._registry.get(call.resource, "", call.name)
        finalizers = (body.get("spec") or {}).get("finalizers") or []
        made = {**value, "spec": {**value["spec"], "finalizers": finalizers}, "metadata": dict(value["metadata"])}
        if made["metadata"].get("deletionTimestamp") and not finalizers and not made["metadata"].get("finalizers"):
            return self._registry.store.delete(call.resource.key, "", call.name)
        return self._registry.store.put(call.resource.key, made)

    def _emptied(self, call: Call, body: Any) -> Object:
        items, metadata = self._watches.list(call)
        options = options_of(body, call.query)
        for each in items:
            with suppress(ApiError):
                self._deletion.remove(call.resource, each, options, call.dry_run)
        return {
            "kind": call.resource.list_kind,
            "apiVersion": call.resource.group_version,
            "metadata": metadata,
            "items": items,
        }

    def _listed(self, call: Call, accept: str) -> web.Response:
        items, metadata = self._watches.list(call)
        if "as=Table" in accept:
            value = tables.table(call.resource, items, metadata, call.query.get("includeObject", "Metadata"))
            return _answer(call, 200, value)
        kind, version = call.resource.list_kind, call.resource.group_version
        if "as=PartialObjectMetadataList" in accept:
            items = [_partial(each) for each in items]
            kind, version = "PartialObjectMetadataList", "meta.k8s.io/v1"
        else:
            # Items of typed lists carry no kind of their own.
            items = [
                {name: each[name] for name in each if call.resource.custom or name not in ("kind", "apiVersion")}
                for each in items
            ]
        return _answer(call, 200, {"kind": kind, "apiVersion": version, "metadata": metadata, "items": items})

    async def _watched(self, request: web.Request, call: Call, accept: str) -> web.StreamResponse:
        events = self._watches.watch(call)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        first = True
        try:
            await response.prepare(request)
            async for event in events:
                shaped = _shaped_event(call, event, accept, first)
                first = first and event["type"] == "BOOKMARK"
                await response.write(msgspec.json.encode(shaped) + b"\n")
            await response.write_eof()
        except (ConnectionResetError, ConnectionError):
            pass
        finally:
            await _closed(events)
        return response


async def _closed(events: AsyncIterator[Object]) -> None:
    await events.aclose()  # type: ignore[attr-defined]


def _partial(value: Object) -> Object:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"]}


def _shaped_event(call: Call, event: Object, accept: str, headers: bool) -> Object:
    if event["type"] in ("ERROR", "BOOKMARK"):
        return event
    if "as=Table" in accept:
        metadata = {"resourceVersion": event["object"]["metadata"]["resourceVersion"]}
        include = call.query.get("includeObject", "Metadata")
        return {**event, "object": tables.table(call.resource, [event["object"]], metadata, include, headers)}
    if "as=PartialObjectMetadata" in accept:
        return {**event, "object": _partial(event["object"])}
    return event


def _shaped(call: Call, value: Object, accept: str, code: int = 200) -> web.Response:
    if "as=Table" in accept:
        metadata = {"resourceVersion": value["metadata"].get("resourceVersion", "")}
        value = tables.table(call.resource, [value], metadata, call.query.get("includeObject", "Metadata"))
    elif "as=PartialObjectMetadata" in accept:
        value = _partial(value)
    return _answer(call, code, value)


def _answer(call: Call, code: int, value: Object) -> web.Response:
    response = web.Response(status=code, body=msgspec.json.encode(value), headers={"Content-Type": "application/json"})
    for each in call.warnings:
        # RFC 7234 warn-code 299, as `k8s.io/apiserver/pkg/warning` writes it.
        escaped = each.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{escaped}"')
    return response


def _refused(error: ApiError) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.code, body=msgspec.json.encode(error.status()), headers=headers)


async def _body(request: web.Request, call: Call) -> Any:
    raw = await request.read()
    if not raw.strip():
        if call.verb in ("delete", "deletecollection"):
            return None
        raise bad_request("the body of the request was empty")
    kind = call.content_type.split(";")[0]
    if "protobuf" in kind and not call.resource.custom:
        return read_protobuf(raw)
    if "protobuf" in kind or "cbor" in kind:
        raise ApiError(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: "
            "application/json, application/yaml",
        )
    try:
        # JSON is YAML, but several times faster to read as what it is.
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        if "yaml" not in kind:
            raise bad_request(f"error decoding body: {error}") from error
    try:
        return yaml.load(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise bad_request(f"error decoding YAML: {error}") from error
