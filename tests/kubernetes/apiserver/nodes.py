"""What the server hands on to a node: logs from its kubelet, and connections to a pod's ports.

Upstream: `pkg/registry/core/pod/rest/{log,subresources}.go`; the kubelet's `/containerLogs`:
`pkg/kubelet/server/server.go`; port-forwarding over websockets, protocol `v4.channel.k8s.io`:
`kubelet/pkg/cri/streaming/portforward/websocket.go`.

Limits: connections are made to the pod's address by the server itself; the SPDY framing that kubectl tunnels through
its websocket is not spoken (the Python client's protocol is).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import aiohttp
from aiohttp import web

from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.errors import ApiError, bad_request
from tests.kubernetes.apiserver.registry import Registry

Object = dict[str, Any]
_PROTOCOL = "v4.channel.k8s.io"
_LOG_OPTIONS = ("follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes")


class NodeProxy:
    """Calls that end at a node."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def log(self, request: web.Request, call: Call) -> web.StreamResponse:
        pod = self._registry.get(call.resource, call.namespace, call.name)
        container = call.query.get("container") or self._only_container(pod)
        named = [each["name"] for kind in ("containers", "initContainers") for each in pod["spec"].get(kind) or []]
        if container not in named:
            raise bad_request(f"container {container} is not valid for pod {call.name}")
        address = self._kubelet(pod)
        if address is None:
            raise bad_request(f'container "{container}" in pod "{call.name}" is waiting to start: ContainerCreating')
        query = {name: call.query[name] for name in _LOG_OPTIONS if name in call.query}
        url = f"https://{address}/containerLogs/{call.namespace}/{call.name}/{container}"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5))
        try:
            # A kubelet signs its certificate itself, and the server does not look who signed it unless told to.
            async with self._session.get(url, params=query, ssl=False) as answer:
                if answer.status != 200:
                    raise bad_request((await answer.text()).strip())
                response = web.StreamResponse(headers={"Content-Type": "text/plain"})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            raise ApiError(
                500, "InternalError", f"Get {url!r}: dial tcp {address}: connect: {error.strerror}"
            ) from error

    def _only_container(self, pod: Object) -> str:
        names = [each["name"] for each in pod["spec"]["containers"]]
        marked = (pod["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
        if marked in names:
            return str(marked)
        if len(names) > 1:
            raise bad_request(
                f"a container name must be specified for pod {pod['metadata']['name']}, choose one of: "
                f"[{' '.join(names)}]"
            )
        return str(names[0])

    def _kubelet(self, pod: Object) -> str | None:
        node = self._registry.store.get(("", "nodes"), "", pod["spec"].get("nodeName") or "")
        status = (node or {}).get("status") or {}
        port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
        address = next(
            (each["address"] for each in status.get("addresses") or [] if each["type"] == "InternalIP"), None
        )
        return f"{address}:{port}" if address and port else None

    async def port_forward(self, request: web.Request, call: Call) -> web.StreamResponse:
        pod = self._registry.get(call.resource, call.namespace, call.name)
        address = (pod.get("status") or {}).get("podIP")
        if (pod.get("status") or {}).get("phase") != "Running" or not address:
            raise bad_request(
                f"unable to forward port because pod is not running. Current "
                f"status={(pod.get('status') or {}).get('phase')}"
            )
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        if _PROTOCOL not in offered:
            raise bad_request(
                f"unable to upgrade: this server forwards ports by the websocket protocol {_PROTOCOL} only"
            )
        ports = [int(part) for each in request.query.getall("ports", []) for part in each.split(",")]
        if not ports:
            raise bad_request('query parameter "ports" is required')
        socket = web.WebSocketResponse(protocols=(_PROTOCOL,), max_msg_size=0)
        await socket.prepare(request)
        forward = _Forward(socket, address, ports)
        await forward.run()
        return socket


class _Forward:
    """Of each port two channels: data and errors; the first message of each names the port."""

    def __init__(self, socket: web.WebSocketResponse, address: str, ports: list[int]) -> None:
        self._socket = socket
        self._address = address
        self._ports = ports
        self._writers: dict[int, asyncio.StreamWriter] = {}
        # Every port is connected, or was refused.
        self._opened = asyncio.Event()

    async def run(self) -> None:
        for at, port in enumerate(self._ports):
            for channel in (2 * at, 2 * at + 1):
                await self._socket.send_bytes(bytes([channel]) + struct.pack("<H", port))
        tasks = [asyncio.create_task(self._outward(at, port)) for at, port in enumerate(self._ports)]
        try:
            await asyncio.gather(*tasks, self._inward())
        finally:
            for task in tasks:
                task.cancel()
            for writer in self._writers.values():
                writer.close()

    async def _inward(self) -> None:
        async for message in self._socket:
            if message.type != aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            await self._opened.wait()
            writer = self._writers.get(channel)
            if writer is not None and data:
                writer.write(data)
                await writer.drain()
        for writer in self._writers.values():
            writer.close()

    async def _outward(self, at: int, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._address, port)
        except OSError as error:
            await self._socket.send_bytes(bytes([2 * at + 1]) + f"error forwarding port {port}: {error}".encode())
            self._opened.set()
            await self._socket.close()
            return
        self._writers[2 * at] = writer
        if len(self._writers) == len(self._ports):
            self._opened.set()
        while data := await reader.read(65536):
            await self._socket.send_bytes(bytes([2 * at]) + data)
        await self._socket.close()
