"""Classes of slots: which slots are alike, so that work for one of them may go to any.

A `SlotPool` is one class; a function whose spec says more of its pods has its own fields over the pool's, field by
field, and is of the class that they make. The class's name is a hash of all that tells slots apart, so that a change of
a pool makes another class, to which its functions move. Limits: an image is told apart by its name; only with a digest
in it (NAME@sha256:...) are slots of a class surely alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.backends.base import SlotClass
from control_plane.backends.kubernetes.pool_spec import SlotPoolSpec
from control_plane.pod_spec import PodFields, own_fields, quantity_value

ASSUMED_COMING_S: Final = 30.0
"""How long a slot takes to come, before any has: a pod on a node that has its image."""
_COUNTS: Final = frozenset({"least", "most", "perNode", "graceSeconds"})
"""What slots may differ in and still be alike: a pool whose bounds are changed keeps its slots."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A SlotPool that was accepted."""

    name: str
    uid: str
    generation: int
    spec: SlotPoolSpec


@dataclass(frozen=True, slots=True)
class Kind:
    """A class with everything that its pods are made from."""

    name: str
    pool: Pool
    spec: SlotPoolSpec
    """The pool's, with a function's own fields over it."""
    own: bool
    """Whether some function has it for itself, or with its like."""

    def as_class(self) -> SlotClass:
        """A class of functions' own has no slots that are always there."""
        return SlotClass(
            name=self.name,
            least=0 if self.own else self.spec.least,
            most=self.pool.spec.most,
            devices=max(sum(self.spec.devices.values()), 1),
            most_replicas=self.spec.places,
            on_demand=True,
            assumed_s=ASSUMED_COMING_S,
        )

    @property
    def pool_bytes(self) -> int:
        return int(quantity_value(self.spec.pool))

    @property
    def disk_bytes(self) -> int:
        return int(quantity_value(self.spec.disk))

    @property
    def memory_bytes(self) -> int:
        """For replicas: the limit less the warm pool, which counts in it; 0 where there is no limit."""
        limit = self.spec.resources.limits.get("memory")
        return int(quantity_value(limit)) - self.pool_bytes if limit is not None else 0


def kind_of(pool: Pool, image: str, fields: PodFields | None = None) -> Kind:
    """`image`: of slots whose pool names none."""
    given = own_fields(fields) if fields is not None else {}
    said = pool.spec.model_dump(mode="json", exclude_none=True)
    whole = {**said, **given}
    whole.setdefault("image", image)
    spec = SlotPoolSpec.model_validate_json(json.dumps(whole))
    told_apart = {name: value for name, value in whole.items() if name not in _COUNTS}
    return Kind(f"{pool.name}-{_digest(told_apart)}", pool, spec, own=bool(given))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def pool_for(fields: PodFields | None, pools: Mapping[str, Pool], default: str) -> Pool | None:
    """Whose slots a function uses; None: there is no such pool."""
    if fields is not None and fields.slotPool:
        return pools.get(fields.slotPool)
    if default in pools:
        return pools[default]
    return next(iter(pools.values())) if len(pools) == 1 else None
