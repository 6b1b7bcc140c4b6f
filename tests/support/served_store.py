"""The store routes of a control plane over a directory, in a thread of their own, for tests of `HttpStore`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from control_plane.errors import Unauthenticated
from control_plane.gateway.store_routes import StoreServer
from control_plane.store_tokens import EVERYTHING, StoreScope
from model_loader.errors import MissingObject
from model_loader.objects import DirectoryStore
from model_loader.objects.http import HttpStore
from model_loader.objects.resilience import Limits

TOKEN = "a-token"


def _no_checkpoint(identity: str, number: int) -> Path:
    raise MissingObject(f"there is no checkpoint {identity}")


class ServedStore:
    """`with` starts and ends it; `stop` and `start` in between keep its port."""

    def __init__(
        self,
        root: Path,
        scope: StoreScope = EVERYTHING,
        checkpoint_file: Callable[[str, int], Path] = _no_checkpoint,
    ) -> None:
        self.directory = DirectoryStore(root)
        self.scope = scope
        self._checkpoint_file = checkpoint_file
        self.port = 0

    def __enter__(self) -> ServedStore:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def uri(self) -> str:
        return f"http+stoker://127.0.0.1:{self.port}"

    def store(self, token: str = TOKEN, limits: Limits = Limits()) -> HttpStore:  # noqa: B008
        return HttpStore(self.uri, limits, token=token)

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="served store")
        self._thread.start()
        ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(StoreServer(lambda: self.directory, self._scope_of, self._checkpoint_file).routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    def _scope_of(self, request: web.Request) -> StoreScope:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Unauthenticated("the token of a slot is required")
        return self.scope
