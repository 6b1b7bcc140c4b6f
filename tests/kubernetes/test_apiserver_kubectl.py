"""The real kubectl against the tests' API server."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.kubernetes.cluster import TestCluster
from tests.kubernetes.conftest import Run

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - {name: web, image: "web:1", ports: [{containerPort: 80, name: http}], env: [{name: A, value: "1"}]}
        - {name: side, image: "side:1"}
"""
DEFINITION = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.dev}
spec:
  group: example.dev
  names: {kind: Widget, plural: widgets, shortNames: [wd]}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}, scale: {specReplicasPath: .spec.replicas, statusReplicasPath: .status.replicas}}
      additionalPrinterColumns:
        - {name: Size, type: integer, jsonPath: .spec.size}
        - {name: Ready, type: string, jsonPath: '.status.conditions[?(@.type=="Ready")].status'}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              required: [size]
              x-kubernetes-validations:
                - {rule: "self.size <= self.limit", message: size must not exceed limit}
                - {rule: "self.color == oldSelf.color", message: color never changes}
              properties:
                size: {type: integer, minimum: 0}
                limit: {type: integer, default: 10}
                color: {type: string, default: red, enum: [red, blue]}
                replicas: {type: integer}
                tags: {type: object, additionalProperties: {type: string}}
            status:
              type: object
              x-kubernetes-preserve-unknown-fields: true
