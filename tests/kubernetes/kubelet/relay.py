"""The way to a pod, where it is to be cut: a TCP relay on an address of its own, which the pod is known by.

While it is cut nothing comes through in either direction, connections that are there stay, and new ones are taken and
get no answer; what was sent meanwhile arrives when it is mended, as after a partition of a network. Limits: what the
pod itself connects to it still reaches; who connects to a pod that has ended is not refused, but cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

_PIECE_BYTES = 65536


class Relay:
    """Use `await Relay.open(...)`."""

    def __init__(self, outside: str, inside: str) -> None:
        self.outside, self.inside = outside, inside
        self._whole = asyncio.Event()
        self._whole.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, outside: str, inside: str, ports: Iterable[int]) -> Relay:
        made = cls(outside, inside)
        for port in ports:
            made._servers.append(await asyncio.start_server(made._accept(port), outside, port))
        return made

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._relay(port, reader, writer)
            except asyncio.CancelledError:
                # Only `close` cancels; asyncio's streams take a cancelled handler for a fault.
                pass
            finally:
                writer.transport.abort()
                self._tasks.discard(task)

        return accept

    async def _relay(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        try:
            there, to_there = await asyncio.open_connection(self.inside, port)
        except OSError:
            return
        try:
            await asyncio.gather(self._pump(reader, to_there), self._pump(there, writer))
        finally:
            to_there.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._whole.wait()
                writer.write(piece)
                await writer.drain()
        await self._whole.wait()
        with suppress(OSError):
            writer.write_eof()
