"""Starts that were too big: a replica that died with its agent before it was ready, of a pod that was killed for
memory, is a failed start of its function. Otherwise one that never fits would be loaded again for ever.

Agent and pod tell of the same death in either order, so each waits for the other a while. Limits: with several replicas
in a slot each that was starting is held responsible; one that was ready is not, its requests go on elsewhere.
"""

from __future__ import annotations

from typing import Final

import msgspec

from control_plane.backends.kubernetes.api import Object
from control_plane.backends.kubernetes.watching import uid_of
from control_plane.fleet import AGENT_GONE
from function_runtime.protocol import ReplicaError, ReplicaState, ReplicaStatus

TOLD_WITHIN_S: Final = 30.0
CODE: Final = "out_of_memory"


def memory_kill(pod: Object) -> str:
    """Which one it was, the last time its agent was killed for memory; empty: it was not."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated") or {}
            if ended.get("reason") == "OOMKilled":
                return f"{uid_of(pod)} {ended.get('finishedAt') or ''} {ended.get('containerID') or ''}"
    return ""


class MemoryKills:
    def __init__(self) -> None:
        self._deaths: dict[str, list[tuple[float, ReplicaStatus]]] = {}
        """Of replicas that were starting, by slot, with when each was told."""
        self._counted: dict[str, str] = {}
        """The last kill of each slot that starts were held against."""

    def died(self, slot_id: str, status: ReplicaStatus, now_s: float) -> None:
        if status.state is ReplicaState.FAILED and not status.ready_us and status.exit == AGENT_GONE:
            self._deaths.setdefault(slot_id, []).append((now_s, status))

    def blamed(self, slot_id: str, pod: Object | None, now_s: float) -> list[ReplicaStatus]:
        """Replicas whose start has failed for memory, each once."""
        waiting = [each for each in self._deaths.pop(slot_id, []) if now_s - each[0] <= TOLD_WITHIN_S]
        kill = memory_kill(pod) if pod is not None else ""
        if pod is None:
            self._counted.pop(slot_id, None)
        elif waiting and (not kill or self._counted.get(slot_id) == kill):
            self._deaths[slot_id] = waiting  # its pod may say so in a moment
        elif waiting:
            self._counted[slot_id] = kill
            return [_failed(status) for _, status in waiting]
        return []


def _failed(status: ReplicaStatus) -> ReplicaStatus:
    message = (
        f"the slot needed more memory than resources.limits.memory allows while {status.function} was started in it: "
        "raise the limit of its SlotPool, or have it loaded in less"
    )
    return msgspec.structs.replace(status, error=ReplicaError(CODE, message, retry=True))
