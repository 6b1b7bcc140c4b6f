"""The pod of a slot: made by one pure function from its class, its name and what the service is.

It runs the agent and nothing else, as nobody, with a read-only root and no token of the cluster's (Pod Security's
"restricted"); its warm pool is memory that counts in its limit. No secret is in it: the agent knows the hash of the
token by which the control plane commands it, which the control plane makes anew from a secret of its own and the pod's
name. Limits: what users add (volumes, affinities) is taken as it is.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any, Final

from control_plane.backends.kubernetes.api import PODS, SLOT_POOLS, Object
from control_plane.backends.kubernetes.classes import Kind
from control_plane.backends.kubernetes.phases import AGENT
from function_runtime.protocol import agent_token, peer_token, token_hash

POOL_LABEL: Final = "stoker.dev/slot-pool"
CLASS_LABEL: Final = "stoker.dev/class"
SEAT_LABEL: Final = "stoker.dev/seat"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
IN_FLIGHT: Final = "stoker.dev/in-flight"
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
PORT: Final = 7070
REPLICA_PORTS: Final = "7100-7163"
USER: Final = 10001
OWN_GRACE_S: Final = 15.0
"""Beyond what streams get: for what the agent does after them."""
LOST_NODE_S: Final = 30
"""How long a pod stays bound to a node that is not heard."""
NAME_MOST: Final = 63
SLOT_BYTES: Final = 2 * 2**30
"""Beside the disk tier, for logs and compiled kernels: a pod that writes more than its volume holds is evicted."""
POOL_SHARE: Final = 0.98
"""Of the warm pool's volume that forms may fill: a file that is being written must not meet its end."""


@dataclass(frozen=True, slots=True)
class Service:
    """What pods have to know of the service they belong to."""

    release: str
    secret: bytes
    """From which agents' tokens are made."""
    orphan_s: float = 120.0
    form_store: str = ""
    """Object store where forms are kept that take long to make."""
    start_s: float = 180.0
    """How long an agent may take to answer before the kubelet starts it anew."""

    def token(self, pod_name: str) -> str:
        """By which this pod's agent is commanded."""
        return agent_token(self.secret, pod_name)

    def labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "stoker",
            INSTANCE_LABEL: self.release,
            "app.kubernetes.io/component": "slot",
            "app.kubernetes.io/managed-by": "stoker",
        }

    def selector(self) -> str:
        return f"{INSTANCE_LABEL}={self.release},app.kubernetes.io/component=slot"


def pod_name(release: str, pool: str, chance: str | None = None) -> str:
    """At most 63 characters, which a label and a host's name can hold; a long one ends in a hash of the whole."""
    chance = chance or secrets.token_hex(4)
    stem = f"{release}-{pool}"
    most = NAME_MOST - len(chance) - 1
    if len(stem) > most:
        digest = hashlib.sha256(stem.encode()).hexdigest()[:6]
        stem = f"{stem[: most - 7].rstrip('-')}-{digest}"
    return f"{stem}-{chance}"


