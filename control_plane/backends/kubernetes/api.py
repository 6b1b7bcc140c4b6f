"""The API server as the rest of this package sees it: objects are mappings, refusals are exceptions with reasons.

The official client brings configuration, credentials and their renewal, TLS and connections; its models are left out,
since they cost a second of import and say nothing that the API server does not check. Limits: one namespace; a watch
gives up when nothing was heard for `SILENT_S`, which ends half-open connections.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp

from control_plane.settings import KubernetesSettings

CALL_S: Final = 15.0
WATCH_S: Final = 290
"""How long the server is asked to keep a watch open: it ends watches by itself after five to ten minutes."""
SILENT_S: Final = 330.0
PAGE: Final = 500
"""Objects a page of a list holds."""
Object = dict[str, Any]
MERGE: Final = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", part: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        tail = "".join(f"/{each}" for each in (name, part) if each)
        return f"{root}/namespaces/{namespace}/{self.plural}{tail}"


PODS: Final = Resource("", "v1", "pods", "Pod")
EVENTS: Final = Resource("", "v1", "events", "Event")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
SLOT_POOLS: Final = Resource("stoker.dev", "v1alpha1", "slotpools", "SlotPool")
FUNCTIONS: Final = Resource("stoker.dev", "v1alpha1", "functions", "Function")


class ApiError(Exception):
    """The API server cannot be reached, or did not answer sensibly: the same call may succeed later."""

    retry_after_s: float | None = None


class ApiRefused(ApiError):
    """It answered, and said no."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{message or reason} ({status})")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Listed:
    items: tuple[Object, ...]
    version: str
    """From where on to watch."""


@dataclass(frozen=True, slots=True)
class Happened:
    kind: str
    """ADDED | MODIFIED | DELETED | BOOKMARK"""
    object: Object


class Api(Protocol):
    """What the backend asks of a cluster, in its namespace."""

    async def list(self, resource: Resource, labels: str = "", fields: str = "") -> Listed: ...

    def watch(self, resource: Resource, version: str, labels: str = "", fields: str = "") -> AsyncIterator[Happened]:
        """Ends when the server ends it. Raises ApiRefused with 410 where the version is too old."""
        ...

    async def get(self, resource: Resource, name: str) -> Object: ...

    async def create(self, resource: Resource, body: Object) -> Object: ...

    async def replace(self, resource: Resource, name: str, body: Object) -> Object: ...

    async def patch(self, resource: Resource, name: str, body: Object, part: str = "") -> Object:
        """A merge patch, of the object or of a part of it (`status`)."""
        ...

    async def delete(self, resource: Resource, name: str, *, uid: str = "", version: str = "") -> None:
        """Of this very object, and in this very state, where that is said. Raises ApiRefused with 409 otherwise."""
        ...

    async def close(self) -> None: ...


