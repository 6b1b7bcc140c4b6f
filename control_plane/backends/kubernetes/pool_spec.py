"""A `SlotPool` as its owner describes it: the slots of one kind, and between how many and how many there are.

One model for the object and for its CRD (`definitions`). Limits: quantities are compared here, since the API server's
rules compare none.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationError, model_validator

from control_plane.pod_spec import PodPlace, Quantity, quantity_value


class SlotPoolSpec(PodPlace):
    least: int = Field(default=0, ge=0, le=1000)
    """Slots that are always there, used or not."""
    most: int = Field(default=4, ge=0, le=1000)
    """Slots there may be at once, those of classes of functions' own included."""
    replicas: int = Field(default=0, ge=0, le=64)
    """Replicas a slot takes; 0: as many as there are devices, or 4 without any."""
    pool: Quantity = "4Gi"
    """Size of the warm pool in memory, which counts in the memory limit: prepared checkpoints."""
    disk: Quantity = "16Gi"
    """Size of the disk tier on the node, for what the warm pool let go."""
    perNode: int = Field(default=1, ge=0, le=64)
    """Slots of this pool a node may have; 0: as many as its resources allow."""
    graceSeconds: float = Field(default=60.0, ge=0, le=86400, allow_inf_nan=False)
    """How long a slot that has to go lets streams finish before it parks what is left."""

    @model_validator(mode="after")
    def _fits(self) -> SlotPoolSpec:
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is above most ({self.most})")
        pool_bytes, limit = quantity_value(self.pool), self.resources.limits.get("memory")
        quantity_value(self.disk)
        if limit is not None and quantity_value(limit) <= pool_bytes:
            raise ValueError(
                f"resources.limits.memory ({limit}) does not hold the warm pool ({self.pool}), which counts in it: "
                "give it the pool's size and what replicas need besides"
            )
        return self

    @property
    def places(self) -> int:
        """Replicas a slot takes."""
        return self.replicas or sum(self.devices.values()) or 4


def parse_pool(spec: Any) -> SlotPoolSpec:
    """Raises InvalidRequest that names every faulty field."""
    from control_plane.spec import invalid_spec

    try:
        return SlotPoolSpec.model_validate_json(json.dumps(spec or {}))
    except ValidationError as error:
        raise invalid_spec(error) from None
