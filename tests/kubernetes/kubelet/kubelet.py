"""The kubelets of all nodes of a test cluster, in one thread, and the hooks by which tests make nodes fail.

Model: nodes are registered and renew their leases; pods bound to them get a `PodWorker` each; services get a proxy. A
node that is lost says nothing and hears nothing: its pods run on (a cut network) or die with it (a lost machine).
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import Access, Client, Informer, suppress_api_error
from tests.kubernetes.controllers.base import World, condition
from tests.kubernetes.kubelet.logs import LogServer
from tests.kubernetes.kubelet.node import LEASES, NodeSpec, lease
from tests.kubernetes.kubelet.processes import REPOSITORY
from tests.kubernetes.kubelet.proxy import ServiceProxy
from tests.kubernetes.kubelet.relay import Relay
from tests.kubernetes.kubelet.worker import PodWorker

Object = dict[str, Any]
T = TypeVar("T")
log = logging.getLogger(__name__)
PORT = 10250


class Kubelet:
    """`start` and `stop`. Attributes may be set before or between pods; hooks may be called from any thread."""

    def __init__(self, access: Access, folder: Path, addresses: Addresses, nodes: list[NodeSpec]) -> None:
        self.access = access
        self.folder = folder
        self._addresses = addresses
        self._specs = {each.name: each for each in nodes}
        self.lease_interval_s = 1.0
        # Restarts and pulls that failed: upstream waits 10 s, doubled up to 300 s, forgotten after 600 s.
        self.first_backoff_s, self.last_backoff_s, self.backoff_reset_s = 0.2, 5.0, 10.0
        # How long a pull takes, and by pattern of images what it fails with.
        self.pull_s = 0.0
        self.pull_faults: dict[str, str] = {}
        # By pattern of pod names, what making their containers fails with.
        self.create_faults: dict[str, str] = {}
        # By pattern of images, what runs where a container names no command.
        self.entrypoints: dict[str, list[str]] = {"*": ["stoker"]}
        # What every image would bring along, and by pattern of images what some would.
        self.image_environment: dict[str, str] = {}
        self.image_environments: dict[str, dict[str, str]] = {}
        # Agents are forks of a process that has imported them already; False where their start is to be timed.
        self.forks = True
        # Ports through which pods that come are reached by a relay, so that their node can be cut off (`lose_node`).
        self.relayed_ports: Sequence[int] = ()
        # Told of each pod that ends, while what it left in its volumes is still there; on the kubelet's thread.
        self.on_end: Callable[[PodWorker], None] = lambda worker: None
        self._pulled: set[tuple[str, str]] = set()
        self._lost: dict[str, asyncio.Event] = {}
        self._off: set[str] = set()
        self._node_ips: dict[str, str] = {}
        self._pod_ips: dict[str, str] = {}
        self._workers: dict[str, PodWorker] = {}
        self._told_ends: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        shm = Path("/dev/shm")
        memory = str(shm) if os.access(shm, os.W_OK) else None
        self.memory_folder = Path(tempfile.mkdtemp(prefix="stoker-test-pods-", dir=memory))

    # Its life.

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work(ready)), name="kubelet", daemon=True)
        self._thread.start()
        if not ready.wait(120):
            raise RuntimeError("the kubelet did not start")

    def stop(self) -> None:
        """Ends every container at once."""
        if self._loop is not None and self._thread is not None and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)
            self._thread = None
        shutil.rmtree(self.memory_folder, ignore_errors=True)

    async def _work(self, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with Client(self.access, "kubelet") as self.client:
            self._world = World(self.client, "kubelet")
            self._services = Informer(self.client, "services")
            slices, self._pods = Informer(self.client, "endpointslices"), Informer(self.client, "pods")
            self._services.listeners.append(self._service_changed)
            self._pods.listeners.append(self._pod_changed)
            self._nodes = Informer(self.client, "nodes")
            maps = [Informer(self.client, plural) for plural in ("configmaps", "secrets")]
            for informer in maps:
                informer.listeners.append(partial(self._source_changed, informer.plural))
            block = f"127.{self._addresses.block}."
            self.proxy = ServiceProxy(self._services, slices, self._pods, block, self._addresses.service)
            self._logs = LogServer(self.folder)
            for each in self._specs.values():
                await self._register(each)
            informers = (self._services, slices, self._pods, self._nodes, *maps)
            tasks = [asyncio.create_task(each.run()) for each in informers]
            for each in informers:
                await each.synced.wait()
            ready.set()
            await self._stopping.wait()
            workers = [each for each in self._tasks if not each.done()]
            for task in [*tasks, *workers]:
                task.cancel()
            await asyncio.gather(*tasks, *workers, return_exceptions=True)
            await self.proxy.close()
            await self._logs.close()

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("in the kubelet", exc_info=error)

    async def _register(self, spec: NodeSpec) -> None:
        address = self._addresses.node()
        self._node_ips[spec.name] = address
        self._lost[spec.name] = asyncio.Event()
        self._lost[spec.name].set()
        await self._logs.listen(address, PORT)
        with suppress_api_error(409):
            await self.client.create("nodes", "", spec.node(address, PORT))
        await self.client.patch("nodes", "", spec.name, {"status": spec.status(address, PORT)}, "status")
        await self._renew(spec.name)
        self.background(self._beat(spec.name))

    async def _beat(self, name: str) -> None:
        while name in self._specs:
            await asyncio.sleep(self.lease_interval_s)
            await self._lost[name].wait()
            with suppress(ApiError, aiohttp.ClientError, OSError):
                await self._renew(name)
                node = self._nodes.objects.get(("", name))
                if node is not None and condition(node, "Ready").get("status") != "True":
                    # Counted as lost by mistake, this process having had no time to say that it is there.
                    await self._report_ready(name)

    async def _report_ready(self, name: str) -> None:
        await self.client.patch("nodes", "", name, {"status": {"conditions": self._specs[name].conditions()}}, "status")

    async def _renew(self, name: str) -> None:
        body = lease(name)
        try:
            await self.client.patch("leases", LEASES, name, {"spec": body["spec"]})
        except ApiError as error:
            if error.code != 404:
                raise
            with suppress_api_error(409):
                await self.client.create("leases", LEASES, body)

    async def _returned(self, name: str) -> None:
        """A node that is back: ready again, and rid of the pods that went while it was away."""
        with suppress(ApiError, aiohttp.ClientError, OSError):
            await self._renew(name)
            await self._report_ready(name)
        for worker in [each for each in self._workers.values() if each.node == name]:
            key = (worker.pod["metadata"]["namespace"], worker.pod["metadata"]["name"])
            now = self._pods.objects.get(key)
            if now is None or now["metadata"]["uid"] != worker.uid:
                worker.end("Deleted", "the pod was deleted while its node was away")
                worker.update(
                    {**worker.pod, "metadata": {**worker.pod["metadata"], "deletionTimestamp": "1970-01-01T00:00:00Z"}}
                )
            else:
                worker.update(now)
        for pod in list(self._pods.objects.values()):
            # Bound to it while it heard nothing.
            if pod["spec"].get("nodeName") == name and pod["metadata"]["uid"] not in self._workers:
                self._pod_changed("ADDED", pod)

    # What it hears.

    def _pod_changed(self, kind: str, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        worker = self._workers.get(uid)
        if worker is None:
            done = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
            if kind == "DELETED" or node not in self._specs or not self._lost[node].is_set():
                return
            if done and "deletionTimestamp" not in pod["metadata"]:
                return
            worker = self._workers[uid] = PodWorker(self, pod)
            self.background(self._run(worker))
        if not self._lost[worker.node].is_set():
            return
        if kind == "DELETED":
            gone = {**pod["metadata"], "deletionTimestamp": "1970-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
            worker.update({**pod, "metadata": gone})
        else:
            worker.update(pod)
        self._refresh_hosts()

    def tell_end(self, worker: PodWorker) -> None:
        """Once a pod: news of it that comes after its end has another worker that finds it ended."""
        if worker.uid not in self._told_ends:
            self._told_ends.add(worker.uid)
            self.on_end(worker)

    async def _run(self, worker: PodWorker) -> None:
        try:
            await worker.run()
        finally:
            self._workers.pop(worker.uid, None)
            self._pod_ips.pop(worker.uid, None)

    def _service_changed(self, kind: str, service: Object) -> None:
        async def follow() -> None:
            await self.proxy.follow(kind, service)
            self._refresh_hosts()

        self.background(follow())

    def _source_changed(self, plural: str, kind: str, value: Object) -> None:
        namespace, name = value["metadata"]["namespace"], value["metadata"]["name"]
        for worker in self._workers.values():
            if worker.pod["metadata"]["namespace"] == namespace and worker.volumes.reads(plural, name):
                self.background(worker.rewrite_volumes())

    def _refresh_hosts(self) -> None:
        for worker in self._workers.values():
            worker.refresh_hosts()

    # What its workers ask.

    async def heard(self, node: str) -> None:
        """Returns when the node reaches the server."""
        await self._lost[node].wait()

    async def runs(self, node: str) -> None:
        """Returns when the machine is there: one that died starts nothing."""
        while node in self._off:
            await self._lost[node].wait()

    async def event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        with suppress(ApiError, aiohttp.ClientError, OSError):
            await self._world.event(pod, kind, reason, message)

    async def read(self, plural: str, namespace: str, name: str) -> Object | None:
        return await self.client.get(plural, namespace, name)

    async def address_of(self, pod: Object) -> str:
        return self._pod_ips.setdefault(pod["metadata"]["uid"], self._addresses.pod())

    async def relay_to(self, address: str) -> Relay | None:
        if not self.relayed_ports:
            return None
        return await Relay.open(self._addresses.pod(), address, self.relayed_ports)

    def host_ip(self, node: str) -> str:
        return self._node_ips[node]

    def allocatable(self, node: str) -> dict[str, str]:
        return {"cpu": self._specs[node].cpu, "memory": self._specs[node].memory}

    def services(self) -> list[Object]:
        return list(self._services.objects.values())

    def hosts(self, pod: Object, own: str) -> str:
        return self.proxy.hosts(pod, own, urlsplit(self.access.url).hostname or "127.0.0.1")

    def must_pull(self, node: str, container: Object) -> bool:
        policy = container.get("imagePullPolicy", "IfNotPresent")
        return policy == "Always" or (policy == "IfNotPresent" and (node, container["image"]) not in self._pulled)

    def pulled(self, node: str, image: str) -> None:
        self._pulled.add((node, image))

    def pull_fault(self, image: str) -> str | None:
        return next((each for pattern, each in self.pull_faults.items() if fnmatch.fnmatch(image, pattern)), None)

    def create_fault(self, pod: Object) -> str | None:
        name = pod["metadata"]["name"]
        return next((each for pattern, each in self.create_faults.items() if fnmatch.fnmatch(name, pattern)), None)

    def entrypoint(self, container: Object) -> list[str]:
        image = container["image"]
        return next(each for pattern, each in reversed(self.entrypoints.items()) if fnmatch.fnmatch(image, pattern))

    def environment_of_image(self, image: str) -> dict[str, str]:
        found = (each for pattern, each in self.image_environments.items() if fnmatch.fnmatch(image, pattern))
        return {name: value for each in found for name, value in each.items()}

    def resolved(self, command: list[str]) -> list[str]:
        """`python` and `stoker` are those of the interpreter that runs the tests."""
        match os.path.basename(command[0]):
            case "python" | "python3":
                return [sys.executable, *command[1:]]
            case "stoker":
                return [sys.executable, "-m", "control_plane.cli.main", *command[1:]]
        return command

    def base_environment(self, pod: Object, container: Object) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        url = urlsplit(self.access.url)
        return {
            "PATH": path,
            "PYTHONPATH": str(REPOSITORY),
            "LANG": "C.UTF-8",
            "HOME": "/tmp",
            **self.image_environment,
            **self.environment_of_image(container["image"]),
            "HOSTNAME": pod["spec"].get("hostname") or pod["metadata"]["name"],
            "KUBERNETES_SERVICE_HOST": url.hostname or "",
            "KUBERNETES_SERVICE_PORT": str(url.port or 443),
        }

    def log_path(self, pod: Object, container: str, restart: int) -> Path:
        metadata = pod["metadata"]
        return (
            self.folder
            / "logs"
            / f"{metadata['namespace']}_{metadata['name']}"
            / metadata["uid"]
            / container
            / f"{restart}.log"
        )

    # Hooks.

    def on_loop(self, call: Callable[[], T]) -> T:
        assert self._loop is not None

        async def wrapped() -> T:
            return call()

        coroutine: Coroutine[Any, Any, T] = wrapped()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def add_node(self, spec: NodeSpec) -> None:
        assert self._loop is not None
        self._specs[spec.name] = spec
        asyncio.run_coroutine_threadsafe(self._register(spec), self._loop).result(120)

    def kill(
        self, pod: str, namespace: str = "default", container: str | None = None, number: int | None = None
    ) -> None:
        """kill -9 of a container's first process; the pod's policy decides what follows."""
        self.on_loop(lambda: self._worker(pod, namespace).kill(container, code=number))

    def oom_kill(self, pod: str, namespace: str = "default", container: str | None = None) -> None:
        """As the kernel's out-of-memory killer: exit code 137, reason OOMKilled."""
        self.on_loop(lambda: self._worker(pod, namespace).kill(container, "OOMKilled"))

    def evict(
        self, pod: str, namespace: str = "default", message: str = "The node was low on resource: memory."
    ) -> None:
        """The node's own eviction, which asks no budget: containers killed, phase Failed, reason Evicted."""
        self.on_loop(lambda: self._worker(pod, namespace).end("Evicted", message))

    def shut_down_node(self, node: str, grace_s: float = 1.0) -> None:
        """Graceful node shutdown (KEP-2000): every pod is asked to go and ends as Failed, reason Terminated."""

        def shut_down() -> None:
            for each in [each for each in self._workers.values() if each.node == node]:
                each.end("Terminated", "Pod was terminated in response to imminent node shutdown.", grace_s)

        self.on_loop(shut_down)

    def lose_node(self, node: str, kill: bool = False) -> None:
        """The node falls silent, and so do those of its pods that are reached by relays; with `kill` everything on it
        dies, too."""

        def lose() -> None:
            self._lost[node].clear()
            self._on_relays(node, Relay.cut)
            if kill:
                self._off.add(node)
                for each in [each for each in self._workers.values() if each.node == node]:
                    for name in list(each.running):
                        each.kill(name)

        self.on_loop(lose)

    def _on_relays(self, node: str, act: Callable[[Relay], None]) -> None:
        for each in self._workers.values():
            if each.node == node and each.relay is not None:
                act(each.relay)

    def restore_node(self, node: str) -> None:
        def restore() -> None:
            self._off.discard(node)
            self._lost[node].set()
            self._on_relays(node, Relay.mend)
            self.background(self._returned(node))

        self.on_loop(restore)

    def execute(
        self,
        pod: str,
        command: list[str],
        namespace: str = "default",
        container: str | None = None,
        timeout_s: float = 120.0,
    ) -> tuple[int, str]:
        """Runs a command in a container, as `kubectl exec` would."""
        assert self._loop is not None
        worker = self.on_loop(lambda: self._worker(pod, namespace))
        name = container or worker.pod["spec"]["containers"][0]["name"]
        work = worker.execute(name, command, timeout_s)
        code, output = asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s + 10)
        return code, output.decode(errors="replace")

    def pids(self, pod: str, namespace: str = "default") -> dict[str, int]:
        """Of each running container its first process."""
        return self.on_loop(lambda: {name: each.pid for name, each in self._worker(pod, namespace).running.items()})

    def log(self, pod: str, namespace: str = "default", container: str | None = None) -> str:
        """Everything that the pods of this name ever printed, oldest first."""
        files = sorted(
            (self.folder / "logs" / f"{namespace}_{pod}").glob(f"*/{container or '*'}/*.log"),
            key=lambda each: each.stat().st_mtime,
        )
        return "".join(each.read_text(errors="replace") for each in files)

    def service_address(self, name: str, namespace: str = "default") -> str | None:
        return self.on_loop(lambda: self.proxy.addresses.get((namespace, name)))

    @property
    def running_pods(self) -> list[str]:
        return self.on_loop(lambda: sorted(each.name for each in self._workers.values() if each.running))

    def wait_idle(self, timeout_s: float = 120.0) -> None:
        """Waits until no pod has a worker any more."""
        ends_at = time.monotonic() + timeout_s
        while self.on_loop(lambda: len(self._workers)):
            if time.monotonic() > ends_at:
                raise AssertionError(f"pods left: {self.running_pods}")
            time.sleep(0.05)

    def _worker(self, pod: str, namespace: str) -> PodWorker:
        name = f"{namespace}/{pod}"
        found = next((each for each in self._workers.values() if each.name == name), None)
        if found is None:
            raise KeyError(f"no pod {name} on any node here")
        return found
