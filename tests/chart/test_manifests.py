"""Every manifest of every values file: valid for each release of Kubernetes, restricted, well named, least rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart import kubernetes_schemas, pod_security
from tests.chart.rendering import CHART, Manifest, named, of_file, rendered, value_files

FOREIGN = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}
"""Kinds of other projects, of which Kubernetes has no schema."""
LONGEST = "r" * 53
UNRESTRICTED: dict[str, str] = {}
"""Pods that cannot be restricted, and why. None at present; docs/kubernetes.md lists what is added here."""


def _all() -> Iterator[tuple[str, Manifest]]:
    for name in value_files():
        for manifest in of_file(name):
            yield name, manifest


def _pods(manifest: Manifest) -> Iterator[Manifest]:
    if manifest["kind"] == "Pod":
        yield manifest
    elif "template" in manifest.get("spec", {}) and manifest["kind"] in (
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "Job",
    ):
        yield manifest["spec"]["template"]


def test_there_are_many_ways_to_install_it() -> None:
    assert len(value_files()) >= 25


def test_every_manifest_is_valid_from_1_30_to_1_37() -> None:
    seen: set[str] = set()
    wrong = []
    for name, manifest in _all():
        text = json.dumps(manifest, sort_keys=True)
        if text in seen or (manifest["apiVersion"], manifest["kind"]) in FOREIGN:
            continue
        seen.add(text)
        found = kubernetes_schemas.faults(manifest)
        wrong += [f"{name}: {manifest['kind']} {manifest['metadata']['name']}: {fault}" for fault in found]
    assert not wrong, "\n".join(wrong[:20])
    assert len(seen) > 50


def test_a_field_that_a_release_does_not_know_is_found() -> None:
    service = json.loads(json.dumps(named(of_file("default"), "Service")["demo-stoker"]))
    service["spec"]["portz"] = []
    found = kubernetes_schemas.faults(service)
    assert len(found) == len(kubernetes_schemas.RELEASES)
    assert "portz" in found[0]


def test_every_pod_is_restricted() -> None:
    wrong = []
    for name, manifest in _all():
        for pod in _pods(manifest):
            found = pod_security.faults(pod["spec"])
            wrong += [f"{name}: {manifest['metadata']['name']}: {fault}" for fault in found]
            wrong += [
                f"{name}: {container['name']} can write to its root"
                for container in pod["spec"]["containers"]
                if container["securityContext"].get("readOnlyRootFilesystem") is not True
            ]
    assert not [fault for fault in wrong if fault.split(": ")[1] not in UNRESTRICTED], "\n".join(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"hostNetwork": True},
        {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
        {"securityContext": {}},
        {"containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": False}}]},
    ],
    ids=["host network", "host path", "root", "capabilities"],
)
def test_what_is_not_restricted_is_found(change: dict[str, Any]) -> None:
    pod = next(_pods(named(of_file("default"), "StatefulSet")["demo-stoker"]))
    assert pod_security.faults({**pod["spec"], **change})


def test_no_rights_reach_beyond_the_namespace_and_none_reads_secrets() -> None:
    for name, manifest in _all():
        kind = manifest["kind"]
        assert kind not in ("ClusterRole", "ClusterRoleBinding"), name
        for rule in manifest.get("rules") or [] if kind == "Role" else []:
            assert "secrets" not in rule["resources"], name
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]), name


def test_only_the_control_plane_of_slots_as_pods_holds_a_token() -> None:
    for name, manifest in _all():
        for pod in _pods(manifest):
            pods = name.startswith("pods") or "STOKER_BACKEND" in json.dumps(pod)
            is_test = pod["metadata"]["name"].endswith("-cycle") if "name" in pod["metadata"] else False
            holds = pods and not is_test and manifest["kind"] != "DaemonSet"
            assert pod["spec"]["automountServiceAccountToken"] is holds, name


def test_secrets_are_referenced_by_name_and_never_by_value() -> None:
    for name, manifest in _all():
        for pod in _pods(manifest):
            for container in pod["spec"]["containers"]:
                for entry in container.get("env", ()):
                    secret = entry["name"].endswith(("_KEY", "PASSWORD")) or "SECRET_" in entry["name"]
                    told = entry["name"] == "STOKER_AGENT_SECRET_FILE"  # a path
                    assert not secret or told or "secretKeyRef" in entry["valueFrom"], (name, entry)


@pytest.mark.parametrize("values", ["default", "pods-budgets", "pods-closed-egress", "other-names"])
def test_the_longest_names_fit(values: str) -> None:
    arguments = ("--values", str(CHART.parents[1] / "tests" / "chart" / "values" / f"{values}.yaml"))
    documents = rendered(*arguments, "--namespace", "n" * 63, release=LONGEST)
    for manifest in documents:
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        assert len(manifest["metadata"]["name"]) <= 63
        assert all(len(str(value)) <= 63 for value in manifest["metadata"].get("labels", {}).values())
        if manifest["kind"] in ("StatefulSet", "Deployment"):
            # A controller's pods are labelled with a hash after its name.
            assert len(manifest["metadata"]["name"]) <= 52


def test_names_that_begin_alike_do_not_meet() -> None:
    both = [rendered(release=LONGEST[:-1] + end) for end in "ab"]
    # Definitions are the cluster's, one for all releases.
    names = [
        {(each["kind"], each["metadata"]["name"]) for each in documents if each["kind"] != "CustomResourceDefinition"}
        for documents in both
    ]
    assert names[0] and not names[0] & names[1]


def test_a_release_that_is_a_number_stays_text() -> None:
    documents = rendered("--set", "fullnameOverride=s", release="123")
    for manifest in documents:
        for labels in (manifest["metadata"].get("labels", {}), manifest.get("spec", {}).get("selector", {})):
            assert all(isinstance(value, str) for value in labels.values() if not isinstance(value, dict | list))
