"""One kind of object, kept as the API server has it: a list, then a watch from where the list ended, for ever.

A watch that ends is taken up again at the last version that was seen (bookmarks move it on while nothing happens); one
whose version is too old (410) begins with a new list, of which only the differences are told. Faults pause it, longer
each time and never all copies at once. Limits: what came and went between two lists is not heard of.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from control_plane.backends.kubernetes.api import Api, ApiError, ApiRefused, Object, Resource
from control_plane.tasks import end_task

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
MOST_PAUSE_S: Final = 30.0
STEADY_S: Final = 5.0
"""A watch that lived this long was none of a series of faults."""
GONE: Final = 410
Changed = Callable[[str, Object | None, Object | None], None]
"""(name, as it was, as it is); None: it was not there, or is not any more."""


def pause_s(faults: int, chance: float) -> float:
    """Before the next try after so many faults in a row: doubled each time, and between a half and the whole of it."""
    if faults <= 0:
        return 0.0
    whole = min(FIRST_PAUSE_S * 2 ** min(faults - 1, 16), MOST_PAUSE_S)
    return float(whole * (0.5 + 0.5 * chance))


class Watching:
    """`start`, then `objects` is the truth as far as it is known here; `close` ends it."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        changed: Changed,
        *,
        labels: str = "",
        fields: str = "",
        keep: bool = True,
        chance: Callable[[], float] = random.random,
        sleep: Callable[[float], asyncio.Future[None]] | None = None,
    ) -> None:
        """`keep`: whether objects are remembered; news that is only passed on need not be."""
        self._api = api
        self._keep = keep
        self.resource = resource
        self._changed = changed
        self._labels = labels
        self._fields = fields
        self._chance = chance
        self._sleep = sleep or (lambda seconds: asyncio.ensure_future(asyncio.sleep(seconds)))
        self._task: asyncio.Task[None] | None = None
        self._version = ""
        self.objects: dict[str, Object] = {}
        self.synced = asyncio.Event()
        """Set by the first list."""
        self.problem = ""
        """Why it is not up to date; empty while it is."""
        self.on_problem: Callable[[], None] = lambda: None
        self.lists = 0
        self.watches = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        await end_task(self._task)

    async def _run(self) -> None:
        faults = 0
        while True:
            began_s = time.monotonic()
            after_s: float | None = None
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                faults = 0
                continue
            except ApiRefused as error:
                after_s = error.retry_after_s
                if error.status == GONE:
                    logger.info("event=relist resource=%s", self.resource.plural)
                    self._version = ""
                    if not faults:
                        faults = 1
                        continue  # the first time it is nobody's fault: history is only kept for so long
                faults = self._failed(faults, began_s, error)
            except ApiError as error:
                faults = self._failed(faults, began_s, error)
            await self._sleep(max(pause_s(faults, self._chance()), after_s or 0.0))

    def _failed(self, faults: int, began_s: float, error: ApiError) -> int:
        self.problem = str(error)
        logger.warning("event=watch_failed resource=%s error=%s", self.resource.plural, error)
        self.on_problem()
        return 1 if time.monotonic() - began_s > STEADY_S else faults + 1

    async def _list(self) -> None:
        listed = await self._api.list(self.resource, self._labels, self._fields)
        self.lists += 1
        there = {name_of(each): each for each in listed.items}
        for name in [known for known in self.objects if known not in there]:
            self._tell(name, self.objects.pop(name), None)
        for name, found in there.items():
            self._put(name, found)
        self._version = listed.version
        self._well()
        self.synced.set()

    def _well(self) -> None:
        if self.problem:
            self.problem = ""
            self.on_problem()

    async def _watch(self) -> None:
        self.watches += 1
        async for event in self._api.watch(self.resource, self._version, self._labels, self._fields):
            self._well()
            self._version = version_of(event.object) or self._version
            name = name_of(event.object)
            if event.kind == "BOOKMARK":
                continue
            if event.kind == "DELETED":
                before = self.objects.pop(name, None)
                self._tell(name, before or event.object, None)
            elif not self._is_older(name, event.object):
                self._put(name, event.object)

    def _is_older(self, name: str, found: Object) -> bool:
        """Than what a write of ours was answered."""
        known = self.objects.get(name)
        return known is not None and uid_of(known) == uid_of(found) and newer(version_of(known), version_of(found))

    def _put(self, name: str, found: Object) -> None:
        before = self.objects.get(name)
        if before is not None and version_of(before) == version_of(found):
            return
        if self._keep:
            self.objects[name] = found
        self._tell(name, before, found)

    def written(self, found: Object) -> None:
        """What the server answered to a write of ours is known at once; a watch that is behind does not undo it."""
        name = name_of(found)
        if not self._is_older(name, found):
            self._put(name, found)

    def _tell(self, name: str, before: Object | None, now: Object | None) -> None:
        try:
            self._changed(name, before, now)
        except Exception:
            logger.exception("event=watch_handler_failed resource=%s name=%s", self.resource.plural, name)


def name_of(found: Object) -> str:
    return str((found.get("metadata") or {}).get("name") or "")


def uid_of(found: Object) -> str:
    return str((found.get("metadata") or {}).get("uid") or "")


def version_of(found: Object) -> str:
    return str((found.get("metadata") or {}).get("resourceVersion") or "")


def generation_of(found: Object) -> int:
    return int((found.get("metadata") or {}).get("generation") or 0)


def newer(one: str, other: str) -> bool:
    """Versions of one kind of object can be compared where they are numbers (Kubernetes 1.35 on says that they are)."""
    return one.isdigit() and other.isdigit() and int(one) > int(other)