class ClusterApi:
    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    async def connect(cls, settings: KubernetesSettings) -> ClusterApi:
        """By the pod's service account, or by a kubeconfig where one is given. Raises ApiError."""
        try:
            # NOTE: a second of the start that may take one: beside it, therefore.
            client = await asyncio.to_thread(_import_client)
        except ImportError as error:
            raise ApiError("the package kubernetes is not installed: pip install 'stoker[kubernetes]'") from error
        configuration = client.Configuration()
        try:
            config: Any = importlib.import_module("kubernetes.aio.config")
            if settings.kubeconfig:
                await config.load_kube_config(
                    settings.kubeconfig, client_configuration=configuration, persist_config=False
                )
            else:
                config.load_incluster_config(configuration)
        except Exception as error:
            raise ApiError(f"how to reach the API server is not known: {error}") from error
        configuration.retries = 0  # whoever calls knows what a repetition means
        configuration.connection_pool_maxsize = 0  # watches hold theirs for long
        return cls(client.ApiClient(configuration), settings.namespace)

    async def close(self) -> None:
        await self._client.close()

    async def list(self, resource: Resource, labels: str = "", fields: str = "") -> Listed:
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE), "continue": ""}
        while True:
            page = await self._call("GET", resource.path(self.namespace), query)
            items += page.get("items") or ()
            metadata = page.get("metadata") or {}
            query["continue"] = str(metadata.get("continue") or "")
            if not query["continue"]:
                return Listed(tuple(items), str(metadata.get("resourceVersion") or ""))

    async def watch(
        self, resource: Resource, version: str, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Happened]:
        query = {
            "labelSelector": labels,
            "fieldSelector": fields,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_S, sock_read=SILENT_S)
        response = await self._send("GET", resource.path(self.namespace), query, None, timeout)
        try:
            if response.status >= 400:
                raise _refusal(response.status, await response.read(), response.headers)
            async for line in response.content:
                if line.strip():
                    yield _happened(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(f"the watch of {resource.plural} broke off: {error or type(error).__name__}") from error
        finally:
            response.close()

    async def get(self, resource: Resource, name: str) -> Object:
        return await self._call("GET", resource.path(self.namespace, name))

    async def create(self, resource: Resource, body: Object) -> Object:
        return await self._call("POST", resource.path(self.namespace), body=body)

    async def replace(self, resource: Resource, name: str, body: Object) -> Object:
        return await self._call("PUT", resource.path(self.namespace, name), body=body)

    async def patch(self, resource: Resource, name: str, body: Object, part: str = "") -> Object:
        return await self._call("PATCH", resource.path(self.namespace, name, part), body=body, content=MERGE)

    async def delete(self, resource: Resource, name: str, *, uid: str = "", version: str = "") -> None:
        said = {key: value for key, value in (("uid", uid), ("resourceVersion", version)) if value}
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", **({"preconditions": said} if said else {})}
        await self._call("DELETE", resource.path(self.namespace, name), body=body)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        response = await self._send(method, path, query, body, aiohttp.ClientTimeout(total=CALL_S), content)
        try:
            answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _refusal(response.status, answer, response.headers)
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise ApiError(f"{method} {path}: the answer is not JSON") from error
        return found if isinstance(found, dict) else {}

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        timeout: aiohttp.ClientTimeout,
        content: str = "application/json",
    ) -> aiohttp.ClientResponse:
        asked = [(name, value) for name, value in (query or {}).items() if value]
        try:
            verb, url, headers, data, _ = await self._client.param_serialize(
                method=method,
                resource_path=path,
                query_params=asked,
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(verb, url, header_params=headers, body=data, _request_timeout=timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(f"the API server cannot be reached: {error or type(error).__name__}") from error
        response: aiohttp.ClientResponse = answer.response
        return response


def _import_client() -> Any:
    importlib.import_module("kubernetes.aio.config")
    client: Any = importlib.import_module("kubernetes.aio.client")
    _ = (client.ApiClient, client.Configuration)  # both are only imported when they are first named
    return client


def _happened(line: bytes) -> Happened:
    event = json.loads(line)
    kind, found = str(event.get("type")), event.get("object")
    if not isinstance(found, dict):
        raise ValueError("an event without an object")
    if kind == "ERROR":
        details = found.get("details") or {}
        raise ApiRefused(
            int(found.get("code") or 500),
            str(found.get("reason") or ""),
            str(found.get("message") or ""),
            details.get("retryAfterSeconds"),
        )
    return Happened(kind, found)


def _refusal(status: int, answer: bytes, headers: Mapping[str, str]) -> ApiRefused:
    reason, message = "", answer[:300].decode(errors="replace")
    try:
        said = json.loads(answer)
        reason, message = str(said.get("reason") or ""), str(said.get("message") or message)
    except (ValueError, AttributeError):
        pass
    after = headers.get("Retry-After", "")
    return ApiRefused(status, reason, message, float(after) if after.isdigit() else None)
