"""A cluster for a test: `with TestCluster(folder) as cluster:`.

Model: the API server of the tests (or, with STOKER_TEST_KUBECONFIG, a real one that has a scheduler and a controller
manager and no kubelets), what a controller manager does, and a kubelet stand-in that runs pods as processes of this
machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import yaml

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.apiserver import ApiServer, Faults
from tests.kubernetes.apiserver.access import Denial
from tests.kubernetes.apiserver.faults import Fault
from tests.kubernetes.client import Access, Api, path_of, suppress_api_error
from tests.kubernetes.controllers import EVERY, Controllers
from tests.kubernetes.controllers.volumes import Claims
from tests.kubernetes.kubelet import Kubelet, NodeSpec

Object = dict[str, Any]
GIVEN_VARIABLE = "STOKER_TEST_KUBECONFIG"
"""Kubeconfig (token or client certificate) of a cluster to test against, instead of the tests' own server."""
_STORAGE_CLASS = """
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: tests.example.dev/folder
"""


class TestCluster:
    """Everything that a test asks of a cluster. Nothing outlives the `with` block."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int | Sequence[NodeSpec] = 1,
        controllers: bool = True,
        kubelet: bool = True,
        node_grace_s: float = 50.0,
    ) -> None:
        self.folder = folder
        self.node_grace_s = node_grace_s
        folder.mkdir(parents=True, exist_ok=True)
        self.addresses = Addresses()
        given = os.environ.get(GIVEN_VARIABLE)
        self._given = Access.of_kubeconfig(Path(given)) if given else None
        self._server = None if given else ApiServer(folder / "apiserver", self.addresses.service)
        # What was made in a cluster that stays, and has to be taken out of it again.
        self._made_namespaces: list[str] = []
        self._with_controllers = controllers
        self._controllers: Controllers | None = None
        self._nodes = [NodeSpec(f"node-{at + 1}") for at in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self._with_kubelet = kubelet
        self._kubelet: Kubelet | None = None
        self._api: Api | None = None

    def __enter__(self) -> TestCluster:
        if self._server is not None:
            self._server.start()
        self.apply(_STORAGE_CLASS)
        if self._with_controllers:
            # A cluster that was given has controllers; what provisions the volumes of our class it has not.
            kinds = EVERY if self._given is None else (Claims,)
            access = self._access_of("kube-controller-manager")
            self._controllers = Controllers(access, node_grace_s=self.node_grace_s, kinds=kinds)
            self._controllers.start()
        if self._with_kubelet:
            self._kubelet = Kubelet(self._access_of("nodes"), self.folder / "kubelet", self.addresses, self._nodes)
            self._kubelet.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Controllers first: they would make anew what ends.
        if self._controllers is not None:
            self._controllers.stop()
        if self._given is not None:
            self._leave()
        if self._kubelet is not None:
            self._kubelet.stop()
        if self._server is not None:
            self._server.stop()
        self.addresses.close()

    @property
    def server(self) -> ApiServer:
        """The server's own hooks; a test that needs them is skipped against a cluster that was given."""
        if self._server is None:
            pytest.skip(f"{GIVEN_VARIABLE} names another server: its faults cannot be chosen")
        return self._server

    def _access_of(self, component: str) -> Access:
        if self._given is not None:
            return self._given
        return Access(self.server.url, self.server.system_token(component), str(self.server.certificates.authority))

    @property
    def is_given(self) -> bool:
        """Whether it stays when this test ends, and its server's faults cannot be chosen."""
        return self._given is not None

    def _leave(self) -> None:
        """Takes what was made out of a cluster that stays, while there still is somebody to end the pods."""
        for path in reversed(self.api.made or []):
            with suppress_api_error(404):
                self.api.call("DELETE", path)
        left = set(self._made_namespaces)
        self.wait(
            lambda: not left & {each["metadata"]["name"] for each in self.api.list("namespaces")},
            "all removed",
            120,
            0.1,
        )
        nodes = {node.name for node in self._nodes} if self._kubelet is not None else set()
        ours = {"default", *self._made_namespaces}

        def emptied() -> bool:
            there = [each for each in self.api.list("pods") if each["metadata"]["namespace"] in ours]
            return not any(each["spec"].get("nodeName") in nodes for each in there)

        self.wait(emptied, "no pod of ours on our nodes", 120, 0.1)
        for name in nodes:
            self.api.delete("nodes", name)

    @property
    def admin_kubeconfig(self) -> Path:
        if self._given is not None:
            return Path(os.environ[GIVEN_VARIABLE]).resolve()
        return self._kubeconfig("admin", self.server.admin_token, "default")

    def kubeconfig(self, service_account: str, namespace: str = "default") -> Path:
        """A kubeconfig with the rights of a service account (`name` or `namespace/name`), with a token of its own."""
        if "/" in service_account:
            namespace, _, service_account = service_account.partition("/")
        if self._given is not None:
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
            path = path_of("serviceaccounts", namespace, service_account, "token")
            token = self.api.call("POST", path, body)["status"]["token"]
        else:
            token = self.server.token_of(namespace, service_account)
        return self._kubeconfig(f"{namespace}-{service_account}", token, namespace)

    def environment(self, kubeconfig: Path | str | None = None) -> dict[str, str]:
        """For helm and kubectl: the cluster, and caches of its own (they key theirs by host and port, which come
        again)."""
        home = str(self.folder / "home")
        return {
            **os.environ,
            "KUBECONFIG": str(kubeconfig or self.admin_kubeconfig),
            "HOME": home,
            "KUBECACHEDIR": home,
        }

    @property
    def kubelet(self) -> Kubelet:
        assert self._kubelet is not None, "this cluster has no kubelet"
        return self._kubelet

    def service_url(self, name: str, port: int | str, namespace: str = "default", scheme: str = "http") -> str:
        """Where a service is reached from this machine; `port` may be its name."""
        service = self.api.get("services", name, namespace)
        number = next(each["port"] for each in service["spec"]["ports"] if port in (each["port"], each.get("name")))
        found = self.wait(lambda: self.kubelet.service_address(name, namespace), f"an address of {name}")
        return f"{scheme}://{found}:{number}"

    def drain(self, node: str, timeout_s: float = 120.0) -> None:
        """Cordons a node and evicts its pods, as `kubectl drain` does: again and again while a budget forbids."""
        self.api.patch("nodes", node, {"spec": {"unschedulable": True}})

        def emptied() -> bool:
            pods = [each for each in self.api.list("pods") if each["spec"].get("nodeName") == node]
            for each in [each for each in pods if "deletionTimestamp" not in each["metadata"]]:
                with suppress_api_error(404, 429):
                    self.api.evict(each["metadata"]["name"], each["metadata"]["namespace"])
            return not pods

        self.wait(emptied, f"{node} drained", timeout_s)

    @property
    def api(self) -> Api:
        """The administrator's blocking client."""
        if self._api is None:
            self._api = Api(Access.of_kubeconfig(self.admin_kubeconfig))
            self._api.made = [] if self.is_given else None
        return self._api

    def apply(self, text: str | Path, namespace: str = "default") -> list[Object]:
        """Applies every document of a YAML text or file."""
        raw = text.read_text() if isinstance(text, Path) else text
        return [self.api.apply(each, namespace) for each in yaml.safe_load_all(raw) if each]

    def create_namespace(self, name: str, **labels: str) -> None:
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        self._made_namespaces.append(name)

    def wait(self, holds: Callable[[], Any], what: str, timeout_s: float = 120.0, every_s: float = 0.02) -> Any:
        """Waits until `holds()` is true, and gives what it returned. `every_s`: where looking costs something."""
        ends_at = time.monotonic() + timeout_s
        while True:
            found = holds()
            if found:
                return found
            if time.monotonic() > ends_at:
                raise AssertionError(f"not within {timeout_s} s: {what}")
            time.sleep(every_s)

    # Faults.

    @property
    def faults(self) -> Faults:
        return self.server.faults

    def fail(
        self, verb: str = "*", resource: str = "*", status: int | str | None = 500, times: int | None = 1, **more: Any
    ) -> Fault:
        """Lets calls fail: see `Fault` for `delay_s`, `retry_after_s`, `lost`, `user`, `chance`; `status` may be
        "reset" or "hang"."""
        return self.server.fail(verb, resource, status, times, **more)

    def cut_watches(self, resource: str = "*", user: str = "") -> int:
        return self.server.cut_watches(resource, user)

    def expire_versions(self, resource: str = "*") -> int:
        return self.server.expire_versions(resource)

    @property
    def denied(self) -> list[Denial]:
        """Calls that no Role allowed: a run that ends with any of them has failed."""
        return self._server.denied if self._server is not None else []

    def _kubeconfig(self, name: str, token: str, namespace: str) -> Path:
        path = self.folder / f"{name}.kubeconfig"
        access = self._given or Access(self.server.url, "", str(self.server.certificates.authority))
        Access(access.url, token, access.authority).write_kubeconfig(path, name, namespace)
        return path
