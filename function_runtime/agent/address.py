"""Where an agent and its replicas listen, and how others reach them.

On one machine that is the loopback address and any free port. A slot on another machine listens where it is told to
(`--listen`), says under which host it is reached (`--advertise`), and gives its replicas ports of one range, so that a
network policy can name them. Limits: one address for the agent and its replicas; what is spoken there is in the clear,
for a network that only gateways, control loops and other agents reach.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", ""})


@dataclass(frozen=True, slots=True)
class Address:
    host: str = LOOPBACK
    """Bound by the agent and by its replicas."""
    port: int = 0
    """The agent's; 0: any that is free."""
    advertised: str = LOOPBACK
    """The host under which others reach what is bound here."""
    replica_ports: tuple[int, int] = (0, 0)
    """First and last; (0, 0): any that is free."""

    def bind(self) -> socket.socket:
        """Raises OSError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family, backlog=128)

    @staticmethod
    def parse(listen: str, advertise: str = "", replica_ports: str = "") -> Address:
        """`HOST:PORT` (IPv6 in brackets), a host, `FIRST-LAST`. Raises ValueError that says what is wrong."""
        host, colon, port_text = listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
            raise ValueError(f"--listen {listen!r}: HOST:PORT is needed, such as 0.0.0.0:7070")
        if not advertise and host in _EVERYWHERE:
            raise ValueError(f"--listen {listen!r} means every address of the machine: say with --advertise which one")
        return Address(host or "0.0.0.0", int(port_text), advertise or host, _ports(replica_ports))


LOCAL: Final = Address()


def _ports(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    first, dash, last = text.partition("-")
    try:
        found = int(first), int(last if dash else first)
    except ValueError:
        found = 0, 0
    if not 0 < found[0] <= found[1] <= 65535:
        raise ValueError(f"--replica-ports {text!r}: FIRST-LAST is needed, both from 1 to 65535")
    return found
