"""The Pod Security Standard "restricted" on a pod's spec, control by control.

After https://kubernetes.io/docs/concepts/security/pod-security-standards/ (all of baseline, and what restricted adds).
Limits: Linux pods; what a runtime class changes is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

VOLUMES: Final = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SECCOMP: Final = ("RuntimeDefault", "Localhost")


def faults(spec: dict[str, Any]) -> list[str]:
    return [*_of_pod(spec), *(fault for each in _containers(spec) for fault in _of_container(spec, each))]


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for kind in ("initContainers", "containers", "ephemeralContainers") for each in spec.get(kind) or []]


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is set"
    for volume in spec.get("volumes") or []:
        for kind in set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is of kind {kind}"
    for sysctl in (spec.get("securityContext") or {}).get("sysctls") or []:
        yield f"sysctl {sysctl['name']}"


def _of_container(spec: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    name, of_pod, own = container["name"], spec.get("securityContext") or {}, container.get("securityContext") or {}
    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may gain privileges"
    if not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield f"{name} may run as root"
    if own.get("runAsUser", of_pod.get("runAsUser", 1)) == 0:
        yield f"{name} runs as root"
    if (own.get("seccompProfile") or of_pod.get("seccompProfile") or {}).get("type") not in SECCOMP:
        yield f"{name} has no seccomp profile"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield f"{name} keeps capabilities"
    if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if own.get("procMount", "Default") != "Default":
        yield f"{name} unmasks /proc"
    for port in container.get("ports") or []:
        if port.get("hostPort"):
            yield f"{name} takes port {port['hostPort']} of the host"
