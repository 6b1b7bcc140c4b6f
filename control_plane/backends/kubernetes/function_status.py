"""What the status of a `Function` object says, made from what this control plane knows of the function.

Limits: of one moment; a start's seconds are those of the slots there are, not of one that would have to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.status import Condition
from control_plane.fleet import STARTING
from control_plane.functions import Function, ImportState
from function_runtime.protocol import ReplicaState

if TYPE_CHECKING:
    from control_plane.context import AppContext


class FunctionStatus:
    def __init__(self, context: AppContext, backend: KubernetesBackend) -> None:
        self._context = context
        self._backend = backend

    def of(self, function: Function) -> tuple[dict[str, Any], tuple[Condition, ...]]:
        context, backend = self._context, self._backend
        key = (function.tenant, function.name)
        living = context.fleet.living(key)
        ready = sum(status.state is ReplicaState.READY for status in living)
        starting = sum(status.state in STARTING for status in living)
        imported, runs = self._imported(function), self._ready(function, ready, starting)
        cold_s = context.serving.cold_start_s(function.current.identity or "")
        fields: dict[str, Any] = {
            "revision": function.revision,
            "digest": function.spec.digest()[:16],
            "state": runs.reason,
            "replicas": ready,
            "starting": starting,
            "slotClass": backend.kinds.of(key) if not backend.kinds.why_none(key) else None,
            "coldStartSeconds": None if cold_s is None else f"{cold_s:.1g}",
        }
        return fields, (imported, runs)

    def _imported(self, function: Function) -> Condition:
        current = function.current
        match current.state:
            case ImportState.READY:
                return Condition("Imported", True, "Imported", f"its checkpoint is {(current.identity or '')[:12]}")
            case ImportState.FAILED:
                error = current.error
                return Condition(
                    "Imported", False, "Failed", f"{error.code}: {error.message}" if error else "its import failed"
                )
            case ImportState.IMPORTING:
                return Condition("Imported", None, "Importing", "its model is being imported")

    def _ready(self, function: Function, ready: int, starting: int) -> Condition:
        context, key = self._context, (function.tenant, function.name)
        if ready:
            return Condition("Ready", True, "Serving", "requests are answered at once")
        if function.current.state is ImportState.FAILED:
            return Condition("Ready", False, "Failed", "its model cannot be used")
        if function.current.state is ImportState.IMPORTING:
            return Condition("Ready", False, "Importing", "its model is being imported")
        if why := self._backend.kinds.why_none(key):
            return Condition("Ready", False, "NoSlotPool", why)
        if error := context.loop.unusable(key, function.revision):
            return Condition("Ready", False, "Failed", error)
        waiting = any(lane.waiting for lane in context.dispatcher.lanes.of_function(key))
        if starting or waiting:
            words = context.dispatcher.why_waiting(key) or "a replica is starting"
            return Condition("Ready", False, "Starting", words)
        return Condition("Ready", True, "AtZero", "nobody calls it; a request starts it")
