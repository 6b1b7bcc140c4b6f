"""What every write goes through, and reads.

Model: decode (drop or refuse unknown fields), fill defaults in, admit, validate, decide who owns which field, then
store, under the optimistic lock of resourceVersion. Upstream: `apiserver/pkg/registry/generic/registry/store.go`,
`registry/rest/{create,update}.go`, `endpoints/handlers/{create,update,patch}.go`.
"""

from __future__ import annotations

import copy
import secrets
import uuid
from collections.abc import Callable
from typing import Any

from tests.kubernetes.apiserver import cel, crds, defaults, errors, ownership, patches, schemas, structural, validation
from tests.kubernetes.apiserver.admission import Admission
from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.errors import ApiError, FieldFault, bad_request
from tests.kubernetes.apiserver.ownership import Manager
from tests.kubernetes.apiserver.resources import Catalogue, ResourceType
from tests.kubernetes.apiserver.store import Change, Store
from tests.kubernetes.clock import stamp

Object = dict[str, Any]

# Letters of generated names: no vowels, nothing alike (`apimachinery/pkg/util/rand`).
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
# Kinds whose update without a resourceVersion is refused, and those that an update may create
# (AllowUnconditionalUpdate and AllowCreateOnUpdate of their strategies). Custom resources are of the first.
_CONDITIONAL = {"Lease", "PodDisruptionBudget", "CustomResourceDefinition", "PriorityClass"}
_CREATED_BY_UPDATE = {"Lease", "Event", "Endpoints"}
# Built-in kinds whose generation counts changes of the spec; the others have none.
_COUNTED = {"Pod", "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "ReplicationController", "Job", "CronJob"}
_COUNTED |= {"PodDisruptionBudget", "NetworkPolicy", "Ingress", "HorizontalPodAutoscaler", "CustomResourceDefinition"}
_KEPT_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "generateName",
)
APPLY, JSON_PATCH = "application/apply-patch+yaml", "application/json-patch+json"
MERGE_PATCH, STRATEGIC_PATCH = "application/merge-patch+json", "application/strategic-merge-patch+json"


