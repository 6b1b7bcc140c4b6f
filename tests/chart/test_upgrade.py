"""The real helm and the tests' API server: installed, upgraded from the chart's first release, removed.

What `helm template` cannot show: that nothing immutable changes, that what was made once is kept, that definitions of
custom resources come and are upgraded with the chart, and that what the chart says about slot pools is valid by them.
"""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.chart.rendering import CHART, named, of_file, value_files
from tests.kubernetes import tools
from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.cluster import TestCluster

FIRST: Final = Path(__file__).parents[1] / "data" / "charts" / "stoker-first"
"""The chart as its first commit had it."""
SEVERAL: Final = ("--set", "slots.mode=pods,database.existingSecret=db,objectStore.uri=s3://bucket/p")
_numbers = itertools.count(1)
Helm = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    with TestCluster(tmp_path_factory.mktemp("chart"), controllers=False, kubelet=False) as cluster:
        yield cluster


@pytest.fixture
def namespace(cluster: TestCluster) -> str:
    name = f"chart-{next(_numbers)}"
    cluster.create_namespace(name, **{"pod-security.kubernetes.io/enforce": "restricted"})
    return name


@pytest.fixture
def helm(cluster: TestCluster, namespace: str) -> Helm:
    def run(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [tools.helm(), "--namespace", namespace, *arguments],
            capture_output=True, text=True, timeout=180, check=False, env=cluster.environment(),
        )  # fmt: skip
        assert (done.returncode != 0) is fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture
def kubectl(cluster: TestCluster, namespace: str) -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        done = subprocess.run(
            [tools.kubectl(), "--namespace", namespace, *arguments, "-o", "json"],
            capture_output=True, text=True, timeout=180, check=True, env=cluster.environment(),
        )  # fmt: skip
        return json.loads(done.stdout)

    return run


def forget_definitions(cluster: TestCluster) -> None:
    command = [tools.kubectl(), "delete", "crd", "--ignore-not-found", "slotpools.stoker.dev", "functions.stoker.dev"]
    subprocess.run(command, capture_output=True, timeout=180, check=True, env=cluster.environment())


def test_an_upgrade_from_the_first_release_keeps_the_workload_and_its_volume(helm: Helm, kubectl: Any) -> None:
    helm("install", "demo", str(FIRST), "--set", "persistence.size=20Gi")
    before = kubectl("get", "statefulset", "demo-stoker")
    helm("upgrade", "demo", str(CHART), "--reset-then-reuse-values")
    after = kubectl("get", "statefulset", "demo-stoker")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    for field in ("selector", "serviceName", "volumeClaimTemplates"):
        assert after["spec"][field] == before["spec"][field]
    # Its slot stays where it is.
    assert "pool" in {each["name"] for each in after["spec"]["template"]["spec"]["volumes"]}
    labels = after["spec"]["template"]["metadata"]["labels"]
    assert kubectl("get", "service", "demo-stoker")["spec"]["selector"].items() <= labels.items()


