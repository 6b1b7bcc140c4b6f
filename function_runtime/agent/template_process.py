"""The template as the agent sees it: started on demand, asked for forks one at a time, replaced when it dies or hangs.

Workers it forked are the agent's children and outlive it. Limits: `IMPORTED_WITHIN_S` for its imports,
`FORKED_WITHIN_S` for a fork; then it is killed, and the next request starts another.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from function_runtime import process
from function_runtime.agent.children import Child, Children
from function_runtime.agent.worker_process import STOPPED_LOOK_S, WorkerProcess
from function_runtime.errors import WorkerLost
from function_runtime.wire import Fork, Forked, Imported, datagram, template_pair, template_words

IMPORTED_WITHIN_S: Final = 180.0
FORKED_WITHIN_S: Final = 30.0


class Template:
    def __init__(self, children: Children, slot_dir: str, log_path: str, on_change: Callable[[], None]) -> None:
        self._children = children
        self._slot_dir = slot_dir
        self._log_path = log_path
        self._on_change = on_change
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._imported: asyncio.Future[int] | None = None
        self._turn = asyncio.Lock()
        self._forked: asyncio.Future[None] | None = None
        self.import_us = 0

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None and self._child.alive else 0

    @property
    def is_ready(self) -> bool:
        return self._imported is not None and self._imported.done() and self._imported.exception() is None

    def start(self) -> asyncio.Future[int]:
        """Starts it unless it lives; resolves when it can fork."""
        if self._imported is not None and self._child is not None and self._child.alive:
            return self._imported
        loop = asyncio.get_running_loop()
        ours, theirs = template_pair()
        ours.setblocking(False)
        imported: asyncio.Future[int] = loop.create_future()
        imported.add_done_callback(lambda f: f.cancelled() or f.exception())
        child = self._children.spawn_module(
            "function_runtime.template",
            ["--slot-dir", self._slot_dir],
            control_fd=theirs.fileno(),
            output=self._log_path,
            environment=dict(os.environ),
        )
        theirs.close()
        self._child, self._socket, self._imported = child, ours, imported
        loop.add_reader(ours, self._receive, ours)
        child.exited.add_done_callback(lambda exited: self._ended(ours, imported, exited.result()))
        timer = loop.call_later(IMPORTED_WITHIN_S, lambda: None if imported.done() else child.kill())
        imported.add_done_callback(lambda _: timer.cancel())
        return imported

    async def fork(self, *, wait: bool) -> WorkerProcess:
        """A new worker, introduced. Raises `WorkerLost` when the template died or hung meanwhile."""
        async with self._turn:
            await asyncio.shield(self.start())
            control, child = self._socket, self._child
            if control is None or child is None:
                raise WorkerLost("the template ended before it could fork")
            ours, theirs = socket.socketpair()
            self._forked = asyncio.get_running_loop().create_future()
            self._forked.add_done_callback(lambda f: f.cancelled() or f.exception())
            worker = WorkerProcess(ours, self._children)
            try:
                try:
                    socket.send_fds(control, [datagram(Fork(wait=wait))], [theirs.fileno()])
                finally:
                    theirs.close()
                async with asyncio.timeout(FORKED_WITHIN_S):
                    await self._until_forked(child, self._forked)
                    await asyncio.shield(worker.born)
            except (TimeoutError, OSError) as error:
                child.kill()
                worker.kill()
                why = str(error) or f"not within {FORKED_WITHIN_S:g} s"
                raise WorkerLost(f"the template did not fork: {why}") from error
            except BaseException:
                worker.kill()
                raise
            finally:
                self._forked = None
            return worker

    async def _until_forked(self, child: Child, forked: asyncio.Future[None]) -> None:
        while not forked.done():
            await asyncio.wait([forked], timeout=STOPPED_LOOK_S)
            if not forked.done() and process.is_stopped(child.pid):
                raise TimeoutError("it is stopped")
        forked.result()

    async def end(self) -> None:
        if self._child is not None and self._child.alive:
            await self._child.end()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _receive(self, control: socket.socket) -> None:
        try:
            message = control.recv(4096)
        except OSError:
            return
        if not message:
            asyncio.get_running_loop().remove_reader(control)
            return
        match template_words.decode(message):
            case Imported(import_us=import_us):
                self.import_us = import_us
                if self._imported is not None and not self._imported.done():
                    self._imported.set_result(import_us)
                self._on_change()
            case Forked():
                if self._forked is not None and not self._forked.done():
                    self._forked.set_result(None)

    def _ended(self, control: socket.socket, imported: asyncio.Future[int], how: str) -> None:
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        lost = WorkerLost(f"the template ended ({how}); its output is in the agent's log")
        if not imported.done():
            imported.set_exception(lost)
        if self._socket is control:
            self._socket = self._child = self._imported = None
            if self._forked is not None and not self._forked.done():
                self._forked.set_exception(lost)
        self._on_change()
