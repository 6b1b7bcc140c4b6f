"""A gateway's connection to one replica: frames of `function_runtime.protocol` over TCP.

`connect` greets and waits for the welcome; afterwards every message goes to the listener, in order, and the loss of the
connection (or a stall: work in flight and no sign of the engine's progress) is told once. Limits: it keeps no state of
requests; whoever listens decides what a loss means.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

from function_runtime import protocol
from function_runtime.protocol import (
    STALLED_AFTER_S,
    Attach,
    Cancel,
    FrameBuffer,
    Hello,
    KvChunk,
    KvKnown,
    Park,
    Progress,
    ReplicaMessage,
    Settled,
    Submit,
    Welcome,
    Work,
)

logger = logging.getLogger(__name__)

CONNECT_S: Final = STALLED_AFTER_S
"""A replica greets between two engine steps: one that takes longer counts as stalled. Refusal shows at once."""


class LinkError(Exception):
    """No usable connection to a replica."""


class LinkListener(Protocol):
    def link_message(self, link: ReplicaLink, message: ReplicaMessage) -> None: ...

    def link_lost(self, link: ReplicaLink, reason: str) -> None: ...


class ReplicaLink(asyncio.Protocol):
    """Use `await ReplicaLink.connect(...)`."""

    def __init__(self, listener: LinkListener, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self._listener = listener
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._stalled_after_s = stalled_after_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self._heard_s = time.monotonic()
        self._lost = False
        self.welcome: Welcome | None = None
        self.progress: Progress | None = None
        """The engine's last heartbeat."""
        self.busy = False
        self._skipped: set[str] = set()

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        token: str,
        gateway_id: str,
        listener: LinkListener,
        *,
        stalled_after_s: float = STALLED_AFTER_S,
        connect_s: float = CONNECT_S,
    ) -> ReplicaLink:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(connect_s):
                _, link = await loop.create_connection(lambda: cls(listener, stalled_after_s), host, port)
                link._send(Hello(token=token, gateway=gateway_id, version=protocol.PROTOCOL_VERSION))
                try:
                    link.welcome = await link._welcome
                except BaseException:
                    link.close()
                    raise
        except TimeoutError:
            raise LinkError(f"no welcome from {host}:{port} within {connect_s} s") from None
        except OSError as error:
            raise LinkError(f"cannot connect to {host}:{port}: {error}") from error
        return link

    @property
    def replica_id(self) -> str:
        return self.welcome.replica_id if self.welcome is not None else ""

    @property
    def silent_s(self) -> float:
        """Since it was last heard. A replica that is idle says something every few seconds, too (`IDLE_TOLD_S`)."""
        return time.monotonic() - self._heard_s

    # --- what a gateway says ---

    def submit(self, work: Work) -> None:
        self._send(Submit(work))

    def attach(self, request_id: str, epoch: int, after_seq: int) -> None:
        self._send(Attach(request_id, epoch, after_seq))

    def cancel(self, request_id: str, epoch: int) -> None:
        self._send(Cancel(request_id, epoch))

    def park(self, request_id: str, epoch: int, reason: str) -> None:
        self._send(Park(request_id, epoch, reason))

    def settled(self, request_id: str, epoch: int, *, goes_on: bool = False) -> None:
        """`goes_on`: the attempt is over, the request is not, or nobody here knows that it is."""
        self._send(Settled(request_id, epoch, goes_on))

    def kv_known(self, request_id: str, epoch: int, chunks: tuple[KvChunk, ...]) -> None:
        self._send(KvKnown(request_id, epoch, chunks))

    def set_busy(self, busy: bool) -> None:
        """Whether work is in flight: only then silence means a stall."""
        begins = busy and not self.busy
        self.busy = busy
        if begins:
            self._heard_s = time.monotonic()
            if self._stall_timer is None:
                self._watch()

    def close(self) -> None:
        """End the connection; the listener is not told."""
        self._lost = True
        self._stop_watch()
        if self._transport is not None:
            self._transport.abort()

    def _send(self, message: protocol.Message) -> None:
        if self._transport is not None and not self._lost:
            self._transport.write(protocol.encode(message))

    # --- stall watch ---

    def _watch(self) -> None:
        self._stall_timer = None
        if not self.busy or self._lost:
            return
        silent_s = time.monotonic() - self._heard_s
        if silent_s >= self._stalled_after_s:
            self._lose(f"no progress for {silent_s:.1f} s with work in flight")
            return
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._stalled_after_s - silent_s, self._watch)

    def _stop_watch(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        messages: list[ReplicaMessage] = []
        try:
            for body in self._frames.feed(data):
                try:
                    messages.append(protocol.decode_replica(body))
                except protocol.UnknownMessage as error:
                    self._skip(error.tag)
        except protocol.ProtocolError as error:
            self._lose(str(error))
            return
        self._heard_s = time.monotonic()
        for message in messages:
            if self._lost:
                return
            if isinstance(message, Progress):
                self.progress = message
            if isinstance(message, Welcome):
                self._greeted(message)
            else:
                self._listener.link_message(self, message)

    def _skip(self, tag: str) -> None:
        """A replica of the next version says something that this one need not know."""
        if tag not in self._skipped:
            self._skipped.add(tag)
            logger.info("event=message_skipped replica=%s message=%s", self.replica_id or "-", tag)

    def _greeted(self, message: Welcome) -> None:
        if self._welcome.done():
            self._lose("a second welcome")
        elif not protocol.speaks(message.version):
            self._lose(f"the replica speaks version {message.version}, this gateway {protocol.PROTOCOL_VERSION}")
        else:
            self.welcome = message  # frames behind it in the same read are already about requests
            self._welcome.set_result(message)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"connection lost: {exc}" if exc is not None else "connection closed by the replica")

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self.close()
        if not self._welcome.done():
            self._welcome.set_exception(LinkError(reason))
        elif self.welcome is not None:
            self._listener.link_lost(self, reason)
