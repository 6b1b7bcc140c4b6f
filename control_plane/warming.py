"""How many workers wait in every slot: said by the leader as functions come and go, and to a slot that says otherwise.

Limits: one number for all slots; what a forecast wants more of (`SlotPools.warm_more`) comes on top.
"""

from __future__ import annotations

from collections.abc import Callable

from autoscaler.scaling import warm_workers
from control_plane.fleet import Fleet
from control_plane.functions import FunctionStore


class Warming:
    def __init__(self, functions: FunctionStore, fleet: Fleet, workers: int, leads: Callable[[], bool]) -> None:
        """`workers`: as set, for a service that has native functions."""
        self._functions = functions
        self._fleet = fleet
        self._workers = workers
        self._leads = leads
        self._told: int | None = None

    def forget(self) -> None:
        """What was said may have been another leader's."""
        self._told = None

    def settle(self) -> None:
        wanted = warm_workers(self._functions.natives, self._workers)
        if self._leads() and wanted != self._told and self._fleet.slots:
            self._told = wanted
            self._fleet.spawn(self._fleet.pools.warm(wanted))

    def slot_changed(self, slot_id: str) -> None:
        if self._told is None:
            self.settle()
            return
        state = self._fleet.slots.get(slot_id)
        if self._leads() and state is not None and state.warm_target != self._fleet.pools.warm_target(slot_id):
            self._fleet.spawn(self._fleet.pools.tell_warm(slot_id))
