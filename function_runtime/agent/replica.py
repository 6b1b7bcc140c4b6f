"""A replica as its agent keeps it: the spec, one state with one transition table, stages, and its last report.

    STARTING -> LOADING -> READY -> DRAINING -> ENDED; FAILED and ENDED are reachable from the first four, and final

Its life is counted from the moment it was asked for, on the machine's monotonic clock; a worker counts from the same
moment. Limits: after a kill the parts of its time are those of its last report, `held_us` is the agent's measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from function_runtime.agent.address import LOOPBACK
from function_runtime.agent.worker_process import WorkerProcess
from function_runtime.errors import SlotError
from function_runtime.protocol import (
    ReplicaError,
    ReplicaMemory,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    Stage,
    StoreTotals,
)
from model_loader.load_order import LoadOutcome

_S: Final = ReplicaState
_NEXT: Final[dict[ReplicaState, frozenset[ReplicaState]]] = {
    _S.STARTING: frozenset({_S.LOADING, _S.FAILED, _S.ENDED}),
    _S.LOADING: frozenset({_S.READY, _S.FAILED, _S.ENDED}),
    _S.READY: frozenset({_S.DRAINING, _S.FAILED, _S.ENDED}),
    _S.DRAINING: frozenset({_S.FAILED, _S.ENDED}),
    _S.FAILED: frozenset(),
    _S.ENDED: frozenset(),
}
"""A worker that proves dead or stopped before it took the spec is replaced while the replica is STARTING."""
FINAL: Final = frozenset({_S.FAILED, _S.ENDED})


class Replica:
    def __init__(
        self,
        spec: ReplicaSpec,
        token: str,
        on_change: Callable[[Replica], None],
        host: str = LOOPBACK,
        here: ReplicaSpec | None = None,
    ) -> None:
        self.spec = spec
        """As it was asked for, and as it is told of."""
        self.here = here or spec
        """With the manifest where this slot has it."""
        self.token = token
        self.host = host
        """Where gateways reach it."""
        self.state = ReplicaState.STARTING
        self.worker: WorkerProcess | None = None
        self.warm_worker = False
        self.created_ns = time.monotonic_ns()
        self.created_us = time.time_ns() // 1000
        self.ready_us = 0
        self.ready_ns = 0
        self.ended_us = 0
        self.ended_ns = 0
        self.port = 0
        self.pid = 0
        self._kv_bytes = 0
        """When it became ready."""
        self.landing: asyncio.Task[LoadOutcome] | None = None
        """The load under way when its checkpoint was handed out; None: it was complete."""
        self.mappable_ns = 0
        self.stages: list[Stage] = []
        self.memory = ReplicaMemory()
        self.error: ReplicaError | None = None
        self.exit = ""
        self.end_reason = ""
        self.memory_returned: bool | None = None
        self.ending = False
        """Its process is being put away: nothing may cancel that."""
        self._time: ReplicaTime | None = None
        self._on_change = on_change

    @property
    def id(self) -> str:
        return self.spec.replica_id

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    def go(self, state: ReplicaState) -> None:
        if state not in _NEXT[self.state]:
            raise SlotError("state", f"replica {self.id} cannot go from {self.state} to {state}", retry=False)
        self.state = state
        self.changed()

    def changed(self) -> None:
        self._on_change(self)

    def add_stage(self, name: str, begin_ns: int, *, nbytes: int = 0, tier: str = "", detail: str = "") -> None:
        now_ns = time.monotonic_ns()
        duration_us = (now_ns - begin_ns) // 1000
        start_us = time.time_ns() // 1000 - duration_us
        self.stages.append(Stage(name, start_us, duration_us, nbytes, tier, detail))

    def fail(self, error: SlotError) -> None:
        """Remembers why; the state follows when the process is gone."""
        if self.error is None:
            self.error = ReplicaError(code=error.code, message=error.message, retry=error.retry)

    def close_time(self) -> None:
        """Called once the process is gone: from now on the time stands still."""
        self.ended_ns = time.monotonic_ns()
        self.ended_us = time.time_ns() // 1000
        held_us = (self.ended_ns - self.created_ns) // 1000
        farewell = self.worker.farewell if self.worker is not None else None
        if farewell is not None:
            # An orderly end: what the process needed to go away is overhead of its own.
            last = farewell.time
            parts_us = last.cold_us + last.attributed_us + last.idle_us
            self._time = msgspec.structs.replace(last, held_us=held_us, overhead_us=max(0, held_us - parts_us))
        elif not self.ready_ns:
            self._time = ReplicaTime(held_us=held_us, cold_us=held_us)
        elif self.worker is not None and self.worker.report is not None:
            self._time = msgspec.structs.replace(self.worker.report.time, held_us=held_us)
        else:
            self._time = ReplicaTime(held_us=held_us, cold_us=(self.ready_ns - self.created_ns) // 1000)

    @property
    def time(self) -> ReplicaTime:
        if self._time is not None:
            return self._time
        report = self.worker.report if self.worker is not None else None
        if report is not None:
            return report.time
        held_us = (time.monotonic_ns() - self.created_ns) // 1000
        return ReplicaTime(held_us=held_us, cold_us=held_us)

    def serves(self, port: int, kv_bytes: int) -> None:
        """Its worker is ready."""
        self.port, self._kv_bytes = port, kv_bytes
        self.ready_us = time.time_ns() // 1000
        self.ready_ns = time.monotonic_ns()

    @property
    def kv_bytes(self) -> int:
        """Memory it has for KV now; 0: not ready yet, or without any."""
        report = self.worker.report if self.worker is not None else None
        return report.kv_bytes if report is not None and report.kv_bytes else self._kv_bytes

    @property
    def store(self) -> StoreTotals:
        worker = self.worker
        word = None if worker is None else worker.farewell or worker.report
        return StoreTotals() if word is None else word.store

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self.id,
            function=self.spec.function,
            revision=self.spec.revision,
            state=self.state,
            spec=self.spec,
            pid=self.pid,
            host=self.host,
            port=self.port,
            token=self.token,
            warm_worker=self.warm_worker,
            created_us=self.created_us,
            ready_us=self.ready_us,
            ended_us=self.ended_us,
            stages=tuple(self.stages),
            time=self.time,
            memory=self.memory,
            store=self.store,
            error=self.error,
            exit=self.exit,
            end_reason=self.end_reason,
            memory_returned=self.memory_returned,
            kv_bytes=0 if self.is_final else self.kv_bytes,
        )
