"""Tables, as `kubectl get` asks for them: columns of built-in kinds, and the printer columns of CRDs.

Upstream: `pkg/printers/internalversion/printers.go`; of CRDs `apiextensions-
apiserver/pkg/registry/customresource/tableconvertor`.

Limits: of JSONPath, members, indexes, `[*]` and filters by equality, which is what printer columns use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.kubernetes.apiserver.resources import Column, ResourceType
from tests.kubernetes.clock import age

Object = dict[str, Any]
_STEP = re.compile(
    r"\.(?P<member>[A-Za-z0-9_$\-]+(?:\\\.[A-Za-z0-9_\-/]+)*)|\[(?P<index>-?\d+)\]|\[(?P<all>\*)\]"
    r"|\['(?P<quoted>[^']+)'\]|\[\?\(@\.(?P<key>[\w.]+)\s*==\s*[\"'](?P<value>[^\"']*)[\"']\)\]"
)


def json_path(value: Any, path: str) -> list[Any]:
    """What a JSONPath finds."""
    found, at = [value], 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            return []
        at = match.end()
        found = [each for item in found for each in _step(item, match)]
    return found


def _step(item: Any, match: re.Match[str]) -> Iterable[Any]:
    member = match["member"] or match["quoted"]
    if member is not None:
        name = member.replace("\\.", ".")
        return [item[name]] if isinstance(item, dict) and name in item else []
    if not isinstance(item, list):
        return []
    if match["index"] is not None:
        return item[int(match["index"]) :][:1]
    if match["all"]:
        return item
    key, wanted = match["key"].split("."), match["value"]
    return [each for each in item if str(next(iter(json_path(each, "." + ".".join(key))), None)) == wanted]


def table(resource: ResourceType, items: list[Object], metadata: Object, include: str, headers: bool = True) -> Object:
    columns = [Column("Name", "string", lambda value: value["metadata"]["name"], format="name"), *_columns(resource)]
    rows = [{"cells": [_cell(column, each) for column in columns], "object": _object(each, include)} for each in items]
    definitions = [
        {
            "name": each.name,
            "type": each.type,
            "format": each.format,
            "description": each.description,
            "priority": each.priority,
        }
        for each in columns
    ]
    made: Object = {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions,
        "rows": rows,
    }
    return made if headers else {**made, "columnDefinitions": []}


def _object(value: Object, include: str) -> Object | None:
    if include == "None":
        return None
    if include == "Object":
        return value
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"]}


def _columns(resource: ResourceType) -> list[Column]:
    if resource.custom:
        return list(resource.columns) or [_AGE]
    return [*_BUILTIN.get(resource.kind, []), _AGE]


def _cell(column: Column, value: Object) -> Any:
    if callable(column.path):
        return column.path(value)
    found = json_path(value, column.path)
    if not found or found[0] is None:
        return None
    first = found[0]
    match column.type:
        case "date":
            return age(first)
        case "integer":
            return int(first) if str(first).lstrip("-").isdigit() else None
        case "number":
            return float(first)
        case "boolean":
            return bool(first)
    if isinstance(first, bool):
        return str(first).lower()
    return str(first) if len(found) == 1 else ",".join(str(each) for each in found)


def _dig(path: str, fallback: Any = "") -> Any:
    def find(value: Object) -> Any:
        found = json_path(value, path)
        return found[0] if found and found[0] is not None else fallback

    return find


def _condition(value: Object, kind: str) -> Object:
    conditions = (value.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})


def pod_reason(pod: Object) -> str:
    """The STATUS column (`printPod`): the phase, or what keeps a container from running."""
    status, metadata = pod.get("status") or {}, pod["metadata"]
    reason = status.get("reason") or status.get("phase", "Unknown")
    for each in status.get("containerStatuses") or []:
        state = each.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason"):
            reason = waiting["reason"]
        elif ended:
            reason = ended.get("reason") or f"ExitCode:{ended.get('exitCode', 0)}"
    if metadata.get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


def _pod_ready(pod: Object) -> str:
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return f"{sum(bool(each.get('ready')) for each in states)}/{len(pod['spec']['containers'])}"


def _restarts(pod: Object) -> str:
    return str(sum(each.get("restartCount", 0) for each in (pod.get("status") or {}).get("containerStatuses") or []))


def _node_status(node: Object) -> str:
    ready = _condition(node, "Ready").get("status")
    words = {"True": "Ready", "False": "NotReady"}.get(str(ready), "Unknown")
    return words + (",SchedulingDisabled" if node["spec"].get("unschedulable") else "")


def _fraction(have: str, of: str) -> Any:
    return lambda value: f"{_dig(have, 0)(value)}/{_dig(of, 0)(value)}"


def _ports(service: Object) -> str:
    ports = service["spec"].get("ports") or []
    return ",".join(f"{each['port']}/{each['protocol']}" for each in ports) or "<none>"


_AGE = Column("Age", "string", lambda value: age(value["metadata"].get("creationTimestamp")))
_BUILTIN: dict[str, list[Column]] = {
    "Pod": [
        Column("Ready", "string", _pod_ready),
        Column("Status", "string", pod_reason),
        Column("Restarts", "string", _restarts),
        Column("IP", "string", _dig(".status.podIP", "<none>"), 1),
        Column("Node", "string", _dig(".spec.nodeName", "<none>"), 1),
    ],
    "Node": [
        Column("Status", "string", _node_status),
        Column("Version", "string", _dig(".status.nodeInfo.kubeletVersion")),
    ],
    "Deployment": [
        Column("Ready", "string", _fraction(".status.readyReplicas", ".spec.replicas")),
        Column("Up-to-date", "string", _dig(".status.updatedReplicas", 0)),
        Column("Available", "string", _dig(".status.availableReplicas", 0)),
    ],
    "ReplicaSet": [
        Column("Desired", "integer", _dig(".spec.replicas", 0)),
        Column("Current", "integer", _dig(".status.replicas", 0)),
        Column("Ready", "integer", _dig(".status.readyReplicas", 0)),
    ],
    "StatefulSet": [Column("Ready", "string", _fraction(".status.readyReplicas", ".spec.replicas"))],
    "Job": [
        Column(
            "Status",
            "string",
            lambda value: (
                "Complete" if _condition(value, "Complete") else "Failed" if _condition(value, "Failed") else "Running"
            ),
        ),
        Column("Completions", "string", _fraction(".status.succeeded", ".spec.completions")),
    ],
    "Service": [
        Column("Type", "string", _dig(".spec.type")),
        Column("Cluster-IP", "string", _dig(".spec.clusterIP", "<none>")),
        Column("External-IP", "string", lambda _: "<none>"),
        Column("Port(s)", "string", _ports),
    ],
    "Namespace": [Column("Status", "string", _dig(".status.phase"))],
    "Secret": [
        Column("Type", "string", _dig(".type")),
        Column("Data", "string", lambda value: len(value.get("data") or {})),
    ],
    "ConfigMap": [Column("Data", "string", lambda value: len(value.get("data") or {}))],
    "PersistentVolumeClaim": [
        Column("Status", "string", _dig(".status.phase")),
        Column("Volume", "string", _dig(".spec.volumeName")),
        Column("Capacity", "string", _dig(".status.capacity.storage")),
        Column("StorageClass", "string", _dig(".spec.storageClassName")),
    ],
    "PodDisruptionBudget": [
        Column("Min available", "string", _dig(".spec.minAvailable", "N/A")),
        Column("Max unavailable", "string", _dig(".spec.maxUnavailable", "N/A")),
        Column("Allowed disruptions", "integer", _dig(".status.disruptionsAllowed", 0)),
    ],
    "Lease": [Column("Holder", "string", _dig(".spec.holderIdentity"))],
    "Event": [
        Column("Last seen", "string", lambda value: age(value.get("lastTimestamp") or value.get("eventTime"))),
        Column("Type", "string", _dig(".type")),
        Column("Reason", "string", _dig(".reason")),
        Column(
            "Object",
            "string",
            lambda value: (
                f"{value['involvedObject'].get('kind', '').lower()}/{value['involvedObject'].get('name', '')}"
            ),
        ),
        Column("Message", "string", _dig(".message")),
    ],
    "CustomResourceDefinition": [Column("Created at", "date", _dig(".metadata.creationTimestamp"))],
}
