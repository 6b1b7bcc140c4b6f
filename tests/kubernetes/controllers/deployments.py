"""ReplicaSets keep their number of pods; Deployments move from one ReplicaSet to the next.

Upstream: `pkg/controller/replicaset/replica_set.go`, `pkg/controller/controller_utils.go` (ActivePodsWithRanks: who
goes first), `pkg/controller/deployment/{rolling,recreate,sync}.go`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from tests.kubernetes.clock import seconds_since
from tests.kubernetes.controllers.base import (
    Controller,
    Key,
    Object,
    amount,
    condition,
    controlled_by,
    deleting,
    digest,
    ended,
    key_of,
    owned,
    owner_of,
    ready,
    with_condition,
)

_REVISION = "deployment.kubernetes.io/revision"
_HASH = "pod-template-hash"
_COST = "controller.kubernetes.io/pod-deletion-cost"


def pod_of(template: Object, name: str = "", prefix: str = "") -> Object:
    metadata = copy.deepcopy(template.get("metadata") or {})
    metadata |= {"name": name} if name else {"generateName": prefix}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"])}


def available(pod: Object, min_ready_s: int) -> bool:
    if not ready(pod) or deleting(pod):
        return False
    return not min_ready_s or seconds_since(condition(pod, "Ready")["lastTransitionTime"]) >= min_ready_s


class ReplicaSets(Controller):
    plurals = ("replicasets", "pods")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "replicasets":
            return [key_of(value)]
        owner = owner_of(value)
        return [(value["metadata"]["namespace"], owner["name"])] if owner and owner["kind"] == "ReplicaSet" else []

    async def sync(self, key: Key) -> float | None:
        replicas = self.world.get("replicasets", key)
        if replicas is None:
            return None
        pods = owned(self.world.all("pods", key[0]), replicas["metadata"]["uid"])
        active = [each for each in pods if not deleting(each) and not ended(each)]
        wanted = replicas["spec"].get("replicas", 1)
        if not deleting(replicas):
            for _ in range(wanted - len(active)):
                pod = pod_of(replicas["spec"]["template"], prefix=replicas["metadata"]["name"] + "-")
                pod["metadata"]["ownerReferences"] = controlled_by(replicas, "apps/v1", "ReplicaSet")
                made = await self.world.create("pods", key[0], pod)
                if made is not None:
                    active.append(made)
            for each in sorted(active, key=_rank)[: max(len(active) - wanted, 0)]:
                await self.world.delete("pods", each)
                active.remove(each)
        min_ready_s = replicas["spec"].get("minReadySeconds", 0)
        status: Object = {
            "replicas": len(active),
            "fullyLabeledReplicas": len(active),
            "readyReplicas": sum(ready(each) for each in active),
            "availableReplicas": sum(available(each, min_ready_s) for each in active),
            "observedGeneration": replicas["metadata"]["generation"],
        }
        kept = ("replicas", "observedGeneration")
        status = {name: each for name, each in status.items() if each or name in kept}
        await self.world.set_status("replicasets", replicas, status)
        return 0.2 if min_ready_s and status.get("availableReplicas", 0) < status.get("readyReplicas", 0) else None


def _rank(pod: Object) -> tuple[bool, bool, bool, int, str]:
    """Who goes first: not placed, not started, not ready, cheapest by its annotation, youngest."""
    annotations = pod["metadata"].get("annotations") or {}
    age = "".join(chr(255 - ord(each)) for each in pod["metadata"]["creationTimestamp"])
    return (
        bool(pod["spec"].get("nodeName")),
        (pod.get("status") or {}).get("phase") == "Running",
        ready(pod),
        int(annotations.get(_COST) or 0),
        age,
    )


class Deployments(Controller):
    plurals = ("deployments", "replicasets")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "deployments":
            return [key_of(value)]
        owner = owner_of(value)
        return [(value["metadata"]["namespace"], owner["name"])] if owner and owner["kind"] == "Deployment" else []

    async def sync(self, key: Key) -> None:
        deployment = self.world.get("deployments", key)
        if deployment is None or deleting(deployment):
            return
        sets = owned(self.world.all("replicasets", key[0]), deployment["metadata"]["uid"])
        sets = [each for each in sets if not deleting(each)]
        spec = deployment["spec"]
        name = digest(spec["template"])
        new = next((each for each in sets if each["metadata"]["labels"].get(_HASH) == name), None)
        old = [each for each in sets if each is not new]
        if not spec.get("paused"):
            if new is None:
                new = await self._new_set(deployment, name, old)
            if new is not None:
                await self._roll(deployment, new, old)
                await self._clean(spec.get("revisionHistoryLimit", 10), old)
        await self._tell(deployment, new, old)

    async def _new_set(self, deployment: Object, name: str, old: list[Object]) -> Object | None:
        spec, metadata = deployment["spec"], deployment["metadata"]
        if spec["strategy"]["type"] == "Recreate" and any(_running(each) for each in old):
            for each in old:
                await self._scale(each, 0)
            if any((each.get("status") or {}).get("replicas") for each in old):
                return None
        template = copy.deepcopy(spec["template"])
        labels = template.setdefault("metadata", {}).setdefault("labels", {})
        labels[_HASH] = name
        revision = max((_revision(each) for each in old), default=0) + 1
        wanted = spec["replicas"]
        surge, _ = _bounds(spec)
        running = sum(each["spec"]["replicas"] for each in old)
        start = wanted if spec["strategy"]["type"] == "Recreate" else min(wanted, max(wanted + surge - running, 0))
        body = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{metadata['name']}-{name}",
                "labels": labels,
                "annotations": {_REVISION: str(revision)},
                "ownerReferences": controlled_by(deployment, "apps/v1", "Deployment"),
            },
            "spec": {
                "replicas": start,
                "minReadySeconds": spec.get("minReadySeconds", 0),
                "selector": {"matchLabels": {**(spec["selector"].get("matchLabels") or {}), _HASH: name}},
                "template": template,
            },
        }
        made = await self.world.create("replicasets", metadata["namespace"], body)
        await self.world.patch("deployments", deployment, {"metadata": {"annotations": {_REVISION: str(revision)}}})
        return made

    async def _roll(self, deployment: Object, new: Object, old: list[Object]) -> None:
        spec = deployment["spec"]
        wanted = spec["replicas"]
        running = [each for each in old if each["spec"]["replicas"]]
        latest = max((_revision(each) for each in old), default=0)
        if _revision(new) <= latest:
            # A template that comes back: its set is the newest again (rollback).
            await self.world.patch("replicasets", new, {"metadata": {"annotations": {_REVISION: str(latest + 1)}}})
        if not running or spec["strategy"]["type"] == "Recreate":
            for each in running:
                await self._scale(each, 0)
            if not any((each.get("status") or {}).get("replicas") for each in old):
                await self._scale(new, wanted)
            return
        surge, missing = _bounds(spec)
        total = new["spec"]["replicas"] + sum(each["spec"]["replicas"] for each in running)
        if new["spec"]["replicas"] < wanted and total < wanted + surge:
            await self._scale(new, min(wanted, new["spec"]["replicas"] + wanted + surge - total))
            return
        if new["spec"]["replicas"] > wanted:
            await self._scale(new, wanted)
        healthy = sum((each.get("status") or {}).get("availableReplicas", 0) for each in [new, *running])
        # Old pods that are not available go first: they cost nothing (cleanupUnhealthyReplicas).
        for each in running:
            sick = each["spec"]["replicas"] - (each.get("status") or {}).get("availableReplicas", 0)
            if sick > 0:
                await self._scale(each, each["spec"]["replicas"] - sick)
        spare = healthy - (wanted - missing)
        for each in running:
            down = min(each["spec"]["replicas"], max(spare, 0))
            if down:
                await self._scale(each, each["spec"]["replicas"] - down)
                spare -= down

    async def _scale(self, replicas: Object, to: int) -> None:
        if replicas["spec"]["replicas"] != to:
            await self.world.patch("replicasets", replicas, {"spec": {"replicas": to}})

    async def _clean(self, limit: int, old: list[Object]) -> None:
        idle = [each for each in old if not _running(each)]
        for each in sorted(idle, key=_revision)[: max(len(idle) - limit, 0)]:
            await self.world.delete("replicasets", each)

    async def _tell(self, deployment: Object, new: Object | None, old: list[Object]) -> None:
        spec = deployment["spec"]
        sets = [each for each in [new, *old] if each is not None]

        def total(name: str, of: list[Object]) -> int:
            return sum((each.get("status") or {}).get(name, 0) for each in of)

        replicas, healthy = total("replicas", sets), total("availableReplicas", sets)
        updated = total("replicas", [new] if new else [])
        _, missing = _bounds(spec)
        enough = healthy >= spec["replicas"] - missing
        done = updated == spec["replicas"] == replicas and healthy >= spec["replicas"]
        name = new["metadata"]["name"] if new else ""
        words = "Deployment has minimum availability." if enough else "Deployment does not have minimum availability."
        reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
        conditions = with_condition(deployment, "Available", str(enough), reason, words)
        seen = {**deployment, "status": {**(deployment.get("status") or {}), "conditions": conditions}}
        told = (
            ("NewReplicaSetAvailable", f'ReplicaSet "{name}" has successfully progressed.')
            if done
            else ("ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.')
        )
        conditions = with_condition(seen, "Progressing", "True", *told)
        status: Object = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": updated,
            "readyReplicas": total("readyReplicas", sets),
            "availableReplicas": healthy,
            "unavailableReplicas": max(spec["replicas"] - healthy, 0),
            "conditions": conditions,
        }
        await self.world.set_status("deployments", deployment, {name: each for name, each in status.items() if each})


def _running(replicas: Object) -> bool:
    return bool(replicas["spec"]["replicas"] or (replicas.get("status") or {}).get("replicas"))


def _revision(replicas: Object) -> int:
    return int((replicas["metadata"].get("annotations") or {}).get(_REVISION, 0))


def _bounds(spec: Object) -> tuple[int, int]:
    """Pods above and below the wanted number (`deployment/util`, ResolveFenceposts)."""
    rolling = spec["strategy"].get("rollingUpdate") or {}
    surge = amount(rolling.get("maxSurge"), spec["replicas"], True)
    missing = amount(rolling.get("maxUnavailable"), spec["replicas"], False)
    if spec["strategy"]["type"] == "Recreate":
        return 0, 0
    return surge, 1 if surge == 0 and missing == 0 else missing
