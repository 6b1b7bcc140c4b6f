"""HTTP/1.1 to an object store: kept connections, a deadline on every wait, bodies read straight into a caller's buffer.

boto3 signs and parses; the bytes go over these connections, because its own can neither be bounded per operation nor
woken, and copy what they read twice. Each recv and send waits until the deadline at most, and abandoning the deadline
shuts the socket, so that nothing can write into a buffer after its operation has ended.
Limits: no proxies; name look-ups and connecting are bounded by `CONNECT_S` each address.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from model_loader.errors import StoreRefused, StoreUnavailable
from model_loader.objects.resilience import Deadline

CONNECT_S: Final = 5.0
STALL_S: Final = 15.0
"""A store that sends or takes nothing for so long is taken for hung."""
IDLE_S: Final = 20.0
"""Connections idle for longer are not used again: many servers and balancers have closed them by then."""
MAX_IDLE: Final = 32
_SEND_BYTES: Final = 1024 * 1024
_STREAM_BYTES: Final = 256 * 1024
_GONE: Final = (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected)


class _TimedReader(io.RawIOBase):
    """A socket's bytes, each wait bounded by the deadline."""

    def __init__(self, source: io.RawIOBase, connection: Connection) -> None:
        self._source = source
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.set_timeout()
        count = self._source.readinto(buffer)
        if count:
            self._connection.moved()
        return count

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


class Connection:
    """One connection, used by one request at a time."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self.place = (host, port, tls is not None)
        self.where = f"{host}:{port}"
        self.idle_since_s = 0.0
        self.is_used = False
        self._deadline: Deadline | None = None
        self._timeout_s = 0.0
        self._http = (
            http.client.HTTPConnection(host, port)
            if tls is None
            else http.client.HTTPSConnection(host, port, context=tls)
        )
        self._http.response_class = self._new_response  # type: ignore[assignment]

    def _new_response(self, sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *args, **options)
        # What http.client made is kept below: it holds the socket open until the response is closed.
        response.fp = io.BufferedReader(_TimedReader(response.fp.detach(), self), 65536)
        return response

    def set_timeout(self) -> None:
        deadline, sock = self._deadline, self._http.sock
        if deadline is None or sock is None:
            return
        left_s = deadline.remaining_s()
        if left_s <= 0:
            raise TimeoutError("deadline")
        timeout_s = min(left_s, STALL_S)
        if timeout_s < self._timeout_s or timeout_s > self._timeout_s + 0.05:
            sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def moved(self) -> None:
        if self._deadline is not None:
            self._deadline.moved()

    def begin(self, deadline: Deadline) -> None:
        self._deadline = deadline
        deadline.attach(self.interrupt)
        if self._http.sock is None:
            self._http.timeout = max(min(deadline.remaining_s(), CONNECT_S), 0.001)
            self._timeout_s = self._http.timeout
            self._http.connect()

    def send(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: Sequence[memoryview]) -> None:
        given = [(name, value) for name, value in headers if name.lower() != "expect"]
        names = {name.lower() for name, _ in given}
        self._http.putrequest(method, target, skip_host="host" in names, skip_accept_encoding=True)
        for name, value in given:
            self._http.putheader(name, value)
        nbytes = sum(len(view) for view in body)
        if nbytes and "content-length" not in names:
            self._http.putheader("Content-Length", str(nbytes))
        self.set_timeout()
        self._http.endheaders()
        for view in body:
            for at in range(0, len(view), _SEND_BYTES):
                self.set_timeout()
                self._http.sock.sendall(view[at : at + _SEND_BYTES])
                self.moved()

    def response(self) -> http.client.HTTPResponse:
        return self._http.getresponse()

    def is_stale(self) -> bool:
        """Closed by the other side, or with bytes that nobody asked for."""
        sock = self._http.sock
        if sock is None or time.monotonic() - self.idle_since_s > IDLE_S:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def end(self) -> None:
        if self._deadline is not None:
            self._deadline.detach(self.interrupt)
            self._deadline = None

    def interrupt(self) -> None:
        """Wakes whoever waits on the socket. The plain socket's method: TLS would begin a shutdown of its own."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._http.close()


