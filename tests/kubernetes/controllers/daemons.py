"""DaemonSets: a pod on every node that its template fits.

Upstream: `pkg/controller/daemon/daemon_controller.go` (`podsShouldBeOnNode`, `rollingUpdate`), `util/daemonset_util.go`
(tolerations that every daemon pod has, the node affinity by which the scheduler binds it).

Limits: an outdated pod is deleted as soon as its node is seen, whatever `maxUnavailable` says; no surge, no history.
"""

from __future__ import annotations

import uuid
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
from tests.kubernetes.controllers.scheduler import fits_node

_REVISION = "controller-revision-hash"
_TOLERATED: list[Object] = [
    {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": effect}
    for name, effect in (
        ("not-ready", "NoExecute"), ("unreachable", "NoExecute"), ("disk-pressure", "NoSchedule"),
        ("memory-pressure", "NoSchedule"), ("pid-pressure", "NoSchedule"), ("unschedulable", "NoSchedule"),
    )
]  # fmt: skip


class DaemonSets(Controller):
    plurals = ("daemonsets", "pods", "nodes")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "daemonsets":
            return [key_of(value)]
        if plural == "nodes":
            return [key_of(each) for each in self.world.all("daemonsets")]
        owner = owner_of(value)
        return [(value["metadata"]["namespace"], owner["name"])] if owner and owner["kind"] == "DaemonSet" else []

    async def sync(self, key: Key) -> float | None:
        daemon = self.world.get("daemonsets", key)
        if daemon is None or deleting(daemon):
            return None
        spec, metadata = daemon["spec"], daemon["metadata"]
        revision = digest(spec["template"])
        template = pod_of(spec["template"], name="any")["spec"]
        template["tolerations"] = [*(template.get("tolerations") or []), *_TOLERATED]
        wanted = {each["metadata"]["name"] for each in self.world.all("nodes") if fits_node(template, each)}
        here: dict[str, Object] = {}
        for pod in owned(self.world.all("pods", key[0]), metadata["uid"]):
            node = _node_of(pod)
            outdated = pod["metadata"]["labels"].get(_REVISION) != revision
            if node not in wanted or node in here or ended(pod) or outdated:
                if not deleting(pod):
                    await self.world.delete("pods", pod)
            elif not deleting(pod):
                here[node] = pod
        for node in sorted(wanted - here.keys()):
            await self._create(daemon, template, node, revision)
        min_ready_s = spec.get("minReadySeconds", 0)
        up = [each for each in here.values() if available(each, min_ready_s)]
        status: Object = {
            "observedGeneration": metadata["generation"],
            "desiredNumberScheduled": len(wanted),
            "currentNumberScheduled": len(here),
            "updatedNumberScheduled": len(here),
            "numberReady": sum(ready(each) for each in here.values()),
            "numberAvailable": len(up),
            "numberUnavailable": len(wanted) - len(up),
            "numberMisscheduled": 0,
        }
        optional = ("updatedNumberScheduled", "numberAvailable", "numberUnavailable")
        told = {name: each for name, each in status.items() if each or name not in optional}
        await self.world.set_status("daemonsets", daemon, told)
        return None

    async def _create(self, daemon: Object, spec: Object, node: str, revision: str) -> None:
        pod = pod_of(daemon["spec"]["template"], name=f"{daemon['metadata']['name']}-{uuid.uuid4().hex[:5]}")
        pod["metadata"]["labels"] = {**(pod["metadata"].get("labels") or {}), _REVISION: revision}
        pod["metadata"]["ownerReferences"] = controlled_by(daemon, "apps/v1", "DaemonSet")
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}}
        pod["spec"] = {**spec, "affinity": {**(spec.get("affinity") or {}), "nodeAffinity": affinity}}
        await self.world.create("pods", daemon["metadata"]["namespace"], pod)


def _node_of(pod: Object) -> str:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    name: str = required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
    return name
