"""Slots as pods: the cluster is watched, every slot that runs is linked to, and the leader makes and deletes pods.

Every gateway sees the same pods and talks to every agent by itself; what a slot is stands in its pod, so that nothing
has to be agreed upon and nothing is lost with a gateway. A pod is asked for by one call that nobody waits for; what
becomes of it is heard from the watch. Limits: a class counts as full at its pool's `most`, whatever its namespace's
quota would allow: that shows when a pod is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.backends.base import SlotClass, SlotListener, SlotUnavailable, SlotWait
from control_plane.backends.kubernetes.api import EVENTS, PODS, SLOT_POOLS, Api, ApiError, ApiRefused, Object
from control_plane.backends.kubernetes.backoff import Backoff, refusal_words
from control_plane.backends.kubernetes.deletion import delete_pod
from control_plane.backends.kubernetes.fence import FencedApi, NotLeading
from control_plane.backends.kubernetes.heard import Heard
from control_plane.backends.kubernetes.home import PodHome, is_ready, is_running
from control_plane.backends.kubernetes.kinds import Kinds
from control_plane.backends.kubernetes.phases import COMING, WORDS, Phase, Progress, Seen, event_time, phase_of
from control_plane.backends.kubernetes.pods import (
    CLASS_LABEL,
    POOL_LABEL,
    SEAT_LABEL,
    Service,
    grace_of,
    label_of,
    pod_name,
    pod_of,
)
from control_plane.backends.kubernetes.watching import Watching, name_of, uid_of
from control_plane.backends.link import SlotLink
from control_plane.backends.local import LinkedSlots
from control_plane.settings import KubernetesSettings

logger = logging.getLogger(__name__)

VOID_SHARE: Final = 1.5
"""Of `orphan_s`: after so much silence an agent and its replicas have ended, wherever they were."""
EVENTS_KEPT: Final = 20
UNSEEN: Final = "(cluster)"
"""Stands for the slots there may be, until the cluster has said which there are."""
CONNECT_AGAIN_S: Final = 5.0
UNANSWERED_S: Final = 30.0
"""How long the creation of a pod is asked for again under the same name, where no answer came."""


@dataclass(slots=True)
class Asked:
    """A pod that was asked for and has not been seen yet."""

    class_name: str
    pool: str
    seat: int
    at_s: float


class KubernetesBackend(LinkedSlots):
    def __init__(
        self,
        settings: KubernetesSettings,
        service: Callable[[], Service],
        connect: Callable[[], Coroutine[Any, Any, Api]],
        orphan_s: float,
    ) -> None:
        """`service`: read when it is needed, as its secret may not be there yet; raises ApiError."""
        super().__init__()
        self.settings = settings
        self._read_service = service
        self._service: Service | None = None
        self._connect = connect
        self._void_after_s = VOID_SHARE * orphan_s
        self.kinds = Kinds(settings.release, settings.slot_image, settings.slot_pool)
        self.kinds.on_change = self._kinds_changed
        self.api: Api | None = None
        self.pods: Watching | None = None
        self.pools: Watching | None = None
        self.watches: list[Watching] = []
        self.progress: dict[str, Progress] = {}
        self._class_of: dict[str, str] = {}
        """Of each pod, by its label: asked for every slot wherever slots are looked at."""
        self._moves = 0
        """How often something changed that says which slots leave; `_left` holds those, as of so many moves."""
        self._left: tuple[tuple[int, bool], frozenset[str]] | None = None
        self._events: dict[str, dict[str, Object]] = {}
        """Of each pod of ours, by the event's name."""
        self.asked: dict[str, Asked] = {}
        self._answering: set[str] = set()
        self._silent: dict[str, str] = {}
        """Why the agent of a slot is not heard that was tried in vain."""
        self._leaving: set[str] = set()
        """Slots that are being given back."""
        self._made: set[str] = set()
        """Pods that this gateway made, until they are linked to."""
        self.backoffs: dict[str, Backoff] = {}
        self._listener: SlotListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.problem = "the API server has not been reached yet"
        """Why nothing is known of the cluster, or not the newest; empty while it is."""
        self.on_pods: Callable[[str], None] = lambda name: None
        """Told of every pod that changed in what counts."""
        self.on_failure: Callable[[str, str], None] = lambda class_name, words: None
        """Told of every failure of a class."""
        self.on_watching: Callable[[], None] = lambda: None
        """Told once the cluster can be reached."""
        self.leads_for_s: Callable[[], float] = lambda: float("inf")
        """How much longer this gateway may write, if its lead is not renewed."""
        self.creates = self.deletes = 0

    # --- life ---

    async def start(self, listener: SlotListener) -> None:
        self._listener = listener
        self._spawn(self._begin(listener))

    async def _begin(self, listener: SlotListener) -> None:
        """Beside the start: a control plane without its cluster serves what it can, and says what is missing."""
        while True:
            try:
                self._service = self._read_service()
                self.api = FencedApi(await self._connect(), lambda: self.leads_for_s())
                break
            except ApiError as error:
                self.problem = str(error)
                logger.warning("event=cluster_unreachable error=%s", error)
                await asyncio.sleep(CONNECT_AGAIN_S)
        self.pools = Watching(self.api, SLOT_POOLS, self._pool_changed)
        self.pods = Watching(self.api, PODS, self._pod_changed, labels=self._service.selector())
        events = Watching(self.api, EVENTS, self._event_changed, fields="involvedObject.kind=Pod", keep=False)
        self.watches = [self.pools, self.pods, events]
        for watch in self.watches:
            watch.on_problem = self._tell_problem
            watch.start()
        await asyncio.gather(self.pools.synced.wait(), self.pods.synced.wait())
        self._tell_problem()
        # Whoever waits to see all slots need not, where there are none.
        listener.slot_lost(UNSEEN, "the cluster is in sight", agent_gone=True)
        self.on_watching()

    def _tell_problem(self) -> None:
        self.problem = next((watch.problem for watch in self.watches if watch.problem), "")

    async def look(self) -> None:
        """The watches tell of everything by themselves."""

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watch in self.watches:
            await watch.close()
        if end_agents:
            await asyncio.gather(*(link.shutdown_agent(grace_s) for link in self._links.values()))
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if self.api is not None:
            await self.api.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def synced(self) -> bool:
        return all(watch is not None and watch.synced.is_set() for watch in (self.pods, self.pools))

    # --- what there is ---

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """NOTE: until the cluster has been read nothing may be taken for gone, and so not everything is in sight."""
        return tuple(self._links) if self.synced else (*self._links, UNSEEN)

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        return tuple(kind.as_class() for kind in self.kinds.all.values())

    def class_of(self, slot_id: str) -> str:
        asked = self.asked.get(slot_id)
        return asked.class_name if asked is not None else self._class_of.get(slot_id, "")

    def pod(self, name: str) -> Object | None:
        return self.pods.objects.get(name) if self.pods is not None else None

    @property
    def coming(self) -> Mapping[str, float]:
        """The seconds since each last moved on: one that makes progress is not lost."""
        now_s = time.monotonic()
        found = {name: now_s - asked.at_s for name, asked in self.asked.items()}
        for name, progress in self.progress.items():
            if progress.seen.phase in COMING and name not in self._leaving and not progress.is_silent(now_s):
                found[name] = now_s - progress.since_s
        return found

    @property
    def leaving(self) -> frozenset[str]:
        """Made anew where something moved: every placement asks for it, and it is a look at all pods."""
        as_of = (self._moves, self.synced)
        if self._left is None or self._left[0] != as_of:
            self._left = (as_of, self._look_who_leaves())
        return self._left[1]

    def _look_who_leaves(self) -> frozenset[str]:
        going = (name for name, each in self.progress.items() if each.seen.phase in (Phase.LEAVING, Phase.GONE))
        return frozenset(going) | self._leaving | frozenset(self.outdated())

    def outdated(self) -> list[str]:
        """Slots of a class that nobody needs any more: their pool was changed, or is gone."""
        known = self.kinds.all
        return [] if not self.synced else [name for name in self.progress if self.class_of(name) not in known]

    @property
    def waits(self) -> tuple[SlotWait, ...]:
        now_s, found = time.monotonic(), []
        for name, asked in self.asked.items():
            words = self.trouble(asked.class_name) or WORDS[Phase.REQUESTED]
            found.append(SlotWait(name, asked.class_name, Phase.REQUESTED, words, now_s - asked.at_s))
        for name, progress in self.progress.items():
            seen = progress.seen
            if seen.phase is not Phase.READY:
                found.append(SlotWait(name, self.class_of(name), seen.phase, seen.words, now_s - progress.since_s))
        return tuple(found)

    def words(self, class_name: str) -> str:
        """What to tell somebody who waits for a slot of this class; empty if there is nothing to tell."""
        best: Progress | None = None
        for name, progress in self.progress.items():
            coming = progress.seen.phase in COMING and self.class_of(name) == class_name
            if coming and (best is None or _rank(progress.seen) > _rank(best.seen)):
                best = progress
        if best is not None:
            return best.seen.words
        if trouble := self.trouble(class_name):
            return trouble
        if any(asked.class_name == class_name for asked in self.asked.values()):
            return WORDS[Phase.REQUESTED]
        return self.problem

    def trouble(self, class_name: str) -> str:
        backoff = self.backoffs.get(class_name)
        return backoff.words if backoff is not None and backoff.is_recent(time.monotonic()) else ""

    def free_bytes(self, slot_id: str) -> int:
        kind = self.kinds.all.get(self.class_of(slot_id))
        return (kind.memory_bytes if kind is not None else 0) or 2**44

    # --- what is told by the cluster ---

    def _pool_changed(self, name: str, before: Object | None, now: Object | None) -> None:
        self.kinds.pool_changed(name, now)

    def _kinds_changed(self) -> None:
        self._moves += 1
        self.on_pods("")

    def _event_changed(self, name: str, before: Object | None, event: Object | None) -> None:
        about = str(((event or {}).get("involvedObject") or {}).get("name") or "")
        if event is None or (about not in self.progress and about not in self.asked):
            return
        known = self._events.setdefault(about, {})
        known[name] = event
        while len(known) > EVENTS_KEPT:
            del known[min(known, key=lambda each: event_time(known[each]))]
        pod = self.pod(about)
        if pod is not None:
            self._note(about, pod)

    def _pod_changed(self, name: str, before: Object | None, pod: Object | None) -> None:
        if pod is None:
            self._pod_gone(name)
            return
        if before is not None and uid_of(before) != uid_of(pod):
            self._pod_gone(name)
        self.asked.pop(name, None)
        self._class_of[name] = label_of(pod, CLASS_LABEL)
        self._moves += 1
        self._note(name, pod)
        if self.progress[name].seen.phase is Phase.GONE:
            self._drop_link(name, self.progress[name].seen.words)
            return
        link = self._links.get(name)
        if link is None:
            if is_running(pod) and name not in self._leaving:
                self._link(name, pod)
        elif isinstance(link.home, PodHome):
            link.home.moved(pod)

    def _note(self, name: str, pod: Object) -> None:
        events = sorted(self._events.get(name, {}).values(), key=event_time)
        seen = phase_of(pod, events, answers=name in self._answering, silent=self._silent.get(name, ""))
        now_s = time.monotonic()
        progress = self.progress.get(name)
        if progress is None:
            self.progress[name] = Progress(seen, now_s, now_s)
        elif not progress.note(seen, now_s):
            return
        self._moves += 1
        logger.info("event=slot_phase slot=%s phase=%s reason=%s", name, seen.phase, seen.reason or "-")
        if seen.phase is Phase.READY:
            self.backoffs.pop(self.class_of(name), None)
        self.on_pods(name)

    def _pod_gone(self, name: str) -> None:
        progress = self.progress.pop(name, None)
        self._class_of.pop(name, None)
        self._moves += 1
        self._made.discard(name)
        self._events.pop(name, None)
        self._silent.pop(name, None)
        self.asked.pop(name, None)
        words = "its pod is gone"
        if progress is not None and progress.seen.phase in (Phase.LEAVING, Phase.GONE):
            words = progress.seen.words
        self._drop_link(name, words)
        self._stays(name)
        self.on_pods(name)

    # --- links ---

    def _link(self, name: str, pod: Object) -> None:
        listener, service = self._listener, self._service
        if listener is None or service is None:
            return
        self._links[name] = link = SlotLink(name, PodHome(pod, service, self._void_after_s))
        ours = name in self._made and self.leads_for_s() > 0
        self._made.discard(name)
        if ours or not is_ready(pod):
            # Nothing runs on a slot that is only coming up, nor on one that nobody else has placed anything on: nobody
            # has to wait for it to know what does.
            listener.slot_lost(name, "it is coming up", agent_gone=True)
        link.start(Heard(self, listener))

    def _drop_link(self, name: str, words: str) -> None:
        self._answering.discard(name)
        link = self._links.pop(name, None)
        if link is not None:
            self._spawn(link.close())
            if self._listener is not None:
                self._listener.slot_lost(name, words, agent_gone=True)
            logger.info("event=slot_gone slot=%s reason=%s", name, words)

    def answers(self, name: str, answers: bool, why: str = "") -> bool:
        """Its agent is heard, or not (any more), and why. Whether that is news."""
        news = (name in self._answering) != answers
        if not news and self._silent.get(name, "") == why:
            return False
        (self._answering.add if answers else self._answering.discard)(name)
        self._silent.pop(name, None)
        if why:
            self._silent[name] = why
        pod = self.pod(name)
        if pod is not None and name in self.progress:
            self._note(name, pod)
        return news

    def tell_leaving(self, name: str) -> None:
        """An agent that was only being started when its pod was deleted has not heard of it: the first process of a
        container gets no SIGTERM before it listens for one. It would live for the whole of its grace."""
        pod, link, progress = self.pod(name), self._links.get(name), self.progress.get(name)
        if pod is not None and link is not None and progress is not None and progress.seen.phase is Phase.LEAVING:
            self._spawn(link.shutdown_agent(grace_of(pod)))

    # --- what is done ---

    async def add_slots(self, class_name: str, count: int) -> int:
        kind, service, now_s = self.kinds.all.get(class_name), self._service, time.monotonic()
        if kind is None or service is None or self.api is None or not self.synced:
            raise SlotUnavailable(self.problem or f"there are no slots of class {class_name}")
        self._require_lead()
        backoff = self.backoffs.get(class_name)
        if backoff is not None and (again_s := backoff.pausing_s(now_s)) > 0:
            raise SlotUnavailable(f"{backoff.words}; tried again in {again_s:.0f} s", again_s=again_s)
        begun = max(min(count, kind.pool.spec.most - self._there(kind.pool.name)), 0)
        for _ in range(begun):
            name = pod_name(self.settings.release, kind.pool.name)
            seat = self._seat(kind.pool.name, kind.spec.perNode)
            self.asked[name] = Asked(class_name, kind.pool.name, seat, now_s)
            self._made.add(name)
            body = pod_of(kind, name, service, namespace=self.settings.namespace, seat=seat)
            self._spawn(self._create(name, class_name, body))
        return begun

    def _of_pool(self, pool: str) -> list[str]:
        """Pods of it that are there or coming, and are to stay."""
        there = [name for name, asked in self.asked.items() if asked.pool == pool]
        leaving = self.leaving
        for name in self.progress:
            pod = self.pod(name)
            if pod is not None and name not in leaving and label_of(pod, POOL_LABEL) == pool:
                there.append(name)
        return there

    def _there(self, pool: str) -> int:
        return len(self._of_pool(pool))

    def _seat(self, pool: str, per_node: int) -> int:
        """The one with the fewest slots, so that nodes fill evenly."""
        taken = dict.fromkeys(range(max(per_node, 1)), 0)
        for name in self._of_pool(pool):
            asked, pod = self.asked.get(name), self.pod(name)
            seat = asked.seat if asked is not None else int(label_of(pod or {}, SEAT_LABEL) or 0)
            if seat in taken:
                taken[seat] += 1
        return min(taken, key=lambda seat: (taken[seat], seat))

    async def _create(self, name: str, class_name: str, body: Object) -> None:
        if self.api is None or self.pods is None:
            return
        self.creates += 1
        try:
            created = await self._created(self.api, name, class_name, body)
        except ApiRefused as error:
            self.asked.pop(name, None)
            self.failed(class_name, refusal_words(error), error.retry_after_s)
        except ApiError:
            # Whether there is a pod is still not known: if there is, the watch will tell.
            self.asked.pop(name, None)
            self.on_pods("")
        else:
            if created is not None:
                self.pods.written(created)

    async def _created(self, api: Api, name: str, class_name: str, body: Object) -> Object | None:
        """A call that was not answered is made again: under one name there is one pod at most, however often it was
        heard. None: the watch has told of it meanwhile."""
        until_s = time.monotonic() + UNANSWERED_S
        while True:
            try:
                return await api.create(PODS, body)
            except ApiRefused as error:
                if error.reason != "AlreadyExists":
                    raise
                return await api.get(PODS, name)
            except NotLeading:
                raise
            except ApiError as error:
                logger.warning("event=pod_create_unanswered pod=%s error=%s", name, error)
                self.failed(class_name, str(error))
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(self.backoffs[class_name].pausing_s(time.monotonic()))
            if name not in self.asked:
                return None

    def failed(self, class_name: str, words: str, retry_after_s: float | None = None) -> None:
        """A slot of this class did not come: the next is not tried at once."""
        backoff = self.backoffs.setdefault(class_name, Backoff())
        backoff.failed(time.monotonic(), words, retry_after_s)
        logger.warning("event=slot_failed class=%s failures=%d error=%s", class_name, backoff.failures, words)
        self.on_failure(class_name, words)
        self.on_pods("")

    def _require_lead(self) -> None:
        if self.leads_for_s() <= 0:
            raise SlotUnavailable("slots are begun and given back by the copy that leads, and this one does not")

    async def remove_slot(self, slot_id: str) -> None:
        pod, link = self.pod(slot_id), self._links.get(slot_id)
        if pod is None:
            raise SlotUnavailable(f"there is no slot {slot_id} any more")
        if slot_id in self._leaving:
            return
        if link is None:
            raise SlotUnavailable(f"the agent of {slot_id} is not heard")
        self._require_lead()
        self._leaving.add(slot_id)
        self._moves += 1
        try:
            await link.retire()
        except BaseException:
            self._stays(slot_id)
            raise
        self._drop_link(slot_id, "it was given back")
        await self.delete(pod)  # it stays among those that leave until it is gone
        logger.info("event=slot_given_back slot=%s", slot_id)

    def _stays(self, slot_id: str) -> None:
        """It does not leave (any more)."""
        self._leaving.discard(slot_id)
        self._moves += 1

    async def delete(self, pod: Object) -> None:
        """Raises SlotUnavailable."""
        if self.api is None:
            raise SlotUnavailable(self.problem)
        try:
            self.deletes += await delete_pod(self.api, pod)
        except ApiError as error:
            raise SlotUnavailable(f"the pod {name_of(pod)} cannot be deleted: {error}") from error


def _rank(seen: Seen) -> tuple[bool, int]:
    """How near to being ready."""
    return (not seen.trouble, COMING.index(seen.phase))
