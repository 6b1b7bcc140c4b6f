"""`Function` objects kept in step with the functions of the API, by the leader, both ways (`agreeing` has the rule).

Whatever changes marks a function; marked ones are looked at a few at a time. Status is written behind them, where it
says something else than before. Limits: a fault of the API server or of the database is tried again after
`AGAIN_S`; a name that another object has already is looked at again when either changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from control_plane.backends.kubernetes.agreeing import (
    ObjectFacts,
    Step,
    decide,
    key_of,
    new_object,
    object_spec,
    spec_of,
)
from control_plane.backends.kubernetes.api import FUNCTIONS, Api, ApiError, ApiRefused, Object
from control_plane.backends.kubernetes.bonds import Bond, Bonds
from control_plane.backends.kubernetes.kinds import is_ours
from control_plane.backends.kubernetes.phases import now_text
from control_plane.backends.kubernetes.status import Condition, status_patch
from control_plane.backends.kubernetes.watching import Watching, generation_of, name_of, uid_of
from control_plane.errors import NotFound, StokerError
from control_plane.functions import Function, FunctionStore
from control_plane.lanes import FunctionKey
from control_plane.spec import FunctionSpec, parse_mapping
from control_plane.tasks import end_task

logger = logging.getLogger(__name__)

AGAIN_S: Final = 5.0
SETTLE_S: Final = 0.25
"""How long a status may be behind: what starts and is ready within it is written once. What is asked for meanwhile does
not wait for it."""
GATHER_S: Final = 0.1
"""How late it is begun to be written: what is done about a change goes before what is said of it."""
AT_ONCE: Final = 8
"""Functions that are looked at together: what each costs is waiting, for the database and the API server."""
StatusOf = Callable[[Function], tuple[dict[str, Any], tuple[Condition, ...]]]


class FunctionObjects:
    def __init__(
        self,
        functions: FunctionStore,
        bonds: Bonds,
        leads: Callable[[], bool],
        status_of: StatusOf,
        *,
        release: str,
        make_objects: bool,
    ) -> None:
        self._functions = functions
        self._bonds = bonds
        self._leads = leads
        self._status_of = status_of
        self._release = release
        self._make_objects = make_objects
        self._api: Api | None = None
        self.objects: Watching | None = None
        self._keys: dict[str, FunctionKey] = {}
        """Of each object."""
        self._names: dict[FunctionKey, set[str]] = {}
        self._marked: dict[FunctionKey, None] = {}
        self._restated: dict[FunctionKey, None] = {}
        """Those of which only the status may have changed."""
        self._refused: dict[FunctionKey, str] = {}
        self._due = asyncio.Event()
        self._led = False
        self._task: asyncio.Task[None] | None = None
        self._restate_at_s = float("-inf")
        """When statuses may be written again."""
        self._later: asyncio.TimerHandle | None = None
        self.writes = 0
        """Of objects and their status."""

    def start(self, api: Api) -> None:
        self._api = api
        self.objects = Watching(api, FUNCTIONS, self._object_changed)
        self.objects.start()
        self._due.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await end_task(self._task)
        if self.objects is not None:
            await self.objects.close()

    # --- what is told ---

    def _object_changed(self, name: str, before: Object | None, now: Object | None) -> None:
        for each in (before, now):
            if each is not None and is_ours(each, self._release):
                (self.restate if _asks_the_same(before, now) else self.mark)(key_of(each))
        known = self._keys.pop(name, None)
        if known is not None:
            self._names[known].discard(name)
        if now is not None and is_ours(now, self._release):
            key = self._keys[name] = key_of(now)
            self._names.setdefault(key, set()).add(name)

    def mark(self, key: FunctionKey) -> None:
        self._marked[key] = None
        self._due.set()

    def restate(self, key: FunctionKey) -> None:
        if not self._restated:
            self._restate_at_s = max(self._restate_at_s, asyncio.get_running_loop().time() + GATHER_S)
        self._restated[key] = None
        self._due.set()

    def poke(self) -> None:
        """The lead may have come or gone."""
        self._due.set()

    def _mark_all(self) -> None:
        keys = [*self._keys.values(), *self._bonds.keys()]
        keys += [(function.tenant, function.name) for function in self._functions.list()]
        self._marked.update(dict.fromkeys(keys))

    # --- what is done ---

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            if self.objects is not None:
                await self.objects.synced.wait()
            self._due.clear()
            try:
                await self.look()
            except Exception:
                logger.exception("event=function_objects_failed")
                self._led = False
                await asyncio.sleep(AGAIN_S)
                self._due.set()

    async def look(self) -> None:
        if not self._leads():
            self._led = False
            self._marked.clear()
            self._restated.clear()
            return
        if not self._led:
            await self._bonds.refresh()
            self._led = True
            self._mark_all()
        while self._marked:
            if not await self._some(self._marked, self._settle_or_again):
                return
        if not self._restated:
            return
        if (left_s := self._restate_at_s - asyncio.get_running_loop().time()) > 0:
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(left_s, self._restate_now)
            return
        restated, self._restated, writes = self._restated, {}, self.writes
        # Between any two of them what was marked meanwhile goes first.
        while restated and not self._marked:
            if not await self._some(restated, self._restate):
                return
        if restated:
            self._restated = {**restated, **self._restated}
            self._due.set()
        elif self.writes != writes:
            self._restate_at_s = asyncio.get_running_loop().time() + SETTLE_S

    def _restate_now(self) -> None:
        self._later = None
        self._due.set()

    async def _some(
        self, keys: dict[FunctionKey, None], work: Callable[[FunctionKey], Coroutine[Any, Any, None]]
    ) -> bool:
        """The first of them, so that their writes wait together; False: the lead went meanwhile."""
        if not self._leads():
            self._led = False
            return False
        some = list(islice(keys, AT_ONCE))
        for key in some:
            del keys[key]
        async with asyncio.TaskGroup() as group:
            for key in some:
                group.create_task(work(key))
        return True

    async def _settle_or_again(self, key: FunctionKey) -> None:
        try:
            await self._settle(key)
        except (ApiError, StokerError) as error:
            logger.warning("event=function_object_unsettled function=%s error=%s", key[1], error)
            asyncio.get_running_loop().call_later(AGAIN_S, self.mark, key)
        self.restate(key)

    def _of(self, key: FunctionKey) -> Object | None:
        """The object that speaks for a function: of several the oldest."""
        objects = self.objects.objects if self.objects is not None else {}
        found = [objects[name] for name in self._names.get(key, ()) if name in objects]
        living = [each for each in found if not each["metadata"].get("deletionTimestamp")]
        return min(living, key=_age, default=None)

    async def _settle(self, key: FunctionKey) -> None:
        found, function = self._of(key), self._functions.find(key[1], key[0])
        spec, refused = _spec(found)
        facts = None
        if found is not None:
            facts = ObjectFacts(uid_of(found), generation_of(found), None if spec is None else spec.digest())
        digest = None if function is None else function.spec.digest()
        step = decide(facts, digest, self._bonds.of(key), make_objects=self._make_objects)
        self._refused.pop(key, None)
        if step is not Step.NOTHING:
            logger.info("event=function_object function=%s step=%s", key[1], step)
        match step:
            case Step.REFUSE:
                self._refused[key] = refused
            case Step.DEPLOY if spec is not None and found is not None:
                await self._deploy(key, found, spec)
            case Step.NOTE if spec is not None and found is not None:
                await self._agree(key, found, spec)
            case Step.WRITE if function is not None and found is not None:
                await self._write(key, found, function)
            case Step.CREATE_OBJECT if function is not None:
                await self._create(key, function)
            case Step.DELETE_OBJECT if found is not None:
                await self._delete(key, found)
            case Step.DELETE_FUNCTION:
                with suppress(NotFound):
                    await self._functions.delete(key[1], key[0])
                await self._bonds.drop(key)
            case Step.FORGET:
                await self._bonds.drop(key)

    async def _agree(self, key: FunctionKey, found: Object, spec: FunctionSpec) -> None:
        bond = Bond(name_of(found), uid_of(found), generation_of(found), spec.digest())
        await self._bonds.put(key, bond)

    async def _deploy(self, key: FunctionKey, found: Object, spec: FunctionSpec) -> None:
        try:
            self._functions.check(spec, key[0])
            await self._functions.put(spec, key[0])
        except StokerError as error:
            if error.http_status >= 500:
                raise
            self._refused[key] = error.message
            return
        await self._agree(key, found, spec)

    async def _write(self, key: FunctionKey, found: Object, function: Function) -> None:
        """In the state that is known of it: if somebody changed it meanwhile, that change wins."""
        if self._api is None or self.objects is None:
            return
        body = {**found, "spec": object_spec(function.spec, key[0], name_of(found))}
        try:
            written = await self._api.replace(FUNCTIONS, name_of(found), body)
        except ApiRefused as error:
            if error.status in (404, 409):
                return  # the watch tells what it is now
            raise
        self.writes += 1
        await self._agree(key, written, function.spec)
        self.objects.written(written)

    async def _create(self, key: FunctionKey, function: Function) -> None:
        if self._api is None or self.objects is None:
            return
        try:
            written = await self._api.create(FUNCTIONS, new_object(function.spec, key, self._release))
        except ApiRefused as error:
            if error.status in (403, 409, 422):
                logger.warning("event=function_object_refused function=%s error=%s", key[1], error)
                return  # the function works without
            raise
        self.writes += 1
        await self._agree(key, written, function.spec)
        self.objects.written(written)

    async def _delete(self, key: FunctionKey, found: Object) -> None:
        if self._api is None:
            return
        try:
            await self._api.delete(FUNCTIONS, name_of(found), uid=uid_of(found))
        except ApiRefused as error:
            if error.status == 409:
                return
            if error.status != 404:
                raise
        self.writes += 1
        await self._bonds.drop(key)

    # --- status ---

    async def _restate(self, key: FunctionKey) -> None:
        function, found = self._functions.find(key[1], key[0]), self._of(key)
        for name in sorted(self._names.get(key, ())):
            each = self.objects.objects.get(name) if self.objects is not None else None
            if each is None or self._api is None:
                continue
            if found is not None and uid_of(each) != uid_of(found):
                words = f"the function {key[1]} is {name_of(found)}'s, which is older"
                await self._patch(each, {"state": "Refused"}, (Condition("Accepted", False, "NameTaken", words),))
            elif key in self._refused:
                refused: tuple[Condition, ...] = (Condition("Accepted", False, "Refused", self._refused[key]),)
                state: dict[str, Any] = {"observedGeneration": generation_of(each), "state": "Refused"}
                if function is not None:
                    fields, conditions = self._status_of(function)
                    refused, state = (*refused, *conditions), {**fields, **state}
                await self._patch(each, state, refused)
            elif function is not None:
                fields, conditions = self._status_of(function)
                fields = {**fields, "observedGeneration": generation_of(each)}
                accepted = Condition("Accepted", True, "Deployed", f"revision {function.revision} is deployed")
                await self._patch(each, fields, (accepted, *conditions))

    async def _patch(self, found: Object, fields: dict[str, Any], conditions: tuple[Condition, ...]) -> None:
        patch = status_patch(found, fields, conditions, now_text(time.time()))
        if patch is None or self._api is None or self.objects is None:
            return
        try:
            written = await self._api.patch(FUNCTIONS, name_of(found), patch, "status")
        except ApiError as error:
            if not (isinstance(error, ApiRefused) and error.status == 404):
                logger.warning("event=function_status_not_written object=%s error=%s", name_of(found), error)
                asyncio.get_running_loop().call_later(AGAIN_S, self.restate, key_of(found))
            return
        self.writes += 1
        self.objects.written(written)


def _spec(found: Object | None) -> tuple[FunctionSpec | None, str]:
    """What an object asks for, or why that cannot be."""
    if found is None:
        return None, ""
    try:
        return parse_mapping(spec_of(found)), ""
    except (StokerError, ValueError) as error:
        return None, str(error)


def _asks_the_same(before: Object | None, now: Object | None) -> bool:
    """Whether only its status is another, which is mostly what was written here."""
    if before is None or now is None:
        return False
    parts = ("uid", "generation", "labels", "deletionTimestamp")
    return all(before["metadata"].get(part) == now["metadata"].get(part) for part in parts)


def _age(found: Object) -> tuple[str, str]:
    return str(found["metadata"].get("creationTimestamp") or ""), uid_of(found)
