"""Slot pools that the chart describes: a file of specs by name, made into objects by the leader.

A chart cannot make objects of a kind whose definition it brings itself, so the control plane does. An object follows
the file whenever the file says something new; what somebody changed in the object stays until then. One that the file
does not name any more goes when nothing runs on its slots. Limits: the file is read at a start, as a mounted one
changes with the pod's restart.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from control_plane.backends.kubernetes.api import SLOT_POOLS, Api, ApiError, ApiRefused, Object
from control_plane.backends.kubernetes.kinds import is_ours
from control_plane.backends.kubernetes.pods import INSTANCE_LABEL, annotation_of
from control_plane.backends.kubernetes.watching import Watching, name_of, uid_of

logger = logging.getLogger(__name__)

FROM_FILE: Final = "stoker.dev/from-file"
"""Annotation: the digest of the spec as the file had it."""


def read_pools(path: str) -> dict[str, Any]:
    """Specs by name; raises ValueError for a file that holds none."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError(f"{path} holds no slot pools by name")
    return found


def digest_of(spec: Any) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def pool_object(name: str, spec: Any, release: str, owner: Object | None) -> Object:
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {INSTANCE_LABEL: release, "app.kubernetes.io/managed-by": "stoker"},
        "annotations": {FROM_FILE: digest_of(spec)},
    }
    if owner is not None:
        metadata["ownerReferences"] = [
            {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": name_of(owner), "uid": uid_of(owner)}
        ]
    return {"apiVersion": SLOT_POOLS.api_version, "kind": SLOT_POOLS.kind, "metadata": metadata, "spec": spec}


class PoolFile:
    def __init__(self, pools: dict[str, Any], release: str, is_used: Callable[[str], bool]) -> None:
        """`is_used`: whether anything runs on a pool's slots."""
        self._pools = pools
        self._release = release
        self._is_used = is_used
        self.owner: Object | None = None
        """What the objects go with, if anything."""

    async def settle(self, api: Api, pools: Watching) -> bool:
        """Whether objects and file agree now."""
        well = True
        for name, spec in self._pools.items():
            found = pools.objects.get(name)
            if found is not None and not is_ours(found, self._release):
                logger.warning("event=slot_pool_taken pool=%s", name)
                continue
            if found is not None and annotation_of(found, FROM_FILE) == digest_of(spec):
                continue
            well = await self._write(api, pools, name, spec, found) and well
        for name, found in list(pools.objects.items()):
            made_here = annotation_of(found, FROM_FILE) and is_ours(found, self._release)
            if made_here and name not in self._pools and not found["metadata"].get("deletionTimestamp"):
                well = not self._is_used(name) and await self._delete(api, found) and well
        return well

    async def _write(self, api: Api, pools: Watching, name: str, spec: Any, found: Object | None) -> bool:
        body = pool_object(name, spec, self._release, self.owner)
        try:
            if found is None:
                written = await api.create(SLOT_POOLS, body)
            else:
                metadata = found["metadata"]
                annotations = {**(metadata.get("annotations") or {}), FROM_FILE: digest_of(spec)}
                written = await api.replace(
                    SLOT_POOLS, name, {**found, "metadata": {**metadata, "annotations": annotations}, "spec": spec}
                )
        except ApiError as error:
            logger.warning("event=slot_pool_not_written pool=%s error=%s", name, error)
            return isinstance(error, ApiRefused) and error.status == 422  # the same again would be refused again
        pools.written(written)
        return True

    async def _delete(self, api: Api, found: Object) -> bool:
        try:
            await api.delete(SLOT_POOLS, name_of(found), uid=uid_of(found))
        except ApiError as error:
            logger.warning("event=slot_pool_not_deleted pool=%s error=%s", name_of(found), error)
            return isinstance(error, ApiRefused) and error.status == 404
        return True
