"""What the server hands on to a node: logs from its kubelet, and connections to a pod's ports.

Upstream: `pkg/registry/core/pod/rest/{log,subresources}.go`; the kubelet's `/containerLogs`:
`pkg/kubelet/server/server.go`; port-forwarding is in `forwarding`.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.errors import ApiError, bad_request
from tests.kubernetes.apiserver.forwarding import CHANNELS, TUNNEL, Channels, Tunnel
from tests.kubernetes.apiserver.registry import Registry

Object = dict[str, Any]
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
        if TUNNEL in offered:
            return await Tunnel(address).run(request)
        if CHANNELS not in offered:
            raise bad_request(
                f"unable to upgrade: ports are forwarded by the websocket protocols {TUNNEL} and {CHANNELS}"
            )
        ports = [int(part) for each in request.query.getall("ports", []) for part in each.split(",")]
        if not ports:
            raise bad_request('query parameter "ports" is required')
        return await Channels(address, ports).run(request)
