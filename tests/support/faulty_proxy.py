"""A proxy for HTTP/1.1 that delays, cuts, refuses, hangs, throttles and damages: a bad network before a good store.

    with FaultyProxy(store_port) as proxy:
        proxy.set(reset=0.1, seed=7)      # a tenth of the requests meet a reset connection
        proxy.set(bytes_per_s=10e6)       # answers' bodies arrive at 10 MB/s, all connections together
        proxy.set()                       # well again

It is a process of its own (`python -m tests.support.faulty_proxy`), so that it takes no time from whom it is between,
told over its standard input and answering what it has done. Faults are drawn per request, by the seed.
Limits: bodies have a length or are chunked; no TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PIECE_BYTES = 64 * 1024


@dataclass
class Faults:
    """Shares are of requests, 0 to 1; drawn in this order, one a request."""

    seed: int = 0
    delay_s: float = 0.0
    """Before each answer's first byte, beside everything else."""
    bytes_per_s: float = 0.0
    """Of bodies in both directions, all connections together; 0 is unlimited."""
    reset: float = 0.0
    """The connection is reset before the answer."""
    cut: float = 0.0
    """The connection is reset in the middle of the answer's body."""
    hang: float = 0.0
    """No answer, connection open."""
    unavailable: float = 0.0
    """503 SlowDown."""
    flip: float = 0.0
    """One bit of the answer's body."""
    answer: str = ""
    """Every request gets this XML (see `error_xml`) ..."""
    answer_status: int = 0
    """... with this status."""
    answer_headers: tuple[tuple[str, str], ...] = ()
    methods: tuple[str, ...] = ()
    """Only requests of these methods suffer; empty: all."""


def error_xml(code: str, message: str = "", **more: str) -> str:
    """An error body as S3 sends it."""
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, "Message": message, **more}.items())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'


class FaultyProxy:
    def __init__(self, upstream_port: int, host: str = "127.0.0.1") -> None:
        command = [sys.executable, "-m", "tests.support.faulty_proxy", "--upstream", f"{host}:{upstream_port}"]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
        )
        self.port = int(self._answer()["port"])
        self.url = f"http://127.0.0.1:{self.port}"

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("the faulty proxy has ended")
        return dict(json.loads(line))

    def set(self, **faults: Any) -> dict[str, int]:
        """These faults and no others, from the next request on; gives how many requests and faults there were before
        (`requests`, `reset`, ...)."""
        told = asdict(Faults(**faults))
        if self._process.stdin is None:
            raise RuntimeError("the faulty proxy has no input")
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the process ------------------------------------------------------------------------------------------------------


class Throttle:
    """A clock that bytes push ahead: each waits until those before it have passed."""

    def __init__(self) -> None:
        self._free_s = 0.0

    async def passing(self, nbytes: int, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s) + nbytes / bytes_per_s
        if self._free_s - now_s > 0.001:
            await asyncio.sleep(self._free_s - now_s)


class Head:
    """A request's or an answer's first lines."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        first, *lines = raw.decode("latin-1").split("\r\n")
        self.first = first.split(" ")
        self.fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def nbytes(self) -> int:
        return int(self.fields.get("content-length", "0"))

    @property
    def chunked(self) -> bool:
        return "chunked" in self.fields.get("transfer-encoding", "").lower()


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.faults = Faults()
        self.counts: dict[str, int] = {"requests": 0}
        self._random = random.Random(0)
        self._throttle = Throttle()

    def set(self, faults: Faults) -> dict[str, int]:
        counts, self.counts = self.counts, {"requests": 0}
        self.faults, self._random = faults, random.Random(faults.seed)
        return counts

    def _drawn(self, method: str) -> str:
        faults = self.faults
        self.counts["requests"] += 1
        what = ""
        if not faults.methods or method in faults.methods:
            for name in ("reset", "cut", "hang", "unavailable", "flip"):
                if (share := getattr(faults, name)) and self._random.random() < share:
                    what = name
                    break
            if faults.answer_status:
                what = "answer"
        if what:
            self.counts[what] = self.counts.get(what, 0) + 1
        return what

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(*self.upstream, limit=1 << 20)
            while True:
                request = Head(await reader.readuntil(b"\r\n\r\n"))
                what = self._drawn(request.first[0])
                if what in ("unavailable", "answer"):
                    await self._drop(reader, request)
                    await self._say(writer, what, request.first[0])
                    continue
                there.write(request.raw)
                await self._body(reader, there, request, request.nbytes)
                if self.faults.delay_s:
                    await asyncio.sleep(self.faults.delay_s)
                if what == "hang":
                    await asyncio.sleep(3600)
                answer = Head(await back.readuntil(b"\r\n\r\n"))
                if what == "reset":
                    return self._reset(writer)
                writer.write(answer.raw)
                bodiless = request.first[0] == "HEAD" or answer.first[1] in ("204", "304")
                nbytes = 0 if bodiless else answer.nbytes
                if what == "cut":
                    await self._body(back, writer, answer, nbytes // 2)
                    return self._reset(writer)
                await self._body(back, writer, answer, nbytes, flip=what == "flip", chunked=not bodiless)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()

    async def _drop(self, reader: asyncio.StreamReader, head: Head) -> None:
        if head.nbytes:
            await reader.readexactly(head.nbytes)

    async def _say(self, writer: asyncio.StreamWriter, what: str, method: str) -> None:
        faults = self.faults
        status, body, more = 503, error_xml("SlowDown", "Reduce your request rate."), ()
        if what == "answer":
            status, body, more = faults.answer_status, faults.answer, faults.answer_headers
        head = f"HTTP/1.1 {status} Faulty\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in more)
        writer.write(f"{head}\r\n{'' if method == 'HEAD' else body}".encode())
        await writer.drain()

    async def _body(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        head: Head,
        nbytes: int,
        *,
        flip: bool = False,
        chunked: bool = True,
    ) -> None:
        if head.chunked and chunked:
            while True:
                line = await source.readuntil(b"\r\n")
                piece = await source.readexactly(int(line.split(b";")[0], 16) + 2)
                await self._throttle.passing(len(piece), self.faults.bytes_per_s)
                sink.write(line + piece)
                await sink.drain()
                if len(piece) == 2:
                    return
        at = self._random.randrange(nbytes) if flip and nbytes else -1
        sent, rate = 0, self.faults.bytes_per_s
        most = min(PIECE_BYTES, max(int(rate / 20), 512)) if rate else PIECE_BYTES
        while sent < nbytes:
            piece = bytearray(await source.read(min(most, nbytes - sent)))
            if not piece:
                raise EOFError
            if sent <= at < sent + len(piece):
                piece[at - sent] ^= 1 << self._random.randrange(8)
            await self._throttle.passing(len(piece), self.faults.bytes_per_s)
            sink.write(piece)
            await sink.drain()
            sent += len(piece)
        await sink.drain()

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.transport.abort()


async def _run(host: str, port: int) -> None:
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    loop = asyncio.get_running_loop()
    names = {field.name for field in fields(Faults)}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        told = {name: value for name, value in json.loads(line).items() if name in names}
        print(json.dumps(proxy.set(Faults(**told))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.faulty_proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    host, _, port = parser.parse_args().upstream.rpartition(":")
    asyncio.run(_run(host, int(port)))


if __name__ == "__main__":
    main()
