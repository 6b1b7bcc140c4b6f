"""Replicas and a slot in this very process, speaking the real protocol: what they do is the test's to say."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from control_plane.backends.base import SlotClass, SlotListener, SlotUnavailable
from function_runtime.protocol import (
    Accepted,
    Attach,
    Attached,
    Cancel,
    DeviceTime,
    Failed,
    Finished,
    FinishReason,
    FrameBuffer,
    Hello,
    Park,
    Parked,
    Peer,
    Progress,
    ReplicaError,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    Settled,
    SlotState,
    Submit,
    TokenEvent,
    Tokens,
    Unknown,
    Welcome,
    Work,
    decode_gateway,
    encode,
)

GatewayWord = Hello | Submit | Attach | Cancel | Settled | Park


def token_text(seed: int, choice: int, position: int) -> str:
    """What a fake replica says at a position (from 0) of a choice: the same on every replica."""
    return f" {choice}.{position}.{seed % 1000}"


@dataclass
class Behaviour:
    """How fake replicas of a slot behave; may be changed at any time."""

    token_s: float = 0.0
    """Pause before each step."""
    start_s: float = 0.0
    start_error: ReplicaError | None = None
    max_requests: int = 32
    silent: bool = False
    """Accepts work and never says a token."""
    stop_after: int | None = None
    """Stops speaking of a request after this many tokens."""
    fail: Failed | None = None
    """Answer every submission with this (ids filled in)."""
    never_ready: bool = False
    finish: FinishReason = FinishReason.LENGTH
    withhold_end: bool = False
    """Sends every token and never says that it has finished."""
    deaf: bool = False
    """Does not hear `Park`."""
    left_out: str = ""
    """What it says of stored KV that it did not load."""


@dataclass
class FakeReplica:
    spec: ReplicaSpec
    behaviour: Behaviour
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    words: list[GatewayWord] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    dead: bool = False
    server: asyncio.Server | None = None
    port: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _held: dict[str, list[Any]] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _owners: dict[str, asyncio.StreamWriter] = field(default_factory=dict)

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameBuffer()
        self._writers.append(writer)
        try:
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    self._hear(decode_gateway(body), writer)
        except ConnectionError:
            pass
        finally:
            writer.close()
            if writer in self._writers:
                self._writers.remove(writer)
            for request_id in [known for known, owner in self._owners.items() if owner is writer]:
                del self._owners[request_id]

    def _hear(self, word: GatewayWord, writer: asyncio.StreamWriter) -> None:
        self.words.append(word)
        if isinstance(word, Hello):
            running = tuple(self._epochs.items())
            spec = self.spec
            self._say(Welcome(spec.replica_id, spec.function, spec.revision, spec.identity,
                              min(spec.options.max_requests, self.behaviour.max_requests), 8192, running),
                      writer)  # fmt: skip
        elif isinstance(word, Submit):
            work = word.work
            self.works.append(work)
            self._epochs[work.request_id] = work.epoch
            self._held[work.request_id] = []
            self._owners[work.request_id] = writer
            self._running[work.request_id] = asyncio.create_task(self._run(work))
            self._running[work.request_id].add_done_callback(lambda done: self.tell_others())
            self.tell_others()
        elif isinstance(word, Attach):
            if word.request_id not in self._epochs:
                self._say(Unknown(word.request_id, word.epoch), writer)
                return
            self._owners[word.request_id] = writer
            self._say(Attached(word.request_id, word.epoch), writer)
            for message in self._held[word.request_id]:
                if isinstance(message, Tokens):
                    skip = word.after_seq + 1 - message.first_seq
                    if skip >= len(message.events):
                        continue
                    if skip > 0:
                        message = msgspec.structs.replace(
                            message, first_seq=word.after_seq + 1, events=message.events[skip:]
                        )
                self._say(message, writer)
        elif isinstance(word, Cancel):
            if self._owners.get(word.request_id, writer) is not writer:
                self._say(Unknown(word.request_id, word.epoch), writer)
                return
            task = self._running.pop(word.request_id, None)
            if task is not None:
                task.cancel()
            self._say(
                Finished(word.request_id, word.epoch, self._last_seq(word.request_id), True, DeviceTime(5, 5)), writer
            )
        elif isinstance(word, Park) and not self.behaviour.deaf:
            task = self._running.pop(word.request_id, None)
            if task is not None:
                task.cancel()
            last_seq = self._last_seq(word.request_id)
            self._say(Parked(word.request_id, word.epoch, last_seq, DeviceTime(5, 5), word.reason), writer)
        elif isinstance(word, Settled) and self._owners.get(word.request_id, writer) is writer:
            self._epochs.pop(word.request_id, None)

    def _last_seq(self, request_id: str) -> int:
        told = sum(len(m.events) for m in self._held.get(request_id, ()) if isinstance(m, Tokens))
        return told + next((len(w.produced) for w in reversed(self.works) if w.request_id == request_id), 0)

    async def _run(self, work: Work) -> None:
        behaviour = self.behaviour
        if behaviour.fail is not None:
            self._tell(work, msgspec.structs.replace(behaviour.fail, request_id=work.request_id, epoch=work.epoch))
            return
        recomputed, detail = len(work.produced), behaviour.left_out
        self._tell(work, Accepted(work.request_id, work.epoch, recomputed_tokens=recomputed, detail=detail))
        sampling = work.sampling
        made = [sum(event.choice == choice for event in work.produced) for choice in range(sampling.n)]
        seq = len(work.produced) + 1
        first = True
        while any(count < sampling.max_tokens for count in made):
            while behaviour.silent or (behaviour.stop_after is not None and seq > behaviour.stop_after):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(behaviour.token_s)
            events = []
            for choice in range(sampling.n):
                if made[choice] < sampling.max_tokens:
                    text = token_text(sampling.seed, choice, made[choice])
                    made[choice] += 1
                    finish = behaviour.finish if made[choice] == sampling.max_tokens else None
                    events.append(TokenEvent(choice, made[choice], text, finish))
            message = Tokens(work.request_id, work.epoch, seq, tuple(events), DeviceTime(100, seq * 10), 0,
                             (0, len(work.prompt)) if first else ())  # fmt: skip
            first = False
            seq += len(events)
            self._tell(work, message)
        if not behaviour.withhold_end:
            self._tell(work, Finished(work.request_id, work.epoch, seq - 1, False, DeviceTime(100, seq * 10)))

    def _tell(self, work: Work, message: Any) -> None:
        self._held[work.request_id].append(message)
        owner = self._owners.get(work.request_id)
        if owner is not None and not owner.is_closing():
            owner.write(encode(message))

    def _say(self, message: Any, writer: asyncio.StreamWriter) -> None:
        if not writer.is_closing():
            writer.write(encode(message))

    def heartbeat(self) -> None:
        live = [request_id for request_id, task in self._running.items() if not task.done()]
        for writer in self._writers:
            others = sum(self._owners.get(request_id) is not writer for request_id in live)
            self._say(Progress(1, len(live), 0, 0, 1, ReplicaTime(), others), writer)

    def tell_others(self) -> None:
        """Like a replica with several gateways: each hears at once what the others took or left."""
        if len(self._writers) > 1:
            self.heartbeat()

    async def cut_connections(self) -> None:
        """The connections break; the replica lives on."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def die(self) -> None:
        self.dead = True
        for task in self._running.values():
            task.cancel()
        if self.server is not None:
            self.server.close()
        await self.cut_connections()


