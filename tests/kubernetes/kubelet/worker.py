"""One pod on a node: from bound to gone.

Upstream: `pkg/kubelet/pod_workers.go`, `pkg/kubelet/kuberuntime/kuberuntime_manager.go` (SyncPod, killPod), back-off of
restarts and image pulls: `pkg/kubelet/kubelet.go` (here shorter), hooks: `pkg/kubelet/lifecycle/handlers.go`.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.client import path_of, suppress_api_error
from tests.kubernetes.clock import read, stamp
from tests.kubernetes.kubelet import processes
from tests.kubernetes.kubelet.environment import ConfigError
from tests.kubernetes.kubelet.launching import Launching, PullError
from tests.kubernetes.kubelet.probes import Prober
from tests.kubernetes.kubelet.processes import Running, StartError
from tests.kubernetes.kubelet.relay import Relay
from tests.kubernetes.kubelet.status import ContainerState, conditions_of, phase_of
from tests.kubernetes.kubelet.volumes import MountError, Volumes

if TYPE_CHECKING:
    from tests.kubernetes.kubelet.kubelet import Kubelet

Object = dict[str, Any]
_RETRY_S = 0.2
# Conditions are merged by their type, so that those of others stay (`pkg/util/pod/pod.go`, PatchPodStatus).
_STRATEGIC = "application/strategic-merge-patch+json"


class PodWorker:
    """Owns a pod's processes, folders and status."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet = kubelet
        self.pod = pod
        metadata = pod["metadata"]
        self.name = f"{metadata['namespace']}/{metadata['name']}"
        self.uid: str = metadata["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.folder: Path = kubelet.folder / "pods" / self.uid
        memory = kubelet.memory_folder / self.uid
        self.volumes = Volumes(pod, self.folder / "volumes", memory, kubelet.folder / "claims")
        self.states = [
            ContainerState(
                each["name"],
                each.get("image", ""),
                init=kind == "initContainers",
                sidecar=each.get("restartPolicy") == "Always",
            )
            for kind in ("initContainers", "containers")
            for each in pod["spec"].get(kind) or []
        ]
        self._launching = Launching(kubelet, self.folder, self.volumes)
        self.running: dict[str, Running] = {}
        self.address = ""
        self.relay: Relay | None = None
        self._started_at = ""
        self._written: Object = {}
        self._reason: tuple[str, str] | None = None
        self._phase: str | None = None
        self._causes: dict[str, tuple[str, str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dirty = asyncio.Event()
        # A container came further.
        self._moved = asyncio.Event()
        self._stopping = asyncio.Event()
        self._killed_at = float("inf")
        self.done = asyncio.Event()

    # What the kubelet tells it.

    def update(self, pod: Object) -> None:
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            # The grace ends at that time, by whoever set it.
            left_s = (read(pod["metadata"]["deletionTimestamp"]) - read(stamp())).total_seconds()
            left_s = min(left_s, pod["metadata"].get("deletionGracePeriodSeconds", 0))
            self._killed_at = min(self._killed_at, time.monotonic() + max(left_s, 0))
            self._stopping.set()
        self._dirty.set()

    def end(self, reason: str, message: str, grace_s: float | None = None) -> None:
        """The node ends the pod by itself: eviction, shutdown."""
        self._reason = (reason, message)
        self._killed_at = time.monotonic() + (grace_s or 0)
        self._phase = "Failed"
        self._stopping.set()

    def kill(self, container: str | None, reason: str = "", code: int | None = None) -> bool:
        """SIGKILL to a container's first process; told as `reason` (`OOMKilled`)."""
        name = container or self.pod["spec"]["containers"][0]["name"]
        process = self.running.get(name)
        if process is None:
            return False
        if reason:
            self._causes[name] = (reason, "")
        process.signal(code or signal.SIGKILL)
        return True

    # Its life.

    async def run(self) -> None:
        teller = asyncio.create_task(self._tell())
        # News of a pod that goes already, late or told anew: it is only ended (SyncTerminatingPod).
        life = asyncio.create_task(asyncio.sleep(0) if self._stopping.is_set() else self._live())
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                # It ended by itself; its object stays until somebody deletes it.
                self._dirty.set()
                await self._stopping.wait()
            await self._stop(life)
            teller.cancel()
            await self._write_status()
            await self._gone()
        finally:
            for task in (teller, life, stop, *self._tasks.values()):
                task.cancel()
            for process in self.running.values():
                process.signal(signal.SIGKILL)
            if self.relay is not None:
                self.relay.close()
            self.kubelet.tell_end(self)
            self.volumes.remove()
            self.done.set()

    async def _live(self) -> None:
        self._started_at = stamp()
        self.address = await self.kubelet.address_of(self.pod)
        self.relay = await self.kubelet.relay_to(self.address)
        for state in self.states:
            state.wait(
                "PodInitializing" if any(each.init for each in self.states) and not state.init else "ContainerCreating"
            )
        self._dirty.set()
        await self._mount()
        self.kubelet.background(self._guarded(self._renew_tokens()))
        init = self.pod["spec"].get("initContainers") or []
        for container in init:
            task = self._begin(container)
            state = self._state(container["name"])
            if state.sidecar:
                await self._sidecar_started(state)
            else:
                await task
                if state.ended is None or state.ended["exitCode"] != 0:
                    return
        main = [self._begin(each) for each in self.pod["spec"]["containers"]]
        await asyncio.gather(*main)
        for state in self.states:
            # Sidecars go when the others have.
            if state.sidecar and state.name in self.running:
                await self._end_process(state.name, time.monotonic() + self._grace_s())

    async def _sidecar_started(self, state: ContainerState) -> None:
        while not state.started:
            self._moved.clear()
            await self._moved.wait()

    async def _mount(self) -> None:
        told = ""
        while True:
            try:
                await self.volumes.make(
                    self.kubelet.client, self.kubelet.read, host_ip=self.kubelet.host_ip(self.node), pod_ip=self.address
                )
                return
            except MountError as error:
                if str(error) != told:
                    told = str(error)
                    await self.kubelet.event(self.pod, "Warning", "FailedMount", f"MountVolume.SetUp failed: {error}")
            except (ApiError, aiohttp.ClientError, OSError) as error:
                told = str(error)
            await asyncio.sleep(_RETRY_S)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that ends with the pod."""
        task = asyncio.create_task(work)
        try:
            await self.done.wait()
        finally:
            task.cancel()

    def _begin(self, container: Object) -> asyncio.Task[None]:
        task = asyncio.create_task(self._keep(container))
        self._tasks[container["name"]] = task
        return task

    async def _keep(self, container: Object) -> None:
        """Runs a container for as often as the pod's policy says."""
        state = self._state(container["name"])
        policy = "Always" if state.sidecar else self.pod["spec"]["restartPolicy"]
        delay_s = self.kubelet.first_backoff_s
        while True:
            await self.kubelet.runs(self.node)
            if self._stopping.is_set():
                return
            began = time.monotonic()
            code = await self._once(container, state)
            again = policy == "Always" or (policy == "OnFailure" and code != 0)
            if state.init and not state.sidecar:
                again = code != 0 and policy != "Never"
            if not again or self._stopping.is_set():
                return
            if time.monotonic() - began > self.kubelet.backoff_reset_s:
                delay_s = self.kubelet.first_backoff_s
            state.last = state.state if state.ended else state.last
            state.restarts += 1
            if state.restarts > 1:
                words = (
                    f"back-off {delay_s:g}s restarting failed container={state.name} pod={self.name.replace('/', '_')}"
                )
                state.wait("CrashLoopBackOff", words)
                self._dirty.set()
                await self.kubelet.event(self.pod, "Warning", "BackOff", words)
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, self.kubelet.last_backoff_s)

    async def _once(self, container: Object, state: ContainerState) -> int:
        process = await self._start(container, state)
        self.running[state.name] = process
        state.run(uuid.uuid4().hex)
        probes = asyncio.create_task(self._probe(container, state))
        self._dirty.set()
        await self.kubelet.event(self.pod, "Normal", "Started", f"Container {state.name} started")
        try:
            await self._post_start(container)
            code = await process.wait()
        except asyncio.CancelledError:
            # Nobody else would end it.
            process.signal(signal.SIGKILL)
            raise
        finally:
            probes.cancel()
            self.running.pop(state.name, None)
        reason, message = self._causes.pop(state.name, ("", ""))
        state.end(code, reason, message)
        self._dirty.set()
        return code

    async def _start(self, container: Object, state: ContainerState) -> Running:
        """Pulls, makes and starts, again and again while that fails; the state says with what."""
        delay_s = self.kubelet.first_backoff_s
        while True:
            try:
                return await self._launching.launch(self.pod, container, state.restarts, self.address, self._shown)
            except PullError as error:
                state.wait("ErrImagePull", str(error))
                words = f'Back-off pulling image "{container["image"]}"'
                await self.kubelet.event(self.pod, "Warning", "Failed", f"Error: ErrImagePull: {error}")
                self._dirty.set()
                await asyncio.sleep(delay_s / 2)
                state.wait("ImagePullBackOff", words)
            except ConfigError as error:
                state.wait("CreateContainerConfigError", str(error))
                await self.kubelet.event(self.pod, "Warning", "Failed", f"Error: {error}")
            except StartError as error:
                state.wait("CreateContainerError", str(error))
                await self.kubelet.event(self.pod, "Warning", "Failed", f"Error: {error}")
            except (ApiError, aiohttp.ClientError) as error:
                state.wait("CreateContainerError", str(error))
            self._dirty.set()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, self.kubelet.last_backoff_s)

    async def rewrite_volumes(self, tokens: bool = False) -> None:
        if self.address:
            host_ip = self.kubelet.host_ip(self.node)
            await self.volumes.rewrite(
                self.pod, self.kubelet.client, self.kubelet.read, host_ip=host_ip, pod_ip=self.address, tokens=tokens
            )

    async def _renew_tokens(self) -> None:
        while self.volumes.tokens_last_s is not None:
            await asyncio.sleep(0.8 * self.volumes.tokens_last_s)
            with suppress(ApiError, aiohttp.ClientError, OSError):
                await self.rewrite_volumes(tokens=True)

    def refresh_hosts(self) -> None:
        if self.address and self.running:
            self._launching.write_hosts(self.pod, self.address)

    async def execute(self, container: str, command: list[str], timeout_s: float) -> tuple[int, bytes]:
        process = self.running.get(container)
        if process is None:
            return 137, b"container not running"
        return await processes.execute(process, self.kubelet.resolved(command), timeout_s)

    # Probes and hooks.

    async def _probe(self, container: Object, state: ContainerState) -> None:
        async def execute(command: list[str], timeout_s: float) -> tuple[int, bytes]:
            return await self.execute(state.name, command, timeout_s)

        def prober(kind: str) -> Prober | None:
            probe = container.get(kind)
            return Prober(probe, container, self.address, execute) if probe else None

        startup, readiness, liveness = prober("startupProbe"), prober("readinessProbe"), prober("livenessProbe")
        if startup is not None:
            await startup.until_success(lambda words: self._unhealthy(state, "Startup", words))
        state.started = True
        state.ready = readiness is None
        self._dirty.set()
        self._moved.set()

        def readied(verdict: bool, words: str) -> None:
            state.ready = verdict
            self._dirty.set()

        following = []
        if readiness is not None:
            following.append(readiness.follow(readied, False))
        if liveness is not None:
            following.append(
                liveness.follow(lambda good, words: good or self._unhealthy(state, "Liveness", words), True)
            )
        await asyncio.gather(*following)

    def _unhealthy(self, state: ContainerState, kind: str, words: str) -> None:
        message = f"{kind} probe failed: {words}"
        self.kubelet.background(self.kubelet.event(self.pod, "Warning", "Unhealthy", message))
        text = f"Container {state.name} failed {kind.lower()} probe, will be restarted"
        self.kubelet.background(self.kubelet.event(self.pod, "Normal", "Killing", text))
        self.kubelet.background(self._end_process(state.name, time.monotonic() + self._grace_s()))

    async def _post_start(self, container: Object) -> None:
        hook = (container.get("lifecycle") or {}).get("postStart")
        if hook:
            await self._hook(container, hook, 30.0)

    async def _hook(self, container: Object, hook: Object, timeout_s: float) -> None:
        if "exec" in hook:
            await self.execute(container["name"], hook["exec"]["command"], timeout_s)
        elif "sleep" in hook:
            await asyncio.sleep(min(hook["sleep"]["seconds"], timeout_s))
        elif "httpGet" in hook:
            probe = {"httpGet": hook["httpGet"], "timeoutSeconds": timeout_s}
            await Prober(probe, container, self.address, self._no_command).once()

    async def _no_command(self, command: list[str], timeout_s: float) -> tuple[int, bytes]:
        raise NotImplementedError

    # Its end.

    def _grace_s(self) -> float:
        return float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

    async def _stop(self, life: asyncio.Task[None]) -> None:
        """Every container at once: preStop, SIGTERM, and SIGKILL when the grace is over."""
        self._dirty.set()
        for name in list(self.running):
            text = f"Stopping container {name}"
            self.kubelet.background(self.kubelet.event(self.pod, "Normal", "Killing", text))
        if not self.running and not life.done():
            # Still being made: nothing to be asked, nothing to wait for.
            life.cancel()
            for task in self._tasks.values():
                task.cancel()
        await asyncio.gather(*(self._end_process(name) for name in list(self.running)))
        # A container that was being started at that moment is ended like the others.
        while any(name in self.running for name in self._tasks):
            await asyncio.gather(*(self._end_process(name) for name in list(self.running)))
        life.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for state in self.states:
            if state.ended is None:
                state.end(137, "ContainerStatusUnknown" if state.running else "Error")

    async def _end_process(self, name: str, killed_at: float | None = None) -> None:
        process = self.running.get(name)
        if process is None:
            return

        def left_s() -> float:
            return max((self._killed_at if killed_at is None else killed_at) - time.monotonic(), 0.0)

        container = next(
            each
            for kind in ("containers", "initContainers")
            for each in self.pod["spec"].get(kind) or []
            if each["name"] == name
        )
        hook = (container.get("lifecycle") or {}).get("preStop")
        if hook and left_s() > 0:
            await self._hook(container, hook, left_s())
        if left_s() > 0:
            process.signal(signal.SIGTERM)
        while name in self.running and self.running[name] is process:
            # The end of the grace may move nearer: a second deletion may shorten it.
            remaining_s = left_s()
            if remaining_s <= 0:
                process.signal(signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.launcher.wait()), min(remaining_s, 0.5) or 0.5)
                await asyncio.sleep(0)
                if name in self.running:
                    await asyncio.sleep(0.01)

    async def _gone(self) -> None:
        """The last word: the object goes, unless the node ended the pod by itself."""
        if "deletionTimestamp" not in self.pod["metadata"] and self._reason is not None:
            while "deletionTimestamp" not in self.pod["metadata"]:
                self._dirty.clear()
                await self._dirty.wait()
        metadata = self.pod["metadata"]
        while True:
            try:
                await self.kubelet.client.delete(
                    "pods",
                    metadata["namespace"],
                    metadata["name"],
                    gracePeriodSeconds=0,
                    preconditions={"uid": self.uid},
                )
                return
            except ApiError as error:
                if error.code == 409:
                    return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(_RETRY_S)

    # Its status.

    @property
    def _shown(self) -> str:
        """The address that others know it by."""
        return self.relay.outside if self.relay is not None else self.address

    def _state(self, name: str) -> ContainerState:
        return next(each for each in self.states if each.name == name)

    def status(self) -> Object:
        policy = self.pod["spec"]["restartPolicy"]
        old = self.pod.get("status") or {}
        phase = self._phase or phase_of(self.states, policy)
        if old.get("phase") in ("Succeeded", "Failed"):
            phase = old["phase"]
        conditions = conditions_of(self.pod, self.states, phase, old.get("conditions") or [])
        made: Object = {
            "phase": phase,
            "conditions": conditions,
            "hostIP": self.kubelet.host_ip(self.node),
            "startTime": old.get("startTime") or self._started_at or stamp(),
            "containerStatuses": [each.written() for each in self.states if not each.init],
            "qosClass": old.get("qosClass", "BestEffort"),
        }
        if self.address:
            made |= {"podIP": self._shown, "podIPs": [{"ip": self._shown}]}
        init = [each.written() for each in self.states if each.init]
        if init:
            made["initContainerStatuses"] = init
        if self._reason is not None:
            made |= {"reason": self._reason[0], "message": self._reason[1]}
        return made

    async def _tell(self) -> None:
        """Writes the status whenever it changed and the node can be heard."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._write_status()

    async def _write_status(self) -> None:
        while True:
            await self.kubelet.heard(self.node)
            status = self.status()
            if status == self._written:
                return
            metadata = self.pod["metadata"]
            path = path_of("pods", metadata["namespace"], metadata["name"], "status")
            body = {"metadata": {"uid": self.uid}, "status": status}
            try:
                with suppress_api_error(404, 409):
                    await self.kubelet.client.call("PATCH", path, body, kind=_STRATEGIC)
                self._written = status
                return
            except (ApiError, aiohttp.ClientError, OSError):
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
