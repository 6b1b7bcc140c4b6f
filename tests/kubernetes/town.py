"""A service whose slots are pods that run, with the rights that the chart's Role gives and no other.

    with town(folder) as place:        # a control plane as a process, a cluster whose kubelet runs the pods' agents
        place.service.deploy(...)

Limits: one control plane, on SQLite, beside the cluster and not in it.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes import tools
from tests.kubernetes.cluster import TestCluster
from tests.support.service import Service

CHART = Path(__file__).parents[2] / "helm" / "stoker"
POOL = {"image": "stoker@sha256:abc", "most": 2, "pool": "64Mi", "disk": "0", "graceSeconds": 1, "perNode": 0}


class PodService(Service):
    """A control plane whose slots are pods: their processes are found by the kubelet, in namespaces of their own."""

    def __init__(self, cluster: TestCluster, data_dir: Path, *, args: tuple[str, ...] = ()) -> None:
        super().__init__(data_dir, args=args)
        self.cluster = cluster
        self._last: list[dict[str, Any]] = []

    def replicas(self, *, live: bool = True) -> list[dict[str, Any]]:
        self._last = super().replicas(live=live)
        return self._last

    def kill(self, victim: str) -> bool:
        """Also `pod`: deleted without a grace. Where the control plane is dead, of the replicas it told of last."""
        if victim == "gateway":
            return super().kill(victim)
        with contextlib.suppress(OSError):
            self.replicas()
        row = next((row for row in self._last if row["pid"]), None)
        if row is None:
            return False
        try:
            match victim:
                case "replica":
                    self.kill_replica(row)
                case "agent":
                    self.cluster.kubelet.kill(row["slot_id"])
                case "pod":
                    self.cluster.api.delete("pods", row["slot_id"], gracePeriodSeconds=0)
        except KeyError:
            return False  # its pod has just ended
        return True

    def kill_replica(self, row: dict[str, Any]) -> None:
        self.cluster.kubelet.execute(row["slot_id"], ["sh", "-c", f"kill -9 {row['pid']}"])

    def runs(self, row: dict[str, Any]) -> bool:
        try:
            return self.cluster.kubelet.execute(row["slot_id"], ["test", "-d", f"/proc/{row['pid']}"])[0] == 0
        except KeyError:
            return False


class Town:
    def __init__(self, cluster: TestCluster, service: PodService) -> None:
        self.cluster, self.service = cluster, service

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.api.list("pods", "default", "app.kubernetes.io/component=slot")

    def name_of_slot(self, function: str = "") -> str:
        rows = (row for row in self.service.replicas() if function in ("", row["function"]))
        return str(next(row for row in rows if row["state"] == "ready")["slot_id"])


@contextlib.contextmanager
def town(
    folder: Path,
    pool: Mapping[str, Any] = POOL,
    env: Mapping[str, str] | None = None,
    *,
    warm_workers: int = 0,
    **cluster_options: Any,
) -> Iterator[Town]:
    """`pool`: the spec of the one SlotPool. Ends with a look at what was denied: nothing is to be."""
    secret = folder / "agent-secret"
    secret.write_text("the secret of all the agents here\n")
    with TestCluster(folder / "cluster", **cluster_options) as cluster:
        for name in ("functions.yaml", "slotpools.yaml"):
            cluster.apply(CHART / "files" / "crds" / name)
        command = [tools.helm(), "template", "rel", str(CHART), "-n", "default", "-s", "templates/rbac.yaml"]
        command += ["--set", "slots.mode=pods", "--set", "image.repository=stoker"]
        cluster.apply(subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout)
        kind = {"apiVersion": "stoker.dev/v1alpha1", "kind": "SlotPool"}
        cluster.api.apply({**kind, "metadata": {"name": "default"}, "spec": dict(pool)})
        service = PodService(cluster, folder / "data", args=("--warm-workers", str(warm_workers)))
        service.env |= {
            "STOKER_BACKEND": "kubernetes",
            "STOKER_RELEASE": "rel",
            "STOKER_KUBECONFIG": str(cluster.kubeconfig("rel-stoker")),
            "STOKER_AGENT_SECRET_FILE": str(secret),
            "STOKER_ADVERTISE_URL": service.url,
            "STOKER_SLOT_HOLD_S": "1",
            "STOKER_KV_LINGER_S": "0.01",
            **(env or {}),
        }
        try:
            service.start(ready_within_s=180.0)
            yield Town(cluster, service)
        finally:
            service.close()
            cluster.api.delete("leases", "rel-control-loop")
        assert [str(each) for each in cluster.denied] == [], "what is done is what the Role allows"
