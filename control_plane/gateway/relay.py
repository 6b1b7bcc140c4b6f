"""Reading a request where it is: what another gateway owns is read there for the client, and goes on when it moves.

A handler raises `Elsewhere`; here the owner is asked in the client's name for the same thing by the request's id. When
the owner dies the adopter is asked, from the last event that was passed on; when that is this gateway, it is read here.
What was forwarded once is not forwarded again, so there are no loops: the first gateway asks anew who the owner is.
A client that goes away is told of to the owner, for whom a broken connection alone could be this gateway's death.
Limits: an answer that is relayed costs a second pass through a gateway, so clients do best to come back to the owner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
from aiohttp import web

from control_plane.context import CONTEXT, AppContext
from control_plane.errors import Elsewhere, StokerError, Unavailable
from control_plane.gateway import responses
from control_plane.gateway.acceptance import find, reading
from control_plane.gateway.access import authenticate
from control_plane.gateway.internal import FORWARDED_FOR, READER, forwarding
from control_plane.gateway.reading import STREAM_WRITER, EventWriter, send_stream, send_whole
from control_plane.gateway.rendering import comment
from control_plane.gateway.responses_found import lookup
from control_plane.gateway.resume import cursor_of
from control_plane.peers import Left
from control_plane.tenants import ApiKey

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 0.5
"""Pause before the owner is looked up anew, unless a gateway came or went."""
GRACE_S: Final = 30.0
"""Beyond the stated time of an adoption, how long a request may be without anybody who can be asked for it."""
SILENT_S: Final = 35.0
"""An owner sends heartbeats; longer silence is a dead connection."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def relay_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Elsewhere as elsewhere:
        writer: EventWriter | None = request.get(STREAM_WRITER)
        if FORWARDED_FOR in request.headers:
            if writer is not None and writer.open and request.transport is not None:
                request.transport.abort()  # whoever forwarded it goes on from the last whole event
                raise ConnectionResetError("moved in the middle of a stream") from elsewhere
            raise
        context = request.app[CONTEXT]
        key = authenticate(context, request)
        request["request_id"] = elsewhere.request_id
        return await _Relay(context, request, key, elsewhere, writer).run(handler)


class _Moved(Exception):
    """The gateway that was asked does not have it (any more), or is gone."""


