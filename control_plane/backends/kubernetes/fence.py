"""Only who leads writes: every write to the cluster is let out while the lead is held, and given up when it ends.

A copy that was stopped and goes on finds the lead void by its own clock before it sends anything; one whose call is
under way when the lead ends does not wait for the answer, nor makes the call again. Limits: what has left this process
is the API server's: a call that it takes up late (a queue before it) may still be carried out. That makes a pod with a
name of its own, which the next leader sees and counts, or deletes one in the very state that was known of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from control_plane.backends.kubernetes.api import Api, ApiError, Happened, Listed, Object, Resource

T = TypeVar("T")


class NotLeading(ApiError):
    """Another copy writes now, or soon will."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: this copy does not lead (any more)")


class FencedApi:
    def __init__(self, api: Api, leads_for_s: Callable[[], float]) -> None:
        """`leads_for_s`: how much longer the lead is held if nothing is renewed; infinite where nobody else could."""
        self._api = api
        self._leads_for_s = leads_for_s

    async def list(self, resource: Resource, labels: str = "", fields: str = "") -> Listed:
        return await self._api.list(resource, labels, fields)

    def watch(self, resource: Resource, version: str, labels: str = "", fields: str = "") -> AsyncIterator[Happened]:
        return self._api.watch(resource, version, labels, fields)

    async def get(self, resource: Resource, name: str) -> Object:
        return await self._api.get(resource, name)

    async def create(self, resource: Resource, body: Object) -> Object:
        return await self._within(lambda: self._api.create(resource, body), f"create {resource.plural}")

    async def replace(self, resource: Resource, name: str, body: Object) -> Object:
        return await self._within(lambda: self._api.replace(resource, name, body), f"update {resource.plural} {name}")

    async def patch(self, resource: Resource, name: str, body: Object, part: str = "") -> Object:
        what = f"patch {resource.plural} {name}"
        return await self._within(lambda: self._api.patch(resource, name, body, part), what)

    async def delete(self, resource: Resource, name: str, *, uid: str = "", version: str = "") -> None:
        what = f"delete {resource.plural} {name}"
        await self._within(lambda: self._api.delete(resource, name, uid=uid, version=version), what)

    async def close(self) -> None:
        await self._api.close()

    async def _within(self, call: Callable[[], Coroutine[Any, Any, T]], what: str) -> T:
        left_s = self._leads_for_s()
        if left_s <= 0:
            raise NotLeading(what)
        if left_s == float("inf"):
            return await call()
        task = asyncio.get_running_loop().create_task(call())
        try:
            while left_s > 0:
                done, _ = await asyncio.wait({task}, timeout=left_s)
                if done:
                    return task.result()
                left_s = self._leads_for_s()  # it may have been renewed meanwhile
        finally:
            task.cancel()
        raise NotLeading(what)
