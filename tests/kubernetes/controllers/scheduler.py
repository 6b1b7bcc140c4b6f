"""Pods to nodes: by resources, selectors, affinity, taints and spread; what fits nowhere is told why.

Upstream:
`pkg/scheduler/framework/plugins/{noderesources,nodeaffinity,tainttoleration,podtopologyspread,interpodaffinity}`;
messages: `framework/types.go`, FitError.

Limits: no preemption, no volume topology; of affinity between pods the required terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from tests.kubernetes.apiserver.selectors import matches
from tests.kubernetes.client import path_of, suppress_api_error
from tests.kubernetes.controllers.base import Controller, Key, Object, World, condition, deleting, ended, key_of
from tests.kubernetes.controllers.base import with_condition as conditions_with
from tests.kubernetes.quantities import parse_quantity, pod_requests

_EVERYTHING = ("", "*")
_DEFAULT = "default-scheduler"
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


class Scheduler(Controller):
    plurals = ("pods", "nodes")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Pods that were bound, until the copy shows it.
        self._bound: dict[str, str] = {}

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "pods" and _waits(value) and kind != "DELETED":
            return [key_of(value)]
        # A node that came or changed, or a pod that went, may make room for any that waits.
        if plural == "nodes" or kind == "DELETED" or ended(value) or deleting(value):
            return [_EVERYTHING]
        return []

    async def sync(self, key: Key) -> None:
        if key == _EVERYTHING:
            waiting = [each for each in self.world.all("pods") if _waits(each)]
            for each in sorted(waiting, key=lambda pod: -pod["spec"].get("priority", 0)):
                await self._schedule(each)
            return
        pod = self.world.get("pods", key)
        if pod is not None and _waits(pod):
            await self._schedule(pod)

    async def _schedule(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._bound:
            return
        nodes = self.world.all("nodes")
        reasons: Counter[str] = Counter()
        fitting = []
        placed = self._placed()
        for node in nodes:
            why = _refusals(pod, node, placed, nodes)
            if why:
                reasons.update(why)
            else:
                fitting.append(node)
        if not fitting:
            await self._unschedulable(pod, len(nodes), reasons)
            return
        best = min(fitting, key=lambda node: _cost(pod, node, placed))
        name = best["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["metadata"]["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": name},
        }
        self._bound[uid] = name
        try:
            with suppress_api_error(404, 409):
                namespace, pod_name = key_of(pod)
                await self.world.client.call("POST", path_of("pods", namespace, pod_name, "binding"), body)
                words = f"Successfully assigned {namespace}/{pod_name} to {name}"
                await self.world.event(pod, "Normal", "Scheduled", words)
        except Exception:
            del self._bound[uid]
            raise

    def _placed(self) -> dict[str, list[Object]]:
        """Pods by node, those just bound included."""
        found: dict[str, list[Object]] = {}
        alive = set()
        for pod in self.world.all("pods"):
            uid = pod["metadata"]["uid"]
            alive.add(uid)
            node = pod["spec"].get("nodeName") or self._bound.get(uid)
            if pod["spec"].get("nodeName"):
                self._bound.pop(uid, None)
            if node and not ended(pod):
                found.setdefault(node, []).append(pod)
        for uid in self._bound.keys() - alive:
            del self._bound[uid]
        return found

    async def _unschedulable(self, pod: Object, nodes: int, reasons: Counter[str]) -> None:
        if nodes:
            listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            message = f"0/{nodes} nodes are available: {listed}."
        else:
            message = "no nodes available to schedule pods"
        if condition(pod, "PodScheduled").get("message") == message:
            return
        conditions = conditions_with(pod, "PodScheduled", "False", "Unschedulable", message)
        await self.world.patch("pods", pod, {"status": {"conditions": conditions}}, "status")
        await self.world.event(pod, "Warning", "FailedScheduling", message)


def _waits(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        not spec.get("nodeName")
        and not deleting(pod)
        and not ended(pod)
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", _DEFAULT) == _DEFAULT
    )


def _refusals(pod: Object, node: Object, placed: dict[str, list[Object]], nodes: list[Object]) -> list[str]:
    """Why a pod cannot go to a node: in the words of the first plugin that refuses, as upstream stops there."""
    spec, name = pod["spec"], node["metadata"]["name"]
    if why := _node_refuses(spec, node):
        return [why]
    labels = node["metadata"].get("labels") or {}
    here = placed.get(name, [])
    allocatable = {key: parse_quantity(each) for key, each in (node["status"].get("allocatable") or {}).items()}
    used: Counter[str] = Counter()
    for each in here:
        for resource, asked in pod_requests(each["spec"]).items():
            used[resource] += asked  # type: ignore[assignment]
    if len(here) + 1 > allocatable.get("pods", Decimal(110)):
        return ["Too many pods"]
    lacking = [
        f"Insufficient {resource}"
        for resource, asked in pod_requests(spec).items()
        if asked and asked + used[resource] > allocatable.get(resource, Decimal(0))
    ]
    if lacking:
        return lacking
    if not _apart(pod, labels, placed, nodes):
        return ["node(s) didn't match pod anti-affinity rules"]
    if not _spread(pod, labels, placed, nodes):
        return ["node(s) didn't match pod topology spread constraints"]
    return []


def _node_refuses(spec: Object, node: Object) -> str:
    if node["spec"].get("unschedulable") and not _tolerated(_UNSCHEDULABLE, spec):
        return "node(s) were unschedulable"
    for taint in node["spec"].get("taints") or []:
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerated(taint, spec):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not _affine(spec, node, node["metadata"].get("labels") or {}):
        return "node(s) didn't match Pod's node affinity/selector"
    return ""


def fits_node(spec: Object, node: Object) -> bool:
    """Whether pods of this spec may go there, whatever else is there."""
    return not _node_refuses(spec, node)


def _tolerated(taint: Object, spec: Object) -> bool:
    return any(tolerates(each, taint) for each in spec.get("tolerations") or [])


def tolerates(toleration: Object, taint: Object) -> bool:
    """`core/v1/toleration.go`, ToleratesTaint."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")


