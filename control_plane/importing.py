"""New revisions get their model: the importer as a subprocess, its progress visible, its outcome in the store.

One import per revision however often it is wanted; a failed one is tried again by itself only where that may help, and
on a request's wish after a pause that grows. Limits: `AT_ONCE` imports at a time; they end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from control_plane.errors import StokerError
from control_plane.fleet import Fleet
from control_plane.functions import (
    ChangeKind,
    FunctionChange,
    FunctionStore,
    ImportState,
    Revision,
    RevisionError,
)
from control_plane.gateway.prompts import KEPT, PromptMakers
from control_plane.lanes import FunctionKey
from control_plane.model_tool import import_command
from control_plane.settings import Settings

logger = logging.getLogger(__name__)

AT_ONCE: Final = 2
RETRY_S: Final = (2.0, 10.0, 60.0)
"""Pauses before an import that failed for a passing reason is tried again; then it has failed."""
AGAIN_S: Final = 60.0
LINE_BYTES: Final = 1 << 20
PREPARED_SLOTS: Final = 8
"""That load a new function's checkpoint before anybody calls it; others take it from them, or are told by forecasts."""
PREPARED_FUNCTIONS: Final = 8
"""Whose checkpoints a new slot loads before anybody calls them: a pool holds few, and a cluster has many."""


class _Line(msgspec.Struct):
    event: str
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    identity: str = ""
    manifest_path: str = ""
    code: str = ""
    message: str = ""
    retry: bool = False


@dataclass(frozen=True, slots=True)
class ImportProgress:
    stage: str
    done_bytes: int
    total_bytes: int


_decode: Final = msgspec.json.Decoder(_Line).decode
ImportKey = tuple[FunctionKey, int]


