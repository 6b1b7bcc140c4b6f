"""The garbage collector: objects whose owners are gone, and owners that wait for what they own.

Upstream: `pkg/controller/garbagecollector/{garbagecollector,graph_builder}.go`; documented in
`kubernetes.io/docs/concepts/architecture/garbage-collection`.

Limits: looks at the kinds listed below and at custom resources, not at every kind there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import Informer, path_of, suppress_api_error
from tests.kubernetes.controllers.base import Controller, Key, Object, World, deleting

_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"
_KINDS = (
    *(
        "pods",
        "replicasets",
        "deployments",
        "statefulsets",
        "daemonsets",
        "jobs",
        "services",
        "endpointslices",
        "configmaps",
    ),
    *("secrets", "persistentvolumeclaims", "leases", "serviceaccounts", "poddisruptionbudgets", "roles"),
    *("rolebindings", "networkpolicies"),
)
_DEFINITIONS = "customresourcedefinitions"


class GarbageCollector(Controller):
    plurals = (*_KINDS, _DEFINITIONS)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Of every object seen, where it is; and of every owner, what it owns.
        self._places: dict[str, tuple[str, Object]] = {}
        self._owned: dict[str, set[str]] = {}
        self._custom: dict[str, asyncio.Task[None]] = {}

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == _DEFINITIONS:
            self._follow(value, kind)
            return []
        return self._seen(plural, kind, value)

    def _seen(self, plural: str, kind: str, value: Object) -> list[Key]:
        metadata = value["metadata"]
        uid = metadata["uid"]
        owners = [each["uid"] for each in metadata.get("ownerReferences") or []]
        if kind == "DELETED":
            self._places.pop(uid, None)
            for owner in owners:
                self._owned.get(owner, set()).discard(uid)
            # What it owned may be garbage; what owned it may have waited for it.
            return [("", each) for each in [*self._owned.get(uid, ()), *owners]]
        self._places[uid] = (plural, value)
        for owner in owners:
            self._owned.setdefault(owner, set()).add(uid)
        return [("", uid)] if owners or deleting(value) else []

    def _follow(self, definition: Object, kind: str) -> None:
        """Custom resources are watched by informers of their own, which come and go with their definitions."""
        spec = definition["spec"]
        version = next(each["name"] for each in spec["versions"] if each.get("storage"))
        plural = f"{spec['group']}/{version}/{spec['names']['plural']}"
        if kind == "DELETED":
            task = self._custom.pop(plural, None)
            if task is not None:
                task.cancel()
        elif plural not in self._custom:
            informer = Informer(self.world.client, plural)
            informer.listeners.append(lambda kind, value: self._told(plural, kind, value))
            self._custom[plural] = asyncio.create_task(informer.run())

    def _told(self, plural: str, kind: str, value: Object) -> None:
        for key in self._seen(plural, kind, value):
            self.requeue(key)

    def requeue(self, key: Key) -> None:
        """For custom resources, which come by another way than the manager's informers and queues."""
        task = asyncio.create_task(self._later(key))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _later(self, key: Key) -> None:
        for _ in range(20):
            try:
                await self.sync(key)
                return
            except ApiError:
                await asyncio.sleep(0.2)

    async def sync(self, key: Key) -> None:
        place = self._places.get(key[1])
        if place is None:
            return
        plural, value = place
        finalizers = value["metadata"].get("finalizers") or []
        if deleting(value):
            if _ORPHAN in finalizers:
                await self._orphan(plural, value)
            elif _FOREGROUND in finalizers:
                await self._foreground(plural, value)
            return
        owners = value["metadata"].get("ownerReferences") or []
        if not owners:
            return
        states = [await self._owner(each, value) for each in owners]
        if any(each == "there" for each in states):
            return
        policy = "Foreground" if "waiting" in states and self._owned.get(value["metadata"]["uid"]) else "Background"
        await self._delete(plural, value, policy)

    async def _owner(self, reference: Object, value: Object) -> str:
        """`there`, `waiting` (being deleted in the foreground), or `gone`."""
        known = self._places.get(reference["uid"])
        if known is None:
            found = await self._look(reference, value["metadata"].get("namespace", ""))
            if found is None or found["metadata"]["uid"] != reference["uid"]:
                return "gone"
            owner = found
        else:
            owner = known[1]
        waiting = deleting(owner) and _FOREGROUND in (owner["metadata"].get("finalizers") or [])
        return "waiting" if waiting else "there"

    async def _look(self, reference: Object, namespace: str) -> Object | None:
        """The owner as the server has it now: a copy may be behind."""
        version = reference["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        try:
            listed = await self.world.client.call("GET", root)
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        for each in listed["resources"]:
            if each["kind"] == reference["kind"] and "/" not in each["name"]:
                scope = f"/namespaces/{namespace}" if each["namespaced"] else ""
                with suppress_api_error(404):
                    return await self.world.client.call("GET", f"{root}{scope}/{each['name']}/{reference['name']}")
        return None

    async def _foreground(self, plural: str, value: Object) -> None:
        uid = value["metadata"]["uid"]
        blocking = 0
        for each in list(self._owned.get(uid, ())):
            place = self._places.get(each)
            if place is None:
                continue
            dependant_plural, dependant = place
            reference = next(owner for owner in dependant["metadata"]["ownerReferences"] if owner["uid"] == uid)
            blocking += bool(reference.get("blockOwnerDeletion"))
            if not deleting(dependant):
                await self._delete(dependant_plural, dependant, "Foreground" if self._owned.get(each) else "Background")
        if not blocking:
            await self._release(plural, value, _FOREGROUND)

    async def _orphan(self, plural: str, value: Object) -> None:
        uid = value["metadata"]["uid"]
        for each in list(self._owned.get(uid, ())):
            place = self._places.get(each)
            if place is not None:
                left = [owner for owner in place[1]["metadata"]["ownerReferences"] if owner["uid"] != uid]
                await self._patch(*place, {"metadata": {"ownerReferences": left or None}})
                self._owned[uid].discard(each)
        await self._release(plural, value, _ORPHAN)

    async def _release(self, plural: str, value: Object, finalizer: str) -> None:
        left = [each for each in value["metadata"].get("finalizers") or [] if each != finalizer]
        await self._patch(plural, value, {"metadata": {"finalizers": left or None}})

    async def _patch(self, plural: str, value: Object, body: Any) -> None:
        metadata = value["metadata"]
        with suppress_api_error(404):
            await self.world.client.patch(plural, metadata.get("namespace", ""), metadata["name"], body)

    async def _delete(self, plural: str, value: Object, policy: str) -> None:
        metadata = value["metadata"]
        options = {"propagationPolicy": policy, "preconditions": {"uid": metadata["uid"]}}
        with suppress_api_error(404, 409):
            path = path_of(plural, metadata.get("namespace", ""), metadata["name"])
            await self.world.client.call("DELETE", path, options)
