"""Discovery, versions and OpenAPI: what clients read before they call.

Upstream: `apiserver/pkg/endpoints/discovery`, `apidiscovery/v2` (aggregated), `kube-openapi/pkg/handler3`.

Limits: OpenAPI v3 only, with the operations that kubectl and helm look at (which verbs take `fieldValidation`) and the
schemas; `/openapi/v2`, which clients of these versions ask for only as a fallback, is not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from tests.kubernetes.apiserver import schemas
from tests.kubernetes.apiserver.resources import Catalogue, ResourceType

Object = dict[str, Any]
VERSION: Object = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.2",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2026-10-01T00:00:00Z",
    "goVersion": "go1.27.2",
    "compiler": "gc",
    "platform": "linux/amd64",
}
AGGREGATED = ("apidiscovery.k8s.io", "APIGroupDiscoveryList")
_COMPONENT = "#/components/schemas/"
# What helm and kubectl ask of a document: may a verb be told to validate fields, may it be run dry.
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation")
]


class Discovery:
    """The documents, made of the catalogue and kept until it changes."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._kept: dict[tuple[int, str], Object] = {}

    def answer(self, path: str, accept: str) -> tuple[str, Object] | None:
        """Content type and document; none where nothing is served."""
        aggregated = "as=APIGroupDiscoveryList" in accept and path in ("/api", "/apis")
        key = (self._catalogue.generation, path + ("+" if aggregated else ""))
        if key not in self._kept:
            made = self._aggregated(path) if aggregated else self._document(path)
            if made is None:
                return None
            self._kept[key] = made
        kind = (
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList" if aggregated else "application/json"
        )
        return kind, self._kept[key]

    def _document(self, path: str) -> Object | None:
        parts = [part for part in path.split("/") if part]
        match parts:
            case ["version"]:
                return VERSION
            case ["api"]:
                address = {"clientCIDR": "0.0.0.0/0", "serverAddress": "127.0.0.1"}
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [address]}
            case ["apis"]:
                groups = [self._group(name) for name in self._catalogue.groups() if name]
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
            case ["apis", group]:
                if group not in self._catalogue.groups():
                    return None
                return {"kind": "APIGroup", "apiVersion": "v1", **self._group(group)}
            case ["api", version]:
                return self._resources("", version)
            case ["apis", group, version]:
                return self._resources(group, version)
            case ["openapi", "v3"]:
                return self._openapi_index()
            case ["openapi", "v3", "api", version]:
                return self._openapi("", version)
            case ["openapi", "v3", "apis", group, version]:
                return self._openapi(group, version)
        return None

    def _group(self, name: str) -> Object:
        versions = [
            {"groupVersion": f"{name}/{version}", "version": version} for version in self._catalogue.groups()[name]
        ]
        return {"name": name, "versions": versions, "preferredVersion": versions[0]}

    def _of(self, group: str, version: str) -> list[ResourceType]:
        return [each for each in self._catalogue.all() if each.group == group and each.version == version]

    def _resources(self, group: str, version: str) -> Object | None:
        found = self._of(group, version)
        if not found:
            return None
        listed = [entry for each in found for entry in _entries(each)]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{group}/{version}" if group else version,
            "resources": listed,
        }

    def _aggregated(self, path: str) -> Object:
        names = [name for name in self._catalogue.groups() if bool(name) == (path == "/apis")]
        items = []
        for name in names:
            versions = [
                {
                    "version": version,
                    "freshness": "Current",
                    "resources": [_aggregated_entry(each) for each in self._of(name, version)],
                }
                for version in self._catalogue.groups()[name]
            ]
            items.append({"metadata": {"name": name, "creationTimestamp": None}, "versions": versions})
        return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}

    def _openapi_index(self) -> Object:
        paths = {}
        for group, versions in self._catalogue.groups().items():
            for version in versions:
                place = f"apis/{group}/{version}" if group else f"api/{version}"
                mark = hashlib.sha256(f"{place} {self._catalogue.generation}".encode()).hexdigest()[:16]
                paths[place] = {"serverRelativeURL": f"/openapi/v3/{place}?hash={mark}"}
        return {"paths": paths}

    def _openapi(self, group: str, version: str) -> Object | None:
        found = self._of(group, version)
        if not found:
            return None
        prefix = f"/apis/{group}/{version}" if group else f"/api/{version}"
        paths: Object = {}
        components: Object = {}
        for each in found:
            name = each.definition or f"{'.'.join(reversed(each.group.split('.')))}.{each.version}.{each.kind}"
            kind = [{"group": each.group, "kind": each.kind, "version": each.version}]
            if each.custom:
                inner = {
                    **(each.schema or {}),
                    "properties": {**_ENVELOPE, **((each.schema or {}).get("properties") or {})},
                }
                components[name] = {**inner, "x-kubernetes-group-version-kind": kind}
                _collect({"$ref": "#/$defs/" + _OBJECT_META}, components)
            else:
                _collect({"$ref": f"#/$defs/{each.definition}"}, components)
            body = {"content": {"application/json": {"schema": {"$ref": _COMPONENT + name}}}}
            operation = {
                "parameters": _PARAMETERS,
                "requestBody": body,
                "x-kubernetes-group-version-kind": kind[0],
                "responses": {},
            }
            scope = "/namespaces/{namespace}" if each.namespaced else ""
            base = f"{prefix}{scope}/{each.plural}"
            paths[base] = {"post": {**operation, "x-kubernetes-action": "post"}}
            if "patch" in each.verbs:
                paths[base + "/{name}"] = {
                    "patch": {**operation, "x-kubernetes-action": "patch"},
                    "put": {**operation, "x-kubernetes-action": "put"},
                }
        return {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
            "paths": paths,
            "components": {"schemas": components},
        }


