"""EndpointSlices: the addresses behind a service, and which of them are ready.

Upstream: `pkg/controller/endpointslice`, `staging/src/k8s.io/endpointslice/reconciler.go`; conditions: KEP-1672.

Limits: one slice a service, IPv4; the older Endpoints objects are not written.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.apiserver.selectors import matches
from tests.kubernetes.controllers.base import (
    Controller,
    Key,
    Object,
    controlled_by,
    deleting,
    digest,
    ended,
    key_of,
    ready,
)

_SERVICE = "kubernetes.io/service-name"


class EndpointSlices(Controller):
    plurals = ("services", "pods", "endpointslices")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "services":
            return [key_of(value)]
        namespace = value["metadata"]["namespace"]
        if plural == "endpointslices":
            name = (value["metadata"].get("labels") or {}).get(_SERVICE)
            return [(namespace, name)] if name else []
        labels = value["metadata"].get("labels") or {}
        return [
            key_of(each)
            for each in self.world.all("services", namespace)
            if each["spec"].get("selector") and matches({"matchLabels": each["spec"]["selector"]}, labels)
        ]

    async def sync(self, key: Key) -> None:
        service = self.world.get("services", key)
        if service is None or not service["spec"].get("selector") or deleting(service):
            return
        name = f"{key[1][:50]}-{digest(service['metadata']['uid'])[:5]}"
        selector = {"matchLabels": service["spec"]["selector"]}
        pods = [
            each
            for each in self.world.all("pods", key[0])
            if matches(selector, each["metadata"].get("labels") or {})
            and not ended(each)
            and (each.get("status") or {}).get("podIP")
        ]
        every = bool(service["spec"].get("publishNotReadyAddresses"))
        endpoints = [_endpoint(each, every) for each in sorted(pods, key=key_of)]
        ports = _ports(service, pods)
        have = self.world.get("endpointslices", (key[0], name))
        if have is not None and have.get("endpoints", []) == endpoints and have.get("ports", []) == ports:
            return
        if have is not None:
            await self.world.patch("endpointslices", have, {"endpoints": endpoints, "ports": ports})
            return
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "labels": {
                    **(service["metadata"].get("labels") or {}),
                    _SERVICE: key[1],
                    "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                },
                "ownerReferences": controlled_by(service, "v1", "Service"),
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": ports,
        }
        await self.world.create("endpointslices", key[0], body)


def _endpoint(pod: Object, every: bool) -> Object:
    serving, terminating = ready(pod), deleting(pod)
    namespace, name = key_of(pod)
    target = {"kind": "Pod", "namespace": namespace, "name": name, "uid": pod["metadata"]["uid"]}
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": every or (serving and not terminating), "serving": serving, "terminating": terminating},
        "nodeName": pod["spec"].get("nodeName", ""),
        "targetRef": target,
    }


def _ports(service: Object, pods: list[Object]) -> list[Object]:
    found = []
    for each in service["spec"].get("ports") or []:
        number = target_port(each, pods)
        if number is not None:
            found.append({"name": each.get("name", ""), "port": number, "protocol": each.get("protocol", "TCP")})
    return found


def target_port(port: Object, pods: list[Object]) -> int | None:
    target = port.get("targetPort", port["port"])
    if isinstance(target, int):
        return target
    for pod in pods:
        for container in pod["spec"]["containers"]:
            for each in container.get("ports") or []:
                if each.get("name") == target:
                    return int(each["containerPort"])
    return None
