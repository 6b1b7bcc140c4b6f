"""Every replica there is, on every slot, as the agents tell it: the mirror on which scaling and serving act.

`start` asks a slot for a replica and `end` drains one; what agents report moves the mirror and is told to listeners; a
replica's last status closes its rows in the ledger, once. Limits: ended replicas are remembered for `KEEP_ENDED`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

import msgspec

from autoscaler.placement import Placement
from control_plane.backends.base import Backend, SlotRefused, SlotUnavailable
from control_plane.errors import StokerError
from control_plane.lanes import FunctionKey
from control_plane.placing import Placing
from control_plane.slot_pools import SlotPools
from function_runtime.protocol import (
    EngineOptions,
    ReplicaError,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    SlotState,
)

logger = logging.getLogger(__name__)
K = TypeVar("K")

KEEP_ENDED: Final = 200
CLOSE_RETRY_S: Final = 2.0
ASK_AGAIN_S: Final = 2.0
"""Pause before an end is asked for again of an agent that is heard but did not take it."""
GONE: Final = frozenset({ReplicaState.ENDED, ReplicaState.FAILED})
TERMINATING: Final = "slot_terminating"
"""What an agent that is going away answers to a start."""
STARTING: Final = frozenset({ReplicaState.STARTING, ReplicaState.LOADING})


class ReplicaBooks(Protocol):
    """Where a replica's life is written down."""

    async def report_replica(self, status: ReplicaStatus) -> object: ...

    async def close_replica(self, status: ReplicaStatus) -> object: ...


def now_us() -> int:
    return time.time_ns() // 1000