"""
WIDGET = "{apiVersion: example.dev/v1, kind: Widget, metadata: {name: one}, spec: {size: %s}}"


def test_apply_changes_what_changed_and_keeps_the_rest(kubectl: Run) -> None:
    assert "created" in kubectl("apply", "-f", "-", given=DEPLOYMENT).stdout
    assert "unchanged" in kubectl("apply", "-f", "-", given=DEPLOYMENT).stdout
    second = DEPLOYMENT.replace("web:1", "web:2").replace(', env: [{name: A, value: "1"}]', "")
    done = kubectl("apply", "-f", "-", given=second)
    assert "configured" in done.stdout, done.stderr
    found = json.loads(kubectl("get", "deploy", "web", "-o", "json").stdout)
    containers = {each["name"]: each for each in found["spec"]["template"]["spec"]["containers"]}
    assert containers["web"]["image"] == "web:2" and "env" not in containers["web"]
    assert containers["side"]["image"] == "side:1"
    assert found["metadata"]["generation"] == 2
    assert found["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": "25%"}


def test_what_may_not_change_is_refused_in_words(kubectl: Run) -> None:
    kubectl("apply", "-f", "-", given=DEPLOYMENT)
    done = kubectl("apply", "-f", "-", given=DEPLOYMENT.replace("app: web", "app: other"))
    assert done.returncode != 0 and "field is immutable" in done.stderr


def test_unknown_fields_are_refused_before_anything_is_stored(kubectl: Run) -> None:
    done = kubectl("apply", "-f", "-", given=DEPLOYMENT.replace("replicas: 2", "replicsa: 2"))
    assert done.returncode != 0 and 'unknown field "spec.replicsa"' in done.stderr
    assert "NotFound" in kubectl("get", "deploy", "web").stderr


def test_server_side_apply_finds_the_conflict_and_force_settles_it(kubectl: Run) -> None:
    config = "{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {mine: '1', theirs: '1'}}"
    assert kubectl("apply", "--server-side", "--field-manager=first", "-f", "-", given=config).returncode == 0
    other = config.replace("mine: '1', theirs: '1'", "theirs: '2'")
    refused = kubectl("apply", "--server-side", "--field-manager=second", "-f", "-", given=other)
    assert refused.returncode != 0
    assert 'conflict with "first"' in refused.stderr and ".data.theirs" in refused.stderr
    forced = kubectl("apply", "--server-side", "--field-manager=second", "--force-conflicts", "-f", "-", given=other)
    assert forced.returncode == 0, forced.stderr
    # What the first no longer says is dropped only where nobody else owns it.
    emptied = config.replace("mine: '1', theirs: '1'", "")
    kubectl("apply", "--server-side", "--field-manager=first", "-f", "-", given=emptied)
    assert json.loads(kubectl("get", "cm", "c", "-o", "json").stdout)["data"] == {"theirs": "2"}


def test_client_side_apply_hands_its_fields_over(kubectl: Run) -> None:
    kubectl("apply", "-f", "-", given=DEPLOYMENT)
    refused = kubectl("apply", "--server-side", "-f", "-", given=DEPLOYMENT.replace("web:1", "web:2"))
    assert 'conflict with "kubectl-client-side-apply"' in refused.stderr
    done = kubectl("apply", "--server-side", "-f", "-", given=DEPLOYMENT)
    assert done.returncode == 0, done.stderr
    found = json.loads(kubectl("get", "deploy", "web", "-o", "json", "--show-managed-fields").stdout)
    fields = found["metadata"]["managedFields"]
    assert {each["operation"] for each in fields if each["manager"].startswith("kubectl")} == {"Apply"}


def test_patches_of_three_kinds(kubectl: Run) -> None:
    kubectl("apply", "-f", "-", given=DEPLOYMENT)
    strategic = '{"spec":{"template":{"spec":{"containers":[{"name":"side","image":"side:2"}]}}}}'
    assert kubectl("patch", "deploy", "web", "-p", strategic).returncode == 0
    assert kubectl("patch", "deploy", "web", "--type=merge", "-p", '{"spec":{"replicas":5}}').returncode == 0
    json_patch = '[{"op":"add","path":"/metadata/labels","value":{"a~b":"c"}}]'
    kubectl("patch", "deploy", "web", "--type=json", "-p", json_patch)
    found = yaml.safe_load(kubectl("get", "deploy", "web", "-o", "yaml").stdout)
    assert [each["image"] for each in found["spec"]["template"]["spec"]["containers"]] == ["web:1", "side:2"]
    assert found["spec"]["replicas"] == 5
    assert kubectl("scale", "deploy", "web", "--replicas=3").returncode == 0
    assert kubectl("get", "deploy", "web", "-o", "jsonpath={.spec.replicas}").stdout == "3"
    assert kubectl("delete", "deploy", "web").returncode == 0
    assert "NotFound" in kubectl("get", "deploy", "web").stderr


def test_custom_resources_are_defaulted_pruned_ruled_and_printed(kubectl: Run) -> None:
    assert kubectl("apply", "-f", "-", given=DEFINITION).returncode == 0
    assert kubectl("wait", "--for=condition=Established", "crd/widgets.example.dev", "--timeout=10s").returncode == 0
    created = kubectl("apply", "-f", "-", given=WIDGET % 3)
    assert created.returncode == 0, created.stderr
    spec = json.loads(kubectl("get", "wd", "one", "-o", "json").stdout)["spec"]
    assert spec == {"size": 3, "limit": 10, "color": "red"}
    assert "size must not exceed limit" in kubectl("apply", "-f", "-", given=WIDGET % 11).stderr
    assert "greater than or equal to 0" in kubectl("apply", "-f", "-", given=WIDGET % -1).stderr
    assert "spec.size in body must be of type integer" in kubectl("apply", "-f", "-", given=WIDGET % "big").stderr
    color = kubectl("patch", "wd", "one", "--type=merge", "-p", '{"spec":{"color":"blue"}}')
    assert "color never changes" in color.stderr
    ready = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    assert kubectl("patch", "wd", "one", "--type=merge", "--subresource=status", "-p", ready).returncode == 0
    lines = kubectl("get", "wd").stdout.split()
    assert lines == ["NAME", "SIZE", "READY", "one", "3", "True"]
    assert kubectl("scale", "wd", "one", "--replicas=4").returncode == 0
    assert kubectl("get", "wd", "one", "-o", "jsonpath={.spec.replicas} {.metadata.generation}").stdout == "4 2"
    assert kubectl("explain", "widget.spec.color").returncode == 0
    assert kubectl("delete", "crd", "widgets.example.dev").returncode == 0
    assert "NotFound" in kubectl("get", "wd").stderr


def test_a_role_lets_through_what_it_names_and_the_rest_is_recorded(
    plain_cluster: TestCluster, namespace: str, kubectl: Run
) -> None:
    rules = f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: reader}}
rules: [{{apiGroups: [""], resources: [configmaps], verbs: [get, list], resourceNames: [open]}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: reader}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}}
subjects: [{{kind: ServiceAccount, name: worker, namespace: {namespace}}}]
---
{{apiVersion: v1, kind: ServiceAccount, metadata: {{name: worker}}}}
---
{{apiVersion: v1, kind: ConfigMap, metadata: {{name: open}}, data: {{a: b}}}}
---
{{apiVersion: v1, kind: ConfigMap, metadata: {{name: closed}}}}
"""
    assert kubectl("apply", "-f", "-", given=rules).returncode == 0
    mine = str(plain_cluster.kubeconfig(f"{namespace}/worker"))
    denied = len(plain_cluster.denied)
    assert kubectl("get", "cm", "open", kubeconfig=mine).returncode == 0
    assert kubectl("auth", "can-i", "get", "cm/open", kubeconfig=mine).stdout.strip() == "yes"
    assert kubectl("auth", "can-i", "delete", "cm/open", kubeconfig=mine).stdout.strip() == "no"
    assert plain_cluster.denied[denied:] == []
    refused = kubectl("get", "cm", "closed", kubeconfig=mine)
    user = f"system:serviceaccount:{namespace}:worker"
    assert f'User "{user}" cannot get resource "configmaps"' in refused.stderr
    recorded = [] if plain_cluster.is_given else [f"{user} may not get configmaps closed in namespace {namespace}"]
    assert [str(each) for each in plain_cluster.denied[denied:]] == recorded


def test_secrets_arrive_from_a_typed_client(kubectl: Run, tmp_path: Path) -> None:
    """`kubectl create` of these kinds writes protobuf."""
    file = tmp_path / "blob"
    file.write_bytes(bytes(range(256)))
    done = kubectl("create", "secret", "generic", "s", f"--from-file=blob={file}", "--from-literal=empty=")
    assert done.returncode == 0, done.stderr
    found = json.loads(kubectl("get", "secret", "s", "-o", "json").stdout)
    assert found["type"] == "Opaque" and found["data"]["empty"] == "" and len(found["data"]["blob"]) == 344
    done = kubectl("create", "job", "j", "--image=x", "--", "true")
    assert done.returncode == 0, done.stderr
    job = json.loads(kubectl("get", "job", "j", "-o", "json").stdout)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["true"]
    assert job["spec"]["backoffLimit"] == 6
