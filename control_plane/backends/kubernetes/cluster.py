"""Everything that makes a control plane one of a cluster, put together: slots as pods, and the objects that mirror it.

Every gateway watches and links; what is written, the leader writes. Limits: `open_cluster` is called once, when the
rest of the service has been put together and before it starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from control_plane.backends.base import SlotUnavailable, SlotWait
from control_plane.backends.kubernetes.api import CONFIG_MAPS, Api, ApiError, ClusterApi
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.bonds import Bonds
from control_plane.backends.kubernetes.function_objects import FunctionObjects
from control_plane.backends.kubernetes.function_status import FunctionStatus
from control_plane.backends.kubernetes.lease import mirror_lead
from control_plane.backends.kubernetes.memory_kills import MemoryKills
from control_plane.backends.kubernetes.phases import WORDS, Phase
from control_plane.backends.kubernetes.pods import POOL_LABEL, Service, label_of
from control_plane.backends.kubernetes.pool_events import PoolEvents
from control_plane.backends.kubernetes.pool_file import PoolFile, read_pools
from control_plane.backends.kubernetes.pool_status import PoolStatus
from control_plane.backends.kubernetes.tending import Tending
from control_plane.functions import ChangeKind, FunctionChange
from control_plane.lanes import FunctionKey
from control_plane.peers import Refusal
from control_plane.records import OutcomeError
from control_plane.settings import Settings
from control_plane.tasks import end_task
from function_runtime.protocol import ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from control_plane.context import AppContext

logger = logging.getLogger(__name__)

SECRET_LEAST_BYTES: Final = 16
WORDS_S: Final = 0.05
"""How late who waits may be told how far it is: of a burst of news, the last."""
LOOK_S: Final = 10.0
"""Pause between looks at what has to be tried again."""


def make_backend(settings: Settings) -> KubernetesBackend:
    cluster = settings.kubernetes

    async def connect() -> Api:
        return await ClusterApi.connect(cluster)

    return KubernetesBackend(cluster, lambda: read_service(settings), connect, settings.slot.orphan_s)


def read_service(settings: Settings) -> Service:
    """Raises ApiError: without the secret no agent can be commanded."""
    cluster = settings.kubernetes
    path = settings.slot.agent_secret_file
    if not path:
        raise ApiError("STOKER_AGENT_SECRET_FILE is not set: agents' tokens are made from the secret in that file")
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ApiError(f"the agents' secret cannot be read: {error}") from error
    if len(secret) < SECRET_LEAST_BYTES:
        raise ApiError(f"the agents' secret in {path} is shorter than {SECRET_LEAST_BYTES} bytes")
    kept = settings.slot.keep_forms and settings.slot_store_uri.startswith("s3:")
    return Service(
        release=cluster.release,
        secret=secret,
        orphan_s=settings.slot.orphan_s,
        form_store=settings.slot_store_uri if kept else "",
        start_s=cluster.starting_s,
    )


class Cluster:
    def __init__(self, context: AppContext, backend: KubernetesBackend) -> None:
        self._context = context
        self.backend = backend
        self.settings = context.settings.kubernetes
        self.tending = Tending(backend, self._leads, self._replicas_on, self._in_flight, context.fleet.count_on)
        self.pool_status = PoolStatus(backend, self._leads, self._replicas_on)
        self._function_status = FunctionStatus(context, backend)
        self.function_objects = FunctionObjects(
            context.functions,
            Bonds(context.db),
            self._leads,
            self._function_status.of,
            release=self.settings.release,
            make_objects=self.settings.function_objects == "all",
        )
        self._events = PoolEvents(self.settings.namespace, self.settings.pod_name or context.gateway_id)
        self._memory_kills = MemoryKills()
        self._pool_file: PoolFile | None = None
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._words_due: asyncio.TimerHandle | None = None
        self._mirrored = self._pool_file_settled = False
        """Whether the lease names who leads, and the pools are those of the file."""
        self._wire()

    def _wire(self) -> None:
        context, backend = self._context, self.backend
        context.functions.slots_are_pods = True
        context.functions.subscribe(self._function_changed)
        context.fleet.placing.kind_of = backend.kinds.of
        context.predicted.kind_of = backend.kinds.of
        context.fleet.watchers.append(self._replica_changed)
        context.slot_scaling.is_stuck = self._is_stuck
        context.dispatcher.why_waiting = self.why_waiting
        backend.on_pods = self._pods_changed
        backend.on_watching = self._watching
        backend.on_failure = self._failure
        backend.leads_for_s = self._leads_for_s
        self.tending.on_look = self._note_all_waiting
        self.tending.on_failed = self._class_failed
        self.tending.on_outdated = self._outdated

    def _is_stuck(self, class_name: str) -> bool:
        """Whether a slot of this class is coming that finds no node."""
        seen = ((name, each.seen.phase) for name, each in self.backend.progress.items())
        return any(phase is Phase.UNSCHEDULABLE and self.backend.class_of(name) == class_name for name, phase in seen)

    # --- life ---

    def _leads(self) -> bool:
        return self._context.loop.leads

    def _leads_for_s(self) -> float:
        return self._context.gateways.leads_for_s if self._context.loop.leads else 0.0

    def lead_changed(self) -> None:
        self._mirrored = self._pool_file_settled = False
        self._due.set()
        self.tending.poke()
        self.pool_status.poke()
        self.function_objects.poke()

    def _watching(self) -> None:
        if self.backend.api is None:
            return
        if self.settings.slot_pools_file:
            try:
                pools = read_pools(self.settings.slot_pools_file)
                self._pool_file = PoolFile(pools, self.settings.release, self._pool_is_used)
            except ValueError as error:
                logger.error("event=slot_pools_unreadable error=%s", error)
        self.tending.start()
        self.pool_status.start()
        self.function_objects.start(self.backend.api)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.lead_changed()
        self._context.slot_scaling.poke()

    async def close(self) -> None:
        if self._words_due is not None:
            self._words_due.cancel()
        await end_task(self._task)
        await self.tending.close()
        await self.pool_status.close()
        await self.function_objects.close()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._settled() else LOOK_S):
                    await self._due.wait()
            self._due.clear()
            try:
                await self._settle()
            except Exception:
                logger.exception("event=cluster_unsettled")

    def _settled(self) -> bool:
        return not self._context.loop.leads or (self._mirrored and self._pool_file_settled)

    async def _settle(self) -> None:
        api, pools, context = self.backend.api, self.backend.pools, self._context
        if api is None or pools is None or not context.loop.leads:
            return
        if not self._mirrored:
            holder = self.settings.pod_name or context.gateway_id
            self._mirrored = await mirror_lead(api, f"{self.settings.release}-control-loop", holder)
        if self._pool_file is None:
            self._pool_file_settled = True
            return
        if self._pool_file.owner is None and self.settings.slot_pools_owner:
            try:
                self._pool_file.owner = await api.get(CONFIG_MAPS, self.settings.slot_pools_owner)
            except ApiError as error:
                logger.warning("event=slot_pools_without_owner error=%s", error)
        self._pool_file_settled = await self._pool_file.settle(api, pools)

    # --- what happens ---

    def _function_changed(self, change: FunctionChange) -> None:
        key = (change.function.tenant, change.function.name)
        if change.kind is ChangeKind.DELETED:
            self.backend.kinds.function_gone(key)
        else:
            spec = change.function.spec
            self.backend.kinds.function_changed(key, spec.pod, on_devices=spec.device.startswith("cuda"))
        self.function_objects.mark(key)

    def _replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        if before is not None and before.state is status.state:
            return
        key = (status.spec.tenant, status.function)
        slot_id = self._context.fleet.slot_of.get(status.replica_id, "")
        self._memory_kills.died(slot_id, status, time.monotonic())
        self._blame(slot_id)
        self._note_waiting(key)
        self.tending.poke()
        self.pool_status.poke()
        self.function_objects.restate(key)

    def _blame(self, slot_id: str) -> None:
        loop = self._context.loop
        for status in self._memory_kills.blamed(slot_id, self.backend.pod(slot_id), time.monotonic()):
            loop.starting.failed((status.spec.tenant, status.function), status, leads=loop.leads)

    def _pods_changed(self, name: str) -> None:
        self._blame(name)
        self.tending.poke()
        self.pool_status.poke()
        self._due.set()
        if self._words_due is None:
            self._words_due = asyncio.get_running_loop().call_later(WORDS_S, self._tell_waiting)
        if name and name not in self.backend.progress:
            # Behind the starts of what ran there.
            asyncio.get_running_loop().call_soon(self._context.slot_scaling.poke)

    def _tell_waiting(self) -> None:
        self._words_due = None
        for key in self._note_all_waiting():
            self.function_objects.restate(key)

    def _note_all_waiting(self) -> set[FunctionKey]:
        """What is said of a class is made once, however many wait for it: it is a look at all slots."""
        keys, said = {lane.key for lane in self._context.dispatcher.lanes if lane.waiting}, dict[str, str]()
        for key in keys:
            self._note_waiting(key, said)
        return keys

    def _note_waiting(self, key: FunctionKey, said: dict[str, str] | None = None) -> None:
        """Heartbeats say how far it is."""
        for lane in self._context.dispatcher.lanes.of_function(key):
            if lane.waiting and not lane.paused:
                words = self.why_waiting(key, said)
                for request in lane.waiting:
                    request.log.note = f"waiting: {words}" if words else "waiting for a replica"

    def _failure(self, class_name: str, words: str) -> None:
        kind, api = self.backend.kinds.all.get(class_name), self.backend.api
        if kind is not None and api is not None and self._context.loop.leads:
            self._context.fleet.spawn(self._events.tell(api, kind.pool, "SlotFailed", words))

    def _class_failed(self, class_name: str, words: str) -> None:
        """Nobody waits on for a slot that does not come, unless there is one already."""
        context, backend = self._context, self.backend
        if any(backend.class_of(slot_id) == class_name for slot_id in context.fleet.slots):
            return
        for function in context.functions.list():
            key = (function.tenant, function.name)
            target = context.serving.target(function)
            if backend.kinds.of(key) != class_name or target is None:
                continue
            message = f"no slot for {function.name}: {words}"
            context.loop.starting.refused.note(Refusal(*key, target.identity or "", "slot_unavailable", message))
            for lane in context.dispatcher.lanes.of_function(key):
                if lane.waiting and not lane.ready:
                    context.dispatcher.fail_waiting(lane, OutcomeError(503, "slot_unavailable", message, True))

    def _outdated(self, slot_id: str, replicas: list[str]) -> None:
        """Its class is no more. What runs there goes on where its function belongs now, once there is such a slot."""
        context, backend = self._context, self.backend
        for replica_id in replicas:
            status = context.fleet.replicas.get(replica_id)
            if status is None or status.state is ReplicaState.DRAINING:
                continue
            wanted = backend.kinds.of((status.spec.tenant, status.function))
            if any(backend.class_of(other) == wanted for other in context.fleet.slots):
                context.loop.end_replica(replica_id, "its slot is of a class that is no more")
            elif wanted in backend.kinds.all and not any(backend.class_of(other) == wanted for other in backend.coming):
                context.fleet.spawn(self._ask_for(wanted))

    async def _ask_for(self, class_name: str) -> None:
        with suppress(SlotUnavailable):
            await self.backend.add_slots(class_name, 1)

    # --- what is seen ---

    def _replicas_on(self, slot_id: str) -> list[str]:
        return [status.replica_id for status in self._context.fleet.on(slot_id)]

    def _in_flight(self) -> Counter[str]:
        """Requests of every replica that has any, of all gateways."""
        found: Counter[str] = Counter(self._context.loop.demand.running_elsewhere())
        for lane in self._context.dispatcher.lanes:
            for seat in lane.seats.values():
                if seat.in_flight or seat.others:
                    found[seat.replica_id] += seat.taken
        return found

    def _pool_is_used(self, pool: str) -> bool:
        for slot_id in self._context.fleet.slots:
            pod = self.backend.pod(slot_id)
            if pod is not None and label_of(pod, POOL_LABEL) == pool and self._context.fleet.on(slot_id):
                return True
        return False

    def why_waiting(self, key: FunctionKey, said: dict[str, str] | None = None) -> str:
        """How far it is with the slot or the replica that a request of this function waits for. `said`: what is known
        of classes at this moment already."""
        states = {status.state for status in self._context.fleet.living(key)}
        if ReplicaState.LOADING in states:
            return WORDS[Phase.LOADING]
        if ReplicaState.STARTING in states:
            return WORDS[Phase.SPECIALISING]
        if ReplicaState.READY in states:
            return ""
        if why := self.backend.kinds.why_none(key):
            return why
        said, wanted = {} if said is None else said, self.backend.kinds.of(key)
        if wanted not in said:
            said[wanted] = self.backend.words(wanted)
        return said[wanted]

    def slots_of(self, key: FunctionKey) -> dict[str, Any]:
        """Of the class a function needs: which are coming, and why it is not better."""
        wanted = self.backend.kinds.of(key)
        there = sum(self.backend.class_of(slot_id) == wanted for slot_id in self._context.fleet.slots)
        return {
            "class": wanted,
            "ready": there,
            "coming": [wait_body(wait) for wait in self.backend.waits if wait.class_name == wanted],
            "trouble": self.backend.kinds.why_none(key) or self.backend.trouble(wanted) or self.backend.problem or None,
            "paused_s": round(self._paused_s(wanted), 1),
        }

    def coming(self) -> list[dict[str, Any]]:
        """Slots that are not ready, with what each waits for."""
        return [wait_body(wait) for wait in self.backend.waits]

    def body(self) -> dict[str, Any]:
        """For `stoker ps` and whoever asks what is the matter."""
        backend = self.backend
        return {
            "problem": backend.problem or None,
            "pools": sorted(backend.kinds.pools),
            "refused_pools": dict(backend.kinds.refused),
            "classes": [
                {"name": kind.name, "pool": kind.pool.name, "image": kind.spec.image, "devices": kind.spec.devices,
                 "own": kind.own, "trouble": backend.trouble(kind.name) or None,
                 "paused_s": round(self._paused_s(kind.name), 1)}
                for kind in backend.kinds.all.values()
            ],
        }  # fmt: skip

    def _paused_s(self, class_name: str) -> float:
        backoff = self.backend.backoffs.get(class_name)
        return backoff.pausing_s(time.monotonic()) if backoff is not None else 0.0


def wait_body(wait: SlotWait) -> dict[str, Any]:
    return {
        "object": "slot.coming",
        "slot_id": wait.slot_id,
        "class": wait.class_name,
        "phase": wait.phase,
        "message": wait.words,
        "since_s": round(wait.since_s, 1),
    }
