"""Small clients of the API for what is not under test: the controllers, the kubelet stand-in, and the tests themselves.

Model: `Client` (asyncio) and `Api` (blocking) speak JSON to any API server; an `Informer` keeps a copy of a
collection by list and watch, resumes after a cut, and lists again after 410 Gone. What is under test uses the
official client instead.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import yaml

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.apiserver.resources import ResourceType, builtin_types

Object = dict[str, Any]
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a server: out of a kubeconfig."""

    url: str
    token: str
    authority: str
    client_certificate: str = ""
    client_key: str = ""

    @classmethod
    def of_kubeconfig(cls, path: Path) -> Access:
        """Contexts with a token or a client certificate, inline or in files."""
        import base64
        import tempfile

        config = yaml.safe_load(path.read_text())
        named = {kind: {each["name"]: each for each in config[kind]} for kind in ("contexts", "clusters", "users")}
        context = named["contexts"][config["current-context"]]["context"]
        cluster = named["clusters"][context["cluster"]]["cluster"]
        user = named["users"][context["user"]].get("user") or {}

        def file_of(source: Object, name: str) -> str:
            if source.get(f"{name}-data"):
                with tempfile.NamedTemporaryFile(delete=False, suffix=".pem") as file:
                    file.write(base64.b64decode(source[f"{name}-data"]))
                return file.name
            return str((path.parent / source[name]).resolve()) if source.get(name) else ""

        return cls(
            cluster["server"],
            user.get("token", ""),
            file_of(cluster, "certificate-authority"),
            file_of(user, "client-certificate"),
            file_of(user, "client-key"),
        )

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority or None)
        if self.client_certificate:
            context.load_cert_chain(self.client_certificate, self.client_key)
        return context

    def write_kubeconfig(self, path: Path, user: str, namespace: str) -> None:
        """With the token alone: whoever has a certificate of a client has a kubeconfig already."""
        cluster = {"server": self.url, "certificate-authority": self.authority}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user, "namespace": namespace}}],
            "current-context": "tests",
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def _types() -> dict[str, ResourceType]:
    return {each.plural: each for each in builtin_types()}


_BUILTIN = _types()