def _affine(spec: Object, node: Object, labels: dict[str, str]) -> bool:
    if any(labels.get(key) != each for key, each in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity is None:
        return True

    def fits(term: Object) -> bool:
        fields = {"metadata.name": node["metadata"]["name"]}
        return matches({"matchExpressions": term.get("matchExpressions")}, labels) and matches(
            {"matchExpressions": term.get("matchFields")}, fields
        )

    return any(fits(term) for term in affinity["nodeSelectorTerms"] if term)


def _domain(nodes: list[Object], name: str, key: str) -> Any:
    node = next((each for each in nodes if each["metadata"]["name"] == name), None)
    return ((node or {}).get("metadata", {}).get("labels") or {}).get(key)


def _apart(pod: Object, labels: dict[str, str], placed: dict[str, list[Object]], nodes: list[Object]) -> bool:
    terms = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    for term in terms or []:
        key = term["topologyKey"]
        for name, pods in placed.items():
            if labels.get(key) is not None and _domain(nodes, name, key) == labels.get(key):
                for each in pods:
                    same = each["metadata"]["namespace"] == pod["metadata"]["namespace"]
                    if same and matches(term.get("labelSelector"), each["metadata"].get("labels") or {}):
                        return False
    return True


def _spread(pod: Object, labels: dict[str, str], placed: dict[str, list[Object]], nodes: list[Object]) -> bool:
    for rule in pod["spec"].get("topologySpreadConstraints") or []:
        if rule["whenUnsatisfiable"] != "DoNotSchedule":
            continue
        key = rule["topologyKey"]
        if key not in labels:
            return False
        counts = _counts(rule, pod, placed, nodes)
        if counts[labels[key]] + 1 - min(counts.values(), default=0) > rule["maxSkew"]:
            return False
    return True


def _counts(rule: Object, pod: Object, placed: dict[str, list[Object]], nodes: list[Object]) -> dict[str, int]:
    key, namespace = rule["topologyKey"], pod["metadata"]["namespace"]
    counts = {labels[key]: 0 for each in nodes if key in (labels := each["metadata"].get("labels") or {})}
    for name, pods in placed.items():
        domain = _domain(nodes, name, key)
        if domain in counts:
            counts[domain] += sum(
                each["metadata"]["namespace"] == namespace
                and matches(rule.get("labelSelector"), each["metadata"].get("labels") or {})
                for each in pods
            )
    return counts


def _cost(pod: Object, node: Object, placed: dict[str, list[Object]]) -> tuple[int, int, str]:
    """Fewest pods of the same owner first, then fewest pods."""
    here = placed.get(node["metadata"]["name"], [])
    labels = pod["metadata"].get("labels") or {}
    alike = sum((each["metadata"].get("labels") or {}) == labels for each in here)
    return (alike, len(here), node["metadata"]["name"])