class Answer:
    """A response whose body is still on the wire. Close it, or read it to its end."""

    def __init__(
        self, response: http.client.HTTPResponse, connection: Connection, owner: Transport, deadline: Deadline
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._connection = connection
        self._owner = owner
        self._deadline = deadline
        self._open = True

    def read_into(self, view: memoryview) -> int:
        """Fills as much of `view` as the body gives."""
        at = 0
        with self._reading():
            while at < len(view):
                count = self._response.readinto(view[at:])
                if not count:
                    break
                at += count
        return at

    def read(self, amount: int | None = None) -> bytes:
        with self._reading():
            return self._response.read(amount)

    def stream(self, amount: int = _STREAM_BYTES, decode_content: bool | None = None) -> Iterator[bytes]:
        """As boto3 reads the bodies it parses itself."""
        while data := self.read(amount):
            yield data

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with _told(self._connection.where, self._deadline):
                yield
        except BaseException:
            self.close()
            raise
        if self._response.isclosed() and self._open:
            self._open = False
            self._owner.give_back(self._connection, whole=not self._response.will_close)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._response.close()
            self._connection.close()


class Transport:
    def __init__(self, ca_bundle: str | None = None) -> None:
        self._ca_bundle = ca_bundle or os.environ.get("AWS_CA_BUNDLE") or None
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def request(
        self,
        method: str,
        url: str,
        headers: Iterable[tuple[str, str]],
        body: Sequence[memoryview],
        deadline: Deadline,
    ) -> Answer:
        """The answer, its body unread. Raises StoreUnavailable."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        given = list(headers)
        with _told(f"{host}:{port}", deadline):
            while True:
                connection = self._take(host, port, parts.scheme == "https")
                was_used = connection.is_used
                try:
                    return self._ask(connection, method, target, given, body, deadline)
                except _GONE:
                    connection.close()
                    if not was_used or deadline.passed:
                        raise
                    # It was closed while idle; every request made here may be sent twice.
                except BaseException:
                    connection.close()
                    raise

    def _ask(
        self,
        connection: Connection,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: Sequence[memoryview],
        deadline: Deadline,
    ) -> Answer:
        connection.begin(deadline)
        connection.is_used = True
        try:
            connection.send(method, target, headers, body)
        except (BrokenPipeError, ConnectionResetError) as error:
            # A server that refuses a body answers before it has taken it, and closes.
            try:
                return Answer(connection.response(), connection, self, deadline)
            except (OSError, http.client.HTTPException):
                raise error from None
        return Answer(connection.response(), connection, self, deadline)

    def _take(self, host: str, port: int, secure: bool) -> Connection:
        while True:
            with self._lock:
                index = next(
                    (i for i in reversed(range(len(self._idle))) if self._idle[i].place == (host, port, secure)), None
                )
                found = self._idle.pop(index) if index is not None else None
            if found is None:
                return Connection(host, port, self._context() if secure else None)
            if not found.is_stale():
                return found
            found.close()

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=self._ca_bundle)
            return self._tls

    def give_back(self, connection: Connection, *, whole: bool) -> None:
        connection.end()
        if whole:
            connection.idle_since_s = time.monotonic()
            with self._lock:
                if len(self._idle) < MAX_IDLE:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


@contextlib.contextmanager
def _told(where: str, deadline: Deadline) -> Iterator[None]:
    """What the operating system says, as what it means for the store."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise StoreRefused(
            f"the certificate of {where} is not trusted ({error.verify_message}): name its authority in AWS_CA_BUNDLE"
        ) from error
    except TimeoutError as error:
        if deadline.passed:
            raise StoreUnavailable(f"{where} did not answer within the deadline") from error
        raise StoreUnavailable(f"{where} said nothing for too long") from error
    except socket.gaierror as error:
        raise StoreUnavailable(f"{where} cannot be found: {error.strerror}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if deadline.abandoned:
            raise StoreUnavailable(f"the request to {where} was given up") from error
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise StoreUnavailable(f"{where} cannot be used: {said}") from error
