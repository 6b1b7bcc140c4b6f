"""Images of slots are on the nodes before a slot is: the chart's DaemonSets, run by the tests' cluster."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.chart.rendering import named, rendered
from tests.kubernetes.cluster import TestCluster

DIGEST = "sha256:" + "d" * 64


def test_a_slot_finds_its_image_on_every_node_it_may_go_to(live_cluster: TestCluster, live_namespace: str) -> None:
    nodes = sorted(node["metadata"]["name"] for node in live_cluster.api.list("nodes"))
    own, extra, other = f"own:{live_namespace}", f"whisper-{live_namespace}@{DIGEST}", f"other:{live_namespace}"
    pinned = {"kubernetes.io/hostname": nodes[0]}
    slots = {
        "mode": "pods",
        "prepull": {"enabled": True, "images": [extra]},
        "pools": {"default": {"most": 1}, "one": {"image": other, "nodeSelector": pinned}},
    }
    values = {"image": {"repository": own.partition(":")[0], "tag": live_namespace}, "slots": slots}
    documents = rendered("--namespace", live_namespace, values=json.dumps(values))
    daemons = named(documents, "DaemonSet")
    assert sorted(daemons) == ["demo-stoker-prepull-default", "demo-stoker-prepull-one"]
    account = named(documents, "ServiceAccount")["demo-stoker-slot"]
    live_cluster.apply(yaml.safe_dump_all([account, *daemons.values()]), live_namespace)

    def ready() -> bool:
        found = {
            each["metadata"]["name"]: each.get("status") or {}
            for each in live_cluster.api.list("daemonsets", live_namespace)
        }
        wanted = {"demo-stoker-prepull-default": len(nodes), "demo-stoker-prepull-one": 1}
        return all(found.get(name, {}).get("numberReady") == count for name, count in wanted.items())

    live_cluster.wait(ready, "every node holds its images")
    kubelet = live_cluster.kubelet
    pulled = kubelet.on_loop(lambda: {each for each in kubelet._pulled if each[1] in (own, extra, other)})
    assert pulled == {*((node, image) for node in nodes for image in (own, extra)), (nodes[0], other)}

    # A slot that comes now pulls nothing.
    slot: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "slot"},
        "spec": {
            "containers": [{"name": "agent", "image": extra, "command": ["sleep", "60"]}],
            "nodeSelector": {"kubernetes.io/hostname": nodes[1]},
            "terminationGracePeriodSeconds": 0,
        },
    }
    live_cluster.apply(json.dumps(slot), live_namespace)

    def running() -> bool:
        pods = {each["metadata"]["name"]: each for each in live_cluster.api.list("pods", live_namespace)}
        return pods["slot"].get("status", {}).get("phase") == "Running"

    live_cluster.wait(running, "the slot runs")
    events = live_cluster.api.list("events", live_namespace)
    told = [each["reason"] for each in events if each["involvedObject"]["name"] == "slot"]
    assert "Started" in told and "Pulling" not in told

    # What holds an image is made again where it is lost.
    (lost,) = [
        each["metadata"]["name"]
        for each in live_cluster.api.list("pods", live_namespace)
        if each["metadata"].get("labels", {}).get("stoker.dev/prepull") == "one"
    ]
    live_cluster.api.delete("pods", lost, live_namespace)

    def again() -> bool:
        pods = [each["metadata"]["name"] for each in live_cluster.api.list("pods", live_namespace)]
        return any(name.startswith("demo-stoker-prepull-one-") and name != lost for name in pods)

    live_cluster.wait(again, "another pod holds the image")
