"""The kubelet stand-in: pods as processes, and what becomes of them when nodes, images or containers fail."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from typing import Any

import aiohttp
import pytest

from tests.kubernetes import tools
from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import Access, path_of
from tests.kubernetes.cluster import TestCluster
from tests.kubernetes.kubelet import processes

Object = dict[str, Any]


WEB = """
apiVersion: v1
kind: ConfigMap
metadata: {name: files}
data: {a.txt: hello}
---
apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {word: secret}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      initContainers:
        - name: before
          image: any:1
          command: [sh, -c, 'echo made by init > /slot/made']
          volumeMounts: [{name: slot, mountPath: /slot}]
      containers:
        - name: web
          image: any:1
          command: [python, -S, -m, http.server, "7070", --bind, 0.0.0.0, --directory, /data]
          ports: [{containerPort: 7070, name: http}]
          env:
            - {name: WORD, valueFrom: {secretKeyRef: {name: key, key: word}}}
            - {name: ADDRESS, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
            - {name: BOTH, value: "$(WORD)@$(ADDRESS)"}
          readinessProbe: {tcpSocket: {port: http}, periodSeconds: 1, timeoutSeconds: 5}
          volumeMounts:
            - {name: files, mountPath: /data}
            - {name: slot, mountPath: /slot}
            - {name: tmp, mountPath: /tmp}
      volumes:
        - {name: files, configMap: {name: files}}
        - {name: slot, emptyDir: {medium: Memory}}
        - {name: tmp, emptyDir: {}}
"""


def pod(name: str, script: str, **spec: Any) -> Object:
    """One shell script, as process number 1: it has to handle SIGTERM to hear it."""
    container = {"name": "main", "image": "any:1", "command": ["sh", "-c", script], **spec.pop("container", {})}
    body: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 20, **spec},
    }
    return body


SAYS_BYE = "trap 'echo bye; exit 0' TERM; "
FOREVER = SAYS_BYE + "while :; do sleep 0.1; done"


def state(cluster: TestCluster, name: str, namespace: str) -> Object:
    found = cluster.api.get("pods", name, namespace)["status"].get("containerStatuses") or [{}]
    return dict(found[0])


def phase(cluster: TestCluster, name: str, namespace: str) -> str:
    return str(cluster.api.get("pods", name, namespace)["status"]["phase"])


def gone(cluster: TestCluster, name: str, namespace: str) -> bool:
    return all(each["metadata"]["name"] != name for each in cluster.api.list("pods", namespace))


def forwarded(cluster: TestCluster, namespace: str) -> bytes:
    """What the service says through `kubectl port-forward`, asked twice over one tunnel."""
    command = [tools.kubectl(), "port-forward", "-n", namespace, "svc/web", ":80"]
    with subprocess.Popen(
        command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as forward:
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+) -> 7070", line)
            assert found is not None, line
            answers = []
            for _ in range(2):
                with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/a.txt", timeout=60) as answer:
                    answers.append(bytes(answer.read()))
        finally:
            forward.terminate()
    assert answers[0] == answers[1]
    return answers[0]


async def channelled(cluster: TestCluster, namespace: str, name: str) -> bytes:
    """The same, over the channels that the Python client speaks."""
    access = Access.of_kubeconfig(cluster.admin_kubeconfig)
    path = path_of("pods", namespace, name, "portforward")
    async with (
        aiohttp.ClientSession(access.url, headers=access.headers()) as session,
        session.ws_connect(
            path, params={"ports": "7070"}, protocols=("v4.channel.k8s.io",), ssl=access.context()
        ) as socket,
    ):
        assert [await socket.receive_bytes() for _ in range(2)] == [b"\x00\x9e\x1b", b"\x01\x9e\x1b"]
        await socket.send_bytes(b"\x00GET /a.txt HTTP/1.0\r\n\r\n")
        said = b""
        async for message in socket:
            said += message.data[1:]
    return said


def test_a_deployment_serves_behind_its_service(live_cluster: TestCluster, live_namespace: str) -> None:
    """Volumes, environment, probes, endpoints, names of services, logs and an orderly end, in one."""
    live_cluster.apply(WEB, live_namespace)

    def available() -> bool:
        status = live_cluster.api.get("deployments", "web", live_namespace).get("status") or {}
        return bool(status.get("availableReplicas"))

    live_cluster.wait(available, "a replica that is ready", 180)
    url = live_cluster.service_url("web", "http", live_namespace)
    live_cluster.wait(lambda: live_cluster.api.list("endpointslices", live_namespace)[0]["endpoints"], "an endpoint")
    with urllib.request.urlopen(f"{url}/a.txt", timeout=60) as answer:
        assert answer.read() == b"hello"
    found = live_cluster.api.list("pods", live_namespace)[0]
    name, address = found["metadata"]["name"], found["status"]["podIP"]
    code, output = live_cluster.kubelet.execute(name, ["sh", "-c", "echo $BOTH; cat /slot/made"], live_namespace)
    if not processes.can_isolate():
        pytest.skip("without mount namespaces, commands inside a container see the machine's own paths")
    assert (code, output) == (0, f"secret@{address}\nmade by init\n")
    script = "cat /etc/hosts /var/run/secrets/kubernetes.io/serviceaccount/namespace; hostname; touch /usr/x"
    _, output = live_cluster.kubelet.execute(name, ["sh", "-c", script], live_namespace)
    assert f"web.{live_namespace}.svc" in output and name in output and "Read-only file system" in output
    live_cluster.api.patch("configmaps", "files", {"data": {"a.txt": "changed"}}, live_namespace)

    def shown() -> bytes:
        with urllib.request.urlopen(f"{url}/a.txt", timeout=60) as answer:
            return bytes(answer.read())

    live_cluster.wait(lambda: shown() == b"changed", "the ConfigMap's new text in its volume")
    logs = subprocess.run(
        [tools.kubectl(), "logs", "-n", live_namespace, "deploy/web"],
        env=live_cluster.environment(), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert '"GET /a.txt HTTP/1.1" 200' in logs.stdout, logs.stderr
    assert forwarded(live_cluster, live_namespace) == b"changed"
    assert asyncio.run(channelled(live_cluster, live_namespace, name)).endswith(b"changed")
    live_cluster.api.delete("deployments", "web", live_namespace, propagationPolicy="Foreground")
    live_cluster.wait(lambda: not live_cluster.api.list("pods", live_namespace), "no pod left")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/a.txt", timeout=5)


def test_the_grace_is_given_and_no_more(live_cluster: TestCluster, live_namespace: str) -> None:
    live_cluster.api.create(pod("polite", SAYS_BYE + "echo up; " + FOREVER), live_namespace)
    live_cluster.api.create(pod("deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done"), live_namespace)
    for name in ("polite", "deaf"):
        live_cluster.wait(lambda name=name: "up" in live_cluster.kubelet.log(name, live_namespace), f"{name} is up")
    live_cluster.api.delete("pods", "polite", live_namespace)
    live_cluster.wait(lambda: gone(live_cluster, "polite", live_namespace), "polite is gone")
    assert "bye" in live_cluster.kubelet.log("polite", live_namespace)
    pids = live_cluster.kubelet.pids("deaf", live_namespace)
    live_cluster.api.delete("pods", "deaf", live_namespace)
    held = live_cluster.api.get("pods", "deaf", live_namespace)
    assert held["metadata"]["deletionGracePeriodSeconds"] == 20 and pids["main"]
    # A second deletion may shorten what is left.
    live_cluster.api.delete("pods", "deaf", live_namespace, gracePeriodSeconds=0)
    live_cluster.wait(lambda: live_cluster.kubelet.running_pods.count(f"{live_namespace}/deaf") == 0, "deaf is killed")


def test_what_dies_starts_again_as_its_policy_says(live_cluster: TestCluster, live_namespace: str) -> None:
    live_cluster.api.create(pod("again", FOREVER), live_namespace)
    live_cluster.api.create(pod("once", "exit 3", restartPolicy="Never"), live_namespace)
    live_cluster.wait(lambda: state(live_cluster, "again", live_namespace).get("ready"), "a container that runs")
    live_cluster.kubelet.oom_kill("again", live_namespace)
    live_cluster.wait(lambda: state(live_cluster, "again", live_namespace).get("restartCount") == 1, "a restart")
    last = state(live_cluster, "again", live_namespace)["lastState"]["terminated"]
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137)
    live_cluster.wait(lambda: phase(live_cluster, "once", live_namespace) == "Failed", "an end")
    assert state(live_cluster, "once", live_namespace)["state"]["terminated"]["exitCode"] == 3
    live_cluster.wait(lambda: state(live_cluster, "again", live_namespace).get("ready"), "the second start")
    live_cluster.kubelet.evict("again", live_namespace)
    live_cluster.wait(lambda: phase(live_cluster, "again", live_namespace) == "Failed", "an eviction")
    assert live_cluster.api.get("pods", "again", live_namespace)["status"]["reason"] == "Evicted"


def test_what_keeps_a_container_from_starting_is_told(live_cluster: TestCluster, live_namespace: str) -> None:
    live_cluster.kubelet.pull_faults["absent:*"] = "not found"
    live_cluster.api.create(pod("absent", FOREVER, container={"image": "absent:1"}), live_namespace)
    wanted = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "late", "key": "a"}}}]}
    live_cluster.api.create(pod("secretless", FOREVER, container=wanted), live_namespace)
    live_cluster.api.create(pod("wrong", "", container={"command": ["/no/such/program"]}), live_namespace)
    devices = {"resources": {"limits": {"example.dev/gpu": "1"}}}
    live_cluster.api.create(pod("nowhere", FOREVER, container=devices), live_namespace)

    def waiting(name: str) -> Object:
        return dict((state(live_cluster, name, live_namespace).get("state") or {}).get("waiting") or {})

    live_cluster.wait(lambda: waiting("absent").get("reason") == "ImagePullBackOff", "a pull that backs off")
    live_cluster.wait(
        lambda: waiting("secretless").get("message") == 'secret "late" not found', "a secret that is missed"
    )
    live_cluster.wait(lambda: waiting("wrong").get("reason") == "CreateContainerError", "a program that is missed")

    def refused() -> Object | None:
        conditions = live_cluster.api.get("pods", "nowhere", live_namespace)["status"].get("conditions") or []
        return next((each for each in conditions if each["type"] == "PodScheduled"), None)

    told = live_cluster.wait(refused, "a verdict of the scheduler")
    assert told["reason"] == "Unschedulable" and "2 Insufficient example.dev/gpu" in told["message"]
    # What was missing comes, and the pod goes on by itself.
    live_cluster.apply("{apiVersion: v1, kind: Secret, metadata: {name: late}, stringData: {a: b}}", live_namespace)
    live_cluster.wait(lambda: state(live_cluster, "secretless", live_namespace).get("ready"), "the pod runs")


def test_a_budget_holds_evictions_back(live_cluster: TestCluster, live_namespace: str) -> None:
    body = pod("kept", FOREVER)
    live_cluster.api.create(body, live_namespace)
    live_cluster.apply(
        "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: b}, "
        "spec: {minAvailable: 1, selector: {matchLabels: {app: kept}}}}",
        live_namespace,
    )

    def counted() -> bool:
        status = live_cluster.api.get("poddisruptionbudgets", "b", live_namespace).get("status") or {}
        return status.get("currentHealthy") == 1

    live_cluster.wait(counted, "a budget that sees the pod")
    with pytest.raises(ApiError) as refused:
        live_cluster.api.evict("kept", live_namespace)
    assert refused.value.code == 429 and "disruption budget" in refused.value.message
    live_cluster.api.delete("poddisruptionbudgets", "b", live_namespace)
    live_cluster.api.evict("kept", live_namespace)
    live_cluster.wait(lambda: gone(live_cluster, "kept", live_namespace), "an eviction that is let through")


def test_a_node_that_falls_silent_loses_its_pods_to_another(live_cluster: TestCluster, live_namespace: str) -> None:
    impatient = [
        {"operator": "Exists", "effect": "NoExecute", "key": f"node.kubernetes.io/{each}", "tolerationSeconds": 0}
        for each in ("unreachable", "not-ready")
    ]
    template = pod("moving", FOREVER, tolerations=impatient)
    del template["metadata"]["name"]
    live_cluster.api.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "moving"},
            "spec": {
                "selector": {"matchLabels": {"app": "moving"}},
                "template": {"metadata": template["metadata"], "spec": template["spec"]},
            },
        },
        live_namespace,
    )

    def running(other_than: str = "") -> Object | None:
        for each in live_cluster.api.list("pods", live_namespace):
            ready = any(
                one["type"] == "Ready" and one["status"] == "True" for one in each["status"].get("conditions") or []
            )
            if ready and each["spec"]["nodeName"] != other_than:
                return each
        return None

    first = live_cluster.wait(running, "a pod that runs")
    node, name = first["spec"]["nodeName"], first["metadata"]["name"]
    live_cluster.kubelet.lose_node(node)
    try:
        live_cluster.wait(lambda: running(node), "its successor on another node", 180)
        # Nobody can say whether the first still runs: its object stays until its node speaks.
        assert not gone(live_cluster, name, live_namespace)
        assert live_cluster.kubelet.pids(name, live_namespace)
    finally:
        live_cluster.kubelet.restore_node(node)
    live_cluster.wait(lambda: gone(live_cluster, name, live_namespace), "the first is gone", 180)


def test_late_news_of_a_pod_that_went_starts_nothing(live_cluster: TestCluster, live_namespace: str) -> None:
    """Nor does news of one that comes while its node hears nothing, until it does."""
    kubelet, body = live_cluster.kubelet, pod("late", FOREVER)
    uid = "00000000-0000-0000-0000-000000000001"
    body["metadata"] |= {
        "namespace": live_namespace, "uid": uid, "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": 20,
    }  # fmt: skip
    body["spec"] |= {"nodeName": live_cluster.api.list("nodes")[0]["metadata"]["name"], "restartPolicy": "Always"}
    kubelet.on_loop(lambda: kubelet._pod_changed("MODIFIED", body))
    live_cluster.wait(lambda: kubelet.on_loop(lambda: uid not in kubelet._workers), "the worker's end")
    assert not (kubelet.folder / "logs" / f"{live_namespace}_late").exists(), "a container has been started"

    node = body["spec"]["nodeName"]
    kubelet.lose_node(node)
    try:
        # Bound as the scheduler does, which has not missed the node yet.
        live_cluster.api.create(
            pod("bound", FOREVER, nodeName=node, tolerations=[{"operator": "Exists"}]), live_namespace
        )
        live_cluster.wait(
            lambda: kubelet.on_loop(lambda: (live_namespace, "bound") in kubelet._pods.objects), "the pod's object"
        )
        assert kubelet.on_loop(lambda: not any(each.name.endswith("/bound") for each in kubelet._workers.values()))
    finally:
        kubelet.restore_node(node)
    live_cluster.wait(
        lambda: state(live_cluster, "bound", live_namespace).get("ready"), "it runs once its node is back"
    )


def test_paths_are_rewritten_where_nothing_can_be_mounted() -> None:
    from pathlib import Path

    mounts = [processes.Mount(Path("/f/slot"), "/slot"), processes.Mount(Path("/f/pool"), "/slot/pool")]
    # What a path becomes is not looked at again.
    mounts.append(processes.Mount(Path("/f/other"), "/f"))
    command = ["run", "--dir=/slot", "/slot/pool/x", "/slots", "/a/slot", "http://h/slot"]
    changed, env = processes.rewritten(command, {"D": "/slot:/other"}, mounts)
    assert changed == ["run", "--dir=/f/slot", "/f/pool/x", "/slots", "/a/slot", "http://h/slot"]
    assert env == {"D": "/f/slot:/other"}


def test_a_job_ends_and_says_so(live_cluster: TestCluster, live_namespace: str) -> None:
    template = {
        "spec": {"restartPolicy": "Never", "containers": [{"name": "j", "image": "any:1", "command": ["true"]}]}
    }
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}
    live_cluster.api.create(body, live_namespace)

    def complete() -> bool:
        conditions = (live_cluster.api.get("jobs", "j", live_namespace).get("status") or {}).get("conditions") or []
        return any(each["type"] == "Complete" for each in conditions)

    live_cluster.wait(complete, "the job's end")
    assert json.dumps(live_cluster.api.get("jobs", "j", live_namespace)["status"]["succeeded"]) == "1"


def test_a_node_that_was_counted_as_lost_by_mistake_says_that_it_is_there(live_cluster: TestCluster) -> None:
    unknown = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": ""}]
    live_cluster.api.patch("nodes", "node-2", {"status": {"conditions": unknown}}, subresource="status")

    def back() -> bool:
        node = live_cluster.api.get("nodes", "node-2")
        ready = next(each for each in node["status"]["conditions"] if each["type"] == "Ready")
        return ready["status"] == "True" and not node["spec"].get("taints")

    live_cluster.wait(back, "the node ready and without a taint")
