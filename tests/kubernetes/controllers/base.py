"""What every controller has: the copies, the client, and small things said of objects."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import Client, Informer, path_of, suppress_api_error
from tests.kubernetes.clock import micro_stamp, stamp

Object = dict[str, Any]
Key = tuple[str, str]
# Uids of deleted objects remembered, so that an answer that comes late does not bring one back into a copy.
_GRAVES = 10_000


@dataclass(slots=True)
class World:
    """The copies of all watched collections, and the client to write with."""

    client: Client
    component: str
    authority: str = ""
    informers: dict[str, Informer] = field(default_factory=dict)
    graves: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        informer = self.informers[plural]
        return list(informer.objects.values()) if namespace is None else informer.of(namespace)

    def get(self, plural: str, key: Key) -> Object | None:
        return self.informers[plural].objects.get(key)

    def bury(self, value: Object) -> None:
        self.graves[value["metadata"]["uid"]] = None
        while len(self.graves) > _GRAVES:
            self.graves.popitem(last=False)

    def remember(self, plural: str, value: Object) -> Object:
        """Puts a written object into its copy at once: the next look must not repeat the write."""
        metadata = value["metadata"]
        informer = self.informers.get(plural)
        if informer is not None and metadata["uid"] not in self.graves:
            key = (metadata.get("namespace", ""), metadata["name"])
            have = informer.objects.get(key)
            if have is None or int(have["metadata"]["resourceVersion"]) < int(metadata["resourceVersion"]):
                informer.objects[key] = value
        return value

    async def create(self, plural: str, namespace: str, body: Object) -> Object | None:
        """None where it is there already."""
        with suppress_api_error(409):
            return self.remember(plural, await self.client.create(plural, namespace, body))
        return None

    async def patch(self, plural: str, value: Object, body: Object, subresource: str = "") -> None:
        metadata = value["metadata"]
        with suppress_api_error(404):
            patched = await self.client.patch(
                plural, metadata.get("namespace", ""), metadata["name"], body, subresource
            )
            self.remember(plural, patched)

    async def set_status(self, plural: str, value: Object, status: Object) -> None:
        """Writes a status that changed, under the version that was read: another writer's status is not undone."""
        old = value.get("status") or {}
        changed = {name: each for name, each in status.items() if old.get(name) != each}
        changed |= {name: None for name in old if name not in status}
        if changed:
            body = {"metadata": {"resourceVersion": value["metadata"]["resourceVersion"]}, "status": changed}
            await self.patch(plural, value, body, "status")

    async def delete(self, plural: str, value: Object, **options: Any) -> None:
        metadata = value["metadata"]
        options = {"preconditions": {"uid": metadata["uid"]}, **options}
        with suppress_api_error(404, 409):
            await self.client.call("DELETE", path_of(plural, metadata.get("namespace", ""), metadata["name"]), options)
            key = (metadata.get("namespace", ""), metadata["name"])
            have = self.informers[plural].objects.get(key) if plural in self.informers else None
            if have is not None and "deletionTimestamp" not in have["metadata"]:
                self.informers[plural].objects[key] = {
                    **have,
                    "metadata": {**have["metadata"], "deletionTimestamp": stamp()},
                }

    async def event(self, value: Object, kind: str, reason: str, message: str) -> None:
        """`client-go/tools/record`: an Event in the object's namespace."""
        metadata = value["metadata"]
        namespace = metadata.get("namespace") or "default"
        at = stamp()
        body: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": reference(value),
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": self.component},
            "reportingComponent": self.component,
            "reportingInstance": self.component,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "eventTime": micro_stamp(),
            "action": reason,
            "count": 1,
        }
        with suppress_api_error(403, 404):
            await self.client.create("events", namespace, body)


class Controller:
    """One loop: `keys` says what to look at when something changed, `sync` looks."""

    plurals: tuple[str, ...] = ()

    def __init__(self, world: World) -> None:
        self.world = world

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        raise NotImplementedError

    async def sync(self, key: Key) -> float | None:
        """Seconds until it wants to look again, where nothing else tells it to."""
        raise NotImplementedError


def key_of(value: Object) -> Key:
    return (value["metadata"].get("namespace", ""), value["metadata"]["name"])


def reference(value: Object) -> Object:
    metadata = value["metadata"]
    made = {
        "kind": value.get("kind", ""),
        "apiVersion": value.get("apiVersion", ""),
        "name": metadata["name"],
        "uid": metadata["uid"],
        "resourceVersion": metadata["resourceVersion"],
    }
    return {**made, "namespace": metadata["namespace"]} if "namespace" in metadata else made


def owner_of(value: Object) -> Object | None:
    return next((each for each in value["metadata"].get("ownerReferences") or [] if each.get("controller")), None)


def owned(values: Iterable[Object], uid: str) -> list[Object]:
    return [each for each in values if (owner := owner_of(each)) is not None and owner["uid"] == uid]


def controlled_by(value: Object, api_version: str, kind: str) -> list[Object]:
    return [
        {
            "apiVersion": api_version,
            "kind": kind,
            "name": value["metadata"]["name"],
            "uid": value["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def deleting(value: Object) -> bool:
    return "deletionTimestamp" in value["metadata"]


def ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def condition(value: Object, kind: str) -> Object:
    conditions = (value.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})


def ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def with_condition(value: Object, kind: str, status: str, reason: str, message: str = "") -> list[Object]:
    """The object's conditions with one of them set; unchanged where it says the same already."""
    conditions = list((value.get("status") or {}).get("conditions") or [])
    old = condition(value, kind)
    same = ("status", "reason", "message")
    if old and (old.get("status"), old.get("reason"), old.get("message", "")) == (status, reason, message):
        return conditions
    since = old.get("lastTransitionTime") if old.get("status") == status else None
    made = {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since or stamp(),
    }
    assert all(name in made for name in same)
    return [*(each for each in conditions if each["type"] != kind), made]


def digest(value: Any) -> str:
    """A short hash of a template, in letters that a label may hold."""
    raw = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()[:10].translate(str.maketrans("aeiou013", "bcdfgh24"))


def amount(value: int | str | None, of: int, up: bool) -> int:
    """A number or a percentage (`apimachinery/pkg/util/intstr`, GetScaledValueFromIntOrPercent)."""
    if value is None:
        return 0
    if isinstance(value, str) and value.endswith("%"):
        whole = int(value[:-1]) * of
        return -(-whole // 100) if up else whole // 100
    return int(value)


def retriable(error: ApiError) -> bool:
    return error.code in (409, 429, 500, 503, 504)
