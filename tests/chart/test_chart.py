"""The chart's shapes: what each mode renders, what its pods get, who may reach whom."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from control_plane.environment import ENVIRONMENT, apply_environment
from control_plane.settings import Settings
from tests.chart.rendering import (
    CHART,
    container_of,
    environment_of,
    named,
    of_file,
    one,
    pod_of,
    rendered,
    template,
    value_files,
    workload,
)
from tests.kubernetes.tools import helm

SELECTOR = {"app.kubernetes.io/name": "stoker", "app.kubernetes.io/instance": "demo"}
CONTROL_PLANE = {**SELECTOR, "app.kubernetes.io/component": "control-plane"}
SLOTS = {**SELECTOR, "app.kubernetes.io/component": "slot"}
OUTSIDE = {
    "HOME",
    "STOKER_URL",
    "STOKER_DATA_DIR",
    "PGPASSWORD",
    "PGSSLROOTCERT",
    "PGSSLMODE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
}
"""Variables that are no settings of the service: their readers are libraries, and commands inside of the pod."""


def test_lint_is_clean() -> None:
    done = subprocess.run([helm(), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- one copy, and several ---


def test_without_postgresql_there_is_one_copy_with_a_volume() -> None:
    for values in ("default", "embedded"):
        spec = one(of_file(values), "StatefulSet")["spec"]
        assert spec["replicas"] == 1
        assert spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "50Gi"


def test_with_postgresql_there_are_two_copies_that_are_replaced_one_by_one() -> None:
    spec = one(of_file("pods-postgresql"), "Deployment")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert one(of_file("pods-postgresql"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_one_copy_has_no_budget_which_would_hinder_every_drain() -> None:
    assert not named(of_file("default"), "PodDisruptionBudget")
    assert not named(of_file("embedded"), "PodDisruptionBudget")


def test_slots_have_a_budget_where_it_is_asked_for() -> None:
    budgets = named(of_file("pods-budgets"), "PodDisruptionBudget")
    assert budgets["demo-stoker"]["spec"]["maxUnavailable"] == "50%"
    slots = budgets["demo-stoker-slots"]["spec"]
    assert slots["minAvailable"] == 2 and slots["selector"]["matchLabels"] == SLOTS
    assert all(each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for each in budgets.values())


def _spread(values: str) -> dict[str, str]:
    rules = pod_of(of_file(values))["spec"].get("topologySpreadConstraints", [])
    assert all(each["labelSelector"]["matchLabels"] == CONTROL_PLANE and each["maxSkew"] == 1 for each in rules)
    return {each["topologyKey"]: each["whenUnsatisfiable"] for each in rules}


def test_copies_are_spread_over_nodes_and_zones_as_strictly_as_is_said() -> None:
    host, zone = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
    assert _spread("pods-postgresql") == {host: "ScheduleAnyway", zone: "ScheduleAnyway"}
    assert _spread("pods-strict-spread") == {host: "DoNotSchedule"}
    assert _spread("default") == {}, "there is one"


def test_an_autoscaler_owns_the_number_of_copies_alone() -> None:
    documents = of_file("pods-autoscaled")
    assert "replicas" not in one(documents, "Deployment")["spec"]
    scaler = one(documents, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 9)
    assert scaler["scaleTargetRef"]["name"] == one(documents, "Deployment")["metadata"]["name"]


@pytest.mark.parametrize(
    ("values", "grace_s"), [("default", 45), ("embedded", 45), ("pods-postgresql", 50), ("first-release", 75)]
)
def test_the_grace_period_outlasts_pause_and_drain(values: str, grace_s: int) -> None:
    assert pod_of(of_file(values))["spec"]["terminationGracePeriodSeconds"] == grace_s


def test_selectors_hold_nothing_that_an_upgrade_changes() -> None:
    assert one(of_file("default"), "StatefulSet")["spec"]["selector"]["matchLabels"] == SELECTOR
    assert one(of_file("pods-postgresql"), "Deployment")["spec"]["selector"]["matchLabels"] == CONTROL_PLANE
    for values in ("default", "pods-postgresql", "extras"):
        documents = of_file(values)
        labels, selector = pod_of(documents)["metadata"]["labels"], workload(documents)["spec"]["selector"]
        assert selector["matchLabels"].items() <= labels.items()


def test_the_service_never_sends_a_request_to_a_slot() -> None:
    for values in ("default", "embedded", "pods-postgresql"):
        documents = of_file(values)
        selector = one(documents, "Service")["spec"]["selector"]
        assert selector == CONTROL_PLANE
        assert selector.items() <= pod_of(documents)["metadata"]["labels"].items()


# --- the pod ---


def test_the_embedded_pool_is_memory_with_a_limit_and_devices_are_asked_for_by_name() -> None:
    documents = of_file("embedded-mig")
    pool = {"name": "pool", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}
    assert pool in pod_of(documents)["spec"]["volumes"]
    resources = container_of(documents)["resources"]
    assert resources["limits"]["nvidia.com/mig-1g.10gb"] == resources["requests"]["nvidia.com/mig-1g.10gb"] == 2


def test_a_control_plane_beside_its_slots_has_neither_pool_nor_devices() -> None:
    documents = of_file("pods-gpus")
    assert "pool" not in {each["name"] for each in pod_of(documents)["spec"]["volumes"]}
    assert set(container_of(documents)["resources"]["limits"]) == {"memory"}


def test_every_mount_has_its_volume() -> None:
    for values in ("default", "embedded", "pods-postgresql-tls", "pods-shared-volume", "secrets-by-name", "extras"):
        documents = of_file(values)
        spec = workload(documents)["spec"]
        volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
        volumes |= {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
        assert {each["name"] for each in container_of(documents)["volumeMounts"]} == volumes, values


def test_every_variable_is_one_that_stoker_reads_and_has_a_value_it_takes() -> None:
    for values in value_files():
        environment = environment_of(of_file(values))
        names = set(environment) - OUTSIDE - {"A", "B"}
        assert names <= set(ENVIRONMENT), (values, names - set(ENVIRONMENT))
        given = {name: value for name, value in environment.items() if isinstance(value, str)}
        apply_environment(Settings(data_dir=CHART), {**given, "STOKER_ADVERTISE_URL": "http://10.0.0.1:8080"})


def test_a_missing_secret_lets_the_pod_start_and_say_which() -> None:
    environment = environment_of(of_file("pods-postgresql-tls"))
    required = yaml.safe_load(environment["STOKER_REQUIRED"])
    assert required == {
        "STOKER_ADMIN_KEY": "field admin-key of secret demo-stoker-admin",
        "PGPASSWORD": "field pw of secret db",
        "AWS_ACCESS_KEY_ID": "field AWS_ACCESS_KEY_ID of secret s3",
        "AWS_SECRET_ACCESS_KEY": "field AWS_SECRET_ACCESS_KEY of secret s3",
    }
    assert all(environment[name]["secretKeyRef"]["optional"] is True for name in required)


def test_an_endpoint_picker_knows_whose_names_the_metrics_have() -> None:
    keys = ("inference.networking.k8s.io/engine-type", "llm-d.ai/engine-type")
    labels = pod_of(of_file("pods-postgresql"))["metadata"]["labels"]
    assert [labels[key] for key in keys] == ["vllm", "vllm"]
    told = pod_of(of_file("gateway-api-plain"))["metadata"]["labels"]
    assert [told[key] for key in keys] == ["custom", "vllm"], "the user's word goes before"


def test_settings_and_extras_reach_the_pod() -> None:
    documents = of_file("extras")
    environment = environment_of(documents)
    assert environment["STOKER_QUEUE_REQUESTS"] == "500"
    assert environment["A"] == "b"
    assert container_of(documents)["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert named(documents, "ConfigMap")["demo-theirs"]["data"] == {"a": "30"}
    assert one(documents, "Service")["metadata"]["labels"]["team"] == "ml"
    assert one(documents, "Service")["metadata"]["annotations"]["owner"] == "ml"
    assert one(documents, "StatefulSet")["spec"]["selector"]["matchLabels"] == SELECTOR


def test_a_digest_goes_before_a_tag() -> None:
    assert "@sha256:0123" in container_of(of_file("digest"))["image"]


# --- slots ---


def test_slot_pools_get_what_all_of_them_need() -> None:
    text = named(of_file("pods-shared-volume"), "ConfigMap")["demo-stoker-slot-pools"]["data"]["slot-pools.yaml"]
    pool = yaml.safe_load(text)["default"]
    assert pool["serviceAccountName"] == "demo-stoker-slot"
    assert [each["name"] for each in pool["volumes"]] == ["cache", "objects"]
    assert {each["mountPath"] for each in pool["volumeMounts"]} == {"/cache", "/objects"}
    assert pool["most"] == 4


def test_a_pool_that_is_taken_out_is_not_there() -> None:
    text = named(of_file("pods-gpus"), "ConfigMap")["demo-stoker-slot-pools"]["data"]["slot-pools.yaml"]
    assert set(yaml.safe_load(text)) == {"h200", "mig", "mi300"}


def test_slots_hold_no_right_and_no_token_of_the_cluster() -> None:
    documents = of_file("pods-single")
    assert named(documents, "ServiceAccount")["demo-stoker-slot"]["automountServiceAccountToken"] is False
    bound = [each["name"] for each in one(documents, "RoleBinding")["subjects"]]
    assert bound == ["demo-stoker"]


def test_with_workload_identity_no_credentials_are_in_any_pod() -> None:
    documents = of_file("pods-workload-identity")
    accounts, role = named(documents, "ServiceAccount"), "eks.amazonaws.com/role-arn"
    told = {name: each["metadata"]["annotations"][role].rpartition("/")[2] for name, each in accounts.items()}
    assert told == {"demo-stoker": "stoker", "demo-stoker-slot": "slots"}
    environment = environment_of(documents)
    assert environment["STOKER_STORE"] == "s3://bucket/p"
    assert not [name for name in environment if name.startswith("AWS_")]
    text = named(documents, "ConfigMap")["demo-stoker-slot-pools"]["data"]["slot-pools.yaml"]
    assert "AWS_" not in text and yaml.safe_load(text)["default"]["serviceAccountName"] == "demo-stoker-slot"


def test_images_are_held_where_slots_of_a_pool_may_go_and_by_nobody_who_may_anything() -> None:
    documents = of_file("pods-prepull")
    daemons = named(documents, "DaemonSet")
    assert sorted(daemons) == ["demo-stoker-prepull-default", "demo-stoker-prepull-gpu"]
    pool, gpu = (daemons[f"demo-stoker-prepull-{name}"]["spec"]["template"]["spec"] for name in ("default", "gpu"))
    more = f"example.com/functions/whisper@sha256:{'0' * 64}"
    assert [each["image"] for each in pool["containers"]] == ["stoker:0.1.0", more]
    assert [each["image"] for each in gpu["containers"]] == ["example.com/stoker-cuda:0.1.0", more]
    assert gpu["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    assert gpu["tolerations"][0]["key"] == "nvidia.com/gpu" and gpu["imagePullSecrets"] == [{"name": "mine"}]
    assert list(gpu["affinity"]) == ["nodeAffinity"], "slots keep apart from one another, not from their image"
    assert "nvidia.com/gpu" not in str(gpu["containers"]), "holding an image takes no device"
    for name, daemon in daemons.items():
        labels = daemon["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == "prepull", name
        assert daemon["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert daemon["spec"]["template"]["spec"]["serviceAccountName"] == "demo-stoker-slot"
    deny = named(documents, "NetworkPolicy")["demo-stoker-deny"]["spec"]["podSelector"]["matchExpressions"]
    assert deny[1]["values"] == ["control-plane", "slot", "prepull"]
    assert not named(of_file("pods-gpus"), "DaemonSet")


def test_traces_go_to_the_collector_that_is_named() -> None:
    found = environment_of(of_file("traces"))
    assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.monitoring:4318"
    assert found["STOKER_TRACE_SHARE"] == "0.05"
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in environment_of(of_file("default"))


# --- who reaches whom ---


def _peers(policy: dict[str, Any]) -> list[Any]:
    return [peer["podSelector"].get("matchLabels") for rule in policy["spec"]["ingress"] for peer in rule["from"]]


def test_nothing_is_let_in_but_what_is_named() -> None:
    deny = named(of_file("pods-single"), "NetworkPolicy")["demo-stoker-deny"]["spec"]
    assert "ingress" not in deny
    assert deny["policyTypes"] == ["Ingress"]
    names, components = deny["podSelector"]["matchExpressions"]
    assert names["values"] == ["stoker"]
    assert components["values"] == ["control-plane", "slot"]


def test_agents_and_replicas_are_reached_by_control_planes_and_slots_alone() -> None:
    policy = named(of_file("pods-single"), "NetworkPolicy")["demo-stoker-slots"]
    assert policy["spec"]["podSelector"]["matchLabels"] == SLOTS
    assert _peers(policy) == [CONTROL_PLANE, SLOTS]
    ports = policy["spec"]["ingress"][0]["ports"]
    assert [(each["port"], each.get("endPort")) for each in ports] == [(7070, None), (7100, 7163)]


def test_whoever_is_named_takes_the_place_of_the_namespace() -> None:
    policy = named(of_file("pods-closed-egress"), "NetworkPolicy")["demo-stoker"]
    assert {"podSelector": {}} not in policy["spec"]["ingress"][0]["from"]
    policy = named(of_file("default"), "NetworkPolicy")["demo-stoker"]
    assert {"podSelector": {}} in policy["spec"]["ingress"][0]["from"]


def test_closed_egress_leaves_names_and_one_another() -> None:
    policies = named(of_file("pods-closed-egress"), "NetworkPolicy")
    assert all(each["spec"]["policyTypes"] == ["Ingress", "Egress"] for each in policies.values())
    slots = policies["demo-stoker-slots"]["spec"]["egress"]
    assert {port["port"] for port in slots[0]["ports"]} == {53}
    assert slots[-1]["to"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert "egress" not in policies["demo-stoker-deny"]["spec"]


# --- ways in ---


def test_routes_lead_to_the_service() -> None:
    ingress = one(of_file("ingress"), "Ingress")["spec"]
    assert ingress["tls"] == [{"secretName": "cert", "hosts": ["stoker.example", "s.example"]}]
    backend = ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "demo-stoker", "port": {"name": "http"}}
    route = one(of_file("gateway-api"), "HTTPRoute")["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "demo-stoker", "port": 8080}]
    assert route["rules"][0]["timeouts"] == {"request": "1h", "backendRequest": "1h"}


def test_monitors_scrape_the_control_plane_alone() -> None:
    assert one(of_file("pod-monitor"), "PodMonitor")["spec"]["selector"]["matchLabels"] == CONTROL_PLANE
    monitor = one(of_file("service-monitor"), "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= SELECTOR.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


# --- notes ---


def test_the_notes_say_the_next_commands_filled_in() -> None:
    done = subprocess.run(
        [helm(), "install", "demo", str(CHART), "--dry-run=client", "--namespace", "ml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl -n ml get secret demo-stoker-admin" in notes
    assert "kubectl -n ml port-forward svc/demo-stoker 8080:8080" in notes
    assert "stoker doctor" in notes
    assert "stoker deploy smol" in notes
    assert "WARNING" not in notes


def test_the_test_hook_is_a_script_that_parses() -> None:
    pod = one(rendered("--show-only", "templates/tests/cycle.yaml"), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    compile(pod["spec"]["containers"][0]["args"][0], "cycle.py", "exec")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["replicas=2", "slots.mode=pods"], "need PostgreSQL"),
        (["slots.mode=embedded", "replicas=2", "database.existingSecret=db"], "slots.mode to pods"),
        (["slots.mode=pods", "database.existingSecret=db"], "objectStore.uri"),
        (["objectStore.uri=s3://bucket/p", "objectStore.existingClaim=c"], "two places"),
        (["objectStore.existingSecret=s"], "names none"),
        (["database.url=postgresql://u:secret@h/d"], "holds a password"),
        (["database.caSecret=ca"], "about PostgreSQL"),
        (["autoscaling.enabled=true", "replicas=2", "slots.mode=pods", "database.existingSecret=d",
          "objectStore.uri=s3://bucket/p"], "fight"),
        (["autoscaling.enabled=true", "autoscaling.minReplicas=9", "slots.mode=pods", "database.existingSecret=d",
          "objectStore.uri=s3://bucket/p"], "above autoscaling.maxReplicas"),
        (["monitoring.serviceMonitor.enabled=true", "monitoring.podMonitor.enabled=true"], "count twice"),
        (["ingress.enabled=true"], "ingress.hosts"),
        (["httpRoute.enabled=true"], "httpRoute.parentRefs"),
        (["slots.mode=pods", "serviceAccount.create=false"], "default account"),
        (["slots.mode=embedded", "slots.podDisruptionBudget.enabled=true"], "slots.mode: pods"),
        (["settings.STOKER_STORE=s3://bucket"], "objectStore"),
        (["settings.STOKER_ADMIN_KEY=abc"], "adminKeySecret"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_values_that_contradict_are_refused_with_what_to_do(settings: list[str], says: str) -> None:
    done = template(*(part for setting in settings for part in ("--set", setting)))
    assert done.returncode != 0
    assert "do not go together" in done.stderr
    assert says in done.stderr


def test_a_release_whose_name_no_service_can_have_is_told_what_to_do() -> None:
    assert "begins with a letter: give fullnameOverride" in template(release="9").stderr


def test_all_contradictions_are_told_at_once() -> None:
    done = template("--set", "replicas=2,ingress.enabled=true,objectStore.existingSecret=s")
    assert done.stderr.count("\n  - ") == 3


def test_the_values_of_an_earlier_release_alone_are_refused_with_the_right_option() -> None:
    done = template("--set", "slots=null,database=null,test=null")
    assert "--reset-then-reuse-values" in done.stderr
