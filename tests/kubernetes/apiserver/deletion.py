"""Deletion: grace, finalizers, propagation, preconditions.

Upstream: `apiserver/pkg/registry/rest/delete.go` (BeforeDelete), `registry/generic/registry/store.go` (Delete,
deletionFinalizersForGarbageCollection), `pkg/registry/core/pod/strategy.go` (CheckGracefulDelete). Dependants are
collected by the garbage collector, which is a client (`tests.kubernetes.controllers`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.kubernetes.apiserver import crds, errors
from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.resources import ResourceType
from tests.kubernetes.apiserver.store import Change
from tests.kubernetes.clock import now, read, stamp

Object = dict[str, Any]
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
# Kinds whose deletion answers with the object (ReturnDeletedObject), not with a Status.
_RETURNED = {
    "Pod",
    "Namespace",
    "Service",
    "PersistentVolumeClaim",
    "PersistentVolume",
    "ServiceAccount",
    "ResourceQuota",
}


class Deletion:
    """Deletes, over a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._store = registry.store
        registry.store.on_change(self._after)

    def delete(self, call: Call, options: Object) -> tuple[int, Object]:
        """The HTTP code and the answer."""
        resource = call.resource
        value = self._registry.get(resource, call.namespace, call.name)
        done, value = self.remove(resource, value, options, call.dry_run)
        if done and resource.kind not in _RETURNED:
            details: Object = {"name": call.name, "kind": resource.plural, "uid": value["metadata"]["uid"]}
            if resource.group:
                details["group"] = resource.group
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return 200, value

    def remove(
        self, resource: ResourceType, value: Object, options: Object, dry_run: bool = False
    ) -> tuple[bool, Object]:
        """Whether it is gone, and how it looks now."""
        metadata = value["metadata"]
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        self._preconditions(resource, metadata, options.get("preconditions") or {})
        grace_s = self._grace(resource, value, options)
        finalizers = self._finalizers(metadata, options)
        if (
            resource.kind == "CustomResourceDefinition"
            and crds.CLEANUP not in finalizers
            and not metadata.get("deletionTimestamp")
        ):
            finalizers.append(crds.CLEANUP)
        pending = (
            bool(finalizers) or grace_s > 0 or (resource.kind == "Namespace" and bool(value["spec"].get("finalizers")))
        )
        if not pending:
            if dry_run:
                return True, value
            return True, self._store.delete(resource.key, namespace, name)
        changed = dict(metadata)
        if finalizers:
            changed["finalizers"] = finalizers
        else:
            changed.pop("finalizers", None)
        if "deletionTimestamp" not in metadata:
            changed["deletionTimestamp"] = stamp(now() + timedelta(seconds=grace_s))
            changed["deletionGracePeriodSeconds"] = grace_s
            if "generation" in changed:
                changed["generation"] += 1
        elif grace_s < metadata.get("deletionGracePeriodSeconds", 0):
            began = read(metadata["deletionTimestamp"]) - timedelta(seconds=metadata["deletionGracePeriodSeconds"])
            changed["deletionTimestamp"] = stamp(began + timedelta(seconds=grace_s))
            changed["deletionGracePeriodSeconds"] = grace_s
        made = {**value, "metadata": changed}
        if resource.kind == "Namespace":
            made["status"] = {**made.get("status", {}), "phase": "Terminating"}
        if changed == metadata or dry_run:
            return False, made
        stored = self._store.put(resource.key, made)
        if resource.key == crds.KEY:
            self._definition(stored)
        return False, stored

    def _preconditions(self, resource: ResourceType, metadata: Object, wanted: Object) -> None:
        for name, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(name) and wanted[name] != metadata[name]:
                have = f"{word} in object meta: {metadata[name]}"
                why = f"Precondition failed: {word} in precondition: {wanted[name]}, {have}"
                raise errors.conflict(resource.plural, resource.group, metadata["name"], why)

    def _grace(self, resource: ResourceType, value: Object, options: Object) -> int:
        if resource.kind != "Pod" or resource.custom:
            return 0
        period = options.get("gracePeriodSeconds")
        if period is None:
            period = value["spec"].get("terminationGracePeriodSeconds", 30)
        if not value["spec"].get("nodeName") or (value.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            period = 0
        elif period < 0:
            period = 1
        already = value["metadata"].get("deletionGracePeriodSeconds")
        if already is not None and value["metadata"].get("deletionTimestamp"):
            # A second deletion may only shorten the time that is left.
            return min(period, already)
        return int(period)

    def _finalizers(self, metadata: Object, options: Object) -> list[str]:
        finalizers = [each for each in metadata.get("finalizers") or [] if each not in (FOREGROUND, ORPHAN)]
        policy = options.get("propagationPolicy")
        if policy is None and options.get("orphanDependents") is not None:
            policy = "Orphan" if options["orphanDependents"] else "Background"
        if policy is None:
            return list(metadata.get("finalizers") or [])
        if policy == "Foreground":
            finalizers.append(FOREGROUND)
        elif policy == "Orphan":
            finalizers.append(ORPHAN)
        elif policy != "Background":
            fault = errors.FieldFault(
                "propagationPolicy",
                'supported values: "Foreground", "Background", "Orphan"',
                "FieldValueNotSupported",
                policy,
            )
            raise errors.invalid("DeleteOptions", "meta.k8s.io", "", [fault])
        return finalizers

    def _definition(self, definition: Object) -> None:
        """A definition that is being deleted takes its objects along, and waits for those with finalizers
        (`apiextensions-apiserver/pkg/controller/finalizer/crd_finalizer.go`)."""
        spec = definition["spec"]
        key = (spec["group"], spec["names"]["plural"])
        resource = self._registry.catalogue.of_key(key)
        if resource is not None:
            for each in self._store.list(key):
                if not each["metadata"].get("deletionTimestamp"):
                    self.remove(resource, each, {})
        self._finish_definition(key)

    def _finish_definition(self, key: tuple[str, str]) -> None:
        name = f"{key[1]}.{key[0]}"
        definition = self._store.get(crds.KEY, "", name)
        if definition is None or not definition["metadata"].get("deletionTimestamp") or self._store.list(key):
            return
        left = [each for each in definition["metadata"].get("finalizers") or [] if each != crds.CLEANUP]
        if left:
            if left != definition["metadata"]["finalizers"]:
                self._store.put(crds.KEY, {**definition, "metadata": {**definition["metadata"], "finalizers": left}})
            return
        self._store.delete(crds.KEY, "", name)

    def _after(self, change: Change) -> None:
        if change.kind == "DELETED" and "." in change.key[0]:
            self._finish_definition(change.key)
