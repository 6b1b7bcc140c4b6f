"""A client of Stoker's HTTP surface whose streams survive whatever the service survives.

Model: `Client` blocks and needs the standard library only, `AsyncClient` uses aiohttp; both iterate a stream over as
many connections as it takes (`control_plane.resumption` says how), and every connection asks where the service is now.
A service with several gateways is given by all their addresses; when one does not answer the next is asked.
Limits: a stream gives up after `give_up_s` without progress; a plain call that was sent is never repeated.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from control_plane.resumption import (
    Broken,
    Call,
    ClientError,
    EventParser,
    HttpError,
    Patience,
    StreamEvent,
    StreamLost,
    StreamState,
    Unreachable,
)

if TYPE_CHECKING:
    import types

    import aiohttp

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Broken",
    "Client",
    "ClientError",
    "Endpoint",
    "HttpError",
    "Stream",
    "StreamEvent",
    "StreamLost",
    "Unreachable",
    "encode_query",
]

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 45.0
"""A held stream carries a heartbeat every ten seconds; silence of this length is a dead connection."""

Json: TypeAlias = Any
Query: TypeAlias = Mapping[str, str | int | float | list[str] | None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service listens (`http://host:port`) and the key to show it."""

    url: str
    api_key: str = ""


Locator: TypeAlias = Callable[[], Endpoint]
"""Asked before every connection, so that a service that came back on another port is found again."""


def _at(endpoint: Endpoint) -> Locator:
    return lambda: endpoint


class Places:
    """Where the service is, and where else: one gateway after the other."""

    def __init__(self, where: Locator | Endpoint | Sequence[Endpoint]) -> None:
        self._locators: list[Locator] = []
        for each in where if isinstance(where, Sequence) else (where,):
            self._locators.append(_at(each) if isinstance(each, Endpoint) else each)
        self._now = self._failed = 0

    def here(self) -> Endpoint:
        return self._locators[self._now]()

    def answered(self) -> None:
        self._failed = 0

    def move_on(self) -> bool:
        """To the next address; False: all have been tried in vain."""
        self._now = (self._now + 1) % len(self._locators)
        self._failed += 1
        return self._failed % len(self._locators) != 0


# --- blocking ---------------------------------------------------------------------------------------------------------


