"""Slots without engines, for `control_loop`: agents and replicas in one process that speak the real protocols.

    python -m tests.benchmarks.control_loop_slots       commands come as JSON lines, what happens is told as JSON lines

What is told of a slot and how often is what `function_runtime.agent.watch` and `function_runtime.serving` do: whoever
changes one changes the other. Limits: nothing is loaded or computed; a start takes `START_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from typing import Any, Final

import msgspec
from aiohttp import web

from function_runtime.agent.watch import IDLE_EVERY, PERIOD_S
from function_runtime.protocol import (
    IDLE_TOLD_S,
    DeviceState,
    PoolEntry,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    SlotEvent,
    SlotState,
)
from tests.control_plane.gateway.fakes import Behaviour, FakeReplica

START_S: Final = 0.05
FORM_BYTES: Final = 128 << 20
MEMORY_BYTES: Final = 1 << 40
PORT: Final = 7070
_event = msgspec.json.Encoder().encode
_spec = msgspec.json.Decoder(ReplicaSpec)


def tell(**news: Any) -> None:
    print(json.dumps({**news, "at_s": time.monotonic()}), flush=True)


class Slot:
    def __init__(self, name: str) -> None:
        self.name = name
        self.statuses: dict[str, ReplicaStatus] = {}
        self.replicas: dict[str, FakeReplica] = {}
        self.readers: set[asyncio.Queue[SlotEvent | None]] = set()
        self.pool: dict[str, PoolEntry] = {}
        self.warm_target = 0
        self.site: web.BaseSite | None = None
        self._tasks = {asyncio.create_task(self._look())}

    @property
    def state(self) -> SlotState:
        return SlotState(
            self.name, 1, f"life-of-{self.name}", True, self.warm_target, self.warm_target, 1 << 32,
            FORM_BYTES * len(self.pool), pool=tuple(self.pool.values()), replicas=tuple(self.statuses.values()),
            devices=(DeviceState("cpu", 0, MEMORY_BYTES, MEMORY_BYTES),),
        )  # fmt: skip

    def publish(self, event: SlotEvent | None) -> None:
        for queue in self.readers:
            queue.put_nowait(event)

    async def _look(self) -> None:
        """As the agent's once-a-second look tells of it."""
        await asyncio.sleep(random.random() * PERIOD_S)
        for look in itertools.count():
            ready = [each for each, status in self.statuses.items() if status.state is ReplicaState.READY]
            if look % round(IDLE_TOLD_S / PERIOD_S) == 0:
                for replica_id in ready:
                    self.replicas[replica_id].heartbeat()
            due = ready if look % IDLE_EVERY == 0 else ()
            self.publish(SlotEvent(times={each: self._age(each).time for each in due}))
            await asyncio.sleep(PERIOD_S)

    def load(self, identity: str) -> None:
        if identity not in self.pool:
            self.pool[identity] = PoolEntry(identity, identity, "ready", FORM_BYTES, reload_s=1.0)
        self.publish(SlotEvent(state=self.state))

    def _age(self, replica_id: str, **changes: Any) -> ReplicaStatus:
        status = msgspec.structs.replace(self.statuses[replica_id], **changes)
        held_us = time.time_ns() // 1000 - status.created_us
        told = ReplicaTime(held_us=held_us, idle_us=held_us)
        status = self.statuses[replica_id] = msgspec.structs.replace(status, time=told)
        return status

    def _change(self, replica_id: str, **changes: Any) -> None:
        self.publish(SlotEvent(replica=self._age(replica_id, **changes)))

    def start(self, spec: ReplicaSpec) -> ReplicaStatus:
        tell(started=spec.replica_id, function=spec.function, slot=self.name)
        status = ReplicaStatus(spec.replica_id, spec.function, spec.revision, ReplicaState.STARTING, spec,
                               pid=1, created_us=time.time_ns() // 1000)  # fmt: skip
        self.statuses[spec.replica_id] = status
        self.load(spec.identity)
        self._spawn(self._become_ready(spec))
        return status

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _become_ready(self, spec: ReplicaSpec) -> None:
        await asyncio.sleep(START_S)
        replica = self.replicas[spec.replica_id] = FakeReplica(spec, Behaviour())
        await replica.listen()
        if spec.replica_id not in self.statuses:
            return await replica.die()  # it was ended meanwhile
        self._change(spec.replica_id, state=ReplicaState.READY, port=replica.port, token=replica.token,
                     ready_us=time.time_ns() // 1000)  # fmt: skip

    async def end(self, replica_id: str, state: ReplicaState) -> None:
        replica = self.replicas.pop(replica_id, None)
        if replica is not None:
            await replica.die()
        self._change(replica_id, state=state, ended_us=time.time_ns() // 1000, exit="exit 0")
        del self.statuses[replica_id]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.publish(None)
        for replica in self.replicas.values():
            await replica.die()
        if self.site is not None:
            await self.site.stop()


class Street:
    """All slots: each is found by the address that it is asked at."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.get("/v1/events", self._events),
            web.post("/v1/replicas", self._start),
            web.delete("/v1/replicas/{id}", self._end),
            web.post("/v1/warm", self._warm),
            web.post("/v1/shutdown", self._shutdown),
            web.route("*", "/v1/{rest:.*}", self._rest),
        ])  # fmt: skip
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

    def _slot(self, request: web.Request) -> Slot:
        transport = request.transport
        if transport is None:
            raise web.HTTPGone
        return self.slots[transport.get_extra_info("sockname")[0]]

    async def add(self, name: str, address: str) -> None:
        slot = self.slots[address] = Slot(name)
        slot.site = web.TCPSite(self.runner, address, PORT, reuse_address=True)
        await slot.site.start()
        tell(added=name)

    async def remove(self, name: str) -> None:
        for address in [address for address, slot in self.slots.items() if slot.name == name]:
            await self.slots.pop(address).close()

    async def kill(self, replica_id: str) -> None:
        for slot in list(self.slots.values()):
            if replica_id in slot.statuses:
                await slot.replicas[replica_id].die()
                tell(killed=replica_id)
                await slot.end(replica_id, ReplicaState.FAILED)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        slot, queue = self._slot(request), asyncio.Queue[SlotEvent | None]()
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        slot.readers.add(queue)
        event: SlotEvent | None = SlotEvent(state=slot.state)
        try:
            while event is not None:
                await response.write(_event(event) + b"\n")
                event = await queue.get()
        except ConnectionError:
            pass  # the reader is gone
        finally:
            slot.readers.discard(queue)
        return response

    async def _start(self, request: web.Request) -> web.Response:
        return _json(self._slot(request).start(_spec.decode(await request.read())))

    async def _end(self, request: web.Request) -> web.Response:
        slot, replica_id = self._slot(request), request.match_info["id"]
        tell(ended=replica_id)
        if replica_id in slot.statuses:
            slot._spawn(slot.end(replica_id, ReplicaState.ENDED))
        return _json({})

    async def _warm(self, request: web.Request) -> web.Response:
        slot = self._slot(request)
        slot.warm_target = (await request.json())["workers"]
        slot.publish(SlotEvent(state=slot.state))
        return _json({})

    async def _shutdown(self, request: web.Request) -> web.Response:
        return _json({})

    async def _rest(self, request: web.Request) -> web.Response:
        """Pools and forecasts: taken, as an agent would, and told anew."""
        raw = await request.read()
        slot = self._slot(request)
        if request.path == "/v1/pool/forecast":
            slot.publish(SlotEvent(state=slot.state))
        elif request.path == "/v1/pool/warm":
            slot.load(json.loads(raw)["identity"])
        tell(asked=request.path)
        return _json({})


def _json(value: Any) -> web.Response:
    return web.Response(body=_event(value), content_type="application/json")


async def serve() -> None:
    street = Street()
    await street.runner.setup()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tell(ready=True)
    while line := await reader.readline():
        command = json.loads(line)
        if "add" in command:
            await street.add(*command["add"])
        elif "remove" in command:
            await street.remove(command["remove"])
        else:
            await street.kill(command["kill"])
    for name in [slot.name for slot in street.slots.values()]:
        await street.remove(name)
    await street.runner.cleanup()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
