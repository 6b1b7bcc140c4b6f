"""Runs the controllers in a thread of their own: informers, one queue a controller, retries with back-off."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import Access, Client, Informer
from tests.kubernetes.controllers.accounts import NamespaceEnd, RootAuthority, ServiceAccounts
from tests.kubernetes.controllers.base import Controller, Key, Object, World
from tests.kubernetes.controllers.collector import GarbageCollector
from tests.kubernetes.controllers.daemons import DaemonSets
from tests.kubernetes.controllers.deployments import Deployments, ReplicaSets
from tests.kubernetes.controllers.disruption import Disruption
from tests.kubernetes.controllers.jobs import Jobs
from tests.kubernetes.controllers.nodes import NodeLifecycle, OrphanedPods
from tests.kubernetes.controllers.scheduler import Scheduler
from tests.kubernetes.controllers.services import EndpointSlices
from tests.kubernetes.controllers.stateful import StatefulSets
from tests.kubernetes.controllers.volumes import Claims

log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 1.0
EVERY: tuple[type[Controller], ...] = (
    ServiceAccounts,
    RootAuthority,
    NamespaceEnd,
    Scheduler,
    ReplicaSets,
    Deployments,
    StatefulSets,
    DaemonSets,
    Jobs,
    EndpointSlices,
    Claims,
    Disruption,
    NodeLifecycle,
    OrphanedPods,
    GarbageCollector,
)


class _Queue:
    """Keys to look at, each once, in order."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Key] = asyncio.Queue()
        self._known: set[Key] = set()
        self.failures: dict[Key, int] = {}

    def add(self, key: Key) -> None:
        if key not in self._known:
            self._known.add(key)
            self._waiting.put_nowait(key)

    async def next(self) -> Key:
        key = await self._waiting.get()
        self._known.discard(key)
        return key


class Controllers:
    """`start` and `stop`; between them a cluster behaves as one with a scheduler and a controller manager.

    `node_grace_s`: how long a node's lease may be old before the node counts as lost (upstream 50 s).
    """

    def __init__(self, access: Access, node_grace_s: float = 50.0, kinds: tuple[type[Controller], ...] = EVERY) -> None:
        self._access = access
        self._kinds = kinds
        self.node_grace_s = node_grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="controllers", daemon=True)
        self._thread.start()
        if not ready.wait(120):
            raise RuntimeError("the controllers did not start")

    def stop(self) -> None:
        if self._loop is not None and self._thread is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)
            self._thread = None

    def _run(self, ready: threading.Event) -> None:
        asyncio.run(self._work(ready))

    async def _work(self, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        authority = Path(self._access.authority).read_text() if self._access.authority else ""  # noqa: ASYNC240
        async with Client(self._access, "kube-controller-manager") as client:
            world = World(client, "kube-controller-manager", authority)
            controllers = [kind(world) for kind in self._kinds]
            for each in controllers:
                if isinstance(each, NodeLifecycle):
                    each.grace_s = self.node_grace_s
            queues = {each: _Queue() for each in controllers}
            plurals = {plural for each in controllers for plural in each.plurals}
            for plural in sorted(plurals):
                world.informers[plural] = Informer(client, plural, listeners=[_listener(world, plural, queues)])
            tasks = [asyncio.create_task(each.run()) for each in world.informers.values()]
            for each in world.informers.values():
                await each.synced.wait()
            tasks += [asyncio.create_task(self._loop_of(*pair)) for pair in queues.items()]
            ready.set()
            await self._stopping.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop_of(self, controller: Controller, queue: _Queue) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = await queue.next()
            try:
                again_s = await controller.sync(key)
                queue.failures.pop(key, None)
            except (ApiError, aiohttp.ClientError, OSError) as error:
                failures = queue.failures[key] = queue.failures.get(key, 0) + 1
                again_s = min(_FIRST_RETRY_S * 2 ** (failures - 1), _LAST_RETRY_S)
                log.debug("%s %s: %s", type(controller).__name__, key, error)
            except Exception:
                log.exception("%s %s", type(controller).__name__, key)
                again_s = _LAST_RETRY_S
            if again_s is not None:
                loop.call_later(again_s, queue.add, key)


def _listener(world: World, plural: str, queues: dict[Controller, _Queue]) -> Callable[[str, Object], None]:
    def told(kind: str, value: Object) -> None:
        if kind == "DELETED":
            world.bury(value)
        for controller, queue in queues.items():
            if plural in controller.plurals:
                with suppress(KeyError):
                    for key in controller.keys(plural, kind, value):
                        queue.add(key)

    return told
