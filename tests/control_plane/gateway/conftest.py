"""A whole control plane in this process, with a fake slot behind it and a real database, tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from control_plane.app import build_app, close_context, open_context, start_context
from control_plane.backends.base import Backend
from control_plane.context import AppContext
from control_plane.functions import ImportState
from control_plane.settings import HttpSettings, QueueSettings, Settings
from control_plane.spec import parse_mapping
from model_loader.importer import import_model
from tests.control_plane.gateway.fakes import Behaviour, FakeReplica, FakeSlot
from tests.support.checkpoints import make_tiny_llama
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """(uri, identity, manifest path) of a tiny model, imported once."""
    folder = tmp_path_factory.mktemp("checkpoint")
    path = make_tiny_llama(folder / "tiny")
    manifest = import_model(f"file://{path}", folder / "models")
    return f"file://{path}", manifest.identity, str(manifest.path)


class Plane:
    """A gateway and what is behind it; `restart` is a new life on the same data."""

    def __init__(self, settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> None:
        self.settings = settings
        self.slot = slot
        self.backend: Backend = slot
        self.checkpoint = checkpoint
        self.context: AppContext
        self.client: TestClient[Any, Any]
        self.key = ""

    async def start(self) -> None:
        self.context = await open_context(self.settings, self.backend)
        # The importer is a subprocess, tested elsewhere: here a revision is imported by decree.
        self.context.importing.want = lambda revision: None  # type: ignore[method-assign]
        server = TestServer(build_app(self.context), handler_cancellation=True)
        self.client = TestClient(server, timeout=aiohttp.ClientTimeout(total=30))
        await self.client.start_server()
        await start_context(self.context, str(server.make_url("")).rstrip("/"))
        self.key = self.settings.admin_key_path.read_text().strip()

    def hold_headers(self) -> None:
        """A stream that fails says so by its status for as long as a user's would; the short heartbeat of these tests
        lets the headers out before a busy machine gets that far."""
        self.context.settings = replace(self.context.settings, http=HttpSettings())

    async def stop(self) -> None:
        self.context.draining = True
        await self.client.close()
        await close_context(self.context)

    async def die(self) -> None:
        """Like kill -9 of the process: nothing is told to anybody, the database keeps what it has committed."""
        context = self.context
        context.draining = True
        context.loop.stop()
        context.dispatcher.closing = True
        for link in list(context.dispatcher._links):
            link.close()
        context.dispatcher._links.clear()
        for live in context.dispatcher.requests.values():
            live.stop_timer()
        await context.seating.close()
        await context.fleet.close(end_agents=False, grace_s=0)
        await context.peers.close()
        await self.client.close()
        await context.db.close()

    async def restart(self) -> None:
        await self.die()
        await self.start()

    async def deploy(self, name: str = "fn", **fields: Any) -> None:
        uri, identity, manifest = self.checkpoint
        spec = parse_mapping({"name": name, "model": uri, "engine": "stub", **fields})
        function = await self.context.functions.put(spec, "default")
        await self.context.functions.set_import(
            name, "default", function.revision, ImportState.READY, identity=identity, manifest_path=manifest
        )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, data=data, headers={**self.headers, **names})

    def get(self, path: str, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(path, headers={**self.headers, **names})

    async def replica(self, index: int = 0) -> FakeReplica:
        return await until(lambda: self.slot.living[index] if len(self.slot.living) > index else None)


async def until(look: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """What `look` finds, as soon as it finds something."""
    async with asyncio.timeout(within_s):
        while not (found := look()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return found


async def until_read(look: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool] = bool) -> Any:
    """What `look` reads, as soon as it is what it should be: what is written down comes after what is known."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(found := await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return found


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fn", "prompt": "hello", "max_tokens": 5, "seed": 7, **fields}


class Stream:
    """An SSE response, event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.comments: list[str] = []

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        place = 0
        async for raw in self.response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith(":"):
                self.comments.append(line[1:].strip())
            elif line.startswith("id:"):
                place = int(line[3:])
            elif line == "data: [DONE]":
                yield place, "[DONE]"
            elif line.startswith("data:"):
                yield place, json.loads(line[5:])

    async def all(self) -> list[tuple[int, Any]]:
        return [event async for event in self.events()]


def text_of(events: list[tuple[int, Any]], choice: int = 0) -> str:
    text = ""
    for _, event in events:
        if event != "[DONE]":
            for part in event.get("choices", ()):
                if part["index"] == choice:
                    text += part["text"] if "text" in part else part["delta"].get("content", "")
    return text


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", http=HttpSettings(heartbeat_s=0.05), queue=QueueSettings())


@pytest.fixture
async def slot() -> AsyncIterator[FakeSlot]:
    slot = FakeSlot(Behaviour())
    yield slot
    await slot.shut()


@pytest.fixture
async def plane(settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> AsyncIterator[Plane]:
    plane = Plane(settings, slot, checkpoint)
    await plane.start()
    yield plane
    await plane.stop()


@pytest.fixture
def small_queue(settings: Settings) -> Settings:
    return replace(settings, queue=QueueSettings(max_requests=2))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, checkpoint: tuple[str, str, str]) -> AsyncIterator[Plane]:
    """One plane with a function `fn` for tests that leave nothing behind."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("shared") / "data", http=HttpSettings(body_bytes=1 << 20))
    plane = Plane(settings, FakeSlot(), checkpoint)
    await plane.start()
    await plane.deploy()
    yield plane
    await plane.stop()
    await plane.slot.shut()
