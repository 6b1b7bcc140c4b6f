"""What a slot's pod may be told beyond Stoker's own: image, devices, where it runs, as whom.

A function that sets any of it has slots of a class of its own (`control_plane.backends.kubernetes.classes`); a slot
pool sets the same for all of its slots. Names are those of a pod, so that they can be copied from one. Limits: what is
inside of affinities, volumes and the like is checked by the API server when the pod is made; on one machine none of it
means anything, and a function that sets it is refused there.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from control_plane.scaling_spec import Part

LABEL: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
RESOURCE: Final = r"^[a-z0-9]([-a-z0-9.]{0,120}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_UNITS: Final = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
Quantity = int | str


def quantity_value(quantity: Quantity) -> float:
    """Bytes of `4Gi`, cores of `500m`; raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)", str(quantity))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is no quantity: write a number, or one with a unit, such as 500m or 4Gi")
    return float(found[1]) * _UNITS[found[2]]


def _check_quantities(values: dict[str, Quantity]) -> dict[str, Quantity]:
    for value in values.values():
        quantity_value(value)
    return values


class PodResources(Part):
    requests: dict[str, Quantity] = Field(default={}, max_length=32)
    """As a container's: what the scheduler counts."""
    limits: dict[str, Quantity] = Field(default={}, max_length=32)
    """As a container's. A memory limit has to hold the warm pool, which counts in it."""

    @field_validator("requests", "limits")
    @classmethod
    def _quantities(cls, values: dict[str, Quantity]) -> dict[str, Quantity]:
        return _check_quantities(values)


class Toleration(Part):
    key: str | None = Field(default=None, max_length=317)
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = Field(default=None, max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: int | None = None


class SecretKey(Part):
    name: str = Field(min_length=1, max_length=253)
    """Of a secret of this namespace."""
    key: str = Field(min_length=1, max_length=253)
    """Of its field."""


class PodPlace(Part):
    """What function and slot pool can both say."""

    image: str | None = Field(default=None, min_length=1, max_length=512)
    """Image of the slot, with Stoker's runtime in it, best by digest (NAME@sha256:...); none: the pool's, or Stoker's
    own."""
    devices: dict[str, int] = Field(default={}, max_length=8)
    """Extended resources by name, and how many of each a slot has: nvidia.com/gpu, nvidia.com/mig-1g.10gb,
    amd.com/gpu. None at all: a slot on CPUs."""
    resources: PodResources = PodResources()
    """CPU and memory of the slot's container."""
    nodeSelector: dict[str, str] = Field(default={}, max_length=32)
    """Labels a node must have."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Taints of nodes that the slot's pods put up with."""
    affinity: dict[str, Any] = Field(default={})
    """As a pod's; where it is given, nothing of Stoker's own is added to it."""
    topologySpreadConstraints: tuple[dict[str, Any], ...] = Field(default=(), max_length=8)
    """As a pod's."""
    priorityClassName: str | None = Field(default=None, pattern=SUBDOMAIN)
    """Priority of the slot's pods among all pods of the cluster."""
    runtimeClassName: str | None = Field(default=None, pattern=SUBDOMAIN)
    """Container runtime of the slot's pods, such as nvidia."""
    imagePullSecrets: tuple[str, ...] = Field(default=(), max_length=16)
    """Names of secrets of this namespace with which the image is pulled."""
    serviceAccountName: str | None = Field(default=None, pattern=SUBDOMAIN)
    """Service account of the slot's pods, for workload identity; its token is not mounted."""
    trustDomain: str | None = Field(default=None, pattern=LABEL)
    """Work of different trust domains never shares a slot."""
    env: dict[str, str] = Field(default={}, max_length=100)
    """Environment of the slot's agent and of every replica on it."""
    secretEnv: dict[str, SecretKey] = Field(default={}, max_length=32)
    """Environment out of secrets of this namespace, such as the credentials of the object store. Functions' code can
    read what is in it."""
    volumes: tuple[dict[str, Any], ...] = Field(default=(), max_length=16)
    """Further volumes, as a pod's. Those whose kind Pod Security's restricted profile does not allow are refused by a
    cluster that enforces it."""
    volumeMounts: tuple[dict[str, Any], ...] = Field(default=(), max_length=16)
    """Where they are mounted, as a container's."""
    labels: dict[str, str] = Field(default={}, max_length=32)
    """Further labels of the slot's pods."""
    annotations: dict[str, str] = Field(default={}, max_length=32)
    """Further annotations of the slot's pods."""

    @field_validator("devices")
    @classmethod
    def _devices(cls, devices: dict[str, int]) -> dict[str, int]:
        for name, count in devices.items():
            if not re.fullmatch(RESOURCE, name):
                raise ValueError(f"{name[:80]!r} is no name of a device resource: it has a domain, as nvidia.com/gpu")
            if not 1 <= count <= 64:
                raise ValueError(f"a slot has 1 to 64 of {name}, not {count}")
        return devices

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for name in labels:
            if name.startswith(("stoker.dev/", "app.kubernetes.io/")):
                raise ValueError(f"{name[:80]} is Stoker's own label")
        return labels

    @field_validator("annotations")
    @classmethod
    def _annotations(cls, annotations: dict[str, str]) -> dict[str, str]:
        for name in annotations:
            if name.startswith("stoker.dev/"):
                raise ValueError(f"{name[:80]} is Stoker's own annotation")
        return annotations

    @field_validator("env", "secretEnv")
    @classmethod
    def _environment(cls, env: dict[str, Any]) -> dict[str, Any]:
        for name in env:
            if name.upper().startswith("STOKER_"):
                raise ValueError(f"{name[:80]} is reserved: names that begin with STOKER_ are Stoker's own")
        return env

    @model_validator(mode="after")
    def _mounted(self) -> PodPlace:
        names = {str(volume.get("name")) for volume in self.volumes}
        for mount in self.volumeMounts:
            if str(mount.get("name")) not in names:
                raise ValueError(f"volumeMounts names {mount.get('name')!r}, which is no volume here")
        return self


class PodFields(PodPlace):
    """A function's own: over those of its slot pool, field by field."""

    slotPool: str | None = Field(default=None, pattern=LABEL)
    """SlotPool whose slots it uses, or whose fields these are over; none: the default pool. Alone it makes no class of
    its own."""


def own_fields(pod: PodPlace) -> dict[str, Any]:
    """What of it says anything, as it was written."""
    return pod.model_dump(mode="json", exclude_defaults=True, exclude_none=True, exclude={"slotPool"})