_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_ENVELOPE: Object = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"allOf": [{"$ref": _COMPONENT + _OBJECT_META}]},
}


def _collect(schema: Any, into: Object) -> Any:
    """The schema in OpenAPI 3.0's form (no null in types, components for definitions); fills what it refers to in."""
    if isinstance(schema, list):
        return [_collect(each, into) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: Object = {}
    for name, each in schema.items():
        if name == "$ref":
            target = each.rsplit("/", 1)[-1]
            if target not in into:
                into[target] = {}
                into[target] = _collect(schemas.of_definition(target), into)
            made["$ref"] = _COMPONENT + target
        elif name == "type" and isinstance(each, list):
            made["type"] = next(kind for kind in each if kind != "null")
        elif name in ("enum", "default", "example"):
            made[name] = each
        elif name == "properties":
            # Names here are the object's own, whatever they look like.
            made[name] = {inner: _collect(part, into) for inner, part in each.items()}
        else:
            made[name] = _collect(each, into)
    return made


def _entries(resource: ResourceType) -> Iterable[Object]:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    yield entry
    for name, kind in resource.subresources.items():
        more: Object = {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": kind,
            "verbs": _subresource_verbs(name),
        }
        if kind in _FOREIGN:
            more["group"], more["version"] = _FOREIGN[kind]
        yield more


_FOREIGN = {
    "Scale": ("autoscaling", "v1"),
    "Eviction": ("policy", "v1"),
    "TokenRequest": ("authentication.k8s.io", "v1"),
}


def _subresource_verbs(name: str) -> list[str]:
    if name in ("eviction", "binding", "token"):
        return ["create"]
    if name == "log":
        return ["get"]
    if name == "portforward":
        return ["create", "get"]
    return ["update"] if name == "finalize" else ["get", "patch", "update"]


def _aggregated_entry(resource: ResourceType) -> Object:
    def kind_of(kind: str) -> Object:
        group, version = _FOREIGN.get(kind, (resource.group, resource.version))
        return {"group": group, "version": version, "kind": kind}

    entry: Object = {
        "resource": resource.plural,
        "responseKind": kind_of(resource.kind),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(resource.verbs),
        "shortNames": list(resource.short_names),
        "categories": list(resource.categories),
    }
    subresources = [
        {"subresource": name, "responseKind": kind_of(kind), "verbs": _subresource_verbs(name)}
        for name, kind in resource.subresources.items()
    ]
    return {**entry, "subresources": subresources} if subresources else entry
