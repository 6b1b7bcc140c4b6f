"""Lists and watches.

Upstream: `apiserver/pkg/endpoints/handlers/{get,watch}.go`, `storage/cacher`; resourceVersion semantics and bookmarks:
`kubernetes.io/docs/reference/using-api/api-concepts`; streaming lists (`sendInitialEvents`): KEP-3157.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from tests.kubernetes.apiserver import errors
from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.errors import ApiError, FieldFault, bad_request
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.selectors import chosen
from tests.kubernetes.apiserver.store import Change, Cut, Object

# A watch without a timeout of its own ends after this at least, twice this at most (`--min-request-timeout`).
MIN_WATCH_S = 1800.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


class Watches:
    """Reads of collections."""

    def __init__(self, registry: Registry, bookmark_interval_s: float) -> None:
        self._registry = registry
        self._store = registry.store
        self.bookmark_interval_s = bookmark_interval_s

    def list(self, call: Call) -> tuple[list[Object], Object]:
        """The objects and the list's metadata."""
        query, resource = call.query, call.resource
        holds = self._selected(call)
        version, match = query.get("resourceVersion", ""), query.get("resourceVersionMatch", "")
        limit, token = int(query.get("limit") or 0), query.get("continue", "")
        after: tuple[str, str] | None = None
        revision = self._store.revision
        if token:
            if version not in ("", "0"):
                raise bad_request("specifying resource version is not allowed when using continue")
            revision, after = _opened(token)
            try:
                self._store.require(revision)
            except ApiError as error:
                raise errors.expired(
                    "The provided continue parameter is too old to display a consistent list result. You "
                    "can start a new list without "
                    "the continue parameter, or use the continue token in this response to retrieve the "
                    "remainder of the list."
                ) from error
        elif version not in ("", "0"):
            wanted = _number(version)
            if wanted > self._store.revision:
                raise ApiError(
                    504,
                    "Timeout",
                    f"Timeout: Too large resource version: {wanted}, current: {self._store.revision}",
                    retry_after_s=1,
                )
            if match == "Exact":
                revision = wanted
        if match and not version:
            raise _match_invalid(resource.kind, "resourceVersionMatch is forbidden unless resourceVersion is provided")
        namespace = call.namespace if resource.namespaced and call.namespace else None
        if revision == self._store.revision:
            items = self._store.list(resource.key, namespace)
        else:
            kept = self._store.snapshot(resource.key, revision)
            items = [kept[name] for name in sorted(kept) if namespace is None or name[0] == namespace]
        if after is not None:
            items = [each for each in items if _name(each) > after]
        metadata: Object = {"resourceVersion": str(revision)}
        found = [each for each in items if holds(each)]
        if limit and len(found) > limit:
            remaining = len(found) - limit
            found = found[:limit]
            metadata["continue"] = _token(revision, _name(found[-1]))
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                metadata["remainingItemCount"] = remaining
        return [self._registry.as_version(resource, each) for each in found], metadata

    async def watch(self, call: Call) -> AsyncIterator[Object]:
        """Events as they are written on the wire."""
        query, resource = call.query, call.resource
        holds = self._selected(call)
        bookmarks = call.flag("allowWatchBookmarks")
        initial = query.get("sendInitialEvents")
        if initial and query.get("resourceVersionMatch") != "NotOlderThan":
            raise _match_invalid(
                resource.kind,
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                "FieldValueForbidden",
            )
        lasting_s = float(query.get("timeoutSeconds") or 0) or random.uniform(MIN_WATCH_S, 2 * MIN_WATCH_S)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + lasting_s
        version = query.get("resourceVersion", "")
        with self._store.subscribed(resource.key, call.user.name) as subscription:
            sent = self._store.revision
            if version in ("", "0") or initial in ("true", "1"):
                if initial != "false":
                    items, _ = self.list(_plain(call))
                    for each in items:
                        yield {"type": "ADDED", "object": each}
                    if initial and bookmarks:
                        yield self._bookmark(call, sent, {INITIAL_EVENTS_END: "true"})
            else:
                try:
                    missed = self._store.since(resource.key, _number(version))
                except ApiError as error:
                    yield {"type": "ERROR", "object": error.status()}
                    return
                for change in missed:
                    for event in self._events(call, change, holds):
                        yield event
            next_bookmark = loop.time() + self.bookmark_interval_s
            while True:
                until = min(ends_at, next_bookmark) if bookmarks else ends_at
                try:
                    change_or_cut = await asyncio.wait_for(subscription.queue.get(), max(until - loop.time(), 0))
                except TimeoutError:
                    if bookmarks:
                        yield self._bookmark(call, self._store.revision if subscription.queue.empty() else sent)
                    if loop.time() >= ends_at:
                        return
                    next_bookmark = loop.time() + self.bookmark_interval_s
                    continue
                if isinstance(change_or_cut, Cut):
                    if change_or_cut.error is not None:
                        yield {"type": "ERROR", "object": change_or_cut.error}
                    return
                sent = change_or_cut.revision
                for event in self._events(call, change_or_cut, holds):
                    yield event

    def _selected(self, call: Call) -> Callable[[Object], bool]:
        fields = call.query.get("fieldSelector", "")
        if call.name:
            # A watch of one object, by its path.
            fields = ",".join(filter(None, (fields, f"metadata.name={call.name}")))
        return chosen(call.resource, call.query.get("labelSelector", ""), fields)

    def _events(self, call: Call, change: Change, holds: Callable[[Object], bool]) -> Iterable[Object]:
        """What a change is to a watcher: an object that no longer fits its selector is deleted to it."""
        if call.resource.namespaced and call.namespace and change.name[0] != call.namespace:
            return
        value = self._registry.as_version(call.resource, change.object)
        before = change.previous is not None and holds(change.previous)
        after = change.kind != "DELETED" and holds(change.object)
        if after:
            yield {"type": "MODIFIED" if before else "ADDED", "object": value}
        elif before:
            # The last state that fitted, under the revision at which it stopped to (`cacher`, convertToWatchEvent).
            assert change.previous is not None
            last = self._registry.as_version(call.resource, change.previous)
            metadata = {**last["metadata"], "resourceVersion": str(change.revision)}
            yield {"type": "DELETED", "object": {**last, "metadata": metadata}}

    def _bookmark(self, call: Call, revision: int, annotations: dict[str, str] | None = None) -> Object:
        metadata: Object = {"resourceVersion": str(revision), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        value = {"kind": call.resource.kind, "apiVersion": call.resource.group_version, "metadata": metadata}
        return {"type": "BOOKMARK", "object": value}


def _plain(call: Call) -> Call:
    """The list that a watch begins with: the same selectors, the newest state."""
    kept = {name: each for name, each in call.query.items() if name in ("labelSelector", "fieldSelector")}
    return Call("list", call.target, call.resource, call.user, kept, call.user_agent)


def _name(value: Object) -> tuple[str, str]:
    return (value["metadata"].get("namespace", ""), value["metadata"]["name"])


def _number(version: str) -> int:
    try:
        return int(version)
    except ValueError as error:
        raise bad_request(f"resourceVersion: Invalid value: {version!r}: strconv.ParseUint: invalid syntax") from error


def _match_invalid(kind: str, message: str, fault: str = "FieldValueForbidden") -> ApiError:
    return errors.invalid("ListOptions", "meta.k8s.io", "", [FieldFault("resourceVersionMatch", message, fault)])


def _token(revision: int, name: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(
        json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": name}).encode()
    ).decode()


def _opened(token: str) -> tuple[int, tuple[str, str]]:
    try:
        value: dict[str, Any] = json.loads(base64.urlsafe_b64decode(token))
        namespace, name = value["start"]
        return int(value["rv"]), (namespace, name)
    except (ValueError, KeyError) as error:
        raise bad_request("continue key is not valid: " + str(error)) from error