class FixedSlots:
    """What a backend answers whose slots neither come nor go."""

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        return (SlotClass(),)

    def class_of(self, slot_id: str) -> str:
        return ""

    @property
    def coming(self) -> Mapping[str, float]:
        return {}

    @property
    def leaving(self) -> frozenset[str]:
        return frozenset()

    async def add_slots(self, class_name: str, count: int) -> int:
        return 0

    async def renew_store(self, slot_id: str, specs: Sequence[ReplicaSpec]) -> None:
        return

    async def resize_kv(self, slot_id: str, kv_bytes: Mapping[str, int]) -> None:
        return

    async def remove_slot(self, slot_id: str) -> None:
        raise SlotUnavailable("this slot stays")


class FakeSlot(FixedSlots):
    """A backend with one slot in this process."""

    def __init__(self, behaviour: Behaviour | None = None, slot_id: str = "slot-0") -> None:
        self.slot_id = slot_id
        self.behaviour = behaviour or Behaviour()
        self.replicas: dict[str, FakeReplica] = {}
        self.statuses: dict[str, ReplicaStatus] = {}
        self.started: list[ReplicaSpec] = []
        self.ended: list[tuple[str, str]] = []
        self.in_reach = True
        self.warm_target = 0
        self.incarnation = "one"
        self.terminating = False
        self.refused = 0
        self.on_start: Callable[[ReplicaSpec], None] = lambda spec: None
        self.make_replica: Callable[[ReplicaSpec, Behaviour], FakeReplica] = FakeReplica
        self._listeners: dict[int, SlotListener] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return (self.slot_id,)

    @property
    def living(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas.values() if not replica.dead]

    async def start(self, listener: SlotListener) -> None:
        self.listen(0, listener)

    def listen(self, reader: int, listener: SlotListener) -> None:
        self._listeners[reader] = listener
        self.tell_state(reader)

    def leave(self, reader: int) -> None:
        self._listeners.pop(reader, None)

    def tell_state(self, only: int | None = None) -> None:
        state = SlotState(self.slot_id, 1, self.incarnation, True, 0, self.warm_target, 0, 0,
                          replicas=tuple(self.statuses.values()), terminating=self.terminating)  # fmt: skip
        for reader, listener in list(self._listeners.items()):
            if only in (None, reader):
                listener.slot_state(self.slot_id, state)

    def go_out_of_sight(self) -> None:
        """Its agent is not heard any more, and may live."""
        self.in_reach = False
        for listener in list(self._listeners.values()):
            listener.slot_lost(self.slot_id, "no news", agent_gone=False)

    async def vanish(self) -> None:
        """Like a machine that is no more: its processes are gone, and that is known."""
        self.in_reach = False
        for replica in self.living:
            await replica.die()
        self.statuses.clear()
        for listener in list(self._listeners.values()):
            listener.slot_lost(self.slot_id, "the machine is gone", agent_gone=True)

    async def terminate(self) -> None:
        """Like a SIGTERM to its agent."""
        self.terminating = True
        self.tell_state()
        for replica in self.living:
            await self.end_replica(self.slot_id, replica.spec.replica_id, 10.0, "the agent ends: SIGTERM")

    def come_back(self) -> None:
        self.in_reach = True
        self.tell_state()

    async def look(self) -> None:
        pass

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        self.leave(0)

    async def shut(self) -> None:
        """The end of the test: everything goes."""
        for replica in self.living:
            await replica.die()
        for task in self._tasks:
            task.cancel()

    def free_bytes(self, slot_id: str) -> int:
        return 1 << 40

    def _tell(self, replica_id: str, **changes: Any) -> None:
        status = self.statuses[replica_id] = msgspec.structs.replace(self.statuses[replica_id], **changes)
        for listener in list(self._listeners.values()):
            listener.replica_changed(self.slot_id, status)

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        if not self.in_reach:
            raise SlotUnavailable("out of reach")
        if self.terminating:
            self.refused += 1
            raise SlotUnavailable("slot_terminating: the slot is ending", "slot_terminating")
        self.started.append(spec)
        self.on_start(spec)
        status = ReplicaStatus(spec.replica_id, spec.function, spec.revision, ReplicaState.STARTING, spec,
                               pid=1, created_us=time.time_ns() // 1000)  # fmt: skip
        self.statuses[spec.replica_id] = status
        self._spawn(self._become_ready(spec))
        return status

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _become_ready(self, spec: ReplicaSpec) -> None:
        await asyncio.sleep(self.behaviour.start_s)
        now_us = time.time_ns() // 1000
        if self.behaviour.start_error is not None:
            self._tell(spec.replica_id, state=ReplicaState.FAILED, error=self.behaviour.start_error, ended_us=now_us,
                       exit="exit 1")  # fmt: skip
            return
        if self.behaviour.never_ready:
            return
        replica = self.make_replica(spec, self.behaviour)
        await replica.listen()
        self.replicas[spec.replica_id] = replica
        self._tell(spec.replica_id, state=ReplicaState.READY, port=replica.port, token=replica.token, ready_us=now_us)

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        if not self.in_reach:
            raise SlotUnavailable("out of reach")
        self.ended.append((replica_id, reason))
        self._tell(replica_id, state=ReplicaState.DRAINING)
        self._spawn(self._drain(replica_id))

    async def _drain(self, replica_id: str) -> None:
        replica = self.replicas.get(replica_id)
        if replica is not None:
            while any(not task.done() for task in replica._running.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await replica.die()
        held = (time.time_ns() // 1000) - self.statuses[replica_id].created_us
        self._tell(replica_id, state=ReplicaState.ENDED, exit="exit 0", ended_us=time.time_ns() // 1000,
                   time=ReplicaTime(held_us=held, cold_us=held))  # fmt: skip

    async def kill(self, replica: FakeReplica) -> None:
        """Like kill -9: connections break, then the agent notices."""
        await replica.die()
        held = (time.time_ns() // 1000) - self.statuses[replica.spec.replica_id].created_us
        self._tell(replica.spec.replica_id, state=ReplicaState.FAILED, exit="signal 9",
                   ended_us=time.time_ns() // 1000, time=ReplicaTime(held_us=held),
                   error=ReplicaError("killed", "signal 9", True))  # fmt: skip

    async def warm(self, slot_id: str, workers: int) -> None:
        self.warm_target = workers

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        return

    async def evict_pool(self, slot_id: str, key: str) -> None:
        return

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        return

    def peers(self, slot_ids: Sequence[str]) -> tuple[Peer, ...]:
        return ()

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> None:
        pass

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return "a line\n"