def path_of(plural: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of a built-in resource by its plural; of others by `group/version/plural`."""
    if "/" in plural:
        group, version, plural = plural.split("/")
    else:
        group, version = _BUILTIN[plural].group, _BUILTIN[plural].version
    parts = ["apis", group, version] if group else ["api", version]
    if namespace and plural != "namespaces":
        parts += ["namespaces", namespace]
    parts += [plural, *([name] if name else []), *([subresource] if subresource else [])]
    return "/" + "/".join(parts)


class Client:
    """For an event loop."""

    def __init__(self, access: Access, agent: str) -> None:
        self._access = access
        self._agent = agent
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {**self._access.headers(), "User-Agent": self._agent, "Accept": "application/json"}
        connector = aiohttp.TCPConnector(
            ssl=self._access.context() if self._access.url.startswith("https") else False, limit=0
        )
        self._session = aiohttp.ClientSession(
            self._access.url,
            headers=headers,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json", **query: Any
    ) -> Object:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        given = {name: str(each) for name, each in query.items() if each is not None}
        async with self._session.request(
            method, path, data=data, params=given, headers={"Content-Type": kind}
        ) as answer:
            raw = await answer.read()
            decoded = msgspec.json.decode(raw) if raw else {}
            if answer.status >= 400:
                raise _error(answer.status, decoded)
            return decoded

    async def get(self, plural: str, namespace: str, name: str) -> Object | None:
        try:
            return await self.call("GET", path_of(plural, namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def create(self, plural: str, namespace: str, body: Object) -> Object:
        return await self.call("POST", path_of(plural, namespace), body)

    async def patch(self, plural: str, namespace: str, name: str, body: Any, subresource: str = "") -> Object:
        return await self.call("PATCH", path_of(plural, namespace, name, subresource), body, kind=MERGE)

    async def delete(self, plural: str, namespace: str, name: str, **options: Any) -> None:
        with suppress_not_found():
            await self.call("DELETE", path_of(plural, namespace, name), options or None)

    async def list(self, plural: str, namespace: str = "", **query: Any) -> tuple[list[Object], str]:
        found = await self.call("GET", path_of(plural, namespace), **query)
        return found["items"], found["metadata"]["resourceVersion"]

    async def watch(self, plural: str, version: str, namespace: str = "", **query: Any) -> AsyncIterator[Object]:
        assert self._session is not None
        given = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true", **query}
        async with self._session.get(path_of(plural, namespace), params=given) as answer:
            if answer.status >= 400:
                raise _error(answer.status, await answer.json(content_type=None))
            buffer = b""
            async for piece in answer.content.iter_any():
                buffer += piece
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    if line.strip():
                        yield msgspec.json.decode(line)


def _error(code: int, body: Any) -> ApiError:
    status = body if isinstance(body, dict) else {}
    details = status.get("details") or {}
    return ApiError(code, status.get("reason", ""), status.get("message", str(code)), details)


def suppress_not_found() -> suppress_api_error:
    return suppress_api_error(404)


class suppress_api_error:
    """Lets refusals with these codes pass."""

    def __init__(self, *codes: int) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, ApiError) and error.code in self._codes


Listener = Callable[[str, Object], None]


@dataclass(slots=True)
class Informer:
    """A copy of a collection, kept by list and watch."""

    client: Client
    plural: str
    query: dict[str, str] = field(default_factory=dict)
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)
    synced: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._listed()
                version = await self._followed(version)
            except ApiError as error:
                if error.code == 410:
                    version = ""
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
            except (aiohttp.ClientError, OSError, TimeoutError):
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))

    def of(self, namespace: str) -> list[Object]:
        return [each for name, each in self.objects.items() if name[0] == namespace]

    async def _listed(self) -> str:
        items, version = await self.client.list(self.plural, **self.query)
        fresh = {_name(each): each for each in items}
        for name in self.objects.keys() - fresh.keys():
            self._tell("DELETED", self.objects.pop(name))
        for name, each in fresh.items():
            kind = "MODIFIED" if name in self.objects else "ADDED"
            self.objects[name] = each
            self._tell(kind, each)
        self.synced.set()
        return version

    async def _followed(self, version: str) -> str:
        async for event in self.client.watch(self.plural, version, **self.query):
            value = event["object"]
            match event["type"]:
                case "ERROR":
                    raise ApiError(value.get("code", 500), value.get("reason", ""), value.get("message", ""))
                case "BOOKMARK":
                    pass
                case "DELETED":
                    self.objects.pop(_name(value), None)
                    self._tell("DELETED", value)
                case kind:
                    self.objects[_name(value)] = value
                    self._tell(kind, value)
            version = value["metadata"]["resourceVersion"]
        return version

    def _tell(self, kind: str, value: Object) -> None:
        for each in self.listeners:
            each(kind, value)


def _name(value: Object) -> tuple[str, str]:
    return (value["metadata"].get("namespace", ""), value["metadata"]["name"])


def _decoded(code: int, raw: bytes) -> Any:
    try:
        decoded = json.loads(raw)
    except ValueError:
        decoded = raw.decode(errors="replace")
    if code >= 400:
        raise _error(code, decoded)
    return decoded


class Api:
    """For a test's own thread: blocking calls, built-in and custom kinds alike."""

    def __init__(self, access: Access, agent: str = "tests") -> None:
        self._access = access
        self._agent = agent
        self._context = access.context() if access.url.startswith("https") else None
        self._kept = threading.local()
        # Paths of objects that were not there before, oldest first; None: it is not kept.
        self.made: list[str] | None = None
        self._kinds = {(each.group_version, each.kind): (each.plural, each.namespaced) for each in builtin_types()}

    def call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", timeout_s: float = 120.0
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {
            **self._access.headers(),
            "Content-Type": kind,
            "User-Agent": self._agent,
            "Accept": "application/json",
        }
        if method == "GET":
            return _decoded(*self._read(path, headers, timeout_s))
        request = urllib.request.Request(self._access.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._context) as answer:
                raw = answer.read()
        except urllib.error.HTTPError as error:
            decoded: Any = {}
            with suppress(ValueError):
                decoded = json.loads(error.read())
            raise _error(error.code, decoded) from None
        return _decoded(200, raw)

    def _read(self, path: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Over a connection that is kept: tests look again and again, and a handshake costs more than a list."""
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        url = urlsplit(self._access.url)
        for connection in (kept, None):
            if connection is None and url.scheme == "https":
                connection = http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=self._context)
            elif connection is None:
                connection = http.client.HTTPConnection(url.netloc, timeout=timeout_s)
            try:
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                raw = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self._kept.connection = None
                if connection is not kept:
                    raise
                continue  # the server may have closed it meanwhile
            self._kept.connection = connection
            return answer.status, raw
        raise AssertionError("a connection of its own is given or refused")

    def get(self, plural: str, name: str, namespace: str = "default") -> Object:
        found: Object = self.call("GET", path_of(plural, self._where(plural, namespace), name))
        return found

    def list(self, plural: str, namespace: str = "", selector: str = "") -> list[Object]:
        query = f"?labelSelector={urllib.request.quote(selector)}" if selector else ""
        return list(self.call("GET", path_of(plural, self._where(plural, namespace)) + query)["items"])

    def create(self, body: Object, namespace: str = "default") -> Object:
        path = self._path(body, namespace)
        made: Object = self.call("POST", path, body)
        if self.made is not None:
            self.made.append(f"{path}/{made['metadata']['name']}")
        return made

    def apply(self, body: Object, namespace: str = "default", manager: str = "tests") -> Object:
        """Server-side apply, forced."""
        path = f"{self._path(body, namespace)}/{body['metadata']['name']}"
        if self.made is not None:
            try:
                self.call("GET", path)
            except ApiError as error:
                self.made += [path] if error.code == 404 else []
        made: Object = self.call("PATCH", f"{path}?fieldManager={manager}&force=true", body, APPLY)
        return made

    def patch(self, plural: str, name: str, body: Any, namespace: str = "default", subresource: str = "") -> Object:
        made: Object = self.call(
            "PATCH", path_of(plural, self._where(plural, namespace), name, subresource), body, MERGE
        )
        return made

    def delete(self, plural: str, name: str, namespace: str = "default", **options: Any) -> None:
        with suppress_not_found():
            self.call("DELETE", path_of(plural, self._where(plural, namespace), name), options or None)

    def evict(self, pod: str, namespace: str = "default") -> None:
        """Raises ApiError with code 429 where a disruption budget forbids it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self.call("POST", path_of("pods", namespace, pod, "eviction"), body)

    def _where(self, plural: str, namespace: str) -> str:
        if "/" in plural:
            return namespace
        return namespace if _BUILTIN[plural].namespaced else ""

    def _path(self, body: Object, namespace: str) -> str:
        version = body["apiVersion"]
        known = self._kinds.get((version, body["kind"]))
        if known is None:
            listed = self.call("GET", f"/apis/{version}")
            for each in listed["resources"]:
                self._kinds.setdefault((version, each["kind"]), (each["name"], each["namespaced"]))
            known = self._kinds[version, body["kind"]]
        plural, namespaced = known
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        where = body["metadata"].get("namespace") or namespace
        return f"{prefix}/namespaces/{where}/{plural}" if namespaced else f"{prefix}/{plural}"
