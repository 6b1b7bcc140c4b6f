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

import yaml

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.apiserver import ApiServer, Faults
from tests.kubernetes.apiserver.access import Denial
from tests.kubernetes.apiserver.faults import Fault
from tests.kubernetes.client import Access, Api, suppress_api_error
from tests.kubernetes.controllers import Controllers
from tests.kubernetes.kubelet import Kubelet, NodeSpec

Object = dict[str, Any]
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
        self.server = ApiServer(folder / "apiserver", self.addresses.service)
        self._with_controllers = controllers
        self._controllers: Controllers | None = None
        self._nodes = [NodeSpec(f"node-{at + 1}") for at in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self._with_kubelet = kubelet
        self._kubelet: Kubelet | None = None
        self._api: Api | None = None

    def __enter__(self) -> TestCluster:
        self.server.start()
        self.apply(_STORAGE_CLASS)
        if self._with_controllers:
            access = Access(self.server.url, self.server.system_token("kube-controller-manager"), self._authority)
            self._controllers = Controllers(access, node_grace_s=self.node_grace_s)
            self._controllers.start()
        if self._with_kubelet:
            access = Access(self.server.url, self.server.system_token("nodes"), self._authority)
            self._kubelet = Kubelet(access, self.folder / "kubelet", self.addresses, self._nodes)
            self._kubelet.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Controllers first: they would make anew what ends.
        if self._controllers is not None:
            self._controllers.stop()
        if self._kubelet is not None:
            self._kubelet.stop()
        self.server.stop()
        self.addresses.close()

    @property
    def _authority(self) -> str:
        return str(self.server.certificates.authority)

    @property
    def admin_kubeconfig(self) -> Path:
        return self._kubeconfig("admin", self.server.admin_token, "default")

    def kubeconfig(self, service_account: str, namespace: str = "default") -> Path:
        """A kubeconfig with the rights of a service account (`name` or `namespace/name`), with a token of its own."""
        if "/" in service_account:
            namespace, _, service_account = service_account.partition("/")
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

    def drain(self, node: str, timeout_s: float = 30.0) -> None:
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
        return self._api

    def apply(self, text: str | Path, namespace: str = "default") -> list[Object]:
        """Applies every document of a YAML text or file."""
        raw = text.read_text() if isinstance(text, Path) else text
        return [self.api.apply(each, namespace) for each in yaml.safe_load_all(raw) if each]

    def create_namespace(self, name: str, **labels: str) -> None:
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    def wait(self, holds: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """Waits until `holds()` is true, and gives what it returned."""
        ends_at = time.monotonic() + timeout_s
        while True:
            found = holds()
            if found:
                return found
            if time.monotonic() > ends_at:
                raise AssertionError(f"not within {timeout_s} s: {what}")
            time.sleep(0.02)

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
        return self.server.denied

    def _kubeconfig(self, name: str, token: str, namespace: str) -> Path:
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.server.url, "certificate-authority": self._authority}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name, "namespace": namespace}}],
            "current-context": "tests",
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path