class Registry:
    """Reads and writes of objects."""

    def __init__(self, store: Store, catalogue: Catalogue, cluster_ip: Callable[[], str]) -> None:
        self.store = store
        self.catalogue = catalogue
        self._cluster_ip = cluster_ip
        self._node_port = 30000
        self._admission = Admission(store)
        # Rules are looked for once a schema, by its identity: a CRD's schema is replaced, never changed.
        self._ruled: dict[int, tuple[Object, bool]] = {}
        store.on_change(self._definitions)

    def get(self, resource: ResourceType, namespace: str, name: str) -> Object:
        found = self.store.get(resource.key, namespace, name)
        if found is None:
            raise errors.not_found(resource.plural, resource.group, name)
        return self.as_version(resource, found)

    def as_version(self, resource: ResourceType, value: Object) -> Object:
        """Another served version of a CRD: its objects convert by name only (conversion strategy None)."""
        if value.get("apiVersion") == resource.group_version:
            return value
        return {**value, "apiVersion": resource.group_version}

    def create(self, call: Call, body: Object) -> Object:
        resource = call.resource
        value = self._named(call, body)
        name = value["metadata"]["name"]
        # Before admission: who creates twice learns of that, not of a quota.
        if self.store.get(resource.key, call.namespace, name) is not None:
            raise errors.already_exists(resource.plural, resource.group, name)
        value["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        for forged in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion", "generation", "selfLink"):
            value["metadata"].pop(forged, None)
        value = self._decoded(call, value)
        if resource.has_status and resource.kind != "Namespace":
            value.pop("status", None)
        if resource.custom or resource.kind in _COUNTED:
            value["metadata"]["generation"] = 1
        self._fill(resource, value, None)
        self._admission.create(resource, value)
        self._validate(resource, value, None)
        self._complete(resource, value)
        if APPLY not in call.content_type:
            manager = self._manager(call, "Update")
            value["metadata"]["managedFields"] = ownership.after_write(
                None, value, manager, self.schema(resource), resource.has_status
            )
        return value if call.dry_run else self.store.put(resource.key, value)

    def update(self, call: Call, body: Object) -> Object:
        resource = call.resource
        old = self.store.get(resource.key, call.namespace, call.name)
        if old is None:
            if resource.kind in _CREATED_BY_UPDATE and not call.subresource:
                return self.create(call, body)
            raise errors.not_found(resource.plural, resource.group, call.name)
        value = self._named(call, body)
        metadata = value["metadata"]
        version = metadata.get("resourceVersion")
        if not version and (resource.custom or resource.kind in _CONDITIONAL):
            fault = FieldFault("metadata.resourceVersion", "must be specified for an update", value=0)
            raise errors.invalid(resource.kind, resource.group, call.name, [fault])
        if version and version != old["metadata"]["resourceVersion"]:
            raise errors.conflict(resource.plural, resource.group, call.name)
        return self.replace(call, old, value)

    def patch(self, call: Call, body: Any) -> Object:
        resource = call.resource
        old = self.store.get(resource.key, call.namespace, call.name)
        if APPLY in call.content_type:
            return self._apply(call, old, body)
        if old is None:
            raise errors.not_found(resource.plural, resource.group, call.name)
        old = self.as_version(resource, old)
        if JSON_PATCH in call.content_type:
            value = patches.json_patch(old, body)
        elif MERGE_PATCH in call.content_type:
            value = patches.merge_patch(old, body)
        elif STRATEGIC_PATCH in call.content_type and not resource.custom:
            value = patches.strategic_patch(old, body, self.schema(resource))
        else:
            accepted = ", ".join(
                (JSON_PATCH, MERGE_PATCH, APPLY)
                if resource.custom
                else (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY)
            )
            raise ApiError(
                415,
                "UnsupportedMediaType",
                f"the body of the request was in an unknown format - accepted media types include: {accepted}",
            )
        if value["metadata"].get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise errors.conflict(resource.plural, resource.group, call.name)
        return self.replace(call, old, self._named(call, value))

    def replace(self, call: Call, old: Object, value: Object, applied: bool = False) -> Object:
        """Stores `value` over `old`, as the subresource of the call allows."""
        resource = call.resource
        value = {**value, "metadata": dict(value["metadata"])}
        uid = value["metadata"].get("uid")
        if uid and uid != old["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            raise errors.conflict(resource.plural, resource.group, call.name, why)
        value = self._decoded(call, value)
        if call.subresource == "status":
            value = {**old, "status": value.get("status"), "metadata": {**old["metadata"], **_managed(value)}}
            if value["status"] is None:
                del value["status"]
        elif resource.has_status:
            value.pop("status", None)
            if "status" in old:
                value["status"] = old["status"]
        metadata = value["metadata"]
        for name in _KEPT_METADATA:
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = old["metadata"][name]
        metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        self._fill(resource, value, old)
        self._finalizers(resource, value, old)
        self._validate(resource, value, old)
        self._count(resource, value, old)
        manager = self._manager(call, "Update")
        if not applied:
            managed = ownership.after_write(old, value, manager, self.schema(resource), resource.has_status)
            metadata["managedFields"] = managed
        if _same(value, old) and (applied or not _forced(old, metadata)):
            return old
        if call.dry_run:
            return value
        released = old["metadata"].get("finalizers") and not metadata.get("finalizers")
        if released and metadata.get("deletionTimestamp") and not metadata.get("deletionGracePeriodSeconds"):
            self.store.put(resource.key, value)
            return self.store.delete(resource.key, call.namespace, call.name)
        return self.store.put(resource.key, value)

    def schema(self, resource: ResourceType) -> schemas.Schema:
        if not resource.custom:
            return schemas.of_definition(resource.definition)
        inner = resource.schema or {}
        envelope = schemas.of_definition("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
        return {**inner, "properties": {**(inner.get("properties") or {}), "metadata": envelope}}

    def _apply(self, call: Call, old: Object | None, body: Object) -> Object:
        """Server-side apply (`handlers/patch.go`, applyPatcher)."""
        resource = call.resource
        if not isinstance(body, dict):
            raise bad_request("error decoding YAML: not an object")
        if not call.query.get("fieldManager"):
            raise ApiError(
                400,
                "BadRequest",
                'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch',
            )
        config = self._named(call, body)
        if config["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        given = config["metadata"].pop("resourceVersion", None)
        if given and old is None:
            raise errors.conflict(resource.plural, resource.group, call.name)
        if given and old is not None and given != old["metadata"]["resourceVersion"]:
            raise errors.conflict(resource.plural, resource.group, call.name)
        if old is None and call.subresource:
            raise errors.not_found(resource.plural, resource.group, call.name)
        self._typed(resource, config)
        manager = self._manager(call, "Apply")
        force = call.flag("force")
        if old is not None:
            old = self.as_version(resource, old)
        value = ownership.applied(old, config, manager, self.schema(resource), resource.has_status, force)
        if old is None:
            return self.create(call, value)
        return self.replace(call, old, value, applied=True)

    def _typed(self, resource: ResourceType, config: Object) -> None:
        if resource.custom:
            _, walk = structural.checked_custom(resource.schema or {}, config, defaulting=False)
        else:
            _, walk = structural.checked_builtin(self.schema(resource), config)
        if walk.unknown:
            where = f"{config['metadata'].get('namespace', '')}/{config['metadata']['name']}"
            raise ApiError(
                500,
                "InternalError",
                f"failed to create typed patch object ({where}; {resource.group_version}, Kind={resource.kind}): "
                + ", ".join(f".{path}: field not declared in schema" for path in walk.unknown),
            )

    def _named(self, call: Call, body: Object) -> Object:
        """The body with its kind, name and namespace, refused where they are not those of the path."""
        resource = call.resource
        if not isinstance(body, dict):
            raise bad_request(f"the object provided is unrecognized (must be of type {resource.kind})")
        for name, wanted in (("apiVersion", resource.group_version), ("kind", resource.kind)):
            if body.get(name) not in (None, "", wanted):
                raise bad_request(
                    f"{resource.kind} in version {resource.version!r} cannot be handled as a "
                    f"{resource.kind}: the {name} in the data "
                    f"({body.get(name)}) does not match the expected {name} ({wanted})"
                )
        metadata = dict(body.get("metadata") or {})
        if resource.namespaced:
            if metadata.get("namespace") not in (None, "", call.namespace):
                raise bad_request(
                    f"the namespace of the provided object does not match the namespace sent on the "
                    f"request ({metadata['namespace']} != {call.namespace})"
                )
            metadata["namespace"] = call.namespace
        else:
            metadata.pop("namespace", None)
        if call.name:
            if metadata.get("name") not in (None, "", call.name):
                raise bad_request(
                    f"the name of the object ({metadata['name']}) does not match the name on the URL ({call.name})"
                )
            metadata["name"] = call.name
        elif not metadata.get("name"):
            prefix = metadata.get("generateName")
            if not prefix:
                fault = FieldFault("metadata.name", "name or generateName is required", "FieldValueRequired")
                raise errors.invalid(resource.kind, resource.group, "", [fault])
            # 63 less five letters (`names.SimpleNameGenerator`).
            metadata["name"] = prefix[:58] + "".join(secrets.choice(_LETTERS) for _ in range(5))
        return {"apiVersion": resource.group_version, "kind": resource.kind, "metadata": metadata, **_rest(body)}

    def _decoded(self, call: Call, value: Object) -> Object:
        resource = call.resource
        managed = value["metadata"].pop("managedFields", None)
        if resource.custom:
            made, walk = structural.checked_custom(resource.schema or {}, value)
        else:
            made, walk = structural.checked_builtin(self.schema(resource), copy.deepcopy(value))
        if walk.unknown and call.strictness != "Ignore":
            words = [f'unknown field "{path}"' for path in walk.unknown]
            if call.strictness == "Strict":
                raise bad_request(f"strict decoding error: {', '.join(words)}")
            call.warnings += words
        if walk.faults:
            name = value["metadata"]["name"]
            if resource.custom:
                raise errors.invalid(resource.kind, resource.group, name, walk.faults)
            wrong = [each for each in walk.faults if each.kind == "FieldValueTypeInvalid"]
            if wrong:
                raise bad_request(
                    f"{resource.kind} in version {resource.version!r} cannot be handled as a "
                    f"{resource.kind}: json: cannot unmarshal: " + "; ".join(each.message for each in wrong)
                )
            raise errors.invalid(resource.kind, resource.group, name, walk.faults)
        if managed is not None:
            made["metadata"]["managedFields"] = managed
        return made

    def _fill(self, resource: ResourceType, value: Object, old: Object | None) -> None:
        if resource.custom:
            return
        if resource.kind == "Service" and old is not None:
            for name in ("clusterIP", "clusterIPs"):
                if not value["spec"].get(name) and old["spec"].get(name):
                    value["spec"][name] = old["spec"][name]
        if resource.kind == "Pod" and old is not None:
            for name in ("serviceAccountName", "serviceAccount", "nodeName", "priority", "preemptionPolicy"):
                if name not in value["spec"] and name in old["spec"]:
                    value["spec"][name] = old["spec"][name]
        if resource.kind == "Job" and old is not None and "selector" not in value["spec"]:
            value["spec"]["selector"] = old["spec"]["selector"]
        if resource.kind == "ServiceAccount" or resource.kind == "ConfigMap":
            return
        defaults.fill(resource.kind, value)

    def _complete(self, resource: ResourceType, value: Object) -> None:
        """What a new object is given by its registry: addresses, first status."""
        if resource.custom:
            return
        match resource.kind:
            case "Service":
                spec = value["spec"]
                if spec["type"] != "ExternalName":
                    spec.setdefault("clusterIP", self._cluster_ip())
                    spec["clusterIPs"] = [spec["clusterIP"]]
                if spec["type"] in ("NodePort", "LoadBalancer"):
                    for port in spec.get("ports") or []:
                        self._node_port += 1
                        port.setdefault("nodePort", self._node_port)
                value["status"] = {"loadBalancer": {}}
            case "Pod":
                value["status"] = {"phase": "Pending", "qosClass": _quality(value["spec"])}
            case "CustomResourceDefinition":
                value["status"] = crds.accepted_status(value)
            case "Namespace":
                value["status"] = {"phase": "Active"}
            case "Deployment" | "ReplicaSet" | "StatefulSet" | "Job" | "DaemonSet":
                value["status"] = {"replicas": 0} if resource.kind in ("ReplicaSet", "StatefulSet") else {}

    def _validate(self, resource: ResourceType, value: Object, old: Object | None) -> None:
        found = validation.faults_of(resource, value, old)
        if resource.kind == "CustomResourceDefinition" and not resource.custom:
            found += crds.faults_of(value)
        if resource.custom and not found and self._has_rules(resource.schema or {}):
            found += cel.evaluate(resource.schema or {}, value, old)
        if found:
            raise errors.invalid(resource.kind, resource.group, value["metadata"]["name"], found)

    def _has_rules(self, schema: Object) -> bool:
        known = self._ruled.get(id(schema))
        if known is None or known[0] is not schema:
            known = self._ruled[id(schema)] = (schema, cel.has_rules(schema))
        return known[1]

    def _finalizers(self, resource: ResourceType, value: Object, old: Object) -> None:
        if old["metadata"].get("deletionTimestamp"):
            added = set(value["metadata"].get("finalizers") or []) - set(old["metadata"].get("finalizers") or [])
            if added:
                fault = FieldFault(
                    "metadata.finalizers",
                    f"no new finalizers can be added if the object is being deleted, found new finalizers "
                    f"{sorted(added)}",
                    "FieldValueForbidden",
                )
                raise errors.invalid(resource.kind, resource.group, value["metadata"]["name"], [fault])

    def _count(self, resource: ResourceType, value: Object, old: Object) -> None:
        """The generation: of custom resources every change counts but of metadata, and of status where it is apart."""
        if not resource.custom and resource.kind not in _COUNTED:
            return
        ignored = {"metadata", "status"} if resource.has_status else {"metadata"}
        changed = any(value.get(name) != old.get(name) for name in (value.keys() | old.keys()) - ignored)
        if changed:
            value["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1

    def _manager(self, call: Call, operation: str) -> Manager:
        subresource = "" if call.subresource in ("", "eviction", "binding") else call.subresource
        return Manager(call.manager, operation, call.resource.group_version, subresource, stamp())

    def _definitions(self, change: Change) -> None:
        """Kinds come, change and go with their definitions."""
        if change.key != crds.KEY:
            return
        spec = change.object["spec"]
        if change.previous is not None:
            self.catalogue.remove(change.previous["spec"]["group"], change.previous["spec"]["names"]["plural"])
        if change.kind != "DELETED":
            for each in crds.served_types({**change.object, "spec": spec}):
                self.catalogue.add(each)


def _rest(body: Object) -> Object:
    return {name: each for name, each in body.items() if name not in ("apiVersion", "kind", "metadata")}


def _managed(value: Object) -> Object:
    return {"managedFields": value["metadata"]["managedFields"]} if "managedFields" in value["metadata"] else {}


def _same(value: Object, old: Object) -> bool:
    """Equal but for times of managers: such a write is none (`etcd3/store.go`, GuaranteedUpdate;
    `fieldmanager/equality.go`)."""

    def plain(each: Object) -> Object:
        metadata = {name: part for name, part in each["metadata"].items() if name != "managedFields"}
        managed = [{**entry, "time": ""} for entry in each["metadata"].get("managedFields") or []]
        return {**each, "metadata": {**metadata, "managedFields": sorted(managed, key=repr)}}

    return plain(value) == plain(old)


def _forced(old: Object, metadata: Object) -> bool:
    return (old["metadata"].get("managedFields") or []) != (metadata.get("managedFields") or []) and len(
        old["metadata"].get("managedFields") or []
    ) != len(metadata.get("managedFields") or [])


def _quality(spec: Object) -> str:
    """Quality of service (`pkg/apis/core/v1/helper/qos/qos.go`)."""
    resources = [each.get("resources") or {} for each in spec["containers"]]
    if all(not each.get("requests") and not each.get("limits") for each in resources):
        return "BestEffort"
    whole = all(
        (each.get("limits") or {}).get(name) is not None
        and (each.get("requests") or each["limits"]).get(name, each["limits"][name]) == each["limits"][name]
        for each in resources
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if whole else "Burstable"
