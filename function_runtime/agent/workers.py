"""Where a replica's worker comes from: one that waits, a fresh fork, or a process of its own for engines without torch.

Keeps `target` forked workers waiting. Refilling stands back while a replica starts, because it would take its CPUs.
Limits: waiting workers hold no device and no model.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from function_runtime.agent.children import Children
from function_runtime.agent.template_process import Template
from function_runtime.agent.worker_process import WorkerProcess
from function_runtime.errors import WorkerLost
from function_runtime.protocol import ReplicaSpec
from function_runtime.wire import MapAhead

REFILL_AFTER_S: Final = 1.0
BORN_WITHIN_S: Final = 30.0
MAP_AHEAD_FORMS: Final = 4
MAP_AHEAD_BYTES: Final = 8 * 1024**3
"""Page tables take a five-hundredth of it; entering them a tenth of a second per GiB."""
_RETRY_AFTER_S: Final = 5.0
STUB: Final = "stub"


class Workers:
    def __init__(
        self, children: Children, slot_dir: Path, target: int, log_path: Path, on_change: Callable[[], None]
    ) -> None:
        self._children = children
        self._slot_dir = slot_dir
        self._on_change = on_change
        self.template = Template(children, str(slot_dir), str(log_path), on_change)
        self.target = target
        self._waiting: list[WorkerProcess] = []
        self._starting = 0
        self._refill: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> list[WorkerProcess]:
        self._waiting = [worker for worker in self._waiting if worker.alive]
        return self._waiting

    @property
    def warm_count(self) -> int:
        return sum(worker.is_warm for worker in self.waiting)

    def set_target(self, workers: int) -> None:
        self.target = workers
        while len(self.waiting) > workers:
            self._waiting.pop().kill()
        self.refill_soon(0.0)

    async def take(self, spec: ReplicaSpec, log_path: Path) -> tuple[WorkerProcess, bool]:
        """A worker for a replica, and whether it was waiting. Raises `WorkerLost`."""
        if spec.options.engine == STUB:
            return await self._spawn_stub(spec, log_path), False
        waiting = sorted(self.waiting, key=lambda worker: not worker.is_warm)
        if waiting:
            self._waiting.remove(waiting[0])
            self._on_change()
            return waiting[0], True
        return await self.template.fork(wait=False), False

    async def _spawn_stub(self, spec: ReplicaSpec, log_path: Path) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        child = self._children.spawn_module(
            "function_runtime.stub",
            ["--slot-dir", str(self._slot_dir)],
            control_fd=theirs.fileno(),
            output=str(log_path),
            environment={**os.environ, **spec.env},
        )
        theirs.close()
        worker = WorkerProcess(ours, self._children, child)
        try:
            await asyncio.wait_for(asyncio.shield(worker.born), BORN_WITHIN_S)
        except TimeoutError as error:
            worker.kill()
            raise WorkerLost(f"the worker did not start within {BORN_WITHIN_S} s") from error
        except BaseException:
            worker.kill()
            raise
        return worker

    def start_begins(self) -> None:
        self._starting += 1

    def start_ends(self) -> None:
        self._starting -= 1
        self.refill_soon(REFILL_AFTER_S)

    def refill_soon(self, delay_s: float) -> None:
        if len(self.waiting) < self.target and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill(delay_s))

    async def _fill(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while len(self.waiting) < self.target:
            if self._starting:
                return
            try:
                worker = await self.template.fork(wait=True)
            except WorkerLost as lost:
                print(f"no warm worker: {lost.message}", file=sys.stderr, flush=True)
                delay_s = _RETRY_AFTER_S
                asyncio.get_running_loop().call_later(delay_s, self.refill_soon, 0.0)
                return
            worker.on_warm = self._on_change
            worker.gone.add_done_callback(lambda _: self._lost())
            if len(self.waiting) < self.target:
                self._waiting.append(worker)
            else:
                worker.kill()
            self._on_change()

    def map_ahead(self, paths: Sequence[Path]) -> None:
        """Tells the waiting workers which prepared forms to have mapped; said again only when it changed."""
        ahead: list[str] = []
        for path in paths[:MAP_AHEAD_FORMS]:
            with suppress(OSError):
                if path.stat().st_size <= MAP_AHEAD_BYTES:
                    ahead.append(str(path))
        told = tuple(ahead)
        for worker in self.waiting:
            if worker.is_warm and worker.mapped_ahead != told:
                worker.mapped_ahead = told
                worker.say(MapAhead(paths=told))

    def _lost(self) -> None:
        self._on_change()
        self.refill_soon(REFILL_AFTER_S)

    async def close(self) -> None:
        self.target = 0
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        for worker in self.waiting:
            worker.kill()
        await self.template.end()
