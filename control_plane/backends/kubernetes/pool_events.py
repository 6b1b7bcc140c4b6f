"""What went wrong with a pool's slots, as Events beside it: `kubectl describe sp NAME` shows them.

Limits: the same kind of trouble of a pool is told once in `AGAIN_S`; the API server forgets events after an hour.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Final

from control_plane.backends.kubernetes.api import EVENTS, SLOT_POOLS, Api, ApiError, Object
from control_plane.backends.kubernetes.classes import Pool
from control_plane.backends.kubernetes.phases import now_text

logger = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
MESSAGE_MOST: Final = 1000
"""Characters; the API server takes 1024."""


def event_of(pool: Pool, namespace: str, reason: str, message: str, reporter: str, now_s: float) -> Object:
    now = now_text(now_s)
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{pool.name}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": SLOT_POOLS.api_version,
            "kind": SLOT_POOLS.kind,
            "name": pool.name,
            "namespace": namespace,
            "uid": pool.uid,
        },
        "type": "Warning",
        "reason": reason,
        "message": message[:MESSAGE_MOST],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": "stoker"},
        "reportingComponent": "stoker.dev/control-plane",
        "reportingInstance": reporter,
    }


class PoolEvents:
    def __init__(self, namespace: str, reporter: str) -> None:
        self._namespace = namespace
        self._reporter = reporter
        self._told_s: dict[tuple[str, str], float] = {}

    def is_due(self, pool: str, reason: str, now_s: float) -> bool:
        last_s = self._told_s.get((pool, reason))
        if last_s is not None and now_s - last_s < AGAIN_S:
            return False
        self._told_s[pool, reason] = now_s
        return True

    async def tell(self, api: Api, pool: Pool, reason: str, message: str) -> None:
        if not self.is_due(pool.name, reason, time.monotonic()):
            return
        try:
            await api.create(EVENTS, event_of(pool, self._namespace, reason, message, self._reporter, time.time()))
        except ApiError as error:
            logger.warning("event=event_not_written pool=%s error=%s", pool.name, error)