class _Relay:
    def __init__(
        self, context: AppContext, request: web.Request, key: ApiKey, elsewhere: Elsewhere, writer: EventWriter | None
    ) -> None:
        self._context = context
        self._request = request
        self._key = key
        self._id = elsewhere.request_id
        self._owner = elsewhere.owner
        self._cursor = elsewhere.cursor
        base = request.path.split(self._id)[0].rstrip("/")
        self._path = f"{base}/{self._id}"
        self._of_responses = base == "/v1/responses"
        self._streams = request.path.endswith("/stream") or writer is not None
        self._cancels = request.path.endswith("/cancel")
        if self._of_responses and request.method == "GET":
            self._streams = responses.wants_stream(request)
        self._reader = secrets.token_hex(8)
        self._asked = ""
        """Where the owner was asked last."""
        self._writer = writer
        self._lost_since_s = time.monotonic()

    async def run(self, handler: Handler) -> web.StreamResponse:
        try:
            return await self._follow(handler)
        except (asyncio.CancelledError, ConnectionResetError):
            if self._asked and not self._context.draining:
                self._context.peers.tell_left(self._asked, Left(self._id, self._reader))
            raise
        except StokerError as error:
            if self._writer is None or not self._writer.open:
                raise
            return await self._writer.fail(error)

    async def _follow(self, handler: Handler) -> web.StreamResponse:
        while True:
            whose = await self._context.journal.whose((self._id,))
            ended = False
            if self._id in whose:
                self._owner, _, state = whose[self._id]
                ended = state.ended
            try:
                if ended or self._owner == self._context.gateway_id:
                    return await self._read_here(handler)
                if url := self._context.gateways.url_of(self._owner):
                    return await self._read_there(url)
            except Elsewhere as elsewhere:
                self._cursor = elsewhere.cursor if elsewhere.cursor is not None else self._cursor
            except (_Moved, aiohttp.ClientError, TimeoutError, OSError) as error:
                if isinstance(error, ConnectionResetError) and self._request.transport is None:
                    raise
                logger.info("event=relay_moved request=%s owner=%s error=%r", self._id, self._owner, error)
            await self._wait_for_another()

    async def _wait_for_another(self) -> None:
        gateway = self._context.settings.gateway
        if time.monotonic() - self._lost_since_s > gateway.adopt_within_s + GRACE_S:
            raise Unavailable(f"no gateway can be asked for {self._id} at present; read on later", retry_after_s=5.0)
        if self._writer is not None and self._writer.open:
            await self._writer.write(comment("heartbeat: its gateway is gone; another takes over"))
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._context.gateways.moved()
        except TimeoutError:
            pass
        await self._context.adopting.settled()

    async def _read_here(self, handler: Handler) -> web.StreamResponse:
        if self._of_responses:
            return await self._read_response_here(handler)
        record = await self._context.journal.get(self._id, self._key.tenant)
        if record is None:
            raise Unavailable(f"{self._id} cannot be read now", retry_after_s=1.0)
        live, answer = await find(self._context, record)
        if self._cancels or (self._request.method == "GET" and not self._streams):
            return await handler(self._request)
        with reading(self._context, live):
            if not self._streams:
                return await send_whole(answer)
            writer = self._writer or EventWriter(self._request, self._context.settings.http.heartbeat_s)
            self._writer = writer
            return await send_stream(writer, answer, self._place())

    async def _read_response_here(self, handler: Handler) -> web.StreamResponse:
        if self._request.path != "/v1/responses" and not self._streams:
            return await handler(self._request)
        found = await lookup(self._context, self._id, self._key.tenant, unstored=True)
        if self._streams:
            return await responses.follow(self._request, found, self._place(), self._writer)
        with reading(self._context, found.live):
            return await responses.send_response(found.answer)

    def _place(self) -> int:
        """From where a stream is to be read."""
        if self._cursor is None and self._of_responses:
            self._cursor = -1 if self._request.method == "POST" else responses.starting_after(self._request)
        if self._cursor is None:
            self._cursor = 0 if self._request.method == "POST" else cursor_of(self._request)
        return self._cursor

    async def _read_there(self, url: str) -> web.StreamResponse:
        method, path, query = "GET", self._path, {}
        if self._cancels:
            method, path = "POST", f"{self._path}/cancel"
        elif self._request.method == "DELETE":
            method = "DELETE"
        elif self._of_responses and self._request.path.startswith(f"{self._path}/"):
            method, path, query = self._request.method, self._request.path, dict(self._request.query)
        elif self._streams and self._of_responses:
            query = {"stream": "true"} | ({"starting_after": str(self._place())} if self._place() >= 0 else {})
        elif self._streams:
            path, query = f"{self._path}/stream", {"starting_after": str(self._place())}
        elif self._request.method == "POST":
            query = {"wait": "1"}
        headers = {FORWARDED_FOR: forwarding(self._key), READER: self._reader}
        self._asked = url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=SILENT_S if self._streams else None)
        gone = asyncio.ensure_future(self._until_gone())
        asking = asyncio.ensure_future(self._ask(method, url + path, query, headers, timeout))
        try:
            await asyncio.wait([gone, asking], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise _Moved(f"{self._owner} does not live any more")
            return await asking
        finally:
            for task in (gone, asking):
                task.cancel()
            await asyncio.gather(gone, asking, return_exceptions=True)

    async def _until_gone(self) -> None:
        while self._context.gateways.url_of(self._owner):
            await self._context.gateways.moved()

    async def _ask(
        self, method: str, url: str, query: dict[str, str], headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> web.StreamResponse:
        async with self._context.peers.session.request(
            method, url, params=query, headers=headers, timeout=timeout
        ) as response:
            if response.status == 503:
                raise _Moved((await response.text())[:300])
            if self._streams and response.status == 200:
                return await self._pass_on(response)
            body = await response.read()
            if self._writer is not None and self._writer.open:
                raise _Moved(f"{response.status}: {body[:300]!r}")
            told = {name: value for name, value in response.headers.items() if name.lower() in _PASSED_ON}
            return web.Response(status=response.status, body=body, headers=told)

    async def _pass_on(self, response: aiohttp.ClientResponse) -> web.StreamResponse:
        """Whole events only, so that what follows from elsewhere begins where this one ended."""
        if self._writer is None:
            self._writer = EventWriter(self._request, self._context.settings.http.heartbeat_s)
        writer, held = self._writer, b""
        await writer.begin(self._id)
        async for data in response.content.iter_any():
            held += data
            whole, mark, rest = held.rpartition(b"\n\n")
            whole += mark
            while rest.startswith(b":") and b"\n" in rest:  # a heartbeat has no empty line behind it
                line, newline, rest = rest.partition(b"\n")
                whole += line + newline
            held = rest
            if not whole:
                continue
            self._lost_since_s = time.monotonic()
            self._note_cursor(whole)
            if whole.endswith(b"data: [DONE]\n\n"):
                return await writer.end(whole)
            await writer.write(whole)
        raise _Moved("the stream broke off")

    def _note_cursor(self, events: bytes) -> None:
        at = events.rfind(b"id: ")
        while at > 0 and events[at - 1 : at] != b"\n":
            at = events.rfind(b"id: ", 0, at)
        if at >= 0:
            self._cursor = int(events[at + 4 : events.index(b"\n", at)])


_PASSED_ON: Final = frozenset(
    {"content-type", "x-request-id", "retry-after", "retry-after-ms", "x-should-retry", "www-authenticate"}
)
