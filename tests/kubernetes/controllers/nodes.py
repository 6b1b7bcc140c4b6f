"""Nodes that stop reporting: NotReady, tainted, their pods told and in the end taken away.

Upstream: `pkg/controller/nodelifecycle/node_lifecycle_controller.go`, `pkg/controller/tainteviction/taint_eviction.go`,
`pkg/controller/podgc/gc_controller.go`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.clock import seconds_since, stamp
from tests.kubernetes.controllers.base import Controller, Key, Object, World, condition, deleting, ended, key_of
from tests.kubernetes.controllers.base import with_condition as conditions_with
from tests.kubernetes.controllers.scheduler import tolerates

_UNREACHABLE, _NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"
_OURS = (_UNREACHABLE, _NOT_READY)
_LEASES = "kube-node-lease"
_CONDITIONS = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")


class NodeLifecycle(Controller):
    plurals = ("nodes", "leases", "pods")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.grace_s = 50.0
        # When a NoExecute taint was first seen on a node: tolerations count from there.
        self._tainted_at: dict[tuple[str, str], str] = {}

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "nodes":
            return [key_of(value)]
        if plural == "leases":
            return [("", value["metadata"]["name"])] if value["metadata"]["namespace"] == _LEASES else []
        name = value["spec"].get("nodeName")
        node = self.world.get("nodes", ("", name)) if name else None
        return [("", name)] if name and node is not None and node["spec"].get("taints") else []

    async def sync(self, key: Key) -> float | None:
        node = self.world.get("nodes", key)
        if node is None:
            return None
        lease = self.world.get("leases", (_LEASES, key[1]))
        seen = (lease or {}).get("spec", {}).get("renewTime") or node["metadata"]["creationTimestamp"]
        silent_s = seconds_since(seen)
        lost = silent_s > self.grace_s
        state = condition(node, "Ready").get("status")
        if lost and state != "Unknown":
            await self._lose(node)
        wanted = []
        if lost or state == "Unknown":
            wanted = [{"key": _UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        elif state == "False":
            wanted = [{"key": _NOT_READY, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        await self._taint(node, wanted)
        evict_s = await self._evict(key)
        times = [max(self.grace_s - silent_s, 0.05) if not lost else None, evict_s]
        return min((each for each in times if each is not None), default=None)

    async def _lose(self, node: Object) -> None:
        value = node
        for kind in _CONDITIONS:
            conditions = conditions_with(
                value, kind, "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status."
            )
            value = {**value, "status": {**value["status"], "conditions": conditions}}
        await self.world.patch("nodes", node, {"status": {"conditions": value["status"]["conditions"]}}, "status")
        await self.world.event(
            node, "Normal", "NodeNotReady", f"Node {node['metadata']['name']} status is now: NodeNotReady"
        )
        for pod in self._pods(node["metadata"]["name"]):
            if condition(pod, "Ready").get("status") == "True":
                conditions = conditions_with(pod, "Ready", "False", "NodeNotReady", "Node is not ready")
                await self.world.patch("pods", pod, {"status": {"conditions": conditions}}, "status")

    async def _taint(self, node: Object, wanted: list[Object]) -> None:
        have = node["spec"].get("taints") or []
        marks = [{"key": each["key"], "effect": each["effect"]} for each in have if each["key"] in _OURS]
        if marks == wanted:
            return
        others = [each for each in have if each["key"] not in _OURS]
        added = [{**each, "timeAdded": stamp()} if each["effect"] == "NoExecute" else each for each in wanted]
        await self.world.patch("nodes", node, {"spec": {"taints": [*others, *added] or None}})

    async def _evict(self, key: Key) -> float | None:
        node = self.world.get("nodes", key)
        taints = [each for each in (node or {}).get("spec", {}).get("taints") or [] if each["effect"] == "NoExecute"]
        soonest: float | None = None
        for pod in self._pods(key[1]) if taints else []:
            if deleting(pod) or ended(pod):
                continue
            left_s = self._left(pod, key[1], taints)
            if left_s is None:
                continue
            if left_s <= 0:
                words = f"deleting pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
                told = "Taint manager: deleting due to NoExecute taint"
                conditions = conditions_with(pod, "DisruptionTarget", "True", "DeletionByTaintManager", told)
                await self.world.patch("pods", pod, {"status": {"conditions": conditions}}, "status")
                await self.world.event(pod, "Normal", "TaintManagerEviction", f"Marking for deletion: {words}")
                await self.world.delete("pods", pod)
            else:
                soonest = left_s if soonest is None else min(soonest, left_s)
        return soonest

    def _left(self, pod: Object, node: str, taints: list[Object]) -> float | None:
        """Seconds that the pod may stay; none where it tolerates for ever."""
        left: float | None = None
        for taint in taints:
            since = taint.get("timeAdded") or self._tainted_at.setdefault((node, taint["key"]), stamp())
            fitting = [each for each in pod["spec"].get("tolerations") or [] if tolerates(each, taint)]
            if not fitting:
                return 0.0
            limits = [each["tolerationSeconds"] for each in fitting if each.get("tolerationSeconds") is not None]
            if limits:
                left_s = min(limits) - seconds_since(since)
                left = left_s if left is None else min(left, left_s)
        return left

    def _pods(self, node: str) -> list[Object]:
        return [each for each in self.world.all("pods") if each["spec"].get("nodeName") == node]


class OrphanedPods(Controller):
    """Pods of nodes that are gone, and pods that were never placed and are being deleted."""

    plurals = ("nodes", "pods")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "pods":
            return [key_of(value)]
        name = value["metadata"]["name"]
        return [
            key_of(each)
            for each in self.world.all("pods")
            if kind == "DELETED" and each["spec"].get("nodeName") == name
        ]

    async def sync(self, key: Key) -> None:
        pod = self.world.get("pods", key)
        node = (pod or {}).get("spec", {}).get("nodeName")
        if pod is None or not node or self.world.get("nodes", ("", node)) is not None:
            return
        # The copy of nodes may lag behind that of pods: ask before a pod is taken away for good.
        if await self.world.client.get("nodes", "", node) is not None:
            return
        if not ended(pod):
            status = {"phase": "Failed", "reason": "NodeLost", "message": "PodGC: node no longer exists"}
            told = "PodGC: node no longer exists"
            status["conditions"] = conditions_with(pod, "DisruptionTarget", "True", "DeletionByPodGC", told)
            await self.world.patch("pods", pod, {"status": status}, "status")
        await self.world.delete("pods", pod, gracePeriodSeconds=0)
