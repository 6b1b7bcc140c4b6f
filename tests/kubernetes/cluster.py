"""A cluster for a test: `with TestCluster(folder) as cluster:`.

Model: the API server of the tests (or, with STOKER_TEST_KUBECONFIG, a real one that has a scheduler and a controller
manager and no kubelets), what a controller manager does, and a kubelet stand-in that runs pods as processes of this
machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.apiserver import ApiServer, Faults
from tests.kubernetes.apiserver.access import Denial
from tests.kubernetes.apiserver.faults import Fault
from tests.kubernetes.client import Access, Api

Object = dict[str, Any]


class TestCluster:
    """Everything that a test asks of a cluster. Nothing outlives the `with` block."""

    __test__ = False

    def __init__(self, folder: Path, *, controllers: bool = True, kubelet: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.addresses = Addresses()
        self.server = ApiServer(folder / "apiserver", self.addresses.service)
        self._api: Api | None = None

    def __enter__(self) -> TestCluster:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()
        self.addresses.close()

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
        cluster = {"server": self.server.url, "certificate-authority": str(self.server.certificates.authority)}
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
