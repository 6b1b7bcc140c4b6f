"""The kinds that are served: names, scope, subresources, columns. Built-in ones are listed here; CRDs add theirs.

Names, short names and categories are those that `kubectl api-resources` of Kubernetes 1.37 prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
CREATE_ONLY = ("create",)


@dataclass(frozen=True, slots=True)
class Column:
    """A printer column: `path` is a JSONPath of a CRD, or a function of the object for built-in kinds."""

    name: str
    type: str
    path: str | Callable[[dict[str, Any]], Any]
    priority: int = 0
    description: str = ""
    format: str = ""


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One served kind."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    # Of each subresource, the kind it speaks.
    subresources: dict[str, str] = field(default_factory=dict, hash=False)
    verbs: tuple[str, ...] = ALL_VERBS
    columns: tuple[Column, ...] = field(default=(), hash=False)
    # Name of the definition in the Kubernetes schemas, or the structural schema of a CRD.
    definition: str = ""
    schema: dict[str, Any] | None = field(default=None, hash=False)
    # Field paths besides metadata.name and metadata.namespace that field selectors may name.
    selectable: tuple[str, ...] = ()
    singular_name: str = ""
    list_kind_name: str = ""
    custom: bool = False

    @property
    def singular(self) -> str:
        return self.singular_name or self.kind.lower()

    @property
    def list_kind(self) -> str:
        return self.list_kind_name or self.kind + "List"

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """Where objects are stored: one place for all versions."""
        return (self.group, self.plural)

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


_POD_SUBRESOURCES = {
    "status": "Pod",
    "log": "Pod",
    "eviction": "Eviction",
    "binding": "Binding",
    "portforward": "PodPortForwardOptions",
    "resize": "Pod",
}


def _core(kind: str, plural: str, short: Iterable[str] = (), **more: Any) -> ResourceType:
    return ResourceType(
        "", "v1", kind, plural, short_names=tuple(short), definition=f"io.k8s.api.core.v1.{kind}", **more
    )


def _named(
    group: str, package: str, version: str, kind: str, plural: str, short: Iterable[str] = (), **more: Any
) -> ResourceType:
    definition = f"io.k8s.api.{package}.{version}.{kind}"
    return ResourceType(group, version, kind, plural, short_names=tuple(short), definition=definition, **more)


def _status(kind: str, **more: str) -> dict[str, str]:
    return {"status": kind, **more}


def builtin_types() -> list[ResourceType]:
    """Everything served without a CRD."""
    every = ("all",)
    scale = {"scale": "Scale"}
    rbac, apps, batch = "rbac.authorization.k8s.io", "apps", "batch"
    networking, storage = "networking.k8s.io", "storage.k8s.io"
    return [
        _core(
            "Namespace",
            "namespaces",
            ["ns"],
            namespaced=False,
            subresources={"status": "Namespace", "finalize": "Namespace"},
            selectable=("status.phase",),
        ),
        _core(
            "Node", "nodes", ["no"], namespaced=False, subresources=_status("Node"), selectable=("spec.unschedulable",)
        ),
        _core(
            "Pod",
            "pods",
            ["po"],
            categories=every,
            subresources=_POD_SUBRESOURCES,
            selectable=(
                "spec.nodeName",
                "spec.restartPolicy",
                "spec.schedulerName",
                "spec.serviceAccountName",
                "status.phase",
                "status.podIP",
                "status.nominatedNodeName",
            ),
        ),
        _core(
            "Service",
            "services",
            ["svc"],
            categories=every,
            subresources=_status("Service"),
            selectable=("spec.clusterIP", "spec.type"),
        ),
        _core("Endpoints", "endpoints", ["ep"], singular_name="endpoints", list_kind_name="EndpointsList"),
        _core("ConfigMap", "configmaps", ["cm"]),
        _core("Secret", "secrets", selectable=("type",)),
        _core("ServiceAccount", "serviceaccounts", ["sa"], subresources={"token": "TokenRequest"}),
        _core(
            "PersistentVolumeClaim", "persistentvolumeclaims", ["pvc"], subresources=_status("PersistentVolumeClaim")
        ),
        _core(
            "PersistentVolume", "persistentvolumes", ["pv"], namespaced=False, subresources=_status("PersistentVolume")
        ),
        _core(
            "Event",
            "events",
            ["ev"],
            selectable=(
                "involvedObject.kind",
                "involvedObject.namespace",
                "involvedObject.name",
                "involvedObject.uid",
                "involvedObject.apiVersion",
                "involvedObject.resourceVersion",
                "involvedObject.fieldPath",
                "reason",
                "reportingComponent",
                "source",
                "type",
            ),
        ),
        _core(
            "ReplicationController",
            "replicationcontrollers",
            ["rc"],
            categories=every,
            subresources=_status("ReplicationController", **scale),
        ),
        _core("LimitRange", "limitranges", ["limits"]),
        _core("ResourceQuota", "resourcequotas", ["quota"], subresources=_status("ResourceQuota")),
        _named(
            apps,
            "apps",
            "v1",
            "Deployment",
            "deployments",
            ["deploy"],
            categories=every,
            subresources=_status("Deployment", **scale),
        ),
        _named(
            apps,
            "apps",
            "v1",
            "ReplicaSet",
            "replicasets",
            ["rs"],
            categories=every,
            subresources=_status("ReplicaSet", **scale),
        ),
        _named(
            apps,
            "apps",
            "v1",
            "StatefulSet",
            "statefulsets",
            ["sts"],
            categories=every,
            subresources=_status("StatefulSet", **scale),
        ),
        _named(
            apps, "apps", "v1", "DaemonSet", "daemonsets", ["ds"], categories=every, subresources=_status("DaemonSet")
        ),
        _named(apps, "apps", "v1", "ControllerRevision", "controllerrevisions"),
        _named(batch, "batch", "v1", "Job", "jobs", categories=every, subresources=_status("Job")),
        _named(batch, "batch", "v1", "CronJob", "cronjobs", ["cj"], categories=every, subresources=_status("CronJob")),
        _named(
            "autoscaling",
            "autoscaling",
            "v2",
            "HorizontalPodAutoscaler",
            "horizontalpodautoscalers",
            ["hpa"],
            categories=every,
            subresources=_status("HorizontalPodAutoscaler"),
        ),
        _named(
            "policy",
            "policy",
            "v1",
            "PodDisruptionBudget",
            "poddisruptionbudgets",
            ["pdb"],
            subresources=_status("PodDisruptionBudget"),
        ),
        _named(rbac, "rbac", "v1", "Role", "roles"),
        _named(rbac, "rbac", "v1", "RoleBinding", "rolebindings"),
        _named(rbac, "rbac", "v1", "ClusterRole", "clusterroles", namespaced=False),
        _named(rbac, "rbac", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False),
        _named("coordination.k8s.io", "coordination", "v1", "Lease", "leases"),
        _named(networking, "networking", "v1", "NetworkPolicy", "networkpolicies", ["netpol"]),
        _named(networking, "networking", "v1", "Ingress", "ingresses", ["ing"], subresources=_status("Ingress")),
        _named(networking, "networking", "v1", "IngressClass", "ingressclasses", namespaced=False),
        _named("discovery.k8s.io", "discovery", "v1", "EndpointSlice", "endpointslices"),
        _named("scheduling.k8s.io", "scheduling", "v1", "PriorityClass", "priorityclasses", ["pc"], namespaced=False),
        _named(storage, "storage", "v1", "StorageClass", "storageclasses", ["sc"], namespaced=False),
        ResourceType(
            "apiextensions.k8s.io",
            "v1",
            "CustomResourceDefinition",
            "customresourcedefinitions",
            False,
            ("crd", "crds"),
            ("api-extensions",),
            subresources=_status("CustomResourceDefinition"),
            definition="io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition",
        ),
        *(
            _named(
                "authorization.k8s.io",
                "authorization",
                "v1",
                kind,
                kind.lower() + "s",
                namespaced=kind.startswith("Local"),
                verbs=CREATE_ONLY,
            )
            for kind in (
                "SelfSubjectAccessReview",
                "SubjectAccessReview",
                "LocalSubjectAccessReview",
                "SelfSubjectRulesReview",
            )
        ),
        _named(
            "authentication.k8s.io",
            "authentication",
            "v1",
            "TokenReview",
            "tokenreviews",
            namespaced=False,
            verbs=CREATE_ONLY,
        ),
        _named(
            "authentication.k8s.io",
            "authentication",
            "v1",
            "SelfSubjectReview",
            "selfsubjectreviews",
            namespaced=False,
            verbs=CREATE_ONLY,
        ),
    ]


class Catalogue:
    """The kinds served now, by path and by name."""

    def __init__(self, types: Iterable[ResourceType] = ()) -> None:
        self._by_path: dict[tuple[str, str, str], ResourceType] = {}
        # Changes with every kind that comes or goes: cached discovery documents are keyed by it.
        self.generation = 0
        for each in types:
            self.add(each)

    def add(self, resource: ResourceType) -> None:
        self._by_path[resource.group, resource.version, resource.plural] = resource
        self.generation += 1

    def remove(self, group: str, plural: str) -> None:
        for path in [path for path in self._by_path if path[0] == group and path[2] == plural]:
            del self._by_path[path]
        self.generation += 1

    def find(self, group: str, version: str, plural: str) -> ResourceType | None:
        return self._by_path.get((group, version, plural))

    def of_key(self, key: tuple[str, str]) -> ResourceType | None:
        return next((each for each in self._by_path.values() if each.key == key), None)

    def of_kind(self, api_version: str, kind: str) -> ResourceType | None:
        return next(
            (each for each in self._by_path.values() if each.kind == kind and each.group_version == api_version), None
        )

    def all(self) -> list[ResourceType]:
        return list(self._by_path.values())

    def groups(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in self._by_path.values():
            versions = found.setdefault(each.group, [])
            if each.version not in versions:
                versions.append(each.version)
        return found
