"""What built-in kinds refuse beyond their schema: names, labels, references within a pod, fields that never change.

Upstream: `apimachinery/pkg/util/validation`, `pkg/apis/core/validation/validation.go`, `pkg/apis/apps/validation`.

Limits: the rules a chart or an operator breaks in practice, not all of them; Pod Security is in `admission`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.kubernetes.apiserver.errors import FieldFault
from tests.kubernetes.apiserver.resources import ResourceType
from tests.kubernetes.apiserver.selectors import matches
from tests.kubernetes.quantities import parse_quantity

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_ENV = re.compile(r"[^=\x00-\x1f\x7f]+")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN_WORDS = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and "
    "must start and end "
    "with an alphanumeric character"
)
_LABEL_WORDS = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start "
    "and end with an "
    "alphanumeric character"
)
# Kinds whose names are DNS labels; role names may be nearly anything (`path.ValidatePathSegmentName`).
_LABEL_NAMED = {"Namespace", "Service"}
_PATH_NAMED = {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
# Paths that an update may not change, by kind.
_IMMUTABLE = {
    "Deployment": ("spec.selector",),
    "ReplicaSet": ("spec.selector",),
    "DaemonSet": ("spec.selector",),
    "Job": ("spec.selector", "spec.template", "spec.completionMode"),
    "RoleBinding": ("roleRef",),
    "ClusterRoleBinding": ("roleRef",),
    "Secret": ("type",),
    "StorageClass": ("provisioner", "parameters", "reclaimPolicy", "volumeBindingMode"),
    "PriorityClass": ("value", "preemptionPolicy"),
    "CustomResourceDefinition": ("spec.group", "spec.names.plural", "spec.scope"),
}
_SET_MUTABLE = {"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "minReadySeconds"}
_SET_MUTABLE |= {"persistentVolumeClaimRetentionPolicy"}
_POD_MUTABLE = (
    "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
    "previously negative)"
)


def faults_of(resource: ResourceType, value: Object, old: Object | None) -> list[FieldFault]:
    found = list(_metadata(resource, value))
    if resource.custom:
        return found
    spec = value.get("spec") or {}
    match resource.kind:
        case "Pod":
            found += _pod_spec(spec, "spec")
        case "Deployment" | "ReplicaSet" | "StatefulSet" | "DaemonSet":
            found += _workload(value)
        case "Job":
            found += _pod_spec(spec["template"]["spec"], "spec.template.spec")
            if spec["template"]["spec"].get("restartPolicy") not in ("OnFailure", "Never"):
                yours = spec["template"]["spec"].get("restartPolicy")
                found.append(
                    FieldFault(
                        "spec.template.spec.restartPolicy",
                        'supported values: "OnFailure", "Never"',
                        "FieldValueNotSupported",
                        yours,
                    )
                )
        case "CronJob":
            found += _pod_spec(spec["jobTemplate"]["spec"]["template"]["spec"], "spec.jobTemplate.spec.template.spec")
        case "Service":
            found += _service(spec)
        case "PodDisruptionBudget":
            if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
                found.append(FieldFault("spec", "minAvailable and maxUnavailable cannot be both set", value=spec))
        case "RoleBinding" | "ClusterRoleBinding":
            for at, each in enumerate(value.get("subjects") or []):
                if each["kind"] == "ServiceAccount" and not each.get("namespace"):
                    found.append(FieldFault(f"subjects[{at}].namespace", "", "FieldValueRequired"))
        case "ConfigMap" | "Secret":
            size = sum(len(each) for part in ("data", "binaryData") for each in (value.get(part) or {}).values())
            if size > 2**20 * (4 / 3 if resource.kind == "Secret" else 1):
                found.append(FieldFault("data", "may not be more than 1048576 bytes", "FieldValueTooLong"))
        case "Lease":
            if (spec.get("leaseDurationSeconds") or 1) <= 0:
                found.append(
                    FieldFault(
                        "spec.leaseDurationSeconds", "must be greater than 0", value=spec["leaseDurationSeconds"]
                    )
                )
    if old is not None:
        found += _changes(resource.kind, value, old)
    return found


def name_fault(kind: str, name: str, custom: bool = False) -> str | None:
    if kind in _PATH_NAMED and not custom:
        return None if name not in (".", "..") and "/" not in name and "%" not in name else "may not contain '/' or '%'"
    if kind in _LABEL_NAMED and not custom:
        if len(name) > 63:
            return "must be no more than 63 characters"
        if kind == "Service" and name[:1].isdigit():
            return "a DNS-1035 label must start with an alphabetic character"
        return None if _LABEL.fullmatch(name) else _LABEL_WORDS
    if len(name) > 253:
        return "must be no more than 253 characters"
    return None if _SUBDOMAIN.fullmatch(name) else _SUBDOMAIN_WORDS


def _metadata(resource: ResourceType, value: Object) -> Iterable[FieldFault]:
    metadata = value["metadata"]
    why = name_fault(resource.kind, metadata["name"], resource.custom)
    if why:
        yield FieldFault("metadata.name", why, value=metadata["name"])
    yield from _labels(metadata.get("labels"), "metadata.labels")
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        why = _key_fault(key.lower())
        if why:
            yield FieldFault("metadata.annotations", why, value=key)
    if sum(len(key) + len(each) for key, each in annotations.items()) > 256 * 1024:
        yield FieldFault("metadata.annotations", "may not be more than 262144 bytes", "FieldValueTooLong")
    for at, each in enumerate(metadata.get("finalizers") or []):
        if why := _key_fault(each):
            yield FieldFault(f"metadata.finalizers[{at}]", why, value=each)
    controllers = [each for each in metadata.get("ownerReferences") or [] if each.get("controller")]
    if len(controllers) > 1:
        yield FieldFault(
            "metadata.ownerReferences", "Only one reference can have Controller set to true", value=controllers
        )


def _labels(labels: Any, path: str) -> Iterable[FieldFault]:
    for key, each in (labels or {}).items():
        if why := _key_fault(key):
            yield FieldFault(path, why, value=key)
        if each and (len(each) > 63 or not _QUALIFIED.fullmatch(each)):
            words = "must be no more than 63 characters" if len(each) > 63 else (
                "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
                "'.', and must start and "
                "end with an alphanumeric character"
            )  # fmt: skip
            yield FieldFault(path, words, value=each)


def _key_fault(key: str) -> str | None:
    prefix, slash, name = key.rpartition("/")
    if slash and (not _SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253):
        return f"prefix part {_SUBDOMAIN_WORDS}"
    if len(name) > 63:
        return "name part must be no more than 63 characters"
    if not _QUALIFIED.fullmatch(name):
        return (
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
            "alphanumeric character"
        )
    return None


def _workload(value: Object) -> Iterable[FieldFault]:
    spec = value["spec"]
    template = spec["template"]
    labels = (template.get("metadata") or {}).get("labels") or {}
    yield from _labels(labels, "spec.template.metadata.labels")
    if not matches(spec["selector"], labels):
        yield FieldFault("spec.template.metadata.labels", "`selector` does not match template `labels`", value=labels)
    yield from _pod_spec(template["spec"], "spec.template.spec")
    if template["spec"].get("restartPolicy") != "Always":
        yours = template["spec"].get("restartPolicy")
        yield FieldFault(
            "spec.template.spec.restartPolicy", 'supported values: "Always"', "FieldValueNotSupported", yours
        )
    strategy = spec.get("strategy") or {}
    if strategy.get("type") == "Recreate" and strategy.get("rollingUpdate"):
        yield FieldFault(
            "spec.strategy.rollingUpdate",
            "may not be specified when strategy `type` is 'Recreate'",
            "FieldValueForbidden",
        )


def _pod_spec(spec: Object, path: str) -> Iterable[FieldFault]:
    volumes = [each["name"] for each in spec.get("volumes") or []]
    # Claims of a StatefulSet become volumes of its pods; which, the pod's own validation sees.
    loose = "template" in path
    for at, name in enumerate(volumes):
        if not _LABEL.fullmatch(name) or len(name) > 63:
            yield FieldFault(f"{path}.volumes[{at}].name", _LABEL_WORDS, value=name)
        if volumes.index(name) != at:
            yield FieldFault(f"{path}.volumes[{at}].name", "", "FieldValueDuplicate", name)
    seen: set[str] = set()
    for kind in ("initContainers", "containers"):
        for at, each in enumerate(spec.get(kind) or []):
            where = f"{path}.{kind}[{at}]"
            if each["name"] in seen:
                yield FieldFault(f"{where}.name", "", "FieldValueDuplicate", each["name"])
            seen.add(each["name"])
            yield from _container(each, where, volumes, loose)
    if not spec.get("containers"):
        yield FieldFault(f"{path}.containers", "", "FieldValueRequired")


def _container(container: Object, path: str, volumes: list[str], loose: bool) -> Iterable[FieldFault]:
    if not _LABEL.fullmatch(container["name"]) or len(container["name"]) > 63:
        yield FieldFault(f"{path}.name", _LABEL_WORDS, value=container["name"])
    if not container.get("image"):
        yield FieldFault(f"{path}.image", "", "FieldValueRequired")
    mounts = [each["mountPath"] for each in container.get("volumeMounts") or []]
    for at, each in enumerate(container.get("volumeMounts") or []):
        if each["name"] not in volumes and not loose:
            yield FieldFault(
                f"{path}.volumeMounts[{at}].name", f'Not found: "{each["name"]}"', "FieldValueNotFound", each["name"]
            )
        if mounts.index(each["mountPath"]) != at:
            yield FieldFault(f"{path}.volumeMounts[{at}].mountPath", "must be unique", value=each["mountPath"])
    for at, each in enumerate(container.get("env") or []):
        if not _ENV.fullmatch(each["name"]):
            yield FieldFault(
                f"{path}.env[{at}].name",
                "a valid environment variable name must consist only of printable ASCII characters other than '='",
                value=each["name"],
            )
        if each.get("value") and each.get("valueFrom"):
            yield FieldFault(f"{path}.env[{at}].valueFrom", "may not be specified when `value` is not empty", value="")
    names: set[str] = set()
    for at, each in enumerate(container.get("ports") or []):
        name = each.get("name")
        if not 0 < each["containerPort"] < 65536:
            yield FieldFault(
                f"{path}.ports[{at}].containerPort",
                "must be between 1 and 65535, inclusive",
                value=each["containerPort"],
            )
        if name and (len(name) > 15 or not _PORT_NAME.fullmatch(name)):
            yield FieldFault(
                f"{path}.ports[{at}].name",
                "must be no more than 15 characters, lower case, with at least one letter",
                value=name,
            )
        if name in names:
            yield FieldFault(f"{path}.ports[{at}].name", "", "FieldValueDuplicate", name)
        names |= {name} if name else set()
    resources = container.get("resources") or {}
    for kind in ("requests", "limits"):
        for name, amount in (resources.get(kind) or {}).items():
            try:
                given = parse_quantity(amount)
            except ValueError as error:
                yield FieldFault(f"{path}.resources.{kind}[{name}]", str(error), value=amount)
                continue
            limit = (resources.get("limits") or {}).get(name)
            extended = "/" in name and not name.startswith("kubernetes.io/")
            if kind == "requests" and limit is not None and given > parse_quantity(limit):
                yield FieldFault(
                    f"{path}.resources.requests",
                    f"must be less than or equal to {name} limit of {limit}",
                    value=str(amount),
                )
            elif kind == "requests" and extended and (limit is None or given != parse_quantity(limit)):
                words = (
                    f"must be equal to {name} limit of {limit}"
                    if limit is not None
                    else "Limit must be set for non overcommitable resources"
                )
                yield FieldFault(f"{path}.resources.requests", words, value=str(amount))
    for probe in ("livenessProbe", "startupProbe"):
        if (container.get(probe) or {}).get("successThreshold", 1) != 1:
            yield FieldFault(
                f"{path}.{probe}.successThreshold", "must be 1", value=container[probe]["successThreshold"]
            )


def _service(spec: Object) -> Iterable[FieldFault]:
    ports = spec.get("ports") or []
    if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield FieldFault("spec.ports", "", "FieldValueRequired")
    for at, each in enumerate(ports):
        if len(ports) > 1 and not each.get("name"):
            yield FieldFault(f"spec.ports[{at}].name", "", "FieldValueRequired")


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _changes(kind: str, value: Object, old: Object) -> Iterable[FieldFault]:
    for path in _IMMUTABLE.get(kind, ()):
        if _at(value, path) != _at(old, path):
            yield FieldFault(path, "field is immutable", value=_at(value, path))
    if (
        kind in ("Secret", "ConfigMap")
        and old.get("immutable")
        and any(value.get(part) != old.get(part) for part in ("data", "binaryData", "immutable"))
    ):
        yield FieldFault("data", "field is immutable when `immutable` is set", "FieldValueForbidden")
    if kind == "StatefulSet":
        both = value["spec"].keys() | old["spec"].keys()
        if any(value["spec"].get(name) != old["spec"].get(name) for name in both - _SET_MUTABLE):
            allowed = (
                "'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', "
                "'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds'"
            )
            yield FieldFault(
                "spec",
                f"updates to statefulset spec for fields other than {allowed} are forbidden",
                "FieldValueForbidden",
            )
    if kind == "PersistentVolumeClaim":
        both = value["spec"].keys() | old["spec"].keys()
        if any(
            value["spec"].get(name) != old["spec"].get(name) and old["spec"].get(name) is not None
            for name in both - {"resources"}
        ):
            yield FieldFault(
                "spec",
                "spec is immutable after creation except resources.requests and volumeAttributesClassName "
                "for bound claims",
                "FieldValueForbidden",
            )
    if (
        kind == "Service"
        and old["spec"].get("clusterIP")
        and value["spec"].get("clusterIP") not in (None, "", old["spec"]["clusterIP"])
    ):
        yield FieldFault("spec.clusterIPs[0]", "may not change once set", value=[value["spec"]["clusterIP"]])
    if kind == "Pod" and _frozen(value["spec"], old["spec"]) != _frozen(old["spec"], old["spec"]):
        yield FieldFault("spec", f"pod updates may not change fields other than {_POD_MUTABLE}", "FieldValueForbidden")


def _frozen(spec: Object, old: Object) -> Object:
    """A pod's spec without what an update may change."""
    kept = {name: each for name, each in spec.items() if name not in ("activeDeadlineSeconds", "tolerations")}
    for kind in ("containers", "initContainers"):
        kept[kind] = [
            {name: each for name, each in container.items() if name != "image"} for container in spec.get(kind) or []
        ]
    before = old.get("tolerations") or []
    kept["tolerations"] = [each for each in spec.get("tolerations") or [] if each in before]
    return kept
