"""One gateway's connection to a replica: non-blocking frames in and out, nothing before a right `Hello`.

Losing a connection loses nothing: what was said about a request is kept and replayed on `Attach`. Limits: a peer that
has not said `Hello` may send one small frame and has `HELLO_WITHIN_S`; one that does not read is cut off at
`MAX_OUTGOING_BYTES`.
"""

from __future__ import annotations

import socket
from typing import Final

from function_runtime.protocol import (
    FrameBuffer,
    GatewayMessage,
    ProtocolError,
    ReplicaMessage,
    UnknownMessage,
    decode_gateway,
    encode,
)

HELLO_WITHIN_S: Final = 5.0
MAX_HELLO_BYTES: Final = 4096
MAX_OUTGOING_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 256 * 1024


class GatewayLink:
    __slots__ = ("_buffer", "_outgoing", "_received_bytes", "closed", "gateway", "opened_ns", "socket", "welcome")

    def __init__(self, connection: socket.socket, opened_ns: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.opened_ns = opened_ns
        self.gateway = ""
        self.welcome = False
        """It said the right `Hello`."""
        self.closed = False
        self._buffer = FrameBuffer()
        self._outgoing = bytearray()
        self._received_bytes = 0

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing) and not self.closed

    def send(self, message: ReplicaMessage) -> None:
        if self.closed:
            return
        frame = encode(message)
        if self._outgoing:
            self._outgoing += frame
            if len(self._outgoing) > MAX_OUTGOING_BYTES:
                self.closed = True
            return
        try:
            sent = self.socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.closed = True
            return
        if sent < len(frame):
            self._outgoing += memoryview(frame)[sent:]

    def flush(self) -> None:
        try:
            sent = self.socket.send(self._outgoing)
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
            return
        del self._outgoing[:sent]

    def receive(self) -> list[GatewayMessage]:
        """Messages that are complete; marks the link closed at the end of the stream or at what is no frame."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            self.closed = True
            return []
        if not data:
            self.closed = True
            return []
        self._received_bytes += len(data)
        messages: list[GatewayMessage] = []
        try:
            for body in self._buffer.feed(data):
                try:
                    messages.append(decode_gateway(body))
                except UnknownMessage:
                    if not self.welcome:
                        raise  # a gateway of another version greets like all others
        except ProtocolError:
            self.closed = True
            return []
        if not messages and not self.welcome and self._received_bytes > MAX_HELLO_BYTES:
            self.closed = True
        return messages

    def close(self) -> None:
        self.closed = True
        self.socket.close()
