"""The stream of an agent's events: read as it comes, and given up when nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from control_plane.backends import agent_client
from control_plane.backends.agent_client import AgentClient
from control_plane.backends.base import SlotUnavailable
from function_runtime.protocol import AgentInfo


class Agent:
    """Says what it is given to say."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status = 200

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        while (line := await self.lines.get()) is not None:
            await response.write(line)
        return response


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[tuple[Agent, AgentClient]]:
    agent, app = Agent(), web.Application()
    app.router.add_get("/v1/events", agent.events)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with AgentClient(AgentInfo("slot-0", 1, "127.0.0.1", port, "t", "life")) as client:
        yield agent, client
    await runner.cleanup()


async def test_lines_are_events_until_the_stream_ends(agent: tuple[Agent, AgentClient]) -> None:
    said, client = agent
    for line in (b'{"log": "one"}\n', b'\n{"lo', b'g": "two"}\n', None):
        said.lines.put_nowait(line)
    assert [event.log async for event in client.events()] == ["one", "two"]


async def test_a_stream_on_which_nothing_comes_any_more_is_given_up(
    agent: tuple[Agent, AgentClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, client = agent
    monkeypatch.setattr(agent_client, "SILENCE_S", 0.05)
    said.lines.put_nowait(b'{"log": "last"}\n')
    heard: list[Any] = []

    async def listen() -> None:
        async for event in client.events():
            heard.append(event.log)

    with pytest.raises(SlotUnavailable, match=r"silent for 0\.05 s"):
        await asyncio.wait_for(listen(), 20)
    assert heard in ([], ["last"])


async def test_while_something_comes_the_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer, which looks when it would be over and not at each line."""
    loop = asyncio.get_running_loop()
    now_s, closed, timers = 0.0, list[str](), list[float]()

    class Response:
        content: Any = type("Content", (), {"set_exception": lambda self, error: closed.append(str(error))})()

        def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(loop, "call_later", lambda delay_s, call: timers.append(delay_s))
    with agent_client._Silence(Response()) as silence:  # type: ignore[arg-type]
        for _ in range(20):
            now_s += 0.4
            silence.broken()
        assert timers == [agent_client.SILENCE_S]
        now_s = agent_client.SILENCE_S
        silence._look()
        assert timers[1:] == [pytest.approx(8.0)] and not closed
        now_s = 8.0 + agent_client.SILENCE_S
        silence._look()
    assert closed == ["silent for 10 s", "closed"]


async def test_an_answer_that_is_no_stream_says_what_it_was(agent: tuple[Agent, AgentClient]) -> None:
    said, client = agent
    said.status = 503
    said.lines.put_nowait(b"no")
    said.lines.put_nowait(None)
    with pytest.raises(SlotUnavailable, match="the agent answered 503: no"):
        await anext(client.events())
