"""All of a replica's connections to gateways, on the loop's selector.

`lost` is told of each that is gone. Limits: at most `MAX_LINKS`; one more is closed at once.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from function_runtime.gateway_link import HELLO_WITHIN_S, GatewayLink

MAX_LINKS: Final = 64
LINGER_NS: Final = 500_000_000


class GatewayLinks:
    def __init__(self, selector: selectors.BaseSelector, lost: Callable[[GatewayLink], None]) -> None:
        self._selector = selector
        self._lost = lost
        self._links: dict[int, GatewayLink] = {}

    def __iter__(self) -> Iterator[GatewayLink]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._links) >= MAX_LINKS:
            connection.close()
            return
        link = GatewayLink(connection, time.monotonic_ns())
        self._links[connection.fileno()] = link
        self._selector.register(connection, selectors.EVENT_READ, link)

    def tend(self) -> None:
        """Closes what is to be closed and asks for writability where bytes wait."""
        now_ns = time.monotonic_ns()
        for descriptor, link in list(self._links.items()):
            if not link.welcome and now_ns - link.opened_ns > HELLO_WITHIN_S * 1e9:
                link.closed = True
            if link.closed:
                self._selector.unregister(link.socket)
                del self._links[descriptor]
                self._lost(link)
                link.close()
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    def linger(self) -> None:
        """The last messages get a moment to leave."""
        deadline_ns = time.monotonic_ns() + LINGER_NS
        while time.monotonic_ns() < deadline_ns and any(link.wants_write for link in self._links.values()):
            for key, _ in self._selector.select(0.05):
                if isinstance(key.data, GatewayLink) and key.data.wants_write:
                    key.data.flush()
            self.tend()
        for link in self:
            try:
                link.socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
