"""What is written into objects' status, and when not: conditions keep the time of their last change, and a status that
says the same is not written again.

Limits: what another writer left in a status is overwritten at the next change only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from control_plane.backends.kubernetes.api import Object


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: bool | None
    """None: unknown."""
    reason: str
    """One word, in CamelCase."""
    message: str


def status_patch(
    found: Object, fields: dict[str, Any], conditions: tuple[Condition, ...], now_text: str
) -> Object | None:
    """The merge patch by which the object's status becomes this; None where it says that already."""
    status = found.get("status") or {}
    known = {each.get("type"): each for each in status.get("conditions") or ()}
    written = [_as_written(each, known.get(each.type), now_text, found) for each in conditions]
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        before = status.get(name)
        if before == value:
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            value = {**dict.fromkeys(before, None), **value}  # a merge patch keeps what it does not name
        changed[name] = value
    if written != (status.get("conditions") or []):
        changed["conditions"] = written
    return {"status": changed} if changed else None


def _as_written(condition: Condition, before: Object | None, now_text: str, found: Object) -> Object:
    status = {True: "True", False: "False", None: "Unknown"}[condition.status]
    since = now_text
    if before is not None and before.get("status") == status:
        since = str(before.get("lastTransitionTime") or now_text)
    return {
        "type": condition.type,
        "status": status,
        "reason": condition.reason,
        "message": condition.message[:32_000],
        "observedGeneration": int((found.get("metadata") or {}).get("generation") or 0),
        "lastTransitionTime": since,
    }
