"""Subresources and reviews: binding, eviction, scale, tokens, access reviews.

Upstream: `pkg/registry/core/pod/storage/{storage,eviction}.go`, `pkg/registry/apps/deployment/storage/storage.go`
(Scale), `pkg/registry/core/serviceaccount/storage/token.go`, `pkg/registry/authorization/*`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.kubernetes.apiserver import crds, errors
from tests.kubernetes.apiserver.access import Access, Attributes, service_account_user
from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.deletion import Deletion
from tests.kubernetes.apiserver.errors import ApiError, bad_request
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.selectors import matches
from tests.kubernetes.clock import now, stamp

Object = dict[str, Any]
SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
_BUDGETS = ("policy", "poddisruptionbudgets")


class Subresources:
    """What is posted below an object, and to the review endpoints."""

    def __init__(self, registry: Registry, deletion: Deletion, access: Access) -> None:
        self._registry = registry
        self._store = registry.store
        self._deletion = deletion
        self._access = access

    def create(self, call: Call, body: Object) -> tuple[int, Object]:
        match call.subresource:
            case "binding":
                return 201, self._bind(call, body)
            case "eviction":
                return 201, self._evict(call, body)
            case "token":
                return 201, self._token(call, body)
        raise errors.method_not_allowed()

    def review(self, call: Call, body: Object) -> Object:
        spec = dict(body.get("spec") or {})
        kind = call.resource.kind
        made: Object = {"apiVersion": call.resource.group_version, "kind": kind, "metadata": {}, "spec": spec}
        match kind:
            case "SelfSubjectReview":
                made.pop("spec")
                made["status"] = {"userInfo": {"username": call.user.name, "groups": list(call.user.groups)}}
            case "SelfSubjectAccessReview":
                made["status"] = self._verdict(call.user, spec)
            case "SubjectAccessReview" | "LocalSubjectAccessReview":
                user = type(call.user)(spec.get("user", ""), tuple(spec.get("groups") or ()))
                made["status"] = self._verdict(user, spec)
            case "SelfSubjectRulesReview":
                rules = self._access.rules(call.user, spec.get("namespace", ""))
                made["status"] = {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}
            case "TokenReview":
                user = self._access.user_of_token(spec.get("token", ""))
                info = {"username": user.name, "groups": list(user.groups), "uid": user.uid} if user else {}
                made["status"] = {"authenticated": user is not None, "user": info}
        return made

    def _verdict(self, user: Any, spec: Object) -> Object:
        asked = spec.get("resourceAttributes")
        if asked is None:
            return {"allowed": "system:masters" in user.groups}
        resource = asked.get("resource", "") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        attributes = Attributes(
            asked.get("verb", ""), asked.get("group", ""), resource, asked.get("namespace", ""), asked.get("name", "")
        )
        return {"allowed": self._access.allows(user, attributes)}

    def _bind(self, call: Call, body: Object) -> Object:
        pod = self._registry.get(call.resource, call.namespace, call.name)
        node = (body.get("target") or {}).get("name")
        if not node:
            raise bad_request("target.name: Required value")
        if pod["spec"].get("nodeName"):
            why = f"pod {call.name} is already assigned to node {pod['spec']['nodeName']!r}"
            raise errors.conflict("pods/binding", "", call.name, why)
        if pod["metadata"].get("deletionTimestamp"):
            raise errors.conflict(
                "pods/binding", "", call.name, f"pod {call.name} is being deleted, cannot be assigned to a host"
            )
        status = with_condition(pod.get("status") or {}, "PodScheduled", "True")
        self._store.put(call.resource.key, _copied(pod, spec={**pod["spec"], "nodeName": node}, status=status))
        return SUCCESS

    def _evict(self, call: Call, body: Object) -> Object:
        pod = self._registry.get(call.resource, call.namespace, call.name)
        options = dict(body.get("deleteOptions") or {})
        phase = (pod.get("status") or {}).get("phase")
        # What has ended, is ending or never ran disturbs nobody (canIgnorePDB).
        if phase in ("Succeeded", "Failed", "Pending") or pod["metadata"].get("deletionTimestamp"):
            self._deletion.remove(call.resource, pod, options, call.dry_run)
            return SUCCESS
        labels = pod["metadata"].get("labels") or {}
        budgets = [
            each for each in self._store.list(_BUDGETS, call.namespace) if matches(each["spec"].get("selector"), labels)
        ]
        if len(budgets) > 1:
            raise ApiError(
                500,
                "InternalError",
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            )
        for budget in budgets:
            self._spend(budget, pod, call.dry_run)
        self._deletion.remove(call.resource, pod, options, call.dry_run)
        return SUCCESS

    def _spend(self, budget: Object, pod: Object, dry_run: bool) -> None:
        """`checkAndDecrement`."""
        status, metadata = budget.get("status") or {}, budget["metadata"]
        name = metadata["name"]
        if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow" and not _ready(pod):
            return
        if (
            not _ready(pod)
            and status.get("currentHealthy", 0) >= status.get("desiredHealthy", 0)
            and status.get("desiredHealthy", 0) > 0
        ):
            return
        if status.get("observedGeneration", 0) < metadata.get("generation", 0):
            raise errors.too_many_requests("Cannot evict pod as it would violate the pod's disruption budget.", 10)
        if status.get("disruptionsAllowed", 0) <= 0:
            refusal = errors.too_many_requests("Cannot evict pod as it would violate the pod's disruption budget.")
            words = (
                f"The disruption budget {name} needs {status.get('desiredHealthy', 0)} healthy pods and has "
                f"{status.get('currentHealthy', 0)} currently"
            )
            refusal.details = {"causes": [{"reason": "DisruptionBudget", "message": words}]}
            raise refusal
        if dry_run:
            return
        disrupted = {**(status.get("disruptedPods") or {}), pod["metadata"]["name"]: stamp()}
        spent = {**status, "disruptionsAllowed": status["disruptionsAllowed"] - 1, "disruptedPods": disrupted}
        self._store.put(_BUDGETS, _copied(budget, status=spent))

    def _token(self, call: Call, body: Object) -> Object:
        account = self._registry.get(call.resource, call.namespace, call.name)
        spec = dict(body.get("spec") or {})
        lasting_s = spec.get("expirationSeconds") or 3600
        uid = account["metadata"]["uid"]
        bound: list[tuple[tuple[str, str], str, str, str]] = [(call.resource.key, call.namespace, call.name, uid)]
        reference, holder = spec.get("boundObjectRef"), ""
        if reference and reference.get("kind") == "Pod":
            pod = self._store.get(("", "pods"), call.namespace, reference["name"])
            if pod is None:
                raise errors.not_found("pods", "", reference["name"])
            holder = reference["name"]
            bound.append((("", "pods"), call.namespace, holder, pod["metadata"]["uid"]))
        user = service_account_user(call.namespace, call.name, uid, holder)
        token = self._access.issue(user, lasting_s, tuple(bound))
        expires = stamp(now() + timedelta(seconds=lasting_s))
        return {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "metadata": {"name": call.name, "namespace": call.namespace},
            "spec": {**spec, "expirationSeconds": lasting_s},
            "status": {"token": token, "expirationTimestamp": expires},
        }

    def scale_of(self, call: Call) -> Object:
        value = self._registry.get(call.resource, call.namespace, call.name)
        paths = self._scale_paths(call)
        metadata = value["metadata"]
        status: Object = {"replicas": _at(value, paths["statusReplicasPath"]) or 0}
        selector = paths.get("labelSelectorPath")
        if selector:
            status["selector"] = _at(value, selector) or ""
        elif not call.resource.custom:
            labels = (value["spec"].get("selector") or {}).get("matchLabels") or {}
            status["selector"] = ",".join(f"{name}={each}" for name, each in sorted(labels.items()))
        kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {name: metadata[name] for name in kept},
            "spec": {"replicas": _at(value, paths["specReplicasPath"]) or 0},
            "status": status,
        }

    def rescale(self, call: Call, scale: Object) -> Object:
        value = self._registry.get(call.resource, call.namespace, call.name)
        version = (scale.get("metadata") or {}).get("resourceVersion")
        if version and version != value["metadata"]["resourceVersion"]:
            raise errors.conflict(call.resource.plural, call.resource.group, call.name)
        replicas = (scale.get("spec") or {}).get("replicas", 0)
        if replicas < 0:
            fault = errors.FieldFault("spec.replicas", "must be greater than or equal to 0", value=replicas)
            raise errors.invalid("Scale", "autoscaling", call.name, [fault])
        path = self._scale_paths(call)["specReplicasPath"].strip(".").split(".")
        changed = _replaced(value, path, replicas)
        main = Call(
            "update",
            type(call.target)(**{**_fields(call.target), "subresource": ""}),
            call.resource,
            call.user,
            call.query,
            call.user_agent,
        )
        self._registry.replace(main, value, changed)
        return self.scale_of(call)

    def _scale_paths(self, call: Call) -> Object:
        if not call.resource.custom:
            return {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
        definition = self._store.get(crds.KEY, "", call.resource.qualified)
        assert definition is not None
        return crds.scale_paths(definition, call.resource.version)


def with_condition(status: Object, kind: str, value: str, reason: str = "", message: str = "") -> Object:
    """A status with one condition set; the time of its transition moves only when it changes."""
    old = next((each for each in status.get("conditions") or [] if each["type"] == kind), None)
    since = old["lastTransitionTime"] if old and old["status"] == value and "lastTransitionTime" in old else stamp()
    made: Object = {"type": kind, "status": value, "lastTransitionTime": since}
    if reason:
        made["reason"] = reason
    if message:
        made["message"] = message
    conditions = status.get("conditions") or []
    if old is None:
        return {**status, "conditions": [*conditions, made]}
    return {**status, "conditions": [made if each is old else each for each in conditions]}


def _ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _copied(value: Object, **parts: Any) -> Object:
    return {**value, "metadata": dict(value["metadata"]), **parts}


def _at(value: Any, path: str) -> Any:
    for part in path.strip(".").split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _replaced(value: Object, path: list[str], leaf: Any) -> Object:
    if len(path) == 1:
        return {**value, path[0]: leaf}
    return {**value, path[0]: _replaced(value.get(path[0]) or {}, path[1:], leaf)}


def _fields(target: Any) -> Object:
    return {name: getattr(target, name) for name in ("group", "version", "plural", "namespace", "name", "subresource")}
