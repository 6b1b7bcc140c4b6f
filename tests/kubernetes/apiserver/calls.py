"""One call to the API, as read from its path, query and headers.

Paths, verbs and the request attributes are those of `apiserver/pkg/endpoints/request/requestinfo.go`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.apiserver.errors import bad_request
from tests.kubernetes.apiserver.resources import ResourceType

_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
# Options that bodies of a wrong kind would carry are refused by the decoder, not here.
YES = ("1", "true", "t", "T", "TRUE", "True")


@dataclass(frozen=True, slots=True)
class User:
    """Who calls."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: dict[str, list[str]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Target:
    """The resource part of a path."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(slots=True)
class Call:
    """A request for a resource, with what the answer has to say beside its body."""

    verb: str
    target: Target
    resource: ResourceType
    user: User
    query: Mapping[str, str]
    user_agent: str = ""
    content_type: str = "application/json"
    warnings: list[str] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.target.namespace

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def subresource(self) -> str:
        return self.target.subresource

    @property
    def dry_run(self) -> bool:
        value = self.query.get("dryRun", "")
        if value and value != "All":
            raise bad_request(f'dryRun: Unsupported value: "{value}": supported values: "All"')
        return bool(value)

    @property
    def manager(self) -> str:
        """The field manager: named, or the first word of the user agent (`handlers/create.go`, managerOrUserAgent)."""
        return (self.query.get("fieldManager") or self.user_agent.split("/")[0] or "unknown")[:128]

    @property
    def strictness(self) -> str:
        """Ignore, Warn (the default) or Strict, of unknown and duplicate fields."""
        return self.query.get("fieldValidation") or "Warn"

    def flag(self, name: str) -> bool:
        return self.query.get(name, "") in YES


def parse_path(path: str) -> Target | None:
    """The resource that a path names; none for discovery and the like."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and not (group == "" and rest[2] in ("status", "finalize")):
        namespace, rest = rest[1], rest[2:]
    name = rest[1] if len(rest) > 1 else ""
    return Target(group, version, rest[0], namespace, name, "/".join(rest[2:]))


def verb_of(method: str, target: Target, query: Mapping[str, str]) -> str:
    verb = _VERBS.get(method, method.lower())
    if verb == "get" and (not target.name or query.get("watch") in YES):
        return "watch" if query.get("watch") in YES else "list"
    if verb == "delete" and not target.name:
        return "deletecollection"
    return verb


def options_of(body: Any, query: Mapping[str, str]) -> dict[str, Any]:
    """DeleteOptions of a body, or of the query where there is none."""
    options = dict(body) if isinstance(body, dict) else {}
    if "gracePeriodSeconds" in query:
        options.setdefault("gracePeriodSeconds", int(query["gracePeriodSeconds"]))
    for name in ("propagationPolicy",):
        if name in query:
            options.setdefault(name, query[name])
    if "orphanDependents" in query:
        options.setdefault("orphanDependents", query["orphanDependents"] in YES)
    return options