class Importing:
    def __init__(self, settings: Settings, functions: FunctionStore, fleet: Fleet, prompts: PromptMakers) -> None:
        self._settings = settings
        self._functions = functions
        self._fleet = fleet
        self._prompts = prompts
        self._running: dict[ImportKey, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._failed_s: dict[ImportKey, tuple[float, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing = 0
        """Tokenizers that are being loaded before anybody asked."""
        self.progress: dict[ImportKey, ImportProgress] = {}
        self.publish: Callable[[str], None] | None = None
        """Puts an imported manifest where gateways on other machines find it; called in a thread."""
        self.leads = True
        """One gateway of a database imports and prepares, for all."""
        functions.subscribe(self._changed)

    def _changed(self, change: FunctionChange) -> None:
        if change.kind is ChangeKind.DELETED:
            for key, task in list(self._running.items()):
                if key[0] == (change.function.tenant, change.function.name):
                    task.cancel()
            return
        self.want(change.function.current)

    def lead(self, leads: bool) -> None:
        self.leads = leads
        if leads:
            for function in self._functions.list():
                self.want(function.current)

    def want(self, revision: Revision) -> None:
        """See to it that this revision is imported. Idempotent."""
        if revision.state is ImportState.READY and revision.manifest_path is not None:
            self._spawn(self._prepare(revision))
        elif revision.state is ImportState.IMPORTING and self.leads:
            key = ((revision.tenant, revision.function), revision.revision)
            if key not in self._running:
                task = asyncio.get_running_loop().create_task(self._import(key, revision))
                self._running[key] = task
                task.add_done_callback(lambda done: self._running.pop(key, None))

    def again(self, revision: Revision) -> bool:
        """A request wants a revision whose import failed: try once more if its pause is over."""
        key = ((revision.tenant, revision.function), revision.revision)
        if key in self._running:
            return True
        failed_s, times = self._failed_s.get(key, (0.0, 1))
        if time.monotonic() - failed_s < AGAIN_S * 2 ** min(times - 1, 6):
            return False
        task = asyncio.get_running_loop().create_task(self._import(key, revision))
        self._running[key] = task
        task.add_done_callback(lambda done: self._running.pop(key, None))
        return True

    async def close(self) -> None:
        tasks = [*self._running.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def slot_appeared(self, slot_id: str) -> None:
        """A new agent: what was prepared for the one before may have to be prepared again."""
        if self.leads:
            self._spawn(self._prepare_slot(slot_id))

    async def _prepare_slot(self, slot_id: str) -> None:
        """The newest functions that belong there, one after the other, while its pool has room for more."""
        newest = sorted(self._functions.list(), key=lambda each: -each.updated_us)
        for function in newest[:PREPARED_FUNCTIONS]:
            revision = function.current
            if revision.state is ImportState.READY and revision.spec.engine == "native":
                await self._warm(revision, [slot_id])

    async def _warm(self, revision: Revision, slot_ids: Iterable[str]) -> None:
        slots = [each for each in slot_ids if self._fleet.pools.can_prepare((revision.tenant, revision.function), each)]
        if slots and revision.manifest_path is not None:
            await self._fleet.pools.load(
                revision.manifest_path, revision.identity or "", revision.spec.dtype, slots[:PREPARED_SLOTS]
            )

    async def _prepare(self, revision: Revision) -> None:
        """Have tokenizer and prepared form at hand before the first request needs them."""
        if revision.manifest_path is None:
            return
        if self.leads and self.publish is not None:
            line = await self._published(_Line("done", manifest_path=revision.manifest_path))
            if line.event == "error":
                logger.warning("event=manifest_not_published function=%s error=%s", revision.function, line.message)
        if self._preparing < KEPT:  # of more at once the first would have to go for the last
            self._preparing += 1
            try:
                await self._prompts.get(revision.manifest_path)
            except StokerError as error:
                logger.warning("event=tokenizer_unusable function=%s error=%s", revision.function, error)
            finally:
                self._preparing -= 1
        if revision.spec.engine == "native" and self.leads:
            await self._warm(revision, list(self._fleet.slots))

    async def _import(self, key: ImportKey, revision: Revision) -> None:
        (_, name), number = key
        try:
            for pause_s in (*RETRY_S, None):
                self.progress[key] = ImportProgress("waiting", 0, 0)
                async with self._room:
                    line = await self._published(await self._run(key, revision))
                if line.event == "done":
                    self._failed_s.pop(key, None)
                    await self._note(revision, ImportState.READY, line)
                    return
                logger.warning("event=import_failed function=%s revision=%d code=%s error=%s retry=%s",
                               name, number, line.code, line.message, line.retry)  # fmt: skip
                if not line.retry or pause_s is None:
                    break
                self.progress[key] = ImportProgress(f"waiting to try again: {line.message}", 0, 0)
                await asyncio.sleep(pause_s)
            self._failed_s[key] = (time.monotonic(), self._failed_s.get(key, (0.0, 0))[1] + 1)
            await self._note(revision, ImportState.FAILED, line)
        finally:
            self.progress.pop(key, None)

    async def _published(self, line: _Line) -> _Line:
        """The import's outcome, once others can find it."""
        from model_loader.errors import LoaderError

        if line.event != "done" or self.publish is None:
            return line
        try:
            await asyncio.to_thread(self.publish, line.manifest_path)
        except LoaderError as error:
            return _Line("error", code=error.code, message=str(error), retry=error.retry)
        return line

    async def _note(self, revision: Revision, state: ImportState, line: _Line) -> None:
        for pause_s in (0.2, 1.0, 5.0, 30.0, None):
            try:
                ready = state is ImportState.READY
                known = await self._functions.revision(revision.function, revision.tenant, revision.revision)
                if known is not None and known.state is ImportState.FAILED:
                    await self._functions.set_import(
                        revision.function, revision.tenant, revision.revision, ImportState.IMPORTING
                    )
                await self._functions.set_import(
                    revision.function,
                    revision.tenant,
                    revision.revision,
                    state,
                    error=None if ready else RevisionError(line.code, line.message),
                    identity=line.identity or None,
                    manifest_path=line.manifest_path or None,
                )
                return
            except StokerError as error:
                logger.warning("event=import_not_noted function=%s error=%s", revision.function, error)
                if pause_s is None or error.http_status < 500:
                    return
                await asyncio.sleep(pause_s)

    async def _run(self, key: ImportKey, revision: Revision) -> _Line:
        """One run of the importer; its last line."""
        uri = revision.spec.model
        if revision.spec.revision is not None and uri.startswith("hf://"):
            uri = f"{uri}@{revision.spec.revision}"
        command = import_command(uri, self._settings.models_dir, self._settings.models.allowed)
        last = _Line("error", code="import_failed", message="the importer ended without a word", retry=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                start_new_session=True,  # a Ctrl-C at our terminal is not meant for it
            )
        except OSError as error:
            return _Line("error", code="import_failed", message=f"cannot run the importer: {error}", retry=True)
        try:
            errors = asyncio.ensure_future(process.stderr.read(65536)) if process.stderr is not None else None
            if process.stdout is not None:
                async for raw in process.stdout:
                    with contextlib.suppress(msgspec.MsgspecError):
                        line = _decode(raw)
                        if line.event == "progress":
                            self.progress[key] = ImportProgress(line.stage, line.done_bytes, line.total_bytes)
                        else:
                            last = line
            status = await process.wait()
            text = (await errors).decode(errors="replace").strip() if errors is not None else ""
            if status != 0 and last.event != "error":
                last = _Line("error", code="import_failed", message=f"the importer ended with {status}", retry=True)
            if last.event == "error" and last.code == "import_failed" and text:
                last.message += f": {text.splitlines()[-1][:500]}"
            return last
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
