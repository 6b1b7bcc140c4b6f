"""Installed for good: `helm install`, `helm test`, and what is there afterwards, with every pod a process here.

The chart's own workloads are run by the tests' cluster, with the rights that the chart gives them: a call that no Role
allows fails the test.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chart.rendering import CHART
from tests.kubernetes import tools
from tests.kubernetes.cluster import TestCluster
from tests.support.checkpoints import make_tiny_llama

pytestmark = pytest.mark.timeout(600)
SMALL: Final = {
    "image": {"repository": "stoker"},
    "warmWorkers": 1,
    "persistence": {"size": "1Gi"},
    "slot": {"pool": "64Mi", "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {}}},
    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
    "slots": {
        "pools": {
            "default": {
                "most": 2,
                "pool": "64Mi",
                "disk": "1Gi",
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
            }
        }
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    with TestCluster(tmp_path_factory.mktemp("installed")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    # Not below /tmp, over which pods have a volume of their own: it stands for what is in the image.
    folder = Path(tempfile.mkdtemp(prefix="stoker-test-model-", dir="/var/tmp"))
    make_tiny_llama(folder / "tiny")
    folder.chmod(0o755)
    yield (folder / "tiny").as_uri()
    shutil.rmtree(folder)


def run(cluster: TestCluster, tool: str, namespace: str, *arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        [tool, "--namespace", namespace, *arguments],
        input=given, capture_output=True, text=True, timeout=400, check=False, env=cluster.environment(),
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}: {done.stderr}\n{done.stdout}\n{_state(cluster, namespace)}"
    return done.stdout


def _state(cluster: TestCluster, namespace: str) -> str:
    """What a person would look at."""
    told = []
    for pod in cluster.api.list("pods", namespace):
        name = pod["metadata"]["name"]
        told.append(f"--- {name}: {json.dumps(pod['status'])[:1500]}")
        command = [tools.kubectl(), "--namespace", namespace, "logs", name, "--tail", "25"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=cluster.environment())
        told.append(done.stdout + done.stderr)
    return "\n".join(told)


def install(cluster: TestCluster, namespace: str, model: str, mode: str) -> None:
    cluster.create_namespace(namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    values: dict[str, Any] = {**SMALL, "test": {"model": model, "timeoutSeconds": 280}}
    values["slots"] = {**SMALL["slots"], "mode": mode}  # type: ignore[dict-item]
    arguments = ("install", "demo", str(CHART), "--values", "-", "--wait", "--timeout", "5m")
    run(cluster, tools.helm(), namespace, *arguments, given=json.dumps(values))


@pytest.mark.e2e
def test_one_pod_goes_from_zero_to_an_answer_and_back(cluster: TestCluster, model: str) -> None:
    install(cluster, "one", model, "embedded")
    said = run(cluster, tools.helm(), "one", "test", "demo", "--logs", "--timeout", "330s")
    assert "and at zero again" in said, said
    assert not cluster.denied
    run(cluster, tools.helm(), "one", "uninstall", "demo", "--wait")


@pytest.mark.e2e
def test_slots_as_pods_come_for_a_request_with_the_rights_of_the_chart(cluster: TestCluster, model: str) -> None:
    install(cluster, "two", model, "pods")
    said = run(cluster, tools.helm(), "two", "test", "demo", "--logs", "--timeout", "330s")
    assert "and at zero again" in said, said
    (pool,) = json.loads(run(cluster, tools.kubectl(), "two", "get", "slotpools", "-o", "json"))["items"]
    assert pool["metadata"]["name"] == "default"
    slots = [each for each in cluster.api.list("pods", "two") if each["metadata"]["labels"].get("stoker.dev/slot-pool")]
    assert slots, "a slot came for the request"
    assert all(each["metadata"]["ownerReferences"][0]["kind"] == "SlotPool" for each in slots)
    assert not cluster.denied
    run(cluster, tools.helm(), "two", "uninstall", "demo", "--wait")
    # Pools go with the chart's list of them, and slots with their pool.
    cluster.wait(lambda: not cluster.api.list("pods", "two"), "no pod is left", 180)


def not_ready(url: str) -> str:
    """Why a control plane takes no requests; empty if it does, or does not listen yet."""
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=10):
            return ""
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


@pytest.mark.e2e
def test_what_is_missing_or_out_of_reach_is_said_by_a_pod_that_runs(cluster: TestCluster) -> None:
    """A secret's name that is wrong, then a database that is not there: the install comes up and says which."""
    cluster.create_namespace("wrong", **{"pod-security.kubernetes.io/enforce": "restricted"})
    values = {**SMALL, "replicas": 1, "slots": {**SMALL["slots"], "mode": "pods"}}  # type: ignore[dict-item]
    values |= {
        "database": {"existingSecret": "absent"},
        "objectStore": {"uri": "s3://bucket/p?endpoint=http://[::1]:9"},
    }
    run(cluster, tools.helm(), "wrong", "install", "demo", str(CHART), "--values", "-", given=json.dumps(values))

    def says(words: str) -> bool:
        for pod in cluster.api.list("pods", "wrong", "app.kubernetes.io/component=control-plane"):
            name, url = pod["metadata"]["name"], f"http://{pod['status'].get('podIP')}:8080"
            if "deletionTimestamp" not in pod["metadata"] and words in not_ready(url):
                # All pods share a loopback here, and listen on addresses of their own.
                command = ["env", f"STOKER_URL={url}", "python", "-m", "control_plane.cli.main", "doctor"]
                code, told = cluster.kubelet.execute(name, command, "wrong")
                assert code != 0 and words in told, told
                return True
        return False

    cluster.wait(lambda: says("field url of secret absent is not there"), "the name of the secret")
    url = "postgresql://stoker@127.0.0.1:9/none"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "absent"}, "stringData": {"url": url}}
    cluster.api.apply(secret, "wrong")
    for pod in cluster.api.list("pods", "wrong"):
        cluster.api.delete("pods", pod["metadata"]["name"], "wrong", gracePeriodSeconds=0)
    cluster.wait(lambda: says("127.0.0.1:9"), "the database that does not answer")
    assert not cluster.denied
    run(cluster, tools.helm(), "wrong", "uninstall", "demo", "--wait")
