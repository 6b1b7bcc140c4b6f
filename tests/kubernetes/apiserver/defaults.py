"""Fields of built-in kinds that the server fills in.

Upstream: `pkg/apis/{core,apps,batch,rbac,networking,scheduling}/v1/defaults.go`,
`apiextensions/v1/defaults.go`. Every default a client of ours reads is here; others are left out.
"""

from __future__ import annotations

import base64
from typing import Any

Object = dict[str, Any]


def fill(kind: str, value: Object) -> None:
    """Fills defaults into `value`, in place."""
    filler = _FILLERS.get(kind)
    if filler is not None:
        filler(value)


def _set(value: Object, **defaults: Any) -> None:
    for name, each in defaults.items():
        if value.get(name) is None:
            value[name] = each


def fill_pod_spec(spec: Object) -> None:
    _set(
        spec,
        restartPolicy="Always",
        dnsPolicy="ClusterFirst",
        schedulerName="default-scheduler",
        terminationGracePeriodSeconds=30,
        securityContext={},
    )
    for each in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        _fill_container(each)
    for each in spec.get("volumes") or []:
        for kind in ("secret", "configMap", "projected", "downwardAPI"):
            if kind in each:
                _set(each[kind], defaultMode=0o644)
        for source in (each.get("projected") or {}).get("sources") or []:
            if "serviceAccountToken" in source:
                _set(source["serviceAccountToken"], expirationSeconds=3600)
        items = (each.get("downwardAPI") or {}).get("items") or []
        for source in (each.get("projected") or {}).get("sources") or []:
            items = [*items, *((source.get("downwardAPI") or {}).get("items") or [])]
        for item in items:
            if "fieldRef" in item:
                _set(item["fieldRef"], apiVersion="v1")
        if len(each) == 1:
            each["emptyDir"] = {}
        if "hostPath" in each:
            _set(each["hostPath"], type="")
    for each in spec.get("topologySpreadConstraints") or []:
        _set(each, nodeAffinityPolicy="Honor", nodeTaintsPolicy="Ignore")


