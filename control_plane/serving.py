"""Which revision of a function serves: the newest that can, so that a new one takes over only when it is able to.

A request is bound to a revision when it is accepted. While the current revision is being imported, has failed or has no
ready replica yet, an older one that can serve goes on. Limits: older revisions are known from this process's life, or
read when the current one cannot serve.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from control_plane.dispatch import Dispatcher
from control_plane.errors import ModelLoading, ModelUnusable, NotFound
from control_plane.functions import ChangeKind, Function, FunctionChange, FunctionStore, ImportState, Revision
from control_plane.lanes import FunctionKey
from control_plane.live_request import TimeLimits
from control_plane.settings import QueueSettings

STARTS_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Servable:
    """A revision as the gateway needs it for one request."""

    key: FunctionKey
    function: str
    revision: int
    identity: str
    manifest_path: str
    durability: str
    on_disconnect: str
    needs_store: bool
    limits: TimeLimits
    max_context_tokens: int
    share_prefixes: str = "tenant"
    shared_prefix_form: str = "raw"
    price_microusd_per_hour: int = 0
    resume: str = "exact"

    def context_tokens(self, model_limit: int) -> int:
        own = self.max_context_tokens
        return min(own, model_limit) if own else model_limit


def limits_of(revision: Revision) -> TimeLimits:
    timeouts = revision.spec.timeouts
    return TimeLimits(
        cold_start_s=timeouts.cold_start_s,
        queue_s=timeouts.queue_s,
        first_token_s=timeouts.first_token_s,
        idle_s=timeouts.idle_s,
        total_s=timeouts.total_s,
        kept_s=revision.spec.retention_s,
    )


def servable_of(revision: Revision) -> Servable:
    if revision.identity is None or revision.manifest_path is None:
        raise RuntimeError(f"revision {revision.revision} of {revision.function} is ready without an identity")
    return Servable(
        key=(revision.tenant, revision.function),
        function=revision.function,
        revision=revision.revision,
        identity=revision.identity,
        manifest_path=revision.manifest_path,
        durability=revision.spec.durability,
        on_disconnect=revision.spec.on_disconnect,
        needs_store=revision.spec.kv_store == "required",
        limits=limits_of(revision),
        max_context_tokens=revision.spec.engine_options.max_context_tokens,
        share_prefixes=revision.spec.share_prefixes,
        shared_prefix_form=revision.spec.shared_prefix_form,
        price_microusd_per_hour=revision.spec.price_microusd_per_hour,
        resume=revision.spec.resume,
    )


class Serving:
    def __init__(self, functions: FunctionStore, dispatcher: Dispatcher, queue: QueueSettings) -> None:
        self._functions = functions
        self._dispatcher = dispatcher
        self._queue = queue
        self._revisions: dict[FunctionKey, dict[int, Revision]] = {}
        self._servables: dict[tuple[FunctionKey, int], Servable] = {}
        self._imports: dict[FunctionKey, asyncio.Future[None]] = {}
        """Done at the next change of a function's import state."""
        self._starts_s: dict[str, deque[float]] = {}
        self.wake: Callable[[Servable], None] = lambda servable: None
        """Start a replica although nobody waits."""
        self.unusable: Callable[[FunctionKey, int], str] = lambda key, revision: ""
        """Why a revision cannot be started at present; empty if it can."""
        self.import_again: Callable[[Revision], bool] = lambda revision: False
        """Try a failed import once more, if its pause is over."""
        functions.subscribe(self._changed)

    # --- revisions ---

    def _changed(self, change: FunctionChange) -> None:
        key = (change.function.tenant, change.function.name)
        known = self._revisions.setdefault(key, {})
        for function in (change.previous, change.function):
            if function is not None:
                self._learn(function.current)
        if change.revision is not None:
            self._learn(change.revision)
        if change.kind is ChangeKind.DELETED:
            for number in known:
                self._servables.pop((key, number), None)
        future = self._imports.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)

    def _learn(self, revision: Revision) -> None:
        key = (revision.tenant, revision.function)
        self._revisions.setdefault(key, {})[revision.revision] = revision
        self._servables.pop((key, revision.revision), None)

    async def load_older(self, key: FunctionKey) -> None:
        """Read all revisions: at start, and when something of an unknown one turns up."""
        try:
            for revision in await self._functions.revisions(key[1], key[0]):
                self._learn(revision)
        except NotFound:
            return

    def revision(self, key: FunctionKey, number: int) -> Revision | None:
        return self._revisions.get(key, {}).get(number)

    def with_identity(self, key: FunctionKey, identity: str) -> Revision | None:
        """The newest revision with this checkpoint."""
        fitting = [r for r in self._revisions.get(key, {}).values() if r.identity == identity]
        return max(fitting, key=lambda revision: revision.revision, default=None)

    def target(self, function: Function) -> Revision | None:
        """What replicas there should be of: the newest revision that is imported and can be started."""
        key = (function.tenant, function.name)
        known = self._revisions.get(key, {})
        for number in sorted(known, reverse=True):
            revision = known[number]
            if number > function.revision or revision.state is not ImportState.READY:
                continue
            if not self.unusable(key, number):
                return revision
        return None

    # --- for requests ---

    def serves_now(self, model: str, tenant: str) -> Servable | None:
        """The revision that takes a new request; None while there is none that could."""
        return self._serves_now(self._functions.resolve(model, tenant))

    def _serves_now(self, function: Function) -> Servable | None:
        key = (function.tenant, function.name)
        target = self.target(function)
        if target is None:
            return None
        if target.identity is not None and self._dispatcher.lanes.has_ready(key, target.identity):
            return self._cached(key, target)
        known = self._revisions.get(key, {})
        for number in sorted(known, reverse=True):
            older = known[number]
            if number >= target.revision or older.identity is None or older.state is not ImportState.READY:
                continue
            if self._dispatcher.lanes.has_ready(key, older.identity):
                return self._cached(key, older)
        return self._cached(key, target)

    def _cached(self, key: FunctionKey, revision: Revision) -> Servable:
        found = self._servables.get((key, revision.revision))
        if found is None:
            found = self._servables[key, revision.revision] = servable_of(revision)
        return found

    async def wait_servable(self, model: str, tenant: str, no_wait: bool) -> Servable:
        """Waits for an import where nothing can serve yet; raises why nothing will."""
        started_s = time.monotonic()
        while True:
            function = self._functions.resolve(model, tenant)
            key, current = (function.tenant, function.name), function.current
            found = self._serves_now(function)
            if found is not None:
                return found
            if current.state is ImportState.READY:
                raise ModelUnusable(self.unusable(key, current.revision) or f"{function.name} cannot be started")
            if current.state is ImportState.FAILED and not self.import_again(current):
                error = current.error
                text = f"{error.code}: {error.message}" if error is not None else "its import failed"
                raise ModelUnusable(f"the model of {function.name} cannot be used: {text}")
            if no_wait:
                raise ModelLoading(
                    f"the model of {function.name} is still being imported",
                    retry_after_s=self._queue.wait_estimate_s,
                )
            limit_s = current.spec.timeouts.cold_start_s - (time.monotonic() - started_s)
            future = self._imports.get(key)
            if future is None:
                future = self._imports[key] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(max(limit_s, 0.0)):
                    await asyncio.shield(future)
            except TimeoutError:
                raise ModelLoading(
                    f"the model of {function.name} was not imported within "
                    f"{current.spec.timeouts.cold_start_s:g} s (timeouts.cold_start_s)",
                    retry_after_s=self._queue.wait_estimate_s,
                ) from None

    # --- measured starts ---

    def note_start(self, identity: str, seconds: float) -> None:
        self._starts_s.setdefault(identity, deque(maxlen=STARTS_KEPT)).append(seconds)

    def cold_start_s(self, identity: str) -> float | None:
        """Median of the last measured starts of this checkpoint."""
        starts = self._starts_s.get(identity)
        return statistics.median(starts) if starts else None

    def start_estimate_s(self, servable: Servable) -> float:
        measured = self.cold_start_s(servable.identity)
        return self._queue.wait_estimate_s if measured is None else measured
