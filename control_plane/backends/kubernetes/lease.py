"""Who leads, as an object: a `Lease` that operators can read where they look for one.

It mirrors the lease in the database, which alone decides. Limits: written when the lead changes hands and not renewed
in between, so its `renewTime` says since when its holder leads, and it has no duration after which it would be void.
"""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

from control_plane.backends.kubernetes.api import LEASES, Api, ApiError, ApiRefused, Object

logger = logging.getLogger(__name__)


def lease_of(name: str, holder: str, before: Object | None, now_s: float) -> Object | None:
    """The object to be written; None where it says that already."""
    known = (before or {}).get("spec") or {}
    if known.get("holderIdentity") == holder:
        return None
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec: dict[str, Any] = {
        "holderIdentity": holder,
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": int(known.get("leaseTransitions") or 0) + (1 if known.get("holderIdentity") else 0),
    }
    metadata = (before or {}).get("metadata") or {"name": name}
    return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}


async def mirror_lead(api: Api, name: str, holder: str) -> bool:
    """Whether it is written now, or says so already."""
    try:
        try:
            before: Object | None = await api.get(LEASES, name)
        except ApiRefused as error:
            if error.status != 404:
                raise
            before = None
        body = lease_of(name, holder, before, time.time())
        if body is None:
            return True
        if before is None:
            await api.create(LEASES, body)
        else:
            await api.replace(LEASES, name, body)
        return True
    except ApiError as error:
        logger.warning("event=lease_not_mirrored lease=%s error=%s", name, error)
        return False