def _fill_container(container: Object) -> None:
    image = container.get("image", "")
    tag = image.rsplit("/", 1)[-1]
    latest = "@" not in tag and (":" not in tag or tag.endswith(":latest"))
    _set(
        container,
        imagePullPolicy="Always" if latest else "IfNotPresent",
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        resources={},
    )
    for each in container.get("ports") or []:
        _set(each, protocol="TCP")
    for each in container.get("env") or []:
        source = each.get("valueFrom") or {}
        if "fieldRef" in source:
            _set(source["fieldRef"], apiVersion="v1")
        if "resourceFieldRef" in source:
            _set(source["resourceFieldRef"], divisor="0")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if probe:
            _set(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            _fill_handler(probe)
    for name in ("postStart", "preStop"):
        _fill_handler((container.get("lifecycle") or {}).get(name) or {})
    resources = container["resources"]
    if resources.get("limits"):
        # Requests of what has only a limit (SetDefaults_Pod).
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def _fill_handler(handler: Object) -> None:
    if "httpGet" in handler:
        _set(handler["httpGet"], path="/", scheme="HTTP")
    if "grpc" in handler:
        _set(handler["grpc"], service="")


def _pod(value: Object) -> None:
    spec = value["spec"]
    fill_pod_spec(spec)
    _set(spec, enableServiceLinks=True)


def _template(value: Object) -> Object:
    template = value["spec"].setdefault("template", {})
    # Go writes the zero time of an embedded ObjectMeta as null; clients treat both alike, so that none is written here.
    fill_pod_spec(template.setdefault("spec", {}))
    return value["spec"]


def _deployment(value: Object) -> None:
    spec = _template(value)
    _set(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600, strategy={})
    _set(spec["strategy"], type="RollingUpdate")
    if spec["strategy"]["type"] == "RollingUpdate":
        _set(spec["strategy"], rollingUpdate={})
        _set(spec["strategy"]["rollingUpdate"], maxUnavailable="25%", maxSurge="25%")


def _replica_set(value: Object) -> None:
    _set(_template(value), replicas=1)


def _stateful_set(value: Object) -> None:
    spec = _template(value)
    _set(
        spec,
        replicas=1,
        podManagementPolicy="OrderedReady",
        revisionHistoryLimit=10,
        updateStrategy={},
        persistentVolumeClaimRetentionPolicy={},
    )
    _set(spec["persistentVolumeClaimRetentionPolicy"], whenDeleted="Retain", whenScaled="Retain")
    _set(spec["updateStrategy"], type="RollingUpdate")
    if spec["updateStrategy"]["type"] == "RollingUpdate":
        _set(spec["updateStrategy"], rollingUpdate={})
        _set(spec["updateStrategy"]["rollingUpdate"], partition=0)
    for each in spec.get("volumeClaimTemplates") or []:
        _set(each, apiVersion="v1", kind="PersistentVolumeClaim", status={"phase": "Pending"})
        _set(each["spec"], volumeMode="Filesystem")


def _daemon_set(value: Object) -> None:
    spec = _template(value)
    _set(
        spec,
        revisionHistoryLimit=10,
        updateStrategy={"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
    )


def _job(value: Object) -> None:
    spec = _template(value)
    _set(
        spec,
        backoffLimit=6,
        completionMode="NonIndexed",
        suspend=False,
        parallelism=1,
        podReplacementPolicy="TerminatingOrFailed",
    )
    if "completions" not in spec:
        spec["completions"] = 1
    if not spec.get("manualSelector"):
        # `pkg/registry/batch/job/strategy.go`, generateSelector.
        uid, name = value["metadata"]["uid"], value["metadata"]["name"]
        metadata = spec["template"].setdefault("metadata", {})
        metadata["labels"] = {
            **(metadata.get("labels") or {}),
            "controller-uid": uid,
            "batch.kubernetes.io/controller-uid": uid,
            "job-name": name,
            "batch.kubernetes.io/job-name": name,
        }
        _set(spec, selector={"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})


def _cron_job(value: Object) -> None:
    spec = value["spec"]
    _set(spec, concurrencyPolicy="Allow", suspend=False, successfulJobsHistoryLimit=3, failedJobsHistoryLimit=1)
    fill_pod_spec(spec["jobTemplate"]["spec"]["template"]["spec"])


def _service(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(spec, type="ClusterIP", sessionAffinity="None")
    if spec["type"] != "ExternalName":
        _set(spec, internalTrafficPolicy="Cluster", ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    if spec["type"] in ("LoadBalancer", "NodePort"):
        _set(spec, externalTrafficPolicy="Cluster")
    for each in spec.get("ports") or []:
        _set(each, protocol="TCP", targetPort=each.get("port"))


def _namespace(value: Object) -> None:
    _set(value, spec={}, status={"phase": "Active"})
    _set(value["spec"], finalizers=["kubernetes"])
    labels = value["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = value["metadata"]["name"]


def _secret(value: Object) -> None:
    _set(value, type="Opaque")
    written = value.pop("stringData", None) or {}
    if written:
        data = value.setdefault("data", {})
        for name, each in written.items():
            data[name] = base64.b64encode(each.encode()).decode()


def _claim(value: Object) -> None:
    _set(value["spec"], volumeMode="Filesystem")
    _set(value, status={"phase": "Pending"})


def _volume(value: Object) -> None:
    _set(value["spec"], volumeMode="Filesystem", persistentVolumeReclaimPolicy="Retain")
    _set(value, status={"phase": "Pending"})


def _binding(value: Object) -> None:
    _set(value["roleRef"], apiGroup="rbac.authorization.k8s.io")
    for each in value.get("subjects") or []:
        if each["kind"] != "ServiceAccount":
            _set(each, apiGroup="rbac.authorization.k8s.io")


def _network_policy(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(spec, podSelector={})
    _set(spec, policyTypes=["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    for rule in [*(spec.get("ingress") or []), *(spec.get("egress") or [])]:
        for each in rule.get("ports") or []:
            _set(each, protocol="TCP")


def _priority_class(value: Object) -> None:
    _set(value, preemptionPolicy="PreemptLowerPriority")


def _storage_class(value: Object) -> None:
    _set(value, reclaimPolicy="Delete", volumeBindingMode="Immediate")


def _slice(value: Object) -> None:
    for each in value.get("ports") or []:
        _set(each, protocol="TCP", name="")


def _definition(value: Object) -> None:
    spec = value["spec"]
    names = spec["names"]
    _set(names, singular=names["kind"].lower(), listKind=names["kind"] + "List")
    _set(spec, conversion={"strategy": "None"})


_FILLERS = {
    "Pod": _pod,
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "ReplicationController": _replica_set,
    "StatefulSet": _stateful_set,
    "DaemonSet": _daemon_set,
    "Job": _job,
    "CronJob": _cron_job,
    "Service": _service,
    "Namespace": _namespace,
    "Secret": _secret,
    "PersistentVolumeClaim": _claim,
    "PersistentVolume": _volume,
    "RoleBinding": _binding,
    "ClusterRoleBinding": _binding,
    "NetworkPolicy": _network_policy,
    "PriorityClass": _priority_class,
    "StorageClass": _storage_class,
    "EndpointSlice": _slice,
    "CustomResourceDefinition": _definition,
}
