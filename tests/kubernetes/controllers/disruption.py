"""PodDisruptionBudgets: how many pods may go now.

Upstream: `pkg/controller/disruption/disruption.go`: a number of `minAvailable` counts the pods there are; a
percentage, or `maxUnavailable`, needs the number that their controller wants, which a custom resource tells by its
scale subresource only.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.apiserver.selectors import matches
from tests.kubernetes.clock import seconds_since
from tests.kubernetes.controllers.base import Controller, Key, Object, amount, deleting, ended, key_of, owner_of, ready
from tests.kubernetes.controllers.base import with_condition as conditions_with

# A pod that was let go and is still there after this counts again (DeletionTimeout).
_DISRUPTED_S = 120.0
_PLURALS = {"ReplicaSet": "replicasets", "Deployment": "deployments", "StatefulSet": "statefulsets"}


class Disruption(Controller):
    plurals = ("poddisruptionbudgets", "pods", "replicasets", "statefulsets", "deployments")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "poddisruptionbudgets":
            return [key_of(value)]
        namespace = value["metadata"]["namespace"]
        budgets = self.world.all("poddisruptionbudgets", namespace)
        if plural == "pods":
            labels = value["metadata"].get("labels") or {}
            budgets = [each for each in budgets if matches(each["spec"].get("selector"), labels)]
        return [key_of(each) for each in budgets]

    async def sync(self, key: Key) -> None:
        budget = self.world.get("poddisruptionbudgets", key)
        if budget is None or deleting(budget):
            return
        spec = budget["spec"]
        pods = [
            each
            for each in self.world.all("pods", key[0])
            if matches(spec.get("selector"), each["metadata"].get("labels") or {}) and not ended(each)
        ]
        disrupted = {
            name: at
            for name, at in ((budget.get("status") or {}).get("disruptedPods") or {}).items()
            if seconds_since(at) < _DISRUPTED_S
            and any(each["metadata"]["name"] == name and not deleting(each) for each in pods)
        }
        healthy = sum(ready(each) and not deleting(each) and each["metadata"]["name"] not in disrupted for each in pods)
        try:
            expected, wanted = await self._wanted(spec, pods)
        except ApiError as error:
            conditions = conditions_with(budget, "DisruptionAllowed", "False", "SyncFailed", error.message)
            status = {**(budget.get("status") or {}), "disruptionsAllowed": 0, "conditions": conditions}
            status |= {"observedGeneration": budget["metadata"]["generation"]}
            status |= {name: status.get(name, 0) for name in ("currentHealthy", "desiredHealthy", "expectedPods")}
            await self.world.set_status("poddisruptionbudgets", budget, status)
            return
        allowed = max(healthy - wanted, 0) if expected else 0
        enough = ("True", "SufficientPods") if allowed else ("False", "InsufficientPods")
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "disruptionsAllowed": allowed,
            "currentHealthy": healthy,
            "desiredHealthy": wanted,
            "expectedPods": expected,
            "conditions": conditions_with(budget, "DisruptionAllowed", *enough),
        }
        if disrupted:
            status["disruptedPods"] = disrupted
        await self.world.set_status("poddisruptionbudgets", budget, status)

    async def _wanted(self, spec: Object, pods: list[Object]) -> tuple[int, int]:
        least, missing = spec.get("minAvailable"), spec.get("maxUnavailable")
        if missing is not None:
            expected = await self._expected(pods)
            return expected, max(expected - amount(missing, expected, True), 0)
        if isinstance(least, str):
            expected = await self._expected(pods)
            return expected, amount(least, expected, True)
        return len(pods), amount(least, len(pods), True)

    async def _expected(self, pods: list[Object]) -> int:
        total, seen = 0, set()
        for pod in pods:
            owner = owner_of(pod)
            if owner is None:
                raise ApiError(500, "SyncFailed", f"found no controller ref for pod {pod['metadata']['name']!r}")
            if owner["uid"] in seen:
                continue
            seen.add(owner["uid"])
            total += await self._scale(owner, pod["metadata"]["namespace"])
        return total

    async def _scale(self, owner: Object, namespace: str) -> int:
        plural = _PLURALS.get(owner["kind"])
        value = self.world.get(plural, (namespace, owner["name"])) if plural else None
        if plural and value is not None:
            above = owner_of(value)
            if above is not None and above["kind"] == "Deployment":
                return await self._scale(above, namespace)
            return int(value["spec"].get("replicas", 1))
        listed = await self.world.client.call("GET", f"/apis/{owner['apiVersion']}")
        for each in listed["resources"]:
            if each["kind"] == owner["kind"] and "/" not in each["name"]:
                path = f"/apis/{owner['apiVersion']}/namespaces/{namespace}/{each['name']}/{owner['name']}/scale"
                return int((await self.world.client.call("GET", path))["spec"].get("replicas", 0))
        raise ApiError(
            500, "SyncFailed", f"{owner['kind']}.{owner['apiVersion']} does not implement the scale subresource"
        )
