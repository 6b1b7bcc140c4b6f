"""One API server for the tests of the server itself; each test has a namespace of its own in it."""

from __future__ import annotations

import itertools
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes import tools
from tests.kubernetes.cluster import TestCluster

TIMEOUT_S = 600
"""Of each test here: what takes seconds alone takes minutes beside much else, and only a test that hangs takes this."""
Run = Callable[..., subprocess.CompletedProcess[str]]
FOLDER = Path(__file__).parent
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def plain_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """The server alone: nothing schedules, nothing runs."""
    with TestCluster(tmp_path_factory.mktemp("cluster"), controllers=False, kubelet=False) as cluster:
        yield cluster


@pytest.fixture
def namespace(plain_cluster: TestCluster) -> str:
    name = f"test-{next(_numbers)}-{secrets.token_hex(3)}"
    plain_cluster.create_namespace(name)
    plain_cluster.apply("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default}}", name)
    return name


@pytest.fixture(scope="module")
def live_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """Everything: two nodes whose pods run, and a node that is silent for eight seconds is lost. Of a module: two
    kubelets over one server that was given would run the same pods."""
    with TestCluster(tmp_path_factory.mktemp("live"), nodes=2, node_grace_s=8.0) as cluster:
        yield cluster


@pytest.fixture
def live_namespace(live_cluster: TestCluster) -> str:
    name = f"live-{next(_numbers)}-{secrets.token_hex(3)}"
    live_cluster.create_namespace(name)
    live_cluster.wait(lambda: live_cluster.api.list("serviceaccounts", name), "the namespace's service account")
    return name


@pytest.fixture
def kubectl(plain_cluster: TestCluster, namespace: str) -> Run:
    return _runner(tools.kubectl(), plain_cluster, namespace)


@pytest.fixture
def helm(plain_cluster: TestCluster, namespace: str) -> Run:
    return _runner(tools.helm(), plain_cluster, namespace)


def _runner(tool: str, cluster: TestCluster, namespace: str) -> Run:
    def run(
        *arguments: str, given: str | None = None, kubeconfig: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [tool, "--namespace", namespace, *arguments]
        env = cluster.environment(kubeconfig)
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=180, env=env)

    return run
