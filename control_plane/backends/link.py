"""One slot as a backend sees it: its agent is found, watched by its event stream, and found again when that ends.

Where the agent is (and who starts it) is its home's to say. Limits: a hung agent is only noticed by the silence of its
stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from control_plane.backends.agent_client import AgentClient
from control_plane.backends.base import SlotListener, SlotUnavailable
from control_plane.tasks import end_task
from function_runtime.protocol import PROTOCOL_VERSION, AgentInfo, SlotState, speaks

logger = logging.getLogger(__name__)

AGAIN_S: Final = (0.0, 0.2, 1.0, 3.0, 10.0)
"""Pauses before an agent that keeps ending is looked for (or started) again; the last one repeats."""
STEADY_S: Final = 30.0
"""An agent that lived this long is trusted again."""
HUNG_S: Final = 60.0
"""An agent that lives and has said nothing for this long is hung."""


PROBE_S: Final = 2.0


async def is_refused(host: str, port: int) -> bool:
    """Whether nobody listens there any more, as the other machine itself says; silence is no answer."""
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        pass
    return False


def _require_spoken(state: SlotState) -> None:
    """One version apart is understood: what is not known is ignored."""
    if not speaks(state.protocol):
        raise SlotUnavailable(
            f"its agent speaks version {state.protocol} of the protocol, this control plane {PROTOCOL_VERSION}: "
            "give slots an image at most one version apart from the control plane's"
        )


class AgentHome(Protocol):
    @property
    def shares_files(self) -> bool:
        """Whether paths of this control plane mean the same there."""
        ...

    async def find(self) -> AgentInfo:
        """The slot's agent; raises SlotUnavailable, or OSError for a directory that cannot be used."""
        ...

    async def is_gone(self) -> bool:
        """Whether there is no agent now: it has ended, and its replicas with it."""
        ...

    async def connected(self, info: AgentInfo) -> None:
        """It answers."""
        ...

    def heard(self) -> None:
        """It has just said something."""

    def end_hung(self) -> None: ...

    async def news(self, pause_s: float) -> None:
        """Returns after the pause, or as soon as there is reason to look again."""
        ...


class SlotLink:
    def __init__(self, slot_id: str, home: AgentHome) -> None:
        self.slot_id = slot_id
        self.home = home
        self._client: AgentClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard_s = self.since_s = time.monotonic()
        self.heard = False
        """Whether its agent has said anything since this began."""
        self._retiring = False

    @property
    def shares_files(self) -> bool:
        return self.home.shares_files

    @property
    def agent(self) -> AgentClient:
        if self._client is None:
            raise SlotUnavailable(f"the agent of {self.slot_id} is not connected")
        return self._client

    def start(self, listener: SlotListener) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(listener))

    def close(self) -> Coroutine[Any, Any, None]:
        """From the call on, awaited or not, the listener hears nothing of it: what is on its way already would bring a
        slot back that is gone, for good."""
        if self._task is not None:
            self._task.cancel()
        return end_task(self._task)

    async def shutdown_agent(self, grace_s: float) -> None:
        if self._client is not None:
            try:
                await self._client.shutdown(grace_s)
            except SlotUnavailable as error:
                logger.warning("event=agent_shutdown_failed slot=%s error=%s", self.slot_id, error)

    async def retire(self) -> None:
        """Ends the agent if it runs nothing; it is not looked for again then. Raises SlotRefused, SlotUnavailable."""
        self._retiring = True
        try:
            await self.agent.shutdown(0.0, if_idle=True)
        except BaseException:
            self._retiring = False
            raise

    async def _watch(self, listener: SlotListener) -> None:
        failures = 0
        while True:
            begin_s = time.monotonic()
            try:
                info = await self.home.find()
                async with AgentClient(info) as client:
                    self._client = client
                    await self._listen(client, info, listener)
                    reason = "the agent closed its event stream"
            except SlotUnavailable as error:
                reason = str(error)
            except OSError as error:
                reason = f"the slot's directory cannot be used: {error}"
            finally:
                self._client = None
            gone = await self.home.is_gone()
            if self._retiring:
                return
            failures = 0 if time.monotonic() - begin_s > STEADY_S else failures + 1
            logger.warning("event=agent_lost slot=%s gone=%s reason=%s", self.slot_id, gone, reason)
            listener.slot_lost(self.slot_id, reason, agent_gone=gone)
            if not gone and time.monotonic() - self._heard_s > HUNG_S:
                self.home.end_hung()
            await self.home.news(AGAIN_S[min(max(failures - 1, 0), len(AGAIN_S) - 1)])

    async def _listen(self, client: AgentClient, info: AgentInfo, listener: SlotListener) -> None:
        first = True
        async for event in client.events():
            self._heard_s = time.monotonic()
            self.home.heard()
            if first:
                first, self.heard = False, True
                logger.info("event=agent_connected slot=%s pid=%d", self.slot_id, info.pid)
                await self.home.connected(info)
            if event.state is not None:
                _require_spoken(event.state)
                listener.slot_state(self.slot_id, event.state)
            if event.replica is not None:
                listener.replica_changed(self.slot_id, event.replica)
            if event.times:
                listener.time_passed(self.slot_id, event.times)
            if event.log:
                logger.info("event=agent_says slot=%s text=%s", self.slot_id, event.log)