class Fleet:
    def __init__(self, backend: Backend, books: ReplicaBooks) -> None:
        self._backend = backend
        self._books = books
        self.placing = Placing(self, backend)
        self.pools = SlotPools(self, backend)
        self.replicas: dict[str, ReplicaStatus] = {}
        """Living ones and, behind them, the last that ended."""
        self.slot_of: dict[str, str] = {}
        self._living: dict[FunctionKey, dict[str, None]] = {}
        self._here: dict[str, dict[str, None]] = {}
        """Living replicas by function and by slot."""
        self.slots: dict[str, SlotState] = {}
        """Slots whose agents are in sight now."""
        self.on_replica: Callable[[ReplicaStatus, ReplicaStatus | None], None] = lambda status, before: None
        """Told of all news: the new status and the one before."""
        self.watchers: list[Callable[[ReplicaStatus, ReplicaStatus | None], None]] = []
        self.slot_watchers: list[Callable[[SlotState, SlotState | None], None]] = []
        """Told before, of a replica that is new or in another state: not that time has passed for it."""
        self.on_slot: Callable[[str, bool], None] = lambda slot_id, anew: None
        """Told when a slot came into sight (`anew`: under another agent) or went out of it."""
        self.on_kv: Callable[[ReplicaStatus], None] = lambda status: None
        """Told of a replica that has another amount of KV memory."""
        self.make_room: Callable[[str, ReplicaSpec], Awaitable[None]] = _no_room_needed
        """Before a replica is asked for: the memory it is to have there may be others' still."""
        self.is_outranked: Callable[[FunctionKey], bool] = lambda key: False
        """Whether room that is becoming free is kept for another function."""
        self.on_no_room: Callable[[FunctionKey, int, int], None] = lambda key, count, waiting: None
        """Told of a function that found no room for so many replicas, and how many requests wait for them."""
        self.may_clear: Callable[[FunctionKey, tuple[str, ...]], bool] = lambda key, victims: True
        """Whether these replicas may end together for a function."""
        self.on_victim: Callable[[str, str], None] = lambda replica_id, reason: None
        """Told of a replica that has to end for another, and why."""
        self.is_closed: Callable[[str], bool] = self.is_terminating
        """Whether a slot takes no new replica: it terminates, or somebody drained it."""
        self._closed: set[str] = set()
        self._ended: dict[str, None] = {}
        """Those that are remembered although they live no more, the first to end first."""
        self.successors: dict[str, str] = {}
        """Replicas that are starting to take the place of another, with that one."""
        self.given_up: set[str] = set()
        """Living replicas that stalled: nobody waits for them, whether or not their agent can be told to end them."""
        self._unended: dict[str, tuple[float, str]] = {}
        """Ends that an agent out of sight was not told of, with grace and reason."""
        self._asking: set[str] = set()
        """Replicas of which an agent that was asked to start them has not answered yet."""
        self._empty: set[str] = set()
        """Slots out of sight that are known to have no agent, and so no replicas."""
        self.keeps_books = True
        """Whether what replicas cost is written down here: one gateway of a database does."""
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._backend.start(self)

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        await self._backend.close(end_agents=end_agents, grace_s=grace_s)
        await self.placing.grants.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- views ---

    @property
    def in_sight(self) -> bool:
        """Whether every slot's agent is being heard, or known to be gone."""
        return all(slot_id in self.slots or slot_id in self._empty for slot_id in self._backend.slot_ids)

    async def look(self) -> None:
        """Slots of other gateways may have come, moved or gone."""
        await self._backend.look()

    async def seen(self) -> None:
        """Returns once every slot's agent has been heard, or is known to be gone."""
        while not self.in_sight:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    @property
    def backend(self) -> Backend:
        """What provides the slots, for who only looks."""
        return self._backend

    def living(self, key: FunctionKey | None = None) -> list[ReplicaStatus]:
        if key is not None:
            return [self.replicas[replica_id] for replica_id in self._living.get(key, ())]
        return [self.replicas[replica_id] for known in self._living.values() for replica_id in known]

    def count_of(self, key: FunctionKey) -> int:
        """How many of a function live."""
        return len(self._living.get(key, ()))

    def knows(self, slot_id: str) -> bool:
        """Whether the slot is one of ours: heard of, or expected."""
        return slot_id in self.slots or slot_id in self._backend.slot_ids

    def is_terminating(self, slot_id: str) -> bool:
        """Its agent was told to go: nothing new is placed there; what runs there finishes or is parked by its replica,
        and goes on elsewhere."""
        state = self.slots.get(slot_id)
        return state is not None and state.terminating

    def on(self, slot_id: str) -> list[ReplicaStatus]:
        """Living ones there."""
        return [self.replicas[replica_id] for replica_id in self._here.get(slot_id, ())]

    def count_on(self, slot_id: str) -> int:
        """How many live there."""
        return len(self._here.get(slot_id, ()))

    # --- commands ---

    async def renew_store(self, slot_id: str) -> None:
        """Newer tokens of the object store for what runs there. Raises SlotUnavailable."""
        if specs := [status.spec for status in self.on(slot_id)]:
            await self._backend.renew_store(slot_id, specs)

    def place(self, spec: ReplicaSpec, *, count: int = 1, waiting: int = 0) -> Placement | None:
        """The slot where a new replica would be ready soonest; those that were only just asked for count. Where others
        have to go for it, they are told to, and there is no room until they have."""
        key = (spec.tenant, spec.function)
        if self.is_outranked(key):
            return None
        placement = self.placing.place(self.placing.work(spec, waiting=waiting), count, spec.options.device)
        if placement is not None and not placement.victims:
            return placement
        self.on_no_room(key, count, waiting)
        if placement is not None and self.may_clear(key, placement.victims):
            for replica_id in placement.victims:
                own = self.replicas[replica_id].spec.tenant == spec.tenant
                why = f"makes room for {spec.function}" if own else "its devices are another tenant's share"
                self.on_victim(replica_id, why)
        return None

    def start_replica(self, placement: Placement, spec: ReplicaSpec) -> None:
        """Counted as starting at once; a slot that cannot be reached makes it a failed start that may be repeated."""
        slot_id, spec = placement.choice, self.placing.fitted(spec, placement)
        placeholder = ReplicaStatus(
            replica_id=spec.replica_id,
            function=spec.function,
            revision=spec.revision,
            state=ReplicaState.STARTING,
            spec=spec,
            created_us=now_us(),
        )
        self.slot_of[spec.replica_id] = slot_id
        # Before the news of it, which has its function looked at again: the slot hears of it first.
        self.spawn(self._ask_start(slot_id, spec))
        self._take(slot_id, placeholder)

    async def _ask_start(self, slot_id: str, spec: ReplicaSpec) -> None:
        """Asks an agent, which may die having answered, or be replaced by another before its answer is here: what only
        the one before had said is nowhere."""
        asked = self.slots.get(slot_id)
        self._asking.add(spec.replica_id)
        try:
            await self._ask(slot_id, spec)
        finally:
            self._asking.discard(spec.replica_id)
        current, now = self.replicas.get(spec.replica_id), self.slots.get(slot_id)
        if asked is None or now is None or now.incarnation == asked.incarnation:
            return
        if current is not None and _is_only_asked_for(current):
            self._take(slot_id, gone_with_agent(current))  # should the new one have it, it says so

    async def _ask(self, slot_id: str, spec: ReplicaSpec) -> None:
        try:
            await self.make_room(slot_id, spec)
            peers = self.pools.peers(slot_id, spec.identity)
            status = await self._backend.start_replica(slot_id, msgspec.structs.replace(spec, peers=peers))
        except SlotUnavailable as error:
            current = self.replicas.get(spec.replica_id)
            if current is not None and current.state not in GONE:
                if error.code == TERMINATING and slot_id in self.slots:
                    self.slots[slot_id] = msgspec.structs.replace(self.slots[slot_id], terminating=True)
                    self.placing.changed(slot_id)
                failed = ReplicaError(error.code, str(error), retry=True)
                if isinstance(error, SlotRefused):
                    failed = ReplicaError(error.code, error.message, retry=False)
                self._take(slot_id, msgspec.structs.replace(current, state=ReplicaState.FAILED, error=failed))
            return
        current = self.replicas.get(spec.replica_id)
        if current is None or _is_only_asked_for(current):
            self._take(slot_id, status)  # events that overtook the answer know more

    def end_replica(self, replica_id: str, grace_s: float, reason: str) -> None:
        status, slot_id = self.replicas.get(replica_id), self.slot_of.get(replica_id)
        if status is not None and slot_id is not None and status.state not in GONE:
            self.spawn(self._ask_end(slot_id, replica_id, grace_s, reason))

    def give_up(self, replica_id: str, reason: str) -> None:
        """Ends a replica that makes no progress; where its agent does not answer either, as soon as that does."""
        status = self.replicas.get(replica_id)
        if status is not None and status.state not in GONE:
            self.given_up.add(replica_id)
            self.end_replica(replica_id, 0.0, reason)
            self.on_slot(self.slot_of[replica_id], False)

    async def _ask_end(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        try:
            await self._backend.end_replica(slot_id, replica_id, grace_s, reason)
        except SlotUnavailable as error:
            # Whoever asked takes the end for certain: it is asked for again when the agent is heard again.
            logger.warning("event=end_refused replica=%s error=%s", replica_id, error)
            status = self.replicas.get(replica_id)
            if status is None or status.state in GONE or isinstance(error, SlotRefused):
                return
            self._unended[replica_id] = (grace_s, reason)
            await asyncio.sleep(ASK_AGAIN_S)
            if slot_id in self.slots:
                self._end_unended(slot_id)

    def _end_unended(self, slot_id: str) -> None:
        for replica_id in [known for known in self._unended if self.slot_of.get(known) == slot_id]:
            self.end_replica(replica_id, *self._unended.pop(replica_id))

    async def replica_log(self, replica_id: str, tail_lines: int) -> str | None:
        slot_id = self.slot_of.get(replica_id)
        if slot_id is None:
            return None
        try:
            return await self._backend.replica_log(slot_id, replica_id, tail_lines)
        except SlotUnavailable:
            return None

    # --- SlotListener ---

    def slot_state(self, slot_id: str, state: SlotState) -> None:
        known = self.slots.get(slot_id)
        first = known is None or known.incarnation != state.incarnation
        if state.terminating and (known is None or not known.terminating):
            logger.info("event=slot_terminating slot=%s replicas=%d", slot_id, len(self.on(slot_id)))
        self.slots[slot_id] = state
        self.placing.changed(slot_id)
        self._empty.discard(slot_id)
        for status in state.replicas:
            self._take(slot_id, status)
        if first:
            there = {status.replica_id for status in state.replicas}
            for status in self.on(slot_id):
                if status.replica_id not in there and status.replica_id not in self._asking:
                    self._take(slot_id, gone_with_agent(status))
            self._end_unended(slot_id)
        for watch in self.slot_watchers:
            watch(state, known)
        self.on_slot(slot_id, first)
        self._tell_waiters()

    def _tell_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def replica_changed(self, slot_id: str, status: ReplicaStatus) -> None:
        self._take(slot_id, status)

    def time_passed(self, slot_id: str, times: Mapping[str, ReplicaTime]) -> None:
        """It concerns the books alone, which read it here: nobody is told."""
        for replica_id in self._here.get(slot_id, {}).keys() & times.keys():
            self.replicas[replica_id] = msgspec.structs.replace(self.replicas[replica_id], time=times[replica_id])

    def slot_lost(self, slot_id: str, reason: str, *, agent_gone: bool) -> None:
        self.slots.pop(slot_id, None)
        if agent_gone:
            self._empty.add(slot_id)
            for status in self.on(slot_id):
                self._take(slot_id, gone_with_agent(status))
        self.placing.changed(slot_id)
        self.on_slot(slot_id, False)
        if agent_gone:
            self._tell_waiters()

    def _take(self, slot_id: str, status: ReplicaStatus) -> None:
        before = self.replicas.get(status.replica_id)
        if before is not None and before.state in GONE and before.exit != AGENT_GONE:
            return  # nothing comes after the end
        self.slot_of[status.replica_id] = slot_id
        self.replicas[status.replica_id] = status
        moved = before is None or before.state is not status.state
        if moved:
            self._index(slot_id, status)
            self.placing.changed(slot_id)
            error = f" error={status.error.code}" if status.error is not None else ""
            logger.info(
                "event=replica state=%s replica=%s function=%s revision=%d%s",
                status.state, status.replica_id, status.function, status.revision, error,
            )  # fmt: skip
        if status.state in GONE:
            self.given_up.discard(status.replica_id)
            self._unended.pop(status.replica_id, None)
            self._close(status)
            self.placing.room_came()
        elif status.state is ReplicaState.READY and (before is None or before.state is not ReplicaState.READY):
            self.spawn(self._open(status))
        if moved:
            self.placing.measured.see(status, before)
            for watch in self.watchers:
                watch(status, before)
        elif before is not None and before.kv_bytes != status.kv_bytes:
            self.on_kv(status)
        self.on_replica(status, before)

    def _index(self, slot_id: str, status: ReplicaStatus) -> None:
        key = (status.spec.tenant, status.function)
        if status.state not in GONE:
            self._ended.pop(status.replica_id, None)
            self._living.setdefault(key, {})[status.replica_id] = None
            self._here.setdefault(slot_id, {})[status.replica_id] = None
            return
        _take_out(self._living, key, status.replica_id)
        _take_out(self._here, slot_id, status.replica_id)

    def _close(self, status: ReplicaStatus) -> None:
        if status.replica_id not in self._closed and self.keeps_books:
            self._closed.add(status.replica_id)
            self.spawn(self._write_close(status))
        self._ended[status.replica_id] = None
        while len(self._ended) > KEEP_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._closed.discard(oldest)
            del self.replicas[oldest]
            self.slot_of.pop(oldest, None)

    async def _open(self, status: ReplicaStatus) -> None:
        """From here on the books know of it, should it and we be gone at once."""
        if not self.keeps_books:
            return
        try:
            await self._books.report_replica(status)
        except StokerError as error:
            logger.warning("event=open_refused replica=%s error=%s", status.replica_id, error)

    async def _write_close(self, status: ReplicaStatus) -> None:
        while True:
            try:
                await self._books.close_replica(status)
                return
            except StokerError as error:
                logger.warning("event=close_refused replica=%s error=%s", status.replica_id, error)
                await asyncio.sleep(CLOSE_RETRY_S)


def _is_only_asked_for(status: ReplicaStatus) -> bool:
    """No process of it has been heard of."""
    return status.pid == 0 and status.state is ReplicaState.STARTING


def _take_out(index: dict[K, dict[str, None]], name: K, replica_id: str) -> None:
    known = index.get(name)
    if known is not None:
        known.pop(replica_id, None)
        if not known:
            del index[name]


async def _no_room_needed(slot_id: str, spec: ReplicaSpec) -> None:
    """Nothing is divided here."""


AGENT_GONE: Final = "agent gone"


def gone_with_agent(status: ReplicaStatus) -> ReplicaStatus:
    """The last status of a replica whose agent died: it died with it, and nobody measured how long it was held, so the
    wall clock since its creation has to do."""
    ended_us = now_us()
    held_us = max(status.time.held_us, ended_us - status.created_us)
    time_held = msgspec.structs.replace(status.time, held_us=held_us)
    return msgspec.structs.replace(
        status,
        state=ReplicaState.FAILED,
        ended_us=ended_us,
        time=time_held,
        exit=AGENT_GONE,
        end_reason="its agent died",
        error=status.error or ReplicaError("agent_gone", "the slot's agent died, and its replicas with it", retry=True),
    )


def new_replica_spec(
    *,
    function: str,
    revision: int,
    tenant: str,
    manifest_path: str,
    identity: str,
    options: EngineOptions,
    env: dict[str, str],
    kv_store: str,
    start_timeout_s: float,
    shares_kv: bool = False,
) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id="rep-" + secrets.token_hex(6),
        function=function,
        revision=revision,
        tenant=tenant,
        manifest_path=manifest_path,
        identity=identity,
        options=options,
        env=env,
        kv_store=kv_store,
        start_timeout_s=start_timeout_s,
        shares_kv=shares_kv,
    )


__all__ = ["GONE", "STARTING", "Fleet", "ReplicaTime", "gone_with_agent", "new_replica_spec"]
