"""StatefulSets: pods with names, in order, each with its claims.

Upstream: `pkg/controller/statefulset/stateful_set_control.go`, `stateful_set_utils.go`.

Limits: revisions are hashes kept in the status; there are no ControllerRevision objects, and no rollback by them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from tests.kubernetes.controllers.base import (
    Controller,
    Key,
    Object,
    controlled_by,
    deleting,
    digest,
    ended,
    key_of,
    owned,
    owner_of,
    ready,
)
from tests.kubernetes.controllers.deployments import available, pod_of

_REVISION = "controller-revision-hash"


class StatefulSets(Controller):
    plurals = ("statefulsets", "pods", "persistentvolumeclaims")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "statefulsets":
            return [key_of(value)]
        owner = owner_of(value)
        return [(value["metadata"]["namespace"], owner["name"])] if owner and owner["kind"] == "StatefulSet" else []

    async def sync(self, key: Key) -> float | None:
        stateful = self.world.get("statefulsets", key)
        if stateful is None or deleting(stateful):
            return None
        spec, metadata = stateful["spec"], stateful["metadata"]
        update = f"{metadata['name']}-{digest(spec['template'])}"
        current = (stateful.get("status") or {}).get("currentRevision") or update
        pods = {each["metadata"]["name"]: each for each in owned(self.world.all("pods", key[0]), metadata["uid"])}
        start = (spec.get("ordinals") or {}).get("start", 0)
        names = [f"{metadata['name']}-{start + number}" for number in range(spec["replicas"])]
        await self._step(stateful, names, pods, update)
        members = [pods[name] for name in names if name in pods]
        at_update = [each for each in members if each["metadata"]["labels"].get(_REVISION) == update]
        if len(at_update) == spec["replicas"] and all(ready(each) for each in at_update):
            current = update
        min_ready_s = spec.get("minReadySeconds", 0)
        status: Object = {
            "observedGeneration": metadata["generation"],
            "replicas": len(pods),
            "readyReplicas": sum(ready(each) for each in pods.values()),
            "availableReplicas": sum(available(each, min_ready_s) for each in pods.values()),
            "currentReplicas": sum(each["metadata"]["labels"].get(_REVISION) == current for each in members),
            "updatedReplicas": len(at_update),
            "currentRevision": current,
            "updateRevision": update,
            "collisionCount": 0,
        }
        kept = ("replicas", "observedGeneration", "availableReplicas", "collisionCount")
        await self.world.set_status(
            "statefulsets", stateful, {name: each for name, each in status.items() if each or name in kept}
        )
        return None

    async def _step(self, stateful: Object, names: list[str], pods: dict[str, Object], update: str) -> None:
        spec = stateful["spec"]
        parallel = spec["podManagementPolicy"] == "Parallel"
        for name in names:
            pod = pods.get(name)
            if pod is not None and ended(pod) and not deleting(pod):
                await self.world.delete("pods", pod)
            if pod is None:
                made = await self._create(stateful, name, update)
                if made is not None:
                    pods[name] = pod = made
            if not parallel and (pod is None or not ready(pod) or deleting(pod)):
                return
        surplus = sorted((name for name in pods if name not in names), key=_ordinal, reverse=True)
        for name in surplus:
            if not deleting(pods[name]):
                await self.world.delete("pods", pods[name])
            if not parallel:
                return
        strategy = spec["updateStrategy"]
        if strategy["type"] != "RollingUpdate":
            return
        first = (strategy.get("rollingUpdate") or {}).get("partition", 0)
        for name in sorted(names, key=_ordinal, reverse=True):
            pod = pods.get(name)
            if pod is None or _ordinal(name) < first:
                continue
            if pod["metadata"]["labels"].get(_REVISION) != update and not deleting(pod):
                await self.world.delete("pods", pod)
                return
            # One at a time: the next goes when this one is ready.
            if deleting(pod) or not ready(pod):
                return

    async def _create(self, stateful: Object, name: str, update: str) -> Object | None:
        spec, namespace = stateful["spec"], stateful["metadata"]["namespace"]
        pod = pod_of(spec["template"], name=name)
        pod["metadata"]["labels"] = {
            **(pod["metadata"].get("labels") or {}),
            _REVISION: update,
            "statefulset.kubernetes.io/pod-name": name,
            "apps.kubernetes.io/pod-index": str(_ordinal(name)),
        }
        pod["metadata"]["ownerReferences"] = controlled_by(stateful, "apps/v1", "StatefulSet")
        pod["spec"] |= {"hostname": name, "subdomain": spec.get("serviceName", "")}
        volumes = [
            each
            for each in pod["spec"].get("volumes") or []
            if each["name"] not in {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []}
        ]
        for template in spec.get("volumeClaimTemplates") or []:
            claim = copy.deepcopy(template)
            wanted = claim["metadata"]["name"]
            claim["metadata"] |= {"name": f"{wanted}-{name}", "namespace": namespace}
            claim["metadata"]["labels"] = {
                **(claim["metadata"].get("labels") or {}),
                **(spec["selector"].get("matchLabels") or {}),
            }
            claim.pop("status", None)
            await self.world.create("persistentvolumeclaims", namespace, claim)
            volumes.append({"name": wanted, "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}})
        if volumes:
            pod["spec"]["volumes"] = volumes
        return await self.world.create("pods", namespace, pod)


def _ordinal(name: str) -> int:
    return int(name.rpartition("-")[2])
