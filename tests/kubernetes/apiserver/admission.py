"""What the server's admission plugins change and refuse before a write.

NamespaceLifecycle, ServiceAccount, Priority, DefaultTolerationSeconds, DefaultStorageClass, ResourceQuota and
PodSecurity (`plugin/pkg/admission/*`, `pod-security-admission/policy`).

Limits: of Pod Security the level `restricted` (and `enforce` only); of quotas, counts of objects and what pods ask for.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from tests.kubernetes.apiserver.errors import forbidden, not_found
from tests.kubernetes.apiserver.resources import ResourceType
from tests.kubernetes.apiserver.store import Store
from tests.kubernetes.quantities import parse_quantity, pod_requests, shown_quantity

Object = dict[str, Any]

TOKEN_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_NOT_READY = [
    {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for name in ("not-ready", "unreachable")
]
_SYSTEM_PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
PODS, QUOTAS = ("", "pods"), ("", "resourcequotas")


class Admission:
    """The plugins, over one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, resource: ResourceType, value: Object) -> None:
        """Changes `value` in place, or refuses it."""
        if resource.namespaced:
            self._namespace(resource, value)
        if resource.key == PODS:
            self._service_account(value)
            self._priority(value)
            _tolerations(value["spec"])
            self._pod_security(value)
        if resource.kind == "PersistentVolumeClaim" and "storageClassName" not in value["spec"]:
            self._storage_class(value)
        if resource.namespaced:
            self._quota(resource, value)

    def _namespace(self, resource: ResourceType, value: Object) -> None:
        name = value["metadata"]["namespace"]
        namespace = self._store.get(("", "namespaces"), "", name)
        if namespace is None:
            raise not_found("namespaces", "", name)
        if namespace["metadata"].get("deletionTimestamp"):
            raise forbidden(
                f'{resource.qualified} "{value["metadata"]["name"]}" is forbidden: unable to create new '
                f"content in namespace "
                f"{name} because it is being terminated",
                resource.plural,
                resource.group,
                value["metadata"]["name"],
            )

    def _service_account(self, pod: Object) -> None:
        """`plugin/pkg/admission/serviceaccount/admission.go`."""
        spec, metadata = pod["spec"], pod["metadata"]
        name = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
        spec["serviceAccountName"] = spec["serviceAccount"] = name
        account = self._store.get(("", "serviceaccounts"), metadata["namespace"], name)
        if account is None:
            raise forbidden(
                f'pods "{metadata["name"]}" is forbidden: error looking up service account '
                f"{metadata['namespace']}/{name}: "
                f'serviceaccount "{name}" not found',
                "pods",
                "",
                metadata["name"],
            )
        if not spec.get("imagePullSecrets") and account.get("imagePullSecrets"):
            spec["imagePullSecrets"] = account["imagePullSecrets"]
        mounted = spec.get("automountServiceAccountToken")
        if mounted is None:
            mounted = account.get("automountServiceAccountToken", True)
        if not mounted:
            return
        volume = f"kube-api-access-{secrets.token_hex(3)[:5]}"
        used = False
        for each in [*(spec.get("initContainers") or []), *spec["containers"]]:
            mounts = each.setdefault("volumeMounts", [])
            if all(mount["mountPath"] != TOKEN_MOUNT for mount in mounts):
                mounts.append({"name": volume, "mountPath": TOKEN_MOUNT, "readOnly": True})
                used = True
        if used:
            spec.setdefault("volumes", []).append({"name": volume, "projected": _token_sources()})

    def _priority(self, pod: Object) -> None:
        spec = pod["spec"]
        name = spec.get("priorityClassName")
        classes = self._store.list(("scheduling.k8s.io", "priorityclasses"))
        if not name:
            default = next((each for each in classes if each.get("globalDefault")), None)
            spec["priority"] = default["value"] if default else 0
            spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
            return
        found = next((each for each in classes if each["metadata"]["name"] == name), None)
        if found is None and name not in _SYSTEM_PRIORITIES:
            raise forbidden(
                f'pods "{pod["metadata"]["name"]}" is forbidden: no PriorityClass with name {name} was found',
                "pods",
                "",
                pod["metadata"]["name"],
            )
        spec["priority"] = found["value"] if found else _SYSTEM_PRIORITIES[name]
        spec.setdefault("preemptionPolicy", (found or {}).get("preemptionPolicy", "PreemptLowerPriority"))

    def _storage_class(self, claim: Object) -> None:
        marked = "storageclass.kubernetes.io/is-default-class"
        for each in self._store.list(("storage.k8s.io", "storageclasses")):
            if (each["metadata"].get("annotations") or {}).get(marked) == "true":
                claim["spec"]["storageClassName"] = each["metadata"]["name"]

    def _pod_security(self, pod: Object) -> None:
        namespace = self._store.get(("", "namespaces"), "", pod["metadata"]["namespace"])
        level = ((namespace or {}).get("metadata", {}).get("labels") or {}).get("pod-security.kubernetes.io/enforce")
        if level != "restricted":
            return
        broken = list(restricted_faults(pod["spec"]))
        if broken:
            name = pod["metadata"]["name"]
            raise forbidden(
                f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {", ".join(broken)}',
                "pods",
                "",
                name,
            )

    def _quota(self, resource: ResourceType, value: Object) -> None:
        """`plugin/pkg/admission/resourcequota/controller.go`, checkRequest; pods that have ended do not count."""
        namespace = value["metadata"]["namespace"]
        for quota in self._store.list(QUOTAS, namespace):
            hard = quota["spec"].get("hard") or {}
            asked = _usage(resource, value)
            touched = {name: amount for name, amount in asked.items() if name in hard}
            if not touched:
                continue
            used = self._used(resource, namespace)
            over = [
                name
                for name, amount in touched.items()
                if used.get(name, Decimal(0)) + amount > parse_quantity(hard[name])
            ]
            if over:
                listed = {
                    "requested": ",".join(f"{name}={shown_quantity(asked[name])}" for name in over),
                    "used": ",".join(f"{name}={shown_quantity(used.get(name, Decimal(0)))}" for name in over),
                    "limited": ",".join(f"{name}={hard[name]}" for name in over),
                }
                words = ", ".join(f"{name}: {text}" for name, text in listed.items())
                name = value["metadata"]["name"]
                raise forbidden(
                    f'{resource.qualified} "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, {words}',
                    resource.plural,
                    resource.group,
                    name,
                )

    def _used(self, resource: ResourceType, namespace: str) -> dict[str, Decimal]:
        used: dict[str, Decimal] = {}
        for each in self._store.list(resource.key, namespace):
            if resource.key == PODS and (each.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                continue
            for name, amount in _usage(resource, each).items():
                used[name] = used.get(name, Decimal(0)) + amount
        return used


def _usage(resource: ResourceType, value: Object) -> dict[str, Decimal]:
    counted = f"count/{resource.plural}" + (f".{resource.group}" if resource.group else "")
    usage = {counted: Decimal(1), resource.plural: Decimal(1)}
    if resource.key == PODS:
        requests = pod_requests(value["spec"])
        usage |= {f"requests.{name}": amount for name, amount in requests.items()}
        usage |= {name: amount for name, amount in requests.items() if name in ("cpu", "memory")}
        usage |= {f"limits.{name}": amount for name, amount in pod_requests(value["spec"], "limits").items()}
    return usage


def _tolerations(spec: Object) -> None:
    have = {each.get("key") for each in spec.get("tolerations") or []}
    added = [dict(each) for each in _NOT_READY if each["key"] not in have and None not in have]
    if added:
        spec["tolerations"] = [*(spec.get("tolerations") or []), *added]


def _token_sources() -> Object:
    return {
        "defaultMode": 0o644,
        "sources": [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {
                "downwardAPI": {
                    "items": [
                        {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
                    ]
                }
            },
        ],
    }


_RESTRICTED_VOLUMES = {
    "name",
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def restricted_faults(spec: Object) -> Iterable[str]:
    """What a pod breaks of the Pod Security Standard `restricted`, in the words of its admission plugin."""
    pod_context = spec.get("securityContext") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]

    def named(broken: list[Object]) -> str:
        names = ", ".join(f'"{each["name"]}"' for each in broken)
        return f"container{'s' if len(broken) > 1 else ''} {names}"

    def context(container: Object) -> Object:
        return container.get("securityContext") or {}

    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"host namespaces ({name}=true)"
    if broken := [each for each in containers if context(each).get("privileged")]:
        yield f"privileged ({named(broken)} must not set securityContext.privileged=true)"
    if broken := [each for each in containers if context(each).get("allowPrivilegeEscalation") is not False]:
        wanted = "securityContext.allowPrivilegeEscalation=false"
        yield f"allowPrivilegeEscalation != false ({named(broken)} must set {wanted})"
    if broken := [
        each for each in containers if "ALL" not in ((context(each).get("capabilities") or {}).get("drop") or [])
    ]:
        yield f'unrestricted capabilities ({named(broken)} must set securityContext.capabilities.drop=["ALL"])'
    if broken := [
        each
        for each in containers
        if set((context(each).get("capabilities") or {}).get("add") or []) - {"NET_BIND_SERVICE"}
    ]:
        words = "must not include more than NET_BIND_SERVICE in capabilities.add"
        yield f"unrestricted capabilities ({named(broken)} {words})"
    if broken := [each for each in containers if any((port.get("hostPort") or 0) for port in each.get("ports") or [])]:
        yield f"hostPort ({named(broken)} uses hostPorts)"
    for each in spec.get("volumes") or []:
        if forbidden_kinds := set(each) - _RESTRICTED_VOLUMES:
            words = f'uses restricted volume type "{min(forbidden_kinds)}"'
            yield f'restricted volume types (volume "{each["name"]}" {words})'
    if broken := [
        each for each in containers if not context(each).get("runAsNonRoot", pod_context.get("runAsNonRoot"))
    ]:
        yield f"runAsNonRoot != true (pod or {named(broken)} must set securityContext.runAsNonRoot=true)"
    if pod_context.get("runAsUser") == 0 or any(context(each).get("runAsUser") == 0 for each in containers):
        yield "runAsUser=0 (pod must not set runAsUser=0)"
    allowed = ("RuntimeDefault", "Localhost")
    broken = [
        each
        for each in containers
        if (context(each).get("seccompProfile") or pod_context.get("seccompProfile") or {}).get("type") not in allowed
    ]
    if broken:
        words = 'must set securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
        yield f"seccompProfile (pod or {named(broken)} {words})"
