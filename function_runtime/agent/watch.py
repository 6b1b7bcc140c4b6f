"""The agent's once-a-second look at everything it keeps: leases out, processes that are stopped or stalled, memory.

    lease   every worker hears that the agent lives; the agent itself ends when nobody reads its events for `orphan_s`
    stopped a stopped child is killed after `STOPPED_FOR_S`, a replica without progress after `STALLED_AFTER_S`

A period that itself came late (the agent was stopped, the machine slept) judges nobody. Limits: a stopped process is
seen within a second or two.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Iterable
from typing import Final

import msgspec

from function_runtime import process
from function_runtime.agent.events import log
from function_runtime.agent.replica import Replica
from function_runtime.agent.slot import Slot
from function_runtime.agent.worker_process import WorkerProcess
from function_runtime.errors import SlotError
from function_runtime.protocol import STALLED_AFTER_S, ReplicaState, ReplicaStatus, ReplicaTime, SlotEvent
from function_runtime.wire import Ping

PERIOD_S: Final = 1.0
MEMORY_EVERY: Final = 10
"""Periods from one look at memory to the next; starts and ends are measured when they happen. The kernel walks every
page to answer: with a few hundred mapped megabytes a process, once a second took a tenth of a core from the engine."""
IDLE_EVERY: Final = 5
"""Periods from one telling of a replica to the next while only time has passed for it: a fleet at rest is told of by
the thousand, and each telling is read by every control plane. So only the time is told, of all of a slot's in the event
that would be sent anyway."""
STOPPED_FOR_S: Final = 3.0


class Watch:
    def __init__(self, slot: Slot, orphan_s: float) -> None:
        self._slot = slot
        self._orphan_s = orphan_s
        self._stopped_since: dict[int, tuple[float, int]] = {}
        """Since when, and the processor time it had by then: what ran in between did not stand still."""
        self._told: dict[str, tuple[ReplicaStatus, int]] = {}
        """What was last told of each replica, and at which look that was."""
        self._looks = 0
        self.read_at_s = time.monotonic()
        """When an event stream was last seen to be read."""
        self.orphaned = asyncio.Event()

    def stream_was_read(self) -> None:
        self.read_at_s = time.monotonic()

    async def run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s += PERIOD_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            was_late = now_s - due_s > PERIOD_S
            if was_late:
                # Not our reader's fault, nor our workers'.
                due_s = now_s
                self.read_at_s = max(self.read_at_s, now_s - self._orphan_s / 2)
                self._stopped_since.clear()
            try:
                await self._look(now_s, judge=not was_late)
            except Exception:
                # One bad look must not take every replica with it.
                traceback.print_exc()

    async def _look(self, now_s: float, *, judge: bool) -> None:
        slot = self._slot
        for worker in self._workers():
            worker.say(Ping(lease_s=self._orphan_s))
        if judge:
            self._kill_stopped(now_s)
            self._kill_stalled(now_s)
            if now_s - self.read_at_s > self._orphan_s:
                self.orphaned.set()
        slot.children.reap_strays()
        self._looks += 1
        if self._looks % MEMORY_EVERY == 0 or not slot.live:
            await slot.measure_memory()
        serving = [each for each in slot.live if each.state in (ReplicaState.READY, ReplicaState.DRAINING)]
        slot.events.publish(SlotEvent(times=self._tell(serving)))

    def _tell(self, serving: Iterable[Replica]) -> dict[str, ReplicaTime]:
        """Whoever has changed is told of as a whole; of those that have not, now and then, how much time has passed."""
        before, self._told, times = self._told, {}, dict[str, ReplicaTime]()
        for replica in serving:
            told, look = before.get(replica.id, (None, 0))
            if told is not None and told.time.attributed_us != replica.time.attributed_us:
                told = None  # it has worked
            if told is not None and self._looks - look < IDLE_EVERY:
                self._told[replica.id] = (told, look)
                continue
            status = replica.status()
            self._told[replica.id] = (status, self._looks)
            if told is not None and msgspec.structs.replace(status, time=told.time) == told:
                times[replica.id] = status.time
            else:
                replica.changed()
        return times

    def _workers(self) -> list[WorkerProcess]:
        held = [replica.worker for replica in self._slot.live if replica.worker is not None]
        return [worker for worker in (*held, *self._slot.workers.waiting) if worker.alive]

    def _kill_stopped(self, now_s: float) -> None:
        stopped = {pid: process.ran_ns(pid) for pid in self._slot.children.pids if process.is_stopped(pid)}
        before = self._stopped_since
        self._stopped_since = {
            pid: before[pid] if pid in before and before[pid][1] == ran_ns else (now_s, ran_ns)
            for pid, ran_ns in stopped.items()
        }
        for pid, (since_s, _) in self._stopped_since.items():
            if now_s - since_s >= STOPPED_FOR_S:
                log(f"killing pid={pid}: stopped for {now_s - since_s:.0f} s")
                self._slot.children.kill(pid)

    def _kill_stalled(self, now_s: float) -> None:
        for replica in self._slot.live:
            worker = replica.worker
            if worker is None or replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
                continue
            silent_s = now_s - worker.heard_ns / 1e9
            if silent_s > STALLED_AFTER_S:
                log(f"killing replica={replica.id}: no progress for {silent_s:.0f} s")
                replica.fail(SlotError("replica_stalled", f"no progress for {silent_s:.0f} s", retry=True))
                worker.kill()
