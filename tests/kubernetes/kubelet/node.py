"""A node: what it offers, and how it is registered and kept alive.

Upstream: `pkg/kubelet/kubelet_node_status.go`, `pkg/kubelet/nodestatus/setters.go`; leases: KEP-589.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.clock import micro_stamp, stamp

Object = dict[str, Any]
LEASES = "kube-node-lease"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """`resources` adds to CPU and memory, and takes their place: `{"nvidia.com/gpu": "1"}`."""

    name: str = "node-1"
    cpu: str = "64"
    memory: str = "256Gi"
    pods: int = 250
    resources: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()

    def node(self, address: str, port: int) -> Object:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.labels,
        }
        spec: Object = {"taints": list(self.taints)} if self.taints else {}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": spec,
            "status": self.status(address, port),
        }

    def status(self, address: str, port: int) -> Object:
        offered = {
            "cpu": self.cpu,
            "memory": self.memory,
            "pods": str(self.pods),
            "ephemeral-storage": "1Ti",
            **self.resources,
        }
        return {
            "capacity": offered,
            "allocatable": offered,
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "conditions": self.conditions(),
            "nodeInfo": {
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
                "kernelVersion": "",
                "osImage": "tests",
                "containerRuntimeVersion": "processes://1",
                "kubeletVersion": "v1.37.2",
                "kubeProxyVersion": "",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }

    def conditions(self, ready: bool = True) -> list[Object]:
        at = stamp()
        states = [
            ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
            ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            ("Ready", str(ready), "KubeletReady" if ready else "KubeletNotReady", "kubelet is posting ready status"),
        ]
        return [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": at,
                "lastHeartbeatTime": at,
            }
            for kind, status, reason, message in states
        ]


def lease(name: str) -> Object:
    spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": micro_stamp()}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": LEASES},
        "spec": spec,
    }
