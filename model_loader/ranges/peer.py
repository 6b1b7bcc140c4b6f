"""Files of another slot's warm pool, by HTTP ranges from its agent.

A connection per thread stays open between ranges; bytes go from the socket into the caller's memory. Several peers can
be one source, each range from the one that has least to do; one that fails is left out for a while.
Limits: HTTP in the clear with a bearer token, inside a network that only agents and the control plane reach.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError, SourceMissing, SourceRefused, SourceUnavailable
from model_loader.ranges.source import Tier

RANGE_BYTES: Final = 4 * CHUNK_BYTES
THREADS: Final = 4
SIZE_WITHIN_S: Final = 5.0
AVOID_S: Final = 2.0
"""A peer that failed gets no range for this long while another is there."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Another slot's pool: its agent's URL, and a token that reads the pool and does nothing else."""

    url: str
    token: str


class PeerSource:
    """One agent. A *file* is a key of its pool."""

    tier: Final = Tier.PEER
    range_bytes: Final = RANGE_BYTES
    threads: Final = THREADS

    def __init__(self, address: PeerAddress) -> None:
        self.name = address.url
        split = urlsplit(address.url)
        if split.scheme != "http" or not split.hostname:
            raise SourceRefused(f"{address.url!r} is no address of an agent: http://HOST:PORT is")
        self._host, self._port = split.hostname, split.port or 80
        self._headers = {"Authorization": f"Bearer {address.token}", "Accept-Encoding": "identity"}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[http.client.HTTPConnection] = []

    def __enter__(self) -> PeerSource:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            connection.close()

    def size(self, file: str) -> int:
        """Raises `SourceMissing` where the pool has no complete form under this key."""
        probe = bytearray(1)
        return self._get(file, 0, memoryview(probe), SIZE_WITHIN_S)[1]

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        return self._get(file, offset, view, within_s)[0]

    def _get(self, file: str, offset: int, view: memoryview, within_s: float) -> tuple[int, int]:
        """(bytes read, bytes of the whole file). A connection that was idle may be dead: once more on a new one."""
        for fresh in (False, True):
            connection, was_open = self._connection(within_s, fresh)
            try:
                return self._ask(connection, file, offset, view)
            except (OSError, http.client.HTTPException) as error:
                self._drop(connection)
                if fresh or not was_open or isinstance(error, TimeoutError):
                    told = f"no answer within {within_s:g} s" if isinstance(error, TimeoutError) else repr(error)
                    raise SourceUnavailable(f"{self.name} cannot be read: {told}") from error
            except BaseException:
                self._drop(connection)
                raise
        raise AssertionError("unreachable")

    def _ask(self, connection: http.client.HTTPConnection, file: str, offset: int, view: memoryview) -> tuple[int, int]:
        last = offset + len(view) - 1
        path = f"/v1/pool/{quote(file, safe='')}/bytes"
        connection.request("GET", path, headers={**self._headers, "Range": f"bytes={offset}-{last}"})
        response = connection.getresponse()
        if response.status != 206:
            told = response.read(500).decode(errors="replace")
            if response.status in (404, 410, 422):
                raise SourceMissing(f"{self.name} has no form {file}: {told}")
            if response.status in (401, 403):
                raise SourceRefused(f"{self.name} does not let its pool be read: {told}")
            if response.status == 416:
                raise IntegrityError(f"{file} of {self.name} has no byte {offset}")
            raise SourceUnavailable(f"{self.name} answered {response.status}: {told}")
        begin, end, whole = _content_range(response.headers.get("Content-Range", ""))
        if begin != offset or end > last:
            raise SourceUnavailable(f"{self.name} answered bytes {begin} to {end} where {offset} to {last} were asked")
        wanted, got = end - begin + 1, 0
        while got < wanted:
            count = response.readinto(view[got:wanted])
            if not count:
                raise SourceUnavailable(f"{self.name} ended after {got} of {wanted} bytes")
            got += count
        response.read()
        return got, whole

    def _connection(self, within_s: float, fresh: bool) -> tuple[http.client.HTTPConnection, bool]:
        connection: http.client.HTTPConnection | None = None if fresh else getattr(self._local, "connection", None)
        if connection is not None and connection.sock is not None:
            connection.sock.settimeout(within_s)
            return connection, True
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s, blocksize=1 << 20)
        with self._lock:
            self._open.append(connection)
        self._local.connection = connection
        return connection, False

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._local.connection = None
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)


class Peers:
    """Several agents that have the same files, as one source."""

    tier: Final = Tier.PEER
    range_bytes: Final = RANGE_BYTES

    def __init__(self, peers: Sequence[PeerSource], now_s: Callable[[], float] = time.monotonic) -> None:
        if not peers:
            raise SourceMissing("there is no peer to read from")
        self.name = ", ".join(peer.name for peer in peers)
        self.threads = THREADS * len(peers)
        self._peers = list(peers)
        self._now_s = now_s
        self._busy = [0] * len(peers)
        self._avoid_until_s = [0.0] * len(peers)
        self._lock = threading.Lock()

    def size(self, file: str) -> int:
        found: int | None = None
        missing: SourceMissing | None = None
        for number, peer in enumerate(self._peers):
            try:
                found = peer.size(file) if found is None else found
            except SourceMissing as error:
                missing, self._avoid_until_s[number] = error, float("inf")
            except (SourceUnavailable, SourceRefused):
                self._failed(number)
        if found is None:
            raise missing or SourceUnavailable(f"none of {self.name} answers")
        return found

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        number = self._choose()
        try:
            return self._peers[number].read_into(file, offset, view, within_s=within_s)
        except (SourceUnavailable, SourceMissing, SourceRefused, IntegrityError):
            self._failed(number)
            raise
        finally:
            with self._lock:
                self._busy[number] -= 1

    def _choose(self) -> int:
        with self._lock:
            now_s = self._now_s()
            number = min(
                range(len(self._peers)), key=lambda n: (max(0.0, self._avoid_until_s[n] - now_s), self._busy[n], n)
            )
            self._busy[number] += 1
            return number

    def _failed(self, number: int) -> None:
        with self._lock:
            self._avoid_until_s[number] = max(self._avoid_until_s[number], self._now_s() + AVOID_S)


def _content_range(text: str) -> tuple[int, int, int]:
    try:
        unit, _, rest = text.partition(" ")
        span, _, whole = rest.partition("/")
        begin, _, end = span.partition("-")
        if unit == "bytes":
            return int(begin), int(end), int(whole)
    except ValueError:
        pass
    raise SourceUnavailable(f"a peer answered with Content-Range {text!r}")