class Client:
    """Calls that block. One connection per call: a command makes few of them."""

    def __init__(self, where: Locator | Endpoint | Sequence[Endpoint], *, give_up_s: float = 60.0) -> None:
        self.places = Places(where)
        self._give_up_s = give_up_s

    @property
    def endpoint(self) -> Endpoint:
        return self.places.here()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Json = None,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
    ) -> Json:
        """The decoded answer (text where it is not JSON); HttpError for a status of 400 or above. A body of bytes is
        sent as it is."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if data is None else {"Content-Type": content_type}
        call = Call(method, path + encode_query(query), sent, data)
        while True:
            try:
                connection, response = self._send(call, timeout_s)
                break
            except Unreachable as error:
                if error.connected or not self.places.move_on():
                    raise
        try:
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self.places.here().url, error, connected=True) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise HttpError.from_response(response.status, dict(response.getheaders()), content)
        if "json" in (response.getheader("Content-Type") or ""):
            return json.loads(content)
        return content.decode("utf-8", "replace")

    def lines(self, method: str, path: str, *, body: Json = None, timeout_s: float = 600.0) -> Iterator[Json]:
        """An answer that is a line of JSON after another, each as it comes. `timeout_s`: longest silence."""
        data = None if body is None else json.dumps(body).encode()
        sent = {} if data is None else {"Content-Type": "application/json"}
        connection, response = self._send(Call(method, path, sent, data), timeout_s)
        try:
            if response.status >= 400:
                raise HttpError.from_response(response.status, dict(response.getheaders()), response.read())
            while line := response.readline():
                yield json.loads(line)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self.places.here().url, error, connected=True) from error
        finally:
            connection.close()

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        idempotency_key: str | None = None,
        on_status: Callable[[str], None] | None = None,
    ) -> Stream:
        return Stream(self, StreamState(path, body, idempotency_key or uuid.uuid4().hex), on_status)

    def resume(self, path: str, request_id: str, cursor: int = 0) -> Stream:
        """Read on in a request that is known by its id."""
        return Stream(self, StreamState(path, {}, "", request_id=request_id, cursor=cursor), None)

    def cancel(self, path: str, request_id: str) -> None:
        self.request("POST", f"{path}/{urllib.parse.quote(request_id)}/cancel")

    def _send(self, call: Call, timeout_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        endpoint = self.places.here()
        parts = urllib.parse.urlsplit(endpoint.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=CONNECT_TIMEOUT_S)
        connected = False
        try:
            connection.connect()
            connected = True
            connection.sock.settimeout(timeout_s)
            headers = {"Authorization": f"Bearer {endpoint.api_key}", **call.headers}
            connection.request(call.method, parts.path.rstrip("/") + call.path, body=call.body, headers=headers)
            response = connection.getresponse()
            self.places.answered()
            return connection, response
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(endpoint.url, error, connected=connected) from error
        except BaseException:
            connection.close()
            raise


class Stream:
    """Iterate it once. `request_id`, `cursor` and `resumes` tell how it went, also after an error."""

    def __init__(self, client: Client, state: StreamState, on_status: Callable[[str], None] | None) -> None:
        self._client = client
        self._state = state
        self._on_status = on_status

    @property
    def request_id(self) -> str | None:
        return self._state.request_id

    @property
    def cursor(self) -> int:
        return self._state.cursor

    @property
    def resumes(self) -> int:
        return self._state.resumes

    def __iter__(self) -> Iterator[StreamEvent]:
        patience = Patience(self._state, self._client._give_up_s, self._client.places.move_on)
        while True:
            cause: ClientError | None = None
            try:
                yield from self._connection()
            except ClientError as error:
                cause = error
            if self._state.done:
                return
            time.sleep(patience.next_pause_s(cause))

    def _connection(self) -> Iterator[StreamEvent]:
        state, parser = self._state, EventParser()
        connection, response = self._client._send(state.call(), READ_TIMEOUT_S)
        try:
            headers = dict(response.getheaders())
            if response.status >= 400:
                raise HttpError.from_response(response.status, headers, response.read())
            state.opened(headers)
            while not state.done and (data := response.read1(65536)):
                for event in parser.feed(data):
                    if event.data is None and self._on_status is not None:
                        self._on_status(event.comment)
                    if (found := state.take(event)) is not None:
                        yield found
        except (OSError, http.client.HTTPException) as error:
            raise Broken(error) from error
        finally:
            connection.close()


# --- asyncio ----------------------------------------------------------------------------------------------------------


class AsyncClient:
    """The same over aiohttp, for many streams at once. Use it as an async context manager."""

    def __init__(self, where: Locator | Endpoint | Sequence[Endpoint], *, give_up_s: float = 60.0) -> None:
        self.places = Places(where)
        self._give_up_s = give_up_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def endpoint(self) -> Endpoint:
        return self.places.here()

    async def __aenter__(self) -> AsyncClient:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, path: str, *, query: Query | None = None, body: Json = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        async with self._open(Call(method, path + encode_query(query), headers, data)) as response:
            content = await response.read()
            if response.status >= 400:
                raise HttpError.from_response(response.status, response.headers, content)
            return json.loads(content) if "json" in response.content_type else content.decode("utf-8", "replace")

    def stream(self, path: str, body: dict[str, Any], *, idempotency_key: str | None = None) -> AsyncStream:
        return AsyncStream(self, StreamState(path, body, idempotency_key or uuid.uuid4().hex))

    def resume(self, path: str, request_id: str, cursor: int = 0) -> AsyncStream:
        return AsyncStream(self, StreamState(path, {}, "", request_id=request_id, cursor=cursor))

    def _open(self, call: Call) -> aiohttp.client._RequestContextManager:
        from yarl import URL

        if self._session is None:
            raise RuntimeError("AsyncClient is used outside its context: write `async with AsyncClient(...)`")
        endpoint = self.places.here()
        return self._session.request(
            call.method,
            URL(endpoint.url.rstrip("/") + call.path, encoded=True),
            data=call.body,
            headers={"Authorization": f"Bearer {endpoint.api_key}", **call.headers},
        )


class AsyncStream:
    """Iterate it once, with `async for`."""

    def __init__(self, client: AsyncClient, state: StreamState) -> None:
        self._client = client
        self._state = state

    @property
    def request_id(self) -> str | None:
        return self._state.request_id

    @property
    def cursor(self) -> int:
        return self._state.cursor

    @property
    def resumes(self) -> int:
        return self._state.resumes

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        patience = Patience(self._state, self._client._give_up_s, self._client.places.move_on)
        while True:
            cause: ClientError | None = None
            try:
                async for event in self._connection():
                    yield event
            except ClientError as error:
                cause = error
            if self._state.done:
                return
            await asyncio.sleep(patience.next_pause_s(cause))

    async def _connection(self) -> AsyncIterator[StreamEvent]:
        import aiohttp

        state, parser = self._state, EventParser()
        try:
            async with self._client._open(state.call()) as response:
                if response.status >= 400:
                    raise HttpError.from_response(response.status, response.headers, await response.read())
                self._client.places.answered()
                state.opened(response.headers)
                async for data in response.content.iter_any():
                    for event in parser.feed(data):
                        if (found := state.take(event)) is not None:
                            yield found
                    if state.done:
                        return
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(self._client.endpoint.url, error, connected=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Broken(error) from error


def encode_query(query: Query | None) -> str:
    """`?a=1&b=x&b=y`; what is None is left out."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return "?" + urllib.parse.urlencode(given, doseq=True) if given else ""
