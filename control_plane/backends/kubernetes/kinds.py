"""Which classes of slots there are now, and which of them a function needs: made from slot pools and functions.

Pools that cannot be are kept out, with the reason; functions whose pool is not there have none, with the reason.
Limits: a pool that was accepted once and is then spoilt keeps its last good spec until the service starts anew.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable

from control_plane.backends.kubernetes.api import Object
from control_plane.backends.kubernetes.classes import Kind, Pool, kind_of, pool_for
from control_plane.backends.kubernetes.pods import INSTANCE_LABEL, label_of
from control_plane.backends.kubernetes.pool_spec import parse_pool
from control_plane.backends.kubernetes.watching import generation_of, uid_of
from control_plane.errors import StokerError
from control_plane.lanes import FunctionKey
from control_plane.pod_spec import PodFields, own_fields

logger = logging.getLogger(__name__)


def is_ours(found: Object, release: str) -> bool:
    """An object without the label belongs to whichever release is here; one with another's is that one's."""
    return label_of(found, INSTANCE_LABEL) in ("", release)


class Kinds:
    def __init__(self, release: str, image: str, default_pool: str) -> None:
        self._release = release
        self._image = image
        self._default_pool = default_pool
        self.pools: dict[str, Pool] = {}
        self.refused: dict[str, str] = {}
        """Slot pools that cannot be, and why."""
        self._functions: dict[FunctionKey, tuple[PodFields | None, bool]] = {}
        self._made: dict[tuple[str, int, str, str], Kind] = {}
        self.all: dict[str, Kind] = {}
        """By class name."""
        self._of: dict[FunctionKey, Kind] = {}
        self._needed_by: Counter[str] = Counter()
        """Functions that need each class."""
        self._own: frozenset[str] = frozenset()
        """The pools' own classes, which are there whether or not they are needed."""
        self.on_change: Callable[[], None] = lambda: None

    # --- what is told ---

    def pool_changed(self, name: str, found: Object | None) -> None:
        if found is None or not is_ours(found, self._release) or (found["metadata"]).get("deletionTimestamp"):
            self.refused.pop(name, None)
            if self.pools.pop(name, None) is not None:
                self._remake()
            return
        known = self.pools.get(name)
        if known is not None and (known.uid, known.generation) == (uid_of(found), generation_of(found)):
            return
        try:
            spec = parse_pool(found.get("spec"))
            if not (spec.image or self._image):
                raise ValueError("image is needed: the service has none of its own (STOKER_SLOT_IMAGE)")
        except (StokerError, ValueError) as error:
            self.refused[name] = str(error)
            logger.warning("event=slot_pool_refused pool=%s error=%s", name, error)
        else:
            self.refused.pop(name, None)
            self.pools[name] = Pool(name, uid_of(found), generation_of(found), spec)
        self._remake()

    def function_changed(self, key: FunctionKey, fields: PodFields | None, *, on_devices: bool = False) -> None:
        """`on_devices`: it computes on GPUs, which a slot has to have."""
        if self._functions.get(key) == (fields, on_devices):
            return
        self._functions[key] = (fields, on_devices)
        self._make(key, fields, on_devices)
        self.on_change()

    def function_gone(self, key: FunctionKey) -> None:
        if key in self._functions:
            del self._functions[key]
            self._need(key, None)
            self.on_change()

    # --- what follows ---

    def of(self, key: FunctionKey) -> str:
        """The class a function needs; of one that needs a pool that is not there, a name that no slot has."""
        kind = self._of.get(key)
        return kind.name if kind is not None else "-"

    def why_none(self, key: FunctionKey) -> str:
        """Why a function has no class; empty if it has one."""
        if key in self._of or key not in self._functions:
            return ""
        fields, on_devices = self._functions[key]
        name = (fields.slotPool if fields is not None else None) or self._default_pool
        if name in self.refused:
            return f"the SlotPool {name} cannot be used: {self.refused[name]}"
        pool = pool_for(fields, self.pools, self._default_pool)
        if pool is not None and on_devices:
            return (
                f"its device is cuda, and slots of the SlotPool {pool.name} have none: name a pool with devices in "
                "pod.slotPool, or the devices themselves in pod.devices"
            )
        there = ", ".join(sorted(self.pools)) or "none"
        return f"there is no SlotPool {name} in this namespace (there are: {there})"

    def _remake(self) -> None:
        self._made.clear()
        self._of.clear()
        self._needed_by.clear()
        own = [self._kind(pool, None) for pool in self.pools.values()]
        self._own = frozenset(kind.name for kind in own)
        self.all = {kind.name: kind for kind in own}
        for key, (fields, on_devices) in self._functions.items():
            self._make(key, fields, on_devices)
        self.on_change()

    def _make(self, key: FunctionKey, fields: PodFields | None, on_devices: bool) -> None:
        pool = pool_for(fields, self.pools, self._default_pool)
        kind = self._kind(pool, fields) if pool is not None else None
        # NOTE: slots without devices would be asked for one after the other, and none would ever fit.
        self._need(key, None if kind is None or (on_devices and not kind.spec.devices) else kind)

    def _need(self, key: FunctionKey, kind: Kind | None) -> None:
        """A class that is none of the pools' own is there for as long as some function needs it."""
        before = self._of.pop(key, None)
        if kind is not None:
            self._of[key] = kind
            if kind.name not in self._own:
                self.all[kind.name] = kind
            self._needed_by[kind.name] += 1
        if before is not None:
            self._needed_by[before.name] -= 1
            if not self._needed_by[before.name]:
                del self._needed_by[before.name]
                if before.name not in self._own:
                    del self.all[before.name]

    def _kind(self, pool: Pool, fields: PodFields | None) -> Kind:
        said = json.dumps(own_fields(fields), sort_keys=True) if fields is not None else "{}"
        which = (pool.uid, pool.generation, pool.name, said)
        if which not in self._made:
            self._made[which] = kind_of(pool, self._image, fields)
        return self._made[which]
