"""What a link hears, passed on, with a note that the slot's agent is heard at all.

Limits: an agent that is heard for the first time after its pod was deleted is told to go by the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from control_plane.backends.base import SlotListener
from function_runtime.protocol import ReplicaStatus, ReplicaTime, SlotState

if TYPE_CHECKING:
    from control_plane.backends.kubernetes.backend import KubernetesBackend


class Heard:
    """Passes on what a link hears, and notes that it does."""

    def __init__(self, backend: KubernetesBackend, listener: SlotListener) -> None:
        self._backend = backend
        self._listener = listener

    def slot_state(self, slot_id: str, state: SlotState) -> None:
        if self._backend.answers(slot_id, True) and not state.terminating:
            self._backend.tell_leaving(slot_id)
        self._listener.slot_state(slot_id, state)

    def replica_changed(self, slot_id: str, status: ReplicaStatus) -> None:
        self._listener.replica_changed(slot_id, status)

    def time_passed(self, slot_id: str, times: Mapping[str, ReplicaTime]) -> None:
        self._listener.time_passed(slot_id, times)

    def slot_lost(self, slot_id: str, reason: str, *, agent_gone: bool) -> None:
        self._backend.answers(slot_id, False, reason)
        self._listener.slot_lost(slot_id, reason, agent_gone=agent_gone)
