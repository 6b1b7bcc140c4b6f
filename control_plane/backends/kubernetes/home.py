"""A slot in a pod: where its agent listens is read from the pod, and the cluster says when it has moved or gone.

Limits: an agent is known to be gone by a refused connection, by its pod's end, or by silence that has lasted for longer
than an agent and its replicas outlive their last reader.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from control_plane.backends.base import SlotUnavailable
from control_plane.backends.kubernetes.api import Object
from control_plane.backends.kubernetes.phases import AGENT
from control_plane.backends.kubernetes.pods import PORT, Service
from control_plane.backends.kubernetes.watching import name_of, uid_of
from control_plane.backends.link import is_refused
from function_runtime.protocol import AgentInfo

LISTEN_S: Final = 15.0
"""An agent that does not listen within this time is taken for lost, and looked for again."""
LOOK_S: Final = 0.1
"""Pause between looks whether an agent listens whose container has been started: the bound on the delay this adds."""
PROBE_S: Final = 2.0


async def listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError):
        return False
    return True


def is_running(pod: Object) -> bool:
    """Whether its container has been started on some node, so that its agent may listen."""
    status = pod.get("status") or {}
    container: Object = next((each for each in status.get("containerStatuses") or () if each.get("name") == AGENT), {})
    return bool(status.get("podIP")) and "running" in (container.get("state") or {})


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def info_of(pod: Object, service: Service) -> AgentInfo:
    name = name_of(pod)
    return AgentInfo(
        slot_id=name,
        pid=0,
        host=str((pod.get("status") or {}).get("podIP") or ""),
        port=PORT,
        token=service.token(name),
        incarnation=uid_of(pod),
    )


class PodHome:
    def __init__(self, pod: Object, service: Service, void_after_s: float) -> None:
        self.pod = pod
        self._service = service
        self._void_after_s = void_after_s
        self._heard_s = time.monotonic()
        self._news = asyncio.Event()

    @property
    def shares_files(self) -> bool:
        return False

    def moved(self, pod: Object) -> None:
        """What the cluster says of it now. A pod that has come up, or lost its container, is looked at at once."""
        before = (is_running(self.pod), is_ready(self.pod), (self.pod.get("status") or {}).get("podIP"))
        self.pod = pod
        if before != (is_running(pod), is_ready(pod), (pod.get("status") or {}).get("podIP")):
            self._news.set()

    async def find(self) -> AgentInfo:
        """Waits for an agent that is only coming up, or is being started anew: it is connected to as soon as it
        listens, which its pod's probes would tell up to a second later."""
        deadline_s = time.monotonic() + LISTEN_S
        while time.monotonic() < deadline_s:
            self._news.clear()
            if is_running(self.pod):
                info = info_of(self.pod, self._service)
                if await listens(info.host, info.port):
                    return info
                await self.news(LOOK_S)
            else:
                await self.news(deadline_s - time.monotonic())
        raise SlotUnavailable(f"the agent of {name_of(self.pod)} did not listen within {LISTEN_S:g} s")

    async def is_gone(self) -> bool:
        if not is_running(self.pod):
            return True
        info = info_of(self.pod, self._service)
        if await is_refused(info.host, info.port):
            return True
        # A partition, or a network policy: silence says nothing until it has lasted.
        return time.monotonic() - self._heard_s > self._void_after_s

    async def connected(self, info: AgentInfo) -> None:
        self._heard_s = time.monotonic()

    def heard(self) -> None:
        self._heard_s = time.monotonic()

    def end_hung(self) -> None:
        return  # its pod's liveness probe sees to that

    async def news(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            pass
