"""Processes that load forms: one waits with everything imported, takes one order, and is replaced when it is used.

    started -> waits for an order on its stdin -> loads, tells progress and outcome -> ends, and its memory with it

A load that finds none waiting starts its own. One that dies while it waits is replaced, later each time. What a load
writes to is mapped when it begins: in huge pages that takes a millisecond a GB, so that no memory is held ahead.
Limits: one waits, so a second load at the same time pays for its imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from function_runtime import process
from function_runtime.agent.children import Children
from function_runtime.agent.events import log
from function_runtime.errors import LoadError
from model_loader.errors import LoaderError, error_from_code
from model_loader.load_order import ProgressCallback
from model_loader.progress import Progress

MODULE: Final = "model_loader.forms.loading"
FIRST_WAITS_AFTER_S: Final = 10.0
"""After the agent's start, whose own imports come first."""
_NEXT_WAITS_AFTER_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_MAX_LINE_BYTES: Final = 1 << 20
_KEEP_NICE: Final = 15
_TUNABLES: Final = "GLIBC_TUNABLES"
_PAST_THE_CACHE: Final = "glibc.cpu.x86_non_temporal_threshold=0x8000"
"""Copies of 32 KiB and more are written past the processor's caches, which saves reading what is written over; those of
512 KiB and more (16 times it) four pages at a time, which saves another twentieth."""


def loader_environment() -> dict[str, str]:
    environment = dict(os.environ)
    given = environment.get(_TUNABLES)
    environment[_TUNABLES] = f"{given}:{_PAST_THE_CACHE}" if given else _PAST_THE_CACHE
    return environment


class Loaders:
    def __init__(self, children: Children, directory: Path) -> None:
        """`directory`: the pool's, named on the command line, so that lists of processes say whose they are."""
        self._children = children
        self._directory = directory
        self._waiting: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self.waits = asyncio.Event()
        """Set while one does."""
        self._closed = False
        self._failures = 0

    @property
    def waiting_pid(self) -> int:
        """0: none waits."""
        return self._waiting.pid if self._waiting is not None else 0

    def wait_soon(self, after_s: float) -> None:
        """Has one waiting in a while, if there is none."""
        if not self._closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(after_s), name="waiting loader")

    async def run(self, order: bytes, progress: ProgressCallback) -> dict[str, Any]:
        """One load, to its end; gives its last word, or raises the error it told."""
        loader = self._take() or await self._start(())
        try:
            return await self._finish(loader, order, progress)
        finally:
            self._failures = 0
            self.wait_soon(_NEXT_WAITS_AFTER_S)

    async def run_beside(self, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        """Something else the module does, at low priority."""
        return await self._finish(await self._start(arguments, os.nice), order, lambda _: None)

    async def close(self) -> None:
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # --- processes ------------------------------------------------------------------------------------------------

    def _take(self) -> asyncio.subprocess.Process | None:
        loader, self._waiting = self._waiting, None
        self.waits.clear()
        if loader is not None and self._watching is not None:
            self._watching.cancel()
            self._watching = None
        return loader if loader is not None and loader.returncode is None else None

    async def _watch(self, after_s: float) -> None:
        """Starts one, and another whenever it dies before it was taken."""
        while not self._closed:
            await asyncio.sleep(after_s)
            loader = self._waiting = await self._start(())
            self.waits.set()
            try:
                status = await loader.wait()
            except BaseException:
                if self._waiting is loader:
                    await self._end(loader)
                raise
            self._waiting = None
            self.waits.clear()
            self._children.foreign.discard(loader.pid)
            self._failures += 1
            after_s = min(_LONGEST_PAUSE_S, 2.0**self._failures)
            log(f"the waiting loader pid={loader.pid} ended with status {status}: another starts in {after_s:g} s")

    async def _start(
        self, arguments: Sequence[str], nice: Callable[[int], object] = lambda _: None
    ) -> asyncio.subprocess.Process:
        agent = os.getpid()

        def bind() -> None:
            process.die_with_parent(agent)
            nice(_KEEP_NICE)

        loader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(self._directory), *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env=loader_environment(),
            preexec_fn=bind,
        )
        self._children.foreign.add(loader.pid)
        return loader

    async def _end(self, loader: asyncio.subprocess.Process) -> None:
        if loader.returncode is None:
            loader.kill()
            await loader.wait()
        self._children.foreign.discard(loader.pid)

    async def _finish(
        self, loader: asyncio.subprocess.Process, order: bytes, progress: ProgressCallback
    ) -> dict[str, Any]:
        try:
            if loader.stdin is not None:
                loader.stdin.write(order + b"\n")
                loader.stdin.close()
            told = await _follow(loader, progress)
            status = await loader.wait()
        finally:
            await self._end(loader)
        if status != 0 or told is None:
            message = f"the process that loaded it ended ({_how(status)}) without a word; see the agent's log"
            raise LoadError("prepare_failed", message, retry=True)
        return told


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


async def _follow(loader: asyncio.subprocess.Process, progress: ProgressCallback) -> dict[str, Any] | None:
    """Passes progress on until the output ends; gives what it came to, or raises the error it reported."""
    told: dict[str, Any] | None = None
    error: LoaderError | None = None
    if loader.stdout is not None:
        async for line in loader.stdout:
            event = json.loads(line)
            if event["event"] == "progress":
                stage, path = event["stage"], event.get("path", "")
                progress(Progress(stage, event["done_bytes"], event["total_bytes"], path))
            elif event["event"] == "error":
                error = error_from_code(event["code"], event["message"])
            elif event["event"] == "done":
                told = event
    if error is not None:
        await loader.wait()
        raise error
    return told
