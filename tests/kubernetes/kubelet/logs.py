"""The kubelet's own server: logs of containers, for the API server to ask.

Upstream: `pkg/kubelet/server/server.go` (`/containerLogs/NAMESPACE/POD/CONTAINER`). Its certificate is signed by
itself.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from aiohttp import web

from tests.kubernetes.apiserver.certificates import make_certificates

_LOOK_AGAIN_S = 0.1


class LogServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self, address: str, port: int) -> None:
        if self._runner is None:
            application = web.Application()
            application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
            self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await self._runner.setup()
            files = make_certificates(self._folder / "certificates", ["kubelet"], ["127.0.0.1"])
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(files.certificate, files.key)
        await web.TCPSite(self._runner, address, port, ssl_context=self._context).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _log(self, request: web.Request) -> web.StreamResponse:
        part, query = request.match_info, request.query
        found = sorted(
            (self._folder / "logs" / f"{part['namespace']}_{part['pod']}").glob(f"*/{part['container']}/*.log"),
            key=lambda each: (each.stat().st_mtime, int(each.stem)),
        )
        if query.get("previous") == "true":
            found = found[:-1]
            if not found:
                return web.Response(status=400, text=f'previous terminated container "{part["container"]}" not found')
        if not found:
            return web.Response(
                status=400, text=f'container "{part["container"]}" is waiting to start: ContainerCreating'
            )
        content = found[-1].read_bytes()
        shown = content
        if query.get("tailLines"):
            count = int(query["tailLines"])
            shown = b"".join(content.splitlines(keepends=True)[-count:]) if count else b""
        if query.get("limitBytes"):
            shown = shown[: int(query["limitBytes"])]
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await response.write(shown)
        if query.get("follow") == "true":
            await self._follow(response, found[-1], len(content))
        await response.write_eof()
        return response

    async def _follow(self, response: web.StreamResponse, path: Path, at: int) -> None:
        """Until the pod's log is continued in another file, or its folder is gone."""
        while (more := _more(path, at)) is not None:
            if more:
                at += len(more)
                await response.write(more)
            await asyncio.sleep(_LOOK_AGAIN_S)


def _more(path: Path, at: int) -> bytes | None:
    """What was added; none where nothing more will be."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(at)
        more = file.read()
    if not more and path.with_name(f"{int(path.stem) + 1}.log").exists():
        return None
    return more
