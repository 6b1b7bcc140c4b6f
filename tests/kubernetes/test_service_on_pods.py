"""A service whose slots are pods that run: from zero to an answer, an eviction under a stream, and zero again, with the
rights of the chart and no other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import tools
from tests.kubernetes.cluster import TestCluster
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

pytestmark = pytest.mark.e2e

CHART = Path(__file__).parents[2] / "helm" / "stoker"
TOKENS = 300
BODY = {"model": "fn", "prompt": list(range(20, 120)), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True, "logprobs": 0}  # fmt: skip
POOL = {"image": "stoker@sha256:abc", "most": 2, "pool": "64Mi", "disk": "0", "graceSeconds": 1, "perNode": 0}


class Town:
    def __init__(self, cluster: TestCluster, service: Service) -> None:
        self.cluster, self.service = cluster, service

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.api.list("pods", "default", "app.kubernetes.io/component=slot")

    def name_of_slot(self) -> str:
        row = next(row for row in self.service.replicas() if row["state"] == "ready")
        return str(row["slot_id"])

    def stream(self, act: Callable[[], None] | None = None) -> tuple[str, list[int], str]:
        """Text, places and id of the answer; `act` is called once half of it has come."""
        text, places, request_id = "", list[int](), ""
        for place, event in self.service.events("/v1/completions", BODY):
            assert "error" not in event, (event, self.service.tail())
            request_id = event["id"]
            places.append(place)
            text += "".join(choice["text"] for choice in event["choices"])
            if act is not None and place >= TOKENS // 2:
                act, _ = None, act()
        return text, places, request_id


@pytest.fixture
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("town")
    checkpoint = make_tiny_llama(folder / "tiny", layers=2, hidden=64)
    secret = folder / "agent-secret"
    secret.write_text("the secret of all the agents here\n")
    with TestCluster(folder / "cluster") as cluster:
        for name in ("functions.yaml", "slotpools.yaml"):
            cluster.apply(CHART / "files" / "crds" / name)
        command = [tools.helm(), "template", "rel", str(CHART), "-n", "default", "-s", "templates/rbac.yaml"]
        command += ["--set", "slots.mode=pods", "--set", "image.repository=stoker"]
        cluster.apply(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
        pool = {"apiVersion": "stoker.dev/v1alpha1", "kind": "SlotPool", "metadata": {"name": "default"}, "spec": POOL}
        cluster.api.apply(pool)
        service = Service(folder / "data", args=("--warm-workers", "0"))
        service.env |= {
            "STOKER_BACKEND": "kubernetes",
            "STOKER_RELEASE": "rel",
            "STOKER_KUBECONFIG": str(cluster.kubeconfig("rel-stoker")),
            "STOKER_AGENT_SECRET_FILE": str(secret),
            "STOKER_ADVERTISE_URL": service.url,
            "STOKER_SLOT_HOLD_S": "1",
            "STOKER_KV_LINGER_S": "0.01",
        }
        try:
            service.start(ready_within_s=90.0)
            options = {"threads": 1, "kv_bytes": 32 << 20}
            service.deploy("fn", f"file://{checkpoint}", scaling={"keep_alive": 5}, engine_options=options)
            yield Town(cluster, service)
        finally:
            service.close()
        assert [str(each) for each in cluster.denied] == [], "what is done is what the Role allows"


def test_pods_come_are_lost_under_a_stream_and_go_again(town: Town) -> None:
    assert town.pods() == [], "nobody called it yet"
    whole, places, _ = town.stream()
    assert places == list(range(1, TOKENS + 1))
    assert len(town.pods()) == 1

    first = town.name_of_slot()
    text, places, request_id = town.stream(lambda: town.cluster.api.evict(first))
    assert (text, places) == (whole, list(range(1, TOKENS + 1)))
    attempts = town.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
    assert len(attempts) == 2 and town.name_of_slot() != first

    town.cluster.wait(lambda: town.pods() == [], "zero is zero: no slot is left", 60)
