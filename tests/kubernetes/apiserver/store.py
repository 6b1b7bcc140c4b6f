"""Objects in memory, one revision counter over all of them, and the log of changes that watches follow.

Model: as in etcd, every write takes the next revision, which becomes the object's resourceVersion; the log can be
compacted, and reading before the compaction is 410 Expired. Objects are never changed in place: a write stores a new
one. Upstream: `apiserver/pkg/storage/etcd3/store.go`, `storage/cacher/cacher.go` (what a selector makes of an event).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.apiserver.errors import expired

Object = dict[str, Any]
Key = tuple[str, str]
Name = tuple[str, str]

# Changes remembered; older ones are compacted, so that a watch from before them gets 410.
LOG_LIMIT = 50_000


@dataclass(frozen=True, slots=True)
class Change:
    """One write: `previous` is None for the first version; `object` carries the new revision, deleted or not."""

    revision: int
    kind: str
    key: Key
    name: Name
    object: Object
    previous: Object | None


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a watch that somebody else decided: closed, or after an error event."""

    error: Object | None = None


class Subscription:
    """What one watcher still has to be told, in order."""

    def __init__(self, key: Key, who: str = "") -> None:
        self.key = key
        self.who = who
        self.queue: asyncio.Queue[Change | Cut] = asyncio.Queue()


class Store:
    """All objects of the cluster. Used from one thread."""

    def __init__(self, first_revision: int = 1000) -> None:
        self.revision = first_revision
        self.compacted = first_revision
        self._objects: dict[Key, dict[Name, Object]] = {}
        self._log: list[Change] = []
        self._subscriptions: set[Subscription] = set()
        self._after: list[Callable[[Change], None]] = []

    def on_change(self, call: Callable[[Change], None]) -> None:
        self._after.append(call)

    def get(self, key: Key, namespace: str, name: str) -> Object | None:
        return self._objects.get(key, {}).get((namespace, name))

    def list(self, key: Key, namespace: str | None = None) -> list[Object]:
        kept = self._objects.get(key, {})
        return [kept[name] for name in sorted(kept) if namespace is None or name[0] == namespace]

    def everything(self) -> Iterator[tuple[Key, Object]]:
        for key, kept in list(self._objects.items()):
            for value in list(kept.values()):
                yield key, value

    def keys(self) -> list[Key]:
        return list(self._objects)

    def snapshot(self, key: Key, revision: int) -> dict[Name, Object]:
        """The objects as they were at `revision`, by taking later changes back."""
        self.require(revision)
        kept = dict(self._objects.get(key, {}))
        for change in reversed(self._log):
            if change.revision <= revision:
                break
            if change.key != key:
                continue
            if change.previous is None:
                kept.pop(change.name, None)
            else:
                kept[change.name] = change.previous
        return kept

    def require(self, revision: int) -> None:
        if revision < self.compacted:
            raise expired(f"too old resource version: {revision} ({self.compacted})")

    def put(self, key: Key, value: Object) -> Object:
        """Stores `value` (which becomes the store's) under the next revision."""
        metadata = value["metadata"]
        name = (metadata.get("namespace", ""), metadata["name"])
        kept = self._objects.setdefault(key, {})
        previous = kept.get(name)
        self.revision += 1
        metadata["resourceVersion"] = str(self.revision)
        kept[name] = value
        self._tell(Change(self.revision, "ADDED" if previous is None else "MODIFIED", key, name, value, previous))
        return value

    def delete(self, key: Key, namespace: str, name: str) -> Object:
        previous = self._objects[key].pop((namespace, name))
        self.revision += 1
        last = {**previous, "metadata": {**previous["metadata"], "resourceVersion": str(self.revision)}}
        self._tell(Change(self.revision, "DELETED", key, (namespace, name), last, previous))
        return last

    def compact(self) -> None:
        """Forgets every change up to now."""
        self.revision += 1
        self.compacted = self.revision
        self._log.clear()

    def since(self, key: Key, revision: int) -> list[Change]:
        self.require(revision)
        first = bisect.bisect_right(self._log, revision, key=lambda change: change.revision)
        return [change for change in self._log[first:] if change.key == key]

    @contextmanager
    def subscribed(self, key: Key, who: str = "") -> Iterator[Subscription]:
        subscription = Subscription(key, who)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def cut(self, cut: Cut, chosen: Callable[[Subscription], bool] = lambda _: True) -> int:
        """Ends watches; the number of those that were ended."""
        ended = [each for each in self._subscriptions if chosen(each)]
        for each in ended:
            each.queue.put_nowait(cut)
        return len(ended)

    @property
    def watches(self) -> int:
        return len(self._subscriptions)

    def _tell(self, change: Change) -> None:
        self._log.append(change)
        if len(self._log) > LOG_LIMIT:
            dropped = self._log[: LOG_LIMIT // 2]
            del self._log[: LOG_LIMIT // 2]
            self.compacted = dropped[-1].revision
        for each in self._subscriptions:
            if each.key == change.key:
                each.queue.put_nowait(change)
        for call in self._after:
            call(change)
