"""Service addresses: a TCP proxy on each, to a ready pod; and the names under which containers find them.

What kube-proxy and the cluster's DNS do (`pkg/proxy`, `kubernetes.io/docs/concepts/services-networking/dns-pod-
service`), as far as it can be done without the kernel's help: connections are relayed by this process, names are in
the pods' /etc/hosts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.kubernetes.client import Informer

Object = dict[str, Any]
Name = tuple[str, str]
log = logging.getLogger(__name__)
_DOMAIN = "svc.cluster.local"
_PIECE_BYTES = 65536


class ServiceProxy:
    """Listens on the address of every service."""

    def __init__(
        self, services: Informer, slices: Informer, pods: Informer, block: str, allocate: Callable[[], str]
    ) -> None:
        self._services = services
        self._slices = slices
        self._pods = pods
        # Addresses of the cluster's own block are listened on; a service of another cluster gets one of ours instead.
        self._block = block
        self._allocate = allocate
        self.addresses: dict[Name, str] = {}
        self._servers: dict[tuple[Name, int], asyncio.Server] = {}
        self._turns = itertools.count()
        self._relays: set[asyncio.Task[None]] = set()

    async def follow(self, kind: str, service: Object) -> None:
        """A service that came, changed or went."""
        name = (service["metadata"]["namespace"], service["metadata"]["name"])
        ports = {each["port"]: each for each in service["spec"].get("ports") or []}
        given = service["spec"].get("clusterIP") or "None"
        if kind == "DELETED" or given == "None" or service["spec"].get("type") == "ExternalName":
            ports = {}
        elif name not in self.addresses:
            self.addresses[name] = given if given.startswith(self._block) else self._allocate()
        for key in [each for each in self._servers if each[0] == name and each[1] not in ports]:
            self._servers.pop(key).close()
        for number, port in ports.items():
            if (name, number) not in self._servers and port.get("protocol", "TCP") == "TCP":
                await self._listen(name, number)
        if kind == "DELETED":
            self.addresses.pop(name, None)

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for relay in self._relays:
            relay.cancel()

    async def _listen(self, name: Name, number: int) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._relays.add(task)
            try:
                await self._relay(name, number, reader, writer)
            except asyncio.CancelledError:
                # Only `close` cancels; asyncio's streams take a cancelled handler for a fault.
                writer.transport.abort()
            finally:
                self._relays.discard(task)

        try:
            self._servers[name, number] = await asyncio.start_server(accept, self.addresses[name], number)
        except OSError as error:
            log.warning("service %s/%s: cannot listen on %s:%d: %s", *name, self.addresses[name], number, error)

    def endpoints(self, name: Name, number: int) -> list[tuple[str, int]]:
        """Addresses of ready pods, and the port there; of terminating ones that still serve, where none is ready."""
        service = self._services.objects.get(name)
        if service is None:
            return []
        port = next((each for each in service["spec"].get("ports") or [] if each["port"] == number), None)
        found: dict[str, list[tuple[str, int]]] = {"ready": [], "serving": []}
        for each in self._slices.of(name[0]):
            if (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name") != name[1] or port is None:
                continue
            wanted = port.get("name", "")
            target = next((one["port"] for one in each.get("ports") or [] if (one.get("name") or "") == wanted), None)
            for endpoint in each.get("endpoints") or [] if target is not None else []:
                for state, listed in found.items():
                    if (endpoint.get("conditions") or {}).get(state):
                        listed += [(address, target) for address in endpoint["addresses"]]
        return found["ready"] or found["serving"]

    async def _relay(self, name: Name, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        choices = self.endpoints(name, number)
        first = next(self._turns)
        for at in range(len(choices)):
            with suppress(OSError):
                there, back = await asyncio.open_connection(*choices[(first + at) % len(choices)])
                try:
                    await asyncio.gather(_pump(reader, back), _pump(there, writer))
                finally:
                    back.close()
                    writer.close()
                return
        # Nobody behind it: the connection is refused, as a service without endpoints refuses it.
        writer.transport.abort()

    def hosts(self, pod: Object, own: str, api_host: str) -> str:
        """`/etc/hosts` of a pod: itself, and every service under the names that the cluster's DNS would know."""
        namespace, name = pod["metadata"]["namespace"], pod["spec"].get("hostname") or pod["metadata"]["name"]
        lines = ["127.0.0.1 localhost", f"{own} {name}"]
        lines.append(f"{api_host} kubernetes.default kubernetes.default.svc kubernetes.default.{_DOMAIN}")
        for (where, service), address in sorted(self.addresses.items()):
            lines.append(f"{address} {_names(where, service, namespace)}")
        for each in self._pods.objects.values():
            address, subdomain = (each.get("status") or {}).get("podIP"), each["spec"].get("subdomain")
            where = each["metadata"]["namespace"]
            service = self._services.objects.get((where, subdomain or ""))
            if address and service is not None:
                host = each["spec"].get("hostname") or each["metadata"]["name"]
                full = f"{host}.{subdomain}.{where}.{_DOMAIN} {host}.{subdomain}.{where}.svc {host}.{subdomain}.{where}"
                lines.append(f"{address} {full}" + (f" {host}.{subdomain}" if where == namespace else ""))
                if service["spec"].get("clusterIP") == "None":
                    lines.append(f"{address} {_names(where, str(subdomain), namespace)}")
        return "\n".join(lines) + "\n"


def _names(where: str, service: str, namespace: str) -> str:
    known = [f"{service}.{where}.{_DOMAIN}", f"{service}.{where}.svc", f"{service}.{where}"]
    return " ".join([*known, service] if where == namespace else known)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (ConnectionError, OSError):
        # A reset on one side is one on the other.
        writer.transport.abort()
