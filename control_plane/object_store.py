"""The deployment's object store as this gateway sees it: opened and checked beside the start, looked at ever again.

    checking ── a check succeeds ──> usable        checking, usable ── one fails ──> unusable, and back

Stored KV is what requests are spared of computing again, never what they are: with the store away they run, and what
is lost is recomputed. Only a function whose spec says `kv_store: required` is refused meanwhile.
Limits: a replica finds out by itself; this is the gateway's view, at most `AGAIN_S` old.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from control_plane.errors import ObjectStoreUnavailable

if TYPE_CHECKING:
    from model_loader.objects import ObjectStore, StoreUse

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_WITHIN_S: Final = 10.0
AGAIN_S: Final = 300.0
"""Pause between checks of a store that works: each costs four requests."""
AGAIN_UNUSABLE_S: Final = 15.0
FIRST_LOOK_S: Final = CHECK_WITHIN_S + 5.0
"""Also for a machine whose credentials take their time."""


class StoreState(enum.StrEnum):
    CHECKING = "checking"
    USABLE = "usable"
    UNUSABLE = "unusable"


class StoreWatch:
    """`opener` makes the store of a URI; `on_change` is told the watch whenever it becomes usable or unusable, or for
    another reason."""

    def __init__(self, uri: str, opener: Callable[[str], ObjectStore] | None = None) -> None:
        self.uri = uri
        self.state = StoreState.CHECKING
        self.problem = ""
        """`model_loader.errors.StoreProblem`, empty while there is none."""
        self.reason = ""
        self.since_us = time.time_ns() // 1000
        self.on_change: Callable[[StoreWatch], None] | None = None
        self._opener = opener
        self._store: ObjectStore | None = None
        self._open_lock = threading.Lock()
        self._watching = False
        self._looked = asyncio.Event()
        """A check has said something."""

    @property
    def usable(self) -> bool:
        """Not known to be unusable: at the start nobody has to wait for the first check but who needs the store."""
        return self.state is not StoreState.UNUSABLE

    async def first_look(self) -> None:
        """For who needs the store: while it is looked at for the first time that is waited for, not guessed."""
        if self._watching and not self._looked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await self._looked.wait()

    def require(self, function: str) -> None:
        if not self.usable:
            raise ObjectStoreUnavailable(
                f"{function} needs the object store (kv_store: required), which cannot be used "
                f"({self.problem}): {self.reason}",
                retry_after_s=AGAIN_UNUSABLE_S,
            )

    def body(self) -> dict[str, Any]:
        """For the API."""
        return {
            "uri": self.uri,
            "state": self.state.value,
            "problem": self.problem or None,
            "reason": self.reason or None,
            "since_us": self.since_us,
        }

    @property
    def use(self) -> StoreUse | None:
        """What this process asked of it; None before it was opened."""
        return self._store.stats.snapshot() if self._store is not None else None

    async def run(self, work: Callable[[ObjectStore], T]) -> T:
        """`work` in a thread. Raises what the store does (`model_loader.errors.LoaderError`)."""
        return await asyncio.to_thread(lambda: work(self.opened()))

    async def watch(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Checks for ever."""
        self._watching = True
        while True:
            await self.check()
            await sleep(AGAIN_S if self.usable else AGAIN_UNUSABLE_S)

    async def check(self) -> None:
        from model_loader.errors import LoaderError, StoreProblem, problem_of

        try:
            await self.run(lambda store: store.check(within_s=CHECK_WITHIN_S))
        except (LoaderError, OSError) as error:
            self._become(StoreState.UNUSABLE, problem_of(error).value, str(error))
        except Exception as error:
            # A library's own error: it says less, and must not end the watch.
            logger.exception("event=object_store_check_failed uri=%s", self.uri)
            self._become(StoreState.UNUSABLE, StoreProblem.OTHER.value, f"{type(error).__name__}: {error}")
        else:
            self._become(StoreState.USABLE, "", "")

    def _become(self, state: StoreState, problem: str, reason: str) -> None:
        self._looked.set()
        changed = (state, problem) != (self.state, self.problem)
        self.state, self.problem, self.reason = state, problem, reason
        if not changed:
            return
        self.since_us = time.time_ns() // 1000
        if state is StoreState.USABLE:
            logger.info("event=object_store_usable uri=%s", self.uri)
        else:
            logger.error("event=object_store_unusable uri=%s problem=%s reason=%s", self.uri, problem, reason)
        if self.on_change is not None:
            self.on_change(self)

    def opened(self) -> ObjectStore:
        """The store itself, for who is in a thread already."""
        from model_loader.objects import open_store

        with self._open_lock:
            if self._store is None:
                self._store = (self._opener or open_store)(self.uri)
            return self._store

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(store.close)
