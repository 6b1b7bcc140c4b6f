"""Connections to a pod's ports, over the websockets of the two kinds of clients.

Model: kubectl tunnels SPDY through one websocket, with a pair of streams (data, errors) a connection, as many as it
likes; the Python client uses numbered channels, one connection a port. Upstream: KEP-4006,
`kubelet/pkg/cri/streaming/portforward/{httpstream,websocket}.go`.

Limits: connections are made by this server, not through the pod's kubelet.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
from aiohttp import web

from tests.kubernetes.apiserver import spdy

CHANNELS = "v4.channel.k8s.io"
TUNNEL = "SPDY/3.1+portforward.k8s.io"
_PIECE_BYTES = 65536


async def _messages(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    async for message in socket:
        if message.type == aiohttp.WSMsgType.BINARY and message.data:
            yield message.data


class Channels:
    """Of each port two channels: data and errors; the first message of each names the port."""

    def __init__(self, address: str, ports: list[int]) -> None:
        self._address = address
        self._ports = ports
        self._writers: dict[int, asyncio.StreamWriter] = {}
        # Every port is connected, or one was refused.
        self._opened = asyncio.Event()

    async def run(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(CHANNELS,), max_msg_size=0)
        await socket.prepare(request)
        for at, port in enumerate(self._ports):
            for channel in (2 * at, 2 * at + 1):
                await socket.send_bytes(bytes([channel]) + struct.pack("<H", port))
        tasks = [asyncio.create_task(self._outward(socket, at, port)) for at, port in enumerate(self._ports)]
        try:
            await asyncio.gather(*tasks, self._inward(socket))
        except ConnectionError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            for writer in self._writers.values():
                writer.close()
        return socket

    async def _inward(self, socket: web.WebSocketResponse) -> None:
        async for message in _messages(socket):
            await self._opened.wait()
            writer = self._writers.get(message[0])
            if writer is not None and len(message) > 1:
                writer.write(message[1:])
                await writer.drain()
        for writer in self._writers.values():
            writer.close()

    async def _outward(self, socket: web.WebSocketResponse, at: int, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._address, port)
        except OSError as error:
            await socket.send_bytes(bytes([2 * at + 1]) + f"error forwarding port {port}: {error}".encode())
            self._opened.set()
            await socket.close()
            return
        self._writers[2 * at] = writer
        if len(self._writers) == len(self._ports):
            self._opened.set()
        while data := await reader.read(_PIECE_BYTES):
            await socket.send_bytes(bytes([2 * at]) + data)
        await socket.close()


class _Pair:
    """A connection: its two streams, and what goes to the pod."""

    def __init__(self) -> None:
        self.port = 0
        self.data: int | None = None
        self.error: int | None = None
        self.outbound: asyncio.Queue[bytes | None] = asyncio.Queue()


class Tunnel:
    """SPDY in a websocket."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._codec = spdy.Codec()
        self._pairs: dict[str, _Pair] = {}
        self._by_stream: dict[int, _Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(TUNNEL,), max_msg_size=0)
        await socket.prepare(request)
        try:
            async for message in _messages(socket):
                for frame in self._codec.read(message):
                    await self._take(socket, frame)
        except ConnectionError:
            pass
        finally:
            for task in self._tasks:
                task.cancel()
        return socket

    async def _take(self, socket: web.WebSocketResponse, frame: spdy.Frame) -> None:
        match frame.kind:
            case spdy.SYN_STREAM:
                await self._open(socket, frame)
            case spdy.PING:
                await socket.send_bytes(spdy.control(spdy.PING, 0, frame.data))
            case spdy.GOAWAY:
                await socket.close()
            case spdy.RST_STREAM:
                pair = self._by_stream.pop(frame.stream, None)
                if pair is not None and pair.data == frame.stream:
                    pair.outbound.put_nowait(None)
            case None:
                pair = self._by_stream.get(frame.stream)
                if pair is not None and pair.data == frame.stream:
                    if frame.data:
                        pair.outbound.put_nowait(frame.data)
                    if frame.flags & spdy.FLAG_FIN:
                        pair.outbound.put_nowait(None)

    async def _open(self, socket: web.WebSocketResponse, frame: spdy.Frame) -> None:
        headers = frame.headers
        pair = self._pairs.setdefault(headers.get("requestid", headers.get("port", "")), _Pair())
        pair.port = int(headers["port"])
        if headers["streamtype"] == "data":
            pair.data = frame.stream
        else:
            pair.error = frame.stream
        self._by_stream[frame.stream] = pair
        await socket.send_bytes(self._codec.reply(frame.stream))
        if pair.data is not None and pair.error is not None:
            task = asyncio.create_task(self._connect(socket, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, socket: web.WebSocketResponse, pair: _Pair) -> None:
        assert pair.data is not None and pair.error is not None
        try:
            try:
                reader, writer = await asyncio.open_connection(self._address, pair.port)
            except OSError as error:
                words = f"error forwarding port {pair.port} to pod, uid : failed to connect: {error}"
                await socket.send_bytes(spdy.data(pair.error, words.encode(), last=True))
                await socket.send_bytes(spdy.data(pair.data, b"", last=True))
                return
            inward = asyncio.create_task(self._inward(pair, writer))
            try:
                while content := await reader.read(_PIECE_BYTES):
                    await socket.send_bytes(spdy.data(pair.data, content))
                await socket.send_bytes(spdy.data(pair.data, b"", last=True))
                await socket.send_bytes(spdy.data(pair.error, b"", last=True))
            finally:
                inward.cancel()
                writer.close()
        except ConnectionError:
            # The tunnel itself is gone.
            pass

    async def _inward(self, pair: _Pair, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while (content := await pair.outbound.get()) is not None:
                writer.write(content)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
