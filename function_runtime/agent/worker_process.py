"""A worker as the agent sees it: a child process and the socket pair to it.

Its words resolve futures (`born`, `warm`, `taken`, `ready`, `farewell`); its reports are kept with the time they came.
All of them fail with `WorkerLost` when the worker is gone. Limits: a worker whose socket is full counts as lost.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Final

from function_runtime import process
from function_runtime.agent.children import Child, Children
from function_runtime.errors import WorkerLost
from function_runtime.wire import (
    Born,
    Farewell,
    LoadFailed,
    Ready,
    Report,
    Taken,
    Warm,
    Word,
    WorkerWord,
    pack,
    worker_words,
)

TAKEN_WITHIN_S: Final = 30.0
STOPPED_LOOK_S: Final = 0.25


class WorkerProcess:
    def __init__(self, connection: socket.socket, children: Children, child: Child | None = None) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        self.child = child
        self.born: asyncio.Future[None] = loop.create_future()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[Ready | LoadFailed] = loop.create_future()
        self.farewell: Farewell | None = None
        self.farewell_ns = 0
        self.load_failure: LoadFailed | None = None
        """Why it ended, said after it was ready: weights that were on their way did not come."""
        self.is_warm = False
        self.mapped_ahead: tuple[str, ...] = ()
        self.report: Report | None = None
        self.heard_ns = time.monotonic_ns()
        self.gone: asyncio.Future[str] = loop.create_future()
        """Resolves with the exit when the process was reaped and everything it said was read."""
        self.on_warm: Callable[[], None] = _nothing
        self.on_kv: Callable[[], None] = _nothing
        """Told of a report that names another amount of KV memory than the last one."""
        self._socket = connection
        self._children = children
        self._buffer = bytearray()
        self._open = True
        for future in (self.born, self.taken, self.ready):
            future.add_done_callback(_mark_seen)
        loop.add_reader(connection, self._receive)
        if child is not None:
            child.exited.add_done_callback(self._reaped)

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def alive(self) -> bool:
        return not self.gone.done()

    async def until_taken(self) -> None:
        """Until the worker says that it has its spec, which one that runs does within milliseconds. Raises `WorkerLost`
        for one that is gone, stopped, or silent for `TAKEN_WITHIN_S`."""
        for _ in range(int(TAKEN_WITHIN_S / STOPPED_LOOK_S)):
            done, _ = await asyncio.wait([self.taken], timeout=STOPPED_LOOK_S)
            if done:
                return self.taken.result()
            if process.is_stopped(self.pid):
                raise WorkerLost(f"worker {self.pid} is stopped")
        raise WorkerLost(f"worker {self.pid} did not take its spec within {TAKEN_WITHIN_S:g} s")

    def say(self, word: Word) -> None:
        frame = pack(word)
        try:
            sent = self._socket.send(frame) if self._open else len(frame)
        except OSError:
            sent = -1
        if sent != len(frame):
            self.kill()

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
        elif self._open:
            # Not yet introduced: the end of its socket makes it end itself.
            self._close("never introduced itself")

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close("closed its socket")
            return
        self.heard_ns = time.monotonic_ns()
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                break
            word = worker_words.decode(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
            self._hear(word)

    def _hear(self, word: WorkerWord) -> None:
        match word:
            case Born(pid=pid):
                if self.child is None:
                    self.child = self._children.adopt(pid)
                    self.child.exited.add_done_callback(self._reaped)
                _resolve(self.born, None)
            case Warm():
                self.is_warm = True
                self.on_warm()
            case Taken():
                _resolve(self.taken, None)
            case LoadFailed() if self.ready.done():
                self.load_failure = word
            case Ready() | LoadFailed():
                _resolve(self.ready, word)
            case Report():
                before, self.report = self.report, word
                if before is not None and before.kv_bytes != word.kv_bytes:
                    self.on_kv()
            case Farewell():
                self.farewell = word
                self.farewell_ns = self.heard_ns

    def _reaped(self, exited: asyncio.Future[str]) -> None:
        while self._open and self._has_words():
            self._receive()
        self._close(exited.result())
        _resolve(self.gone, exited.result())

    def _has_words(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _close(self, why: str) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        for future in (self.born, self.taken, self.ready):
            if not future.done():
                future.set_exception(WorkerLost(f"the worker {self.pid or ''} ended ({why})".replace("  ", " ")))
        if self.child is None:
            _resolve(self.gone, why)
        elif self.child.alive:
            # A worker without its socket is of no use, and it ends at once by itself unless it hangs.
            asyncio.get_running_loop().call_later(1.0, self.child.kill)


def _nothing() -> None:
    pass


def _resolve(future: asyncio.Future, value: object) -> None:  # type: ignore[type-arg]
    if not future.done():
        future.set_result(value)


def _mark_seen(future: asyncio.Future) -> None:  # type: ignore[type-arg]
    if not future.cancelled():
        future.exception()