def pod_of(kind: Kind, name: str, service: Service, *, namespace: str, seat: int = 0) -> Object:
    """`seat`: of those that the slots of a pool have on a node, where there is a bound; two with the same one never
    share a node."""
    spec = kind.spec
    pod: dict[str, Any] = {
        "containers": [_container(kind, name, service)],
        "volumes": [
            {"name": "pool", "emptyDir": {"medium": "Memory", "sizeLimit": str(spec.pool)}},
            {"name": "slot", "emptyDir": {"sizeLimit": str(kind.disk_bytes + SLOT_BYTES)}},
            {"name": "tmp", "emptyDir": {}},
            *spec.volumes,
        ],
        # An agent that fails is started anew where its warm pool still is; one that ends as asked stays ended.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": round(spec.graceSeconds + OWN_GRACE_S),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    affinity = dict(spec.affinity) or _apart(kind, service, seat)
    given: dict[str, Any] = {
        "nodeSelector": dict(spec.nodeSelector),
        "tolerations": _tolerations(kind),
        "affinity": affinity,
        "topologySpreadConstraints": list(spec.topologySpreadConstraints),
        "priorityClassName": spec.priorityClassName,
        "runtimeClassName": spec.runtimeClassName,
        "imagePullSecrets": [{"name": each} for each in spec.imagePullSecrets],
        "serviceAccountName": spec.serviceAccountName,
    }
    pod |= {field: value for field, value in given.items() if value}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": {
            **spec.labels,
            **service.labels(),
            POOL_LABEL: kind.pool.name,
            CLASS_LABEL: kind.name,
            SEAT_LABEL: str(seat),
        },
        "annotations": {**spec.annotations, **marks(0, 0, coming=True)},
        "ownerReferences": [
            {
                "apiVersion": SLOT_POOLS.api_version,
                "kind": SLOT_POOLS.kind,
                "name": kind.pool.name,
                "uid": kind.pool.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
    return {"apiVersion": PODS.api_version, "kind": PODS.kind, "metadata": metadata, "spec": pod}


def marks(in_flight: int, replicas: int, *, coming: bool = False) -> dict[str, str]:
    """What the cluster's own autoscaler, and whoever evicts, may know: how much would be lost with this slot."""
    idle = not (in_flight or replicas or coming)
    return {
        IN_FLIGHT: str(in_flight),
        DELETION_COST: str(min(in_flight * 10 + replicas, 1_000_000)),
        SAFE_TO_EVICT: "true" if idle else "false",
    }


def _container(kind: Kind, name: str, service: Service) -> Object:
    spec, token = kind.spec, service.token(name)
    command = ["python", "-m", "function_runtime.agent"]
    command += ["--slot-dir", "/slot", "--slot-id", name, "--pool-dir", "/pool"]
    command += ["--pool-bytes", str(int(kind.pool_bytes * POOL_SHARE)), "--disk-bytes", str(kind.disk_bytes)]
    if service.form_store:
        command += ["--form-store", service.form_store]
    command += ["--warm", "0", "--orphan-s", f"{service.orphan_s:g}"]
    command += ["--listen", f"0.0.0.0:{PORT}", "--advertise", "$(STOKER_POD_IP)", "--replica-ports", REPLICA_PORTS]
    command += ["--token-hash", token_hash(token), "--peer-token-hash", token_hash(peer_token(token))]
    command += ["--term-grace-s", f"{spec.graceSeconds:g}"]
    devices = dict(spec.devices)
    resources: dict[str, Any] = {
        "requests": {**spec.resources.requests, **devices},
        "limits": {**spec.resources.limits, **devices},
    }
    probe = {"httpGet": {"path": "/v1/health", "port": "agent"}}
    return {
        "name": AGENT,
        "image": spec.image,
        "command": command,
        "env": [
            {"name": "STOKER_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": "/tmp"},
            *({"name": variable, "value": value} for variable, value in sorted(spec.env.items())),
            *(
                {"name": variable, "valueFrom": {"secretKeyRef": {"name": place.name, "key": place.key}}}
                for variable, place in sorted(spec.secretEnv.items())
            ),
        ],
        "ports": [{"name": "agent", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": max(round(service.start_s), 1)},
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 1},
        # NOTE: not the same as ready: an agent that terminates answers 503 there, and is not to be killed for it.
        "livenessProbe": {"tcpSocket": {"port": "agent"}, "periodSeconds": 10, "failureThreshold": 6},
        "resources": {part: values for part, values in resources.items() if values},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "pool", "mountPath": "/pool"},
            {"name": "slot", "mountPath": "/slot"},
            {"name": "tmp", "mountPath": "/tmp"},
            *spec.volumeMounts,
        ],
    }


def _tolerations(kind: Kind) -> list[Object]:
    """The pool's, and a shorter patience with lost nodes than the five minutes a pod has otherwise: until its pod is
    given up, a slot that nobody hears counts against the pool's bound."""
    given: list[Object] = [each.model_dump(exclude_none=True) for each in kind.spec.tolerations]
    for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
        if not any(each.get("key") in (None, key) and each.get("effect") in (None, "NoExecute") for each in given):
            given.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S})
    return given


def _apart(kind: Kind, service: Service, seat: int) -> Object:
    """Slots of a pool on nodes of their own: at most `perNode` share one, since those of a seat never do."""
    if not kind.spec.perNode:
        return {}
    alike = {INSTANCE_LABEL: service.release, POOL_LABEL: kind.pool.name, SEAT_LABEL: str(seat)}
    term = {"labelSelector": {"matchLabels": alike}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def grace_of(pod: Object) -> float:
    """What streams get when the pod is told to go."""
    seconds = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return max(float(seconds or 0.0) - OWN_GRACE_S, 0.0)


def label_of(pod: Object, name: str) -> str:
    return str(((pod.get("metadata") or {}).get("labels") or {}).get(name) or "")


def annotation_of(pod: Object, name: str) -> str:
    return str(((pod.get("metadata") or {}).get("annotations") or {}).get(name) or "")
