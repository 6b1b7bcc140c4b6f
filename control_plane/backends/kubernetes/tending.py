"""What the leader sees to: pods that ended are collected, those that take too long are given up, slots of a class that
is no more make way, and each pod says what would be lost with it.

`decide` makes of what is known of the pods what is to be done; `Tending` does it, at every change and when the next
budget ends. Limits: a fault of the API server leaves a thing undone until the next look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from control_plane.backends.base import SlotUnavailable
from control_plane.backends.kubernetes.api import PODS, ApiError, Object
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.phases import COMING, Phase, budget_s
from control_plane.backends.kubernetes.pods import DELETION_COST, IN_FLIGHT, SAFE_TO_EVICT, annotation_of, marks
from control_plane.tasks import end_task

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.03
"""Of a burst of news the last is looked at: it is a look at every pod, and who waits for a replica goes before."""
LOOK_S: Final = 1.0
"""How late work that came or went may be told to the cluster: it moves without an event."""
AGAIN_S: Final = 10.0
"""Pause before something that was refused is tried again."""
MARK_S: Final = 10.0
"""How often the count of a busy slot may be written; that it became busy or idle is written at once."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    name: str
    class_name: str
    phase: Phase
    words: str
    late_s: float = float("-inf")
    """Beyond its phase's budget."""
    budget_s: float = float("inf")
    was_ready: bool = False
    outdated: bool = False
    going: bool = False
    """It is being given back or deleted already."""
    replicas: int = 0
    in_flight: int = 0
    marked: Mapping[str, str] = field(default_factory=dict)
    """What its annotations say."""
    marked_s: float = float("-inf")
    """When they were last written."""


@dataclass(frozen=True, slots=True)
class Tasks:
    collect: tuple[str, ...] = ()
    """Pods that ended."""
    give_up: tuple[tuple[str, str], ...] = ()
    """Pods that do not come, and what to say of that."""
    failed: tuple[tuple[str, str, str], ...] = ()
    """Pods that ended before they were of use, with their classes, and how."""
    give_back: tuple[str, ...] = ()
    """Empty slots of classes that are no more."""
    move_off: tuple[str, ...] = ()
    """Such slots on which something runs, one at a time."""
    mark: tuple[tuple[str, Mapping[str, str]], ...] = ()


def decide(pods: Iterable[PodFacts], now_s: float) -> Tasks:
    collect: list[str] = []
    give_up: list[tuple[str, str]] = []
    failed: list[tuple[str, str, str]] = []
    give_back: list[str] = []
    move_off: list[str] = []
    mark: list[tuple[str, Mapping[str, str]]] = []
    for pod in pods:
        if pod.phase is Phase.GONE:
            collect.append(pod.name)
            if not pod.was_ready:
                failed.append((pod.name, pod.class_name, pod.words))
        elif pod.phase is Phase.LEAVING or pod.going:
            continue
        elif pod.phase in COMING:
            if pod.outdated:
                collect.append(pod.name)
            elif pod.late_s > 0:
                words = f"{pod.words}; given up after {pod.budget_s:.0f} s"
                give_up.append((pod.name, words))
                failed.append((pod.name, pod.class_name, words))
        else:
            if pod.outdated and not pod.replicas:
                give_back.append(pod.name)
                continue
            if pod.outdated and not move_off:
                move_off.append(pod.name)
            wanted = marks(pod.in_flight, pod.replicas)
            if is_due(pod.marked, wanted, now_s - pod.marked_s):
                mark.append((pod.name, wanted))
    return Tasks(tuple(collect), tuple(give_up), tuple(failed), tuple(give_back), tuple(move_off), tuple(mark))


def is_due(marked: Mapping[str, str], wanted: Mapping[str, str], since_s: float) -> bool:
    """Whether to write: nothing when nothing changes, at once when a slot becomes busy or idle, and while it is busy
    now and then, when the count is another by half."""
    if marked.get(SAFE_TO_EVICT) != wanted[SAFE_TO_EVICT]:
        return True
    before, now = (int(each.get(IN_FLIGHT) or 0) for each in (marked, wanted))
    if (before == 0) != (now == 0):
        return True
    return since_s >= MARK_S and abs(now - before) * 2 >= max(before, now) > 0


