"""The face of whatever provides slots: start and end replicas there, and tell what happens to them.

A backend owns the connections to its agents and reports to one listener; it decides nothing. Slots of a class come and
go through it, too: `add_slots` begins to get some, which are heard of once they are there, `remove_slot` gives an idle
one back. Limits: how long a slot takes to come is told by the one that came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from function_runtime.protocol import Peer, ReplicaSpec, ReplicaStatus, ReplicaTime, SlotState


class SlotUnavailable(Exception):
    """The slot's agent cannot be reached now; the backend is already trying to get it back."""

    def __init__(self, message: str, code: str = "slot_unavailable", again_s: float | None = None) -> None:
        """`again_s`: after how long it may be asked again, where that is known."""
        super().__init__(message)
        self.code = code
        self.again_s = again_s


class SlotRefused(SlotUnavailable):
    """The agent is there and says no: the same command would be refused again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}", code)
        self.message = message


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots that are alike: where work that needs one of them may go. On one machine there is one class."""

    name: str = ""
    least: int = 1
    """Never fewer."""
    most: int = 1
    devices: int = 1
    """Of each slot."""
    most_replicas: int = 0
    """That a slot takes; 0: what its memory holds."""
    on_demand: bool = False
    """Whether even the least are only there once they were asked for."""
    assumed_s: float = 2.0
    """How long a slot takes to come, before any has."""

    @property
    def elastic(self) -> bool:
        return self.most > self.least or self.on_demand


@dataclass(frozen=True, slots=True)
class SlotWait:
    """A slot that is coming or leaving, as people are told of it."""

    slot_id: str
    class_name: str
    phase: str
    words: str
    since_s: float
    """Seconds in this phase."""


class SlotListener(Protocol):
    def slot_state(self, slot_id: str, state: SlotState) -> None:
        """The whole truth about a slot, at the start of a stream of events and whenever it changes."""

    def replica_changed(self, slot_id: str, status: ReplicaStatus) -> None: ...

    def time_passed(self, slot_id: str, times: Mapping[str, ReplicaTime]) -> None:
        """For replicas, by id, that have not changed."""

    def slot_lost(self, slot_id: str, reason: str, *, agent_gone: bool) -> None:
        """No events from there any more. `agent_gone`: the agent has ended, and its replicas with it."""


class Backend(Protocol):
    async def start(self, listener: SlotListener) -> None:
        """Begin to watch the slots; returns at once."""

    async def look(self) -> None:
        """Slots of others may have come, moved or gone: look for them now."""

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        """Stop watching; replicas live on unless `end_agents`."""

    @property
    def slot_ids(self) -> tuple[str, ...]:
        """Those that are watched: heard of, or expected to be."""
        ...

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        """How many slots there may be, over all gateways."""
        ...

    def class_of(self, slot_id: str) -> str: ...

    @property
    def coming(self) -> Mapping[str, float]:
        """Slots that were asked for and have not been heard yet, with the seconds since."""
        ...

    @property
    def leaving(self) -> frozenset[str]:
        """Slots that are being given back: nothing new goes there."""
        ...

    async def add_slots(self, class_name: str, count: int) -> int:
        """Begin to get so many more; how many could be begun (the class has a bound). Raises SlotUnavailable."""
        ...

    async def remove_slot(self, slot_id: str) -> None:
        """Give a slot back on which nothing runs. Raises SlotRefused where something does, which whoever ends it knows
        better than whoever asked; SlotUnavailable where that cannot be told."""

    def free_bytes(self, slot_id: str) -> int:
        """Memory a new replica could have there."""

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        """Idempotent by replica id; answers at once. Raises SlotUnavailable."""

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None: ...

    async def warm(self, slot_id: str, workers: int) -> None:
        """How many forked workers should wait there."""

    def peers(self, slot_ids: Sequence[str]) -> tuple[Peer, ...]:
        """How these slots' pools are read by another's agent; those out of reach are left out."""

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> None:
        """Prepare a checkpoint before anyone needs it, or take the form from one of the peers."""

    async def renew_store(self, slot_id: str, specs: Sequence[ReplicaSpec]) -> None:
        """Newer tokens of the object store for these replicas there. Raises SlotUnavailable."""

    async def resize_kv(self, slot_id: str, kv_bytes: Mapping[str, int]) -> None:
        """Other shares of their device's memory for these replicas there; what they have then they tell. Raises
        SlotUnavailable."""

    async def evict_pool(self, slot_id: str, key: str) -> None:
        """Let a prepared form go that nobody uses. Raises SlotUnavailable; SlotRefused where there is none."""

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        """Drop what is kept of a checkpoint, in the pool where nobody uses it and below."""

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        """The chance per checkpoint identity of being wanted, for `holds_s`: the pool keeps by it."""

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str: ...
