"""A cluster in this process, for tests that count calls and set the pace: the client's interface over a mapping.

`FakeApi` keeps versions, watches and preconditions; `Kubelet` brings pods up with agents of `town.Machine`. Limits:
nothing is validated and nobody is refused: `tests.kubernetes` has a server that does.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from control_plane.backends.kubernetes.api import PODS, SLOT_POOLS, ApiRefused, Happened, Listed, Object, Resource
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.pods import Service
from control_plane.settings import KubernetesSettings
from tests.control_plane.backends.town import Machine, client_of

SECRET = b"a secret of thirty-two bytes....."


class FakeApi:
    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.calls: Counter[str] = Counter()
        """By verb and resource."""
        self.faults: list[tuple[str, Exception]] = []
        """(verb and resource, what is raised), each once and in order."""
        self._version = 0
        self._log: list[tuple[int, str, Happened]] = []
        self._forgotten = 0
        self._moved = asyncio.Event()
        self._cuts = 0
        self.on_change: list[Callable[[Resource, str, Object], None]] = []

    @property
    def writes(self) -> int:
        return sum(count for call, count in self.calls.items() if call.split()[0] not in ("list", "watch", "get"))

    # --- what a test does ---

    def cut_watches(self) -> None:
        self._cuts += 1
        self._wake()

    def expire_versions(self) -> None:
        """History before now is forgotten: who watches from there gets 410."""
        self._forgotten = self._version
        self._log.clear()
        self.cut_watches()

    def put(self, resource: Resource, found: Object, kind: str = "") -> Object:
        """As somebody else's write."""
        name, known = found["metadata"]["name"], self.objects.setdefault(resource.plural, {})
        before = known.get(name)
        self._version += 1
        found = copy.deepcopy(found)
        metadata = found["metadata"]
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", f"uid-{self._version}")
        metadata.setdefault("creationTimestamp", f"2026-01-01T00:00:{self._version % 60:02d}Z")
        generation = int((before or {}).get("metadata", {}).get("generation") or 0)
        same = before is not None and before.get("spec") == found.get("spec")
        metadata["generation"] = generation if same else generation + 1
        known[name] = found
        self._happened(resource, kind or ("ADDED" if before is None else "MODIFIED"), found)
        return copy.deepcopy(found)

    def remove(self, resource: Resource, name: str) -> None:
        found = self.objects[resource.plural].pop(name)
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._happened(resource, "DELETED", found)

    def change(self, resource: Resource, name: str, **parts: Any) -> Object:
        found = self.objects[resource.plural][name]
        return self.put(resource, {**found, **parts})

    def _happened(self, resource: Resource, kind: str, found: Object) -> None:
        self._log.append((self._version, resource.plural, Happened(kind, copy.deepcopy(found))))
        self._wake()
        for told in list(self.on_change):
            told(resource, kind, found)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # --- Api ---

    def _called(self, verb: str, resource: Resource) -> None:
        call = f"{verb} {resource.plural}"
        self.calls[call] += 1
        for index, (wanted, error) in enumerate(self.faults):
            if wanted == call:
                del self.faults[index]
                raise error

    def _find(self, resource: Resource, name: str) -> Object:
        found = self.objects.get(resource.plural, {}).get(name)
        if found is None:
            raise ApiRefused(404, "NotFound", f"{resource.plural} {name!r} not found")
        return found

    async def list(self, resource: Resource, labels: str = "", fields: str = "") -> Listed:
        self._called("list", resource)
        found = self.objects.get(resource.plural, {}).values()
        return Listed(tuple(copy.deepcopy(each) for each in found if _selected(each, labels)), str(self._version))

    async def watch(
        self, resource: Resource, version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Happened]:
        self._called("watch", resource)
        seen, cuts = int(version), self._cuts
        if seen < self._forgotten:
            raise ApiRefused(410, "Expired", f"too old resource version: {version}")
        while cuts == self._cuts:
            moved = self._moved
            first = bisect.bisect_right(self._log, seen, key=lambda each: each[0])
            for at, plural, event in self._log[first:]:
                seen = at
                if plural == resource.plural and _selected(event.object, labels):
                    yield event
            if moved is self._moved:
                await moved.wait()

    async def get(self, resource: Resource, name: str) -> Object:
        self._called("get", resource)
        return copy.deepcopy(self._find(resource, name))

    async def create(self, resource: Resource, body: Object) -> Object:
        self._called("create", resource)
        if body["metadata"]["name"] in self.objects.get(resource.plural, {}):
            raise ApiRefused(409, "AlreadyExists", "already exists")
        return self.put(resource, body)

    async def replace(self, resource: Resource, name: str, body: Object) -> Object:
        self._called("update", resource)
        found, version = self._find(resource, name), body["metadata"].get("resourceVersion")
        if version and version != found["metadata"]["resourceVersion"]:
            raise ApiRefused(409, "Conflict", "the object has been modified")
        return self.put(resource, body)

    async def patch(self, resource: Resource, name: str, body: Object, part: str = "") -> Object:
        self._called("patch", resource)
        return self.put(resource, merged(self._find(resource, name), body))

    async def delete(self, resource: Resource, name: str, *, uid: str = "", version: str = "") -> None:
        self._called("delete", resource)
        metadata = self._find(resource, name)["metadata"]
        if uid not in ("", metadata["uid"]) or version not in ("", metadata["resourceVersion"]):
            raise ApiRefused(409, "Conflict", "precondition failed")
        if resource == PODS and not metadata.get("deletionTimestamp"):
            self.change(resource, name, metadata={**metadata, "deletionTimestamp": "2026-01-01T01:00:00Z"})
        elif resource != PODS:
            self.remove(resource, name)

    async def close(self) -> None:
        return