def test_values_of_the_first_release_are_still_taken(helm: Helm, kubectl: Any, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text((FIRST / "values.yaml").read_text())
    helm("install", "demo", str(FIRST), "--values", str(values))
    helm("upgrade", "demo", str(CHART), "--values", str(values))
    assert kubectl("get", "statefulset", "demo-stoker")["spec"]["replicas"] == 1


def test_reused_values_alone_are_refused_with_the_right_option(helm: Helm) -> None:
    helm("install", "demo", str(FIRST))
    assert "--reset-then-reuse-values" in helm("upgrade", "demo", str(CHART), "--reuse-values", fails=True)


def test_a_long_name_stays_what_the_first_release_made_of_it(helm: Helm, kubectl: Any) -> None:
    release = "release-" + "x" * 45
    helm("install", release, str(FIRST))
    old = kubectl("get", "statefulset")["items"][0]["metadata"]["name"]
    helm("upgrade", release, str(CHART))
    (only,) = kubectl("get", "statefulset")["items"]
    assert only["metadata"]["name"] == old
    assert len(old) == 40


def test_a_volume_of_another_size_is_refused_with_the_command_that_enlarges_it(helm: Helm) -> None:
    helm("install", "demo", str(CHART))
    said = helm("upgrade", "demo", str(CHART), "--set", "persistence.size=100Gi", fails=True)
    assert "persistence.size is fixed by the first installation (50Gi)" in said
    assert "patch pvc data-demo-stoker-0" in said


def test_what_was_made_once_is_kept_over_upgrades(helm: Helm, kubectl: Any) -> None:
    helm("install", "demo", str(CHART), *SEVERAL)

    def made() -> dict[str, Any]:
        return {name: kubectl("get", "secret", name)["data"] for name in ("demo-stoker-admin", "demo-stoker-agent")}

    before = made()
    assert len(base64.b64decode(before["demo-stoker-admin"]["admin-key"])) == 48
    assert before["demo-stoker-admin"]["admin-key"] != before["demo-stoker-agent"]["agent-secret"]
    helm("upgrade", "demo", str(CHART), *SEVERAL, "--set", "drainSeconds=5")
    assert made() == before
    helm("rollback", "demo", "1")
    assert made() == before


def test_from_one_pod_to_several_copies_and_slots_as_pods(helm: Helm, kubectl: Any) -> None:
    helm("install", "demo", str(CHART), "--set", "slots.mode=embedded")
    key = kubectl("get", "secret", "demo-stoker-admin")["data"]
    helm("upgrade", "demo", str(CHART), *SEVERAL)
    assert kubectl("get", "deployment", "demo-stoker")["spec"]["replicas"] == 2
    assert kubectl("get", "statefulset")["items"] == []
    assert kubectl("get", "secret", "demo-stoker-admin")["data"] == key


def test_definitions_come_and_are_upgraded_with_the_chart_and_stay_when_it_goes(
    helm: Helm, kubectl: Any, cluster: TestCluster
) -> None:
    forget_definitions(cluster)
    helm("install", "demo", str(CHART), "--set", "slots.mode=pods")
    kubectl("annotate", "crd", "slotpools.stoker.dev", "stoker.dev/older=yes")
    before = kubectl("get", "crd", "slotpools.stoker.dev")
    helm("upgrade", "demo", str(CHART), "--set", "slots.mode=pods,commonLabels.new=one")
    after = kubectl("get", "crd", "slotpools.stoker.dev")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["labels"]["new"] == "one"
    helm("uninstall", "demo")
    assert kubectl("get", "crd", "slotpools.stoker.dev")["metadata"]["uid"] == before["metadata"]["uid"]
    # A release of the same name takes them over again; and without `keep` they go with it.
    helm("install", "demo", str(CHART), "--set", "slots.mode=pods,crds.keep=false")
    helm("uninstall", "demo")
    names = [each["metadata"]["name"] for each in kubectl("get", "crd")["items"]]
    assert "slotpools.stoker.dev" not in names


def test_definitions_of_somebody_else_are_left_alone(helm: Helm, kubectl: Any, cluster: TestCluster) -> None:
    forget_definitions(cluster)
    cluster.apply(CHART / "files" / "crds" / "slotpools.yaml")
    said = helm("install", "demo", str(CHART), "--set", "slots.mode=pods")
    assert "installed by somebody without Helm" in said
    assert "app.kubernetes.io/managed-by" not in kubectl("get", "crd", "slotpools.stoker.dev")["metadata"].get(
        "labels", {}
    )
    assert kubectl("get", "crd", "functions.stoker.dev")["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert "SlotPool" in helm("upgrade", "demo", str(CHART), "--set", "slots.mode=pods")
    helm("uninstall", "demo")


def test_pools_of_the_values_are_valid_by_their_definition(cluster: TestCluster, namespace: str) -> None:
    for name in ("functions", "slotpools"):
        cluster.apply(CHART / "files" / "crds" / f"{name}.yaml")
    seen = 0
    for values in value_files():
        maps = named(of_file(values), "ConfigMap")
        text = maps.get("demo-stoker-slot-pools", {"data": {"slot-pools.yaml": "{}"}})["data"]["slot-pools.yaml"]
        for name, spec in yaml.safe_load(text).items():
            pool = {"apiVersion": "stoker.dev/v1alpha1", "kind": "SlotPool", "spec": spec}
            cluster.apply(json.dumps({**pool, "metadata": {"name": f"{name}-{seen}"}}), namespace)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"least": 5}, "least is above most"),
        ({"devices": {"gpu": 1}}, "has a domain in its name"),
        ({"env": {"STOKER_STORE": "s3://elsewhere"}}, "Stoker's own"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "Stoker's own"),
    ],
    ids=["bounds", "device", "variable", "label"],
)
def test_rules_of_the_definition_refuse_in_words(
    cluster: TestCluster, namespace: str, spec: dict[str, Any], says: str
) -> None:
    cluster.apply(CHART / "files" / "crds" / "slotpools.yaml")
    pool = {"apiVersion": "stoker.dev/v1alpha1", "kind": "SlotPool", "metadata": {"name": "p"}, "spec": spec}
    with pytest.raises(ApiError, match=says):
        cluster.apply(json.dumps(pool), namespace)
