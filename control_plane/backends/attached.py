"""Slots on other machines that are started by whoever keeps those machines, and named to this control plane.

`STOKER_AGENTS` says where their agents listen; they are commanded with tokens derived from one secret, of which each
agent knows the hash of its own. They share no folder with this process. Limits: they are neither begun nor given back
from here; one that comes up late is found within the longest pause of its link.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from control_plane.backends.base import SlotUnavailable
from control_plane.backends.link import is_refused
from control_plane.settings import AgentPlace
from function_runtime.protocol import AgentInfo, agent_token

VOID_SHARE: Final = 1.5
"""Of `orphan_s`: after so much silence an agent that nobody reads has ended, and so have its replicas."""


@dataclass(slots=True)
class AttachedHome:
    """An agent at a known address."""

    place: AgentPlace
    secret_path: Path
    orphan_s: float
    _heard_s: float = 0.0

    @property
    def shares_files(self) -> bool:
        return False

    async def find(self) -> AgentInfo:
        try:
            secret = await asyncio.to_thread(self.secret_path.read_bytes)
        except OSError as error:
            raise SlotUnavailable(f"the secret of the agents cannot be read: {error}") from error
        place = self.place
        token = agent_token(secret.strip(), place.slot_id)
        self._heard_s = self._heard_s or time.monotonic()
        return AgentInfo(place.slot_id, 0, place.host, place.port, token, "")

    async def is_gone(self) -> bool:
        """Silence says nothing until it has lasted for longer than an agent outlives its last reader."""
        if await is_refused(self.place.host, self.place.port):
            return True
        return time.monotonic() - self._heard_s > VOID_SHARE * self.orphan_s

    async def connected(self, info: AgentInfo) -> None:
        self.heard()

    def heard(self) -> None:
        self._heard_s = time.monotonic()

    def end_hung(self) -> None:
        return  # whoever started it sees to that

    async def news(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
