"""Of every namespace: its default service account, the cluster's authority, and its end.

Upstream: `pkg/controller/serviceaccount/serviceaccounts_controller.go`,
`pkg/controller/certificates/rootcacertpublisher`,
`pkg/controller/namespace/deletion/namespaced_resources_deleter.go`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import suppress_api_error
from tests.kubernetes.controllers.base import Controller, Key, Object, deleting

_LOOK_AGAIN_S = 0.1


class ServiceAccounts(Controller):
    plurals = ("namespaces", "serviceaccounts")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        return [("", value["metadata"]["name" if plural == "namespaces" else "namespace"])]

    async def sync(self, key: Key) -> None:
        namespace = self.world.get("namespaces", key)
        if namespace is None or deleting(namespace) or self.world.get("serviceaccounts", (key[1], "default")):
            return
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await self.world.create("serviceaccounts", key[1], body)


class RootAuthority(Controller):
    plurals = ("namespaces",)

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        return [("", value["metadata"]["name"])]

    async def sync(self, key: Key) -> None:
        namespace = self.world.get("namespaces", key)
        if namespace is None or deleting(namespace):
            return
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kube-root-ca.crt"},
            "data": {"ca.crt": self.world.authority},
        }
        await self.world.create("configmaps", key[1], body)


class NamespaceEnd(Controller):
    """Empties a namespace that is being deleted, then lets it go."""

    plurals = ("namespaces",)

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        return [("", value["metadata"]["name"])] if deleting(value) and kind != "DELETED" else []

    async def sync(self, key: Key) -> float | None:
        name = key[1]
        namespace = self.world.get("namespaces", key)
        if namespace is None or not namespace["spec"].get("finalizers"):
            return None
        left = 0
        for path in await self._paths(name):
            items = (await self.world.client.call("GET", path))["items"]
            left += len(items)
            if items:
                with suppress_api_error(404, 405):
                    await self.world.client.call("DELETE", path, {"propagationPolicy": "Background"})
        if left:
            return _LOOK_AGAIN_S
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}, "spec": {"finalizers": []}}
        with suppress_api_error(404):
            await self.world.client.call("PUT", f"/api/v1/namespaces/{name}/finalize", body)
        return None

    async def _paths(self, namespace: str) -> list[str]:
        client = self.world.client
        roots = ["/api/v1"]
        for group in (await client.call("GET", "/apis"))["groups"]:
            roots += [f"/apis/{each['groupVersion']}" for each in group["versions"]]
        found = []
        for root in roots:
            try:
                listed = await client.call("GET", root)
            except ApiError:
                continue
            found += [
                f"{root}/namespaces/{namespace}/{each['name']}"
                for each in listed["resources"]
                if each["namespaced"] and "/" not in each["name"] and "deletecollection" in each["verbs"]
            ]
        return found
