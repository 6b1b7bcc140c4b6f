"""The status of slot pools: how many slots there are in which phase, and why it is not better.

Made from what the backend sees and written by the leader, at a change and no other time. Limits: counts of one moment;
a change is told within `SETTLE_S`, so that a slot that comes up is one write and not five.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from control_plane.backends.kubernetes.api import SLOT_POOLS, ApiError, ApiRefused, Object
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.kinds import is_ours
from control_plane.backends.kubernetes.phases import COMING, Phase, Seen, now_text
from control_plane.backends.kubernetes.pods import POOL_LABEL, label_of
from control_plane.backends.kubernetes.status import Condition, status_patch
from control_plane.backends.kubernetes.watching import generation_of
from control_plane.tasks import end_task

logger = logging.getLogger(__name__)

SETTLE_S: Final = 0.2
AGAIN_S: Final = 5.0


def pool_status(
    generation: int,
    refused: str,
    seen: Mapping[str, Seen],
    replicas: int,
    classes: list[str],
    least: int,
    trouble: str,
) -> tuple[dict[str, Any], tuple[Condition, ...]]:
    """`seen`: of its pods by name; `trouble`: why no slot can be had, if so."""
    phases = Counter(each.phase for each in seen.values())
    coming = sum(phases[phase] for phase in COMING)
    fields: dict[str, Any] = {
        "observedGeneration": generation,
        "ready": phases[Phase.READY],
        "coming": coming,
        "leaving": phases[Phase.LEAVING] + phases[Phase.GONE],
        "replicas": replicas,
        "phases": {phase.value: count for phase, count in sorted(phases.items())} or None,
        "classes": sorted(classes),
    }
    if refused:
        accepted = Condition("Accepted", False, "InvalidSpec", refused)
        return fields, (accepted, Condition("Ready", False, "InvalidSpec", "its spec cannot be used"))
    accepted = Condition("Accepted", True, "Valid", "its spec is in use")
    return fields, (accepted, _ready(phases, seen, least, trouble))


def _ready(phases: Counter[Phase], seen: Mapping[str, Seen], least: int, trouble: str) -> Condition:
    worst = next((each for each in seen.values() if each.trouble), None)
    if trouble:
        return Condition("Ready", False, "NoSlots", trouble)
    if worst is not None:
        return Condition("Ready", False, worst.reason or "SlotFails", worst.words)
    if phases[Phase.UNSCHEDULABLE]:
        waiting = next(each for each in seen.values() if each.phase is Phase.UNSCHEDULABLE)
        return Condition("Ready", False, "Unschedulable", waiting.words)
    if phases[Phase.READY] < least:
        return Condition(
            "Ready", False, "SlotsComing", f"{phases[Phase.READY]} of the {least} slots it keeps are ready"
        )
    if any(phases[phase] for phase in COMING):
        return Condition("Ready", True, "SlotsComing", "slots are on their way")
    if phases[Phase.READY]:
        return Condition("Ready", True, "SlotsReady", "its slots are ready")
    return Condition("Ready", True, "AtZero", "no slot is needed now")


class PoolStatus:
    def __init__(
        self, backend: KubernetesBackend, leads: Callable[[], bool], replicas_on: Callable[[str], list[str]]
    ) -> None:
        self._backend = backend
        self._leads = leads
        self._replicas_on = replicas_on
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.writes = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def poke(self) -> None:
        self._due.set()

    async def close(self) -> None:
        await end_task(self._task)

    async def _run(self) -> None:
        pause_s = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
            await asyncio.sleep(SETTLE_S)
            self._due.clear()
            try:
                pause_s = None if await self.look() else AGAIN_S
            except Exception:
                logger.exception("event=pool_status_failed")
                pause_s = AGAIN_S

    async def look(self) -> bool:
        """Whether everything is written that is to be."""
        backend = self._backend
        pools = backend.pools
        if not self._leads() or not backend.synced or pools is None or backend.api is None:
            return True
        well = True
        for name, found in list(pools.objects.items()):
            if not is_ours(found, backend.settings.release):
                continue
            patch = status_patch(found, *self._status(name, found), now_text(time.time()))
            if patch is None:
                continue
            try:
                pools.written(await backend.api.patch(SLOT_POOLS, name, patch, "status"))
                self.writes += 1
            except ApiRefused as error:
                well = well and error.status == 404
                logger.warning("event=pool_status_refused pool=%s error=%s", name, error)
            except ApiError as error:
                well = False
                logger.warning("event=pool_status_not_written pool=%s error=%s", name, error)
        return well

    def _status(self, name: str, found: Object) -> tuple[dict[str, Any], tuple[Condition, ...]]:
        backend = self._backend
        mine = {}
        for pod_name, progress in backend.progress.items():
            pod = backend.pod(pod_name)
            if pod is not None and label_of(pod, POOL_LABEL) == name:
                mine[pod_name] = progress.seen
        kinds = [kind for kind in backend.kinds.all.values() if kind.pool.name == name]
        trouble = next((words for kind in kinds if (words := backend.trouble(kind.name))), "")
        pool = backend.kinds.pools.get(name)
        return pool_status(
            generation_of(found),
            backend.kinds.refused.get(name, ""),
            mine,
            sum(len(self._replicas_on(pod_name)) for pod_name in mine),
            [kind.name for kind in kinds],
            pool.spec.least if pool is not None else 0,
            trouble,
        )