def merged(found: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _selected(found: Object, labels: str) -> bool:
    known = found["metadata"].get("labels") or {}
    return all(
        known.get(name) == value for name, _, value in (each.partition("=") for each in labels.split(",") if each)
    )


class Kubelet:
    """Brings every new pod up, or as far as `stops_at` says, and ends those that are deleted."""

    def __init__(self, api: FakeApi, machine: Machine) -> None:
        self.api = api
        self.machine = machine
        self.stops_at = ""
        """`schedule`: no pod finds a node; `start`: none gets beyond its node."""
        api.on_change.append(self._changed)

    def _changed(self, resource: Resource, kind: str, pod: Object) -> None:
        if resource != PODS or kind == "DELETED":
            return
        name = pod["metadata"]["name"]
        if pod["metadata"].get("deletionTimestamp"):
            asyncio.get_running_loop().call_soon(self._end, name)
        elif not pod.get("status"):
            asyncio.get_running_loop().call_soon(self.bring_up, name)

    def bring_up(self, name: str) -> None:
        if name not in self.api.objects.get("pods", {}):
            return
        if self.stops_at == "schedule":
            scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                         "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}  # fmt: skip
            self.api.change(PODS, name, status={"phase": "Pending", "conditions": [scheduled]})
            return
        pod = self.api.objects["pods"][name]
        on_node = {**pod["spec"], "nodeName": "node-1"}
        waiting = {"name": "agent", "state": {"waiting": {"reason": "ContainerCreating"}}}
        self.api.change(PODS, name, spec=on_node, status={"phase": "Pending", "containerStatuses": [waiting]})
        if self.stops_at != "start":
            self.run(name)

    def run(self, name: str) -> None:
        self.machine.spawn(name)
        self.api.change(PODS, name, status=running(ready=True))

    def _end(self, name: str) -> None:
        agent = self.machine.of(name)
        if agent is not None:
            agent.ended.set()
        if name in self.api.objects.get("pods", {}):
            self.api.remove(PODS, name)

    def kill(self, name: str, reason: str = "OOMKilled", *, restarts: bool = False) -> None:
        """Its container ends."""
        agent = self.machine.of(name)
        if agent is not None:
            agent.ended.set()
        ended = {"terminated": {"reason": reason, "exitCode": 137}}
        if restarts:
            status = {"phase": "Running", "podIP": "127.0.0.1",
                      "containerStatuses": [{"name": "agent", "state": ended, "restartCount": 0}]}  # fmt: skip
        else:
            status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": ended}]}
        self.api.change(PODS, name, status=status)


def running(*, ready: bool) -> Object:
    return {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"name": "agent", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}],
    }


def pod_client_of(machine: Machine) -> Any:
    """Agents of pods all listen on the same port: they are found by their slot."""
    local = client_of(machine)

    def client(info: Any) -> Any:
        agent = machine.of(info.slot_id)
        if agent is None and info.port == 7070:
            agent = machine.spawn(info.slot_id)
            agent.ended.set()
        return local(agent.info if agent is not None and info.port == 7070 else info)

    return client


def listening(is_there: Callable[[], bool]) -> Any:
    """In the place of a look at a port that stand-ins have none of."""

    async def listens(host: str, port: int) -> bool:
        return is_there()

    return listens


def slot_pool(name: str = "default", **spec: Any) -> Object:
    return {
        "apiVersion": SLOT_POOLS.api_version,
        "kind": SLOT_POOLS.kind,
        "metadata": {"name": name},
        "spec": {"image": "stoker@sha256:abc", "most": 3, **spec},
    }


def backend_of(api: FakeApi, **settings: Any) -> KubernetesBackend:
    async def connect() -> Any:
        return api

    given = KubernetesSettings(backend="kubernetes", release="rel", **settings)
    return KubernetesBackend(given, lambda: Service("rel", SECRET), connect, orphan_s=120.0)