class Tending:
    def __init__(
        self,
        backend: KubernetesBackend,
        leads: Callable[[], bool],
        replicas_on: Callable[[str], list[str]],
        in_flight: Callable[[], Mapping[str, int]],
        count_on: Callable[[str], int] | None = None,
    ) -> None:
        """`replicas_on`: living ones of a slot, `count_on`: how many; `in_flight`: requests of each that has any, at
        all gateways."""
        self._backend = backend
        self._leads = leads
        self._replicas_on = replicas_on
        self._in_flight = in_flight
        self._count_on = count_on or (lambda slot_id: len(replicas_on(slot_id)))
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._was_ready: set[str] = set()
        self._marked_s: dict[str, float] = {}
        self._tried_s: dict[str, float] = {}
        self._at_rest: dict[str, tuple[Object, int]] = {}
        """Slots that were ready, idle and marked so when they were last looked at: their pods as they were, and how
        many replicas they had. While both stay there is nothing to see to, and most are so most of the time."""
        self._counted: set[str] = set()
        """Pods whose failure is held against their class already."""
        self.on_failed: Callable[[str, str], None] = lambda class_name, words: None
        """Told of a class of which no slot comes, and why: nobody should wait for one in vain."""
        self.on_outdated: Callable[[str, list[str]], None] = lambda slot_id, replicas: None
        """Told of replicas that should run elsewhere."""
        self.on_look: Callable[[], object] = lambda: None
        self.marks_written = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def poke(self) -> None:
        self._due.set()

    async def close(self) -> None:
        await end_task(self._task)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._due.wait()
                    await asyncio.sleep(GATHER_S)
            self._due.clear()
            try:
                self.on_look()
                await self.look()
            except Exception:
                logger.exception("event=tending_failed")

    def facts(self, now_s: float) -> list[PodFacts]:
        """Of the pods that there may be something to do about."""
        backend = self._backend
        outdated, leaving = set(backend.outdated()), backend.leaving
        in_flight = self._in_flight()
        found: list[PodFacts] = []
        for name, progress in backend.progress.items():
            seen, pod = progress.seen, backend.pod(name)
            going = name in leaving
            if seen.phase is Phase.READY:
                self._was_ready.add(name)
                rest = self._at_rest.get(name)
                same = rest is not None and rest[0] is pod and rest[1] == self._count_on(name) and not going
                if same and (not in_flight or in_flight.keys().isdisjoint(self._replicas_on(name))):
                    continue
            replicas = self._replicas_on(name)
            annotations = (
                {}
                if pod is None
                else {each: annotation_of(pod, each) for each in (IN_FLIGHT, DELETION_COST, SAFE_TO_EVICT)}
            )
            found.append(
                PodFacts(
                    name=name,
                    class_name=backend.class_of(name),
                    phase=seen.phase,
                    words=seen.words,
                    late_s=progress.late_s(now_s, backend.settings),
                    budget_s=budget_s(seen, backend.settings),
                    was_ready=name in self._was_ready,
                    outdated=name in outdated,
                    going=going and name not in outdated,
                    replicas=len(replicas),
                    in_flight=sum(in_flight.get(replica_id, 0) for replica_id in replicas),
                    marked=annotations,
                    marked_s=self._marked_s.get(name, float("-inf")),
                )
            )
        self._was_ready &= backend.progress.keys()
        return found

    def _note_rest(self, pods: Iterable[PodFacts]) -> None:
        """Which of those that were looked at need not be until something changes."""
        self._at_rest = {name: rest for name, rest in self._at_rest.items() if name in self._backend.progress}
        for each in pods:
            self._at_rest.pop(each.name, None)
            pod, wanted = self._backend.pod(each.name), marks(0, each.replicas)
            rests = each.phase is Phase.READY and not (each.in_flight or each.outdated or each.going)
            if pod is not None and rests and not is_due(each.marked, wanted, float("inf")):
                self._at_rest[each.name] = (pod, each.replicas)

    async def look(self) -> None:
        if not self._leads() or not self._backend.synced:
            self._was_ready.clear()
            return
        now_s = time.monotonic()
        self._tried_s = {name: at_s for name, at_s in self._tried_s.items() if now_s - at_s < AGAIN_S}
        facts = self.facts(now_s)
        tasks = decide(facts, now_s)
        self._note_rest(facts)
        for name, class_name, words in tasks.failed:
            if class_name in self._backend.kinds.all and name not in self._counted:
                self._backend.failed(class_name, words)
            self._counted.add(name)
        self._counted &= self._backend.progress.keys()
        for name, words in tasks.give_up:
            logger.warning("event=slot_given_up slot=%s reason=%s", name, words)
            self.on_failed(self._backend.class_of(name), words)
        self._tell_lasting(now_s)
        for name in (*tasks.collect, *(name for name, _ in tasks.give_up)):
            await self._try(name, self._delete)
        for name in tasks.give_back:
            await self._try(name, self._backend.remove_slot)
        for name in tasks.move_off:
            self.on_outdated(name, self._replicas_on(name))
        for name, wanted in tasks.mark:
            await self._mark(name, wanted, now_s)

    def _tell_lasting(self, now_s: float) -> None:
        """What the cluster has refused for long enough is not waited for any longer, until it is tried again: for that
        somebody has to wait."""
        for class_name, backoff in self._backend.backoffs.items():
            if backoff.pausing_s(now_s) > 0 and backoff.lasted_s > self._backend.settings.trouble_s:
                self.on_failed(class_name, backoff.words)

    async def _try(self, name: str, work: Callable[[str], object]) -> None:
        if name in self._tried_s:
            return
        self._tried_s[name] = time.monotonic()
        try:
            done = work(name)
            if asyncio.iscoroutine(done):
                await done
        except SlotUnavailable as error:
            logger.warning("event=pod_not_deleted pod=%s error=%s", name, error)

    async def _delete(self, name: str) -> None:
        pod = self._backend.pod(name)
        if pod is not None:
            await self._backend.delete(pod)

    async def _mark(self, name: str, wanted: Mapping[str, str], now_s: float) -> None:
        pods, api = self._backend.pods, self._backend.api
        if pods is None or api is None:
            return
        self._marked_s[name] = now_s
        try:
            pods.written(await api.patch(PODS, name, {"metadata": {"annotations": dict(wanted)}}))
            self.marks_written += 1
        except ApiError as error:
            logger.warning("event=pod_not_marked pod=%s error=%s", name, error)
