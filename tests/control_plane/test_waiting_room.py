"""While the service cannot start it is alive, not ready, and says why; and it starts once it can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from control_plane.app import bind
from control_plane.required import BadRequirements, missing
from control_plane.settings import DatabaseSettings, Settings
from control_plane.waiting_room import NotStarted, WaitingRoom, wait_for_needs


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest_asyncio.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def require(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    monkeypatch.setenv("STOKER_REQUIRED", json.dumps(variables))


def test_only_what_is_empty_is_missing() -> None:
    told = json.dumps({"A": "field a of secret s", "B": "field b of secret s"})
    assert missing({"STOKER_REQUIRED": told, "A": "x", "B": " "}) == ("B is empty: field b of secret s is not there",)
    assert missing({}) == ()
    with pytest.raises(BadRequirements, match="no JSON"):
        missing({"STOKER_REQUIRED": "{"})


async def test_it_is_alive_and_not_ready_and_the_socket_outlives_it(web: aiohttp.ClientSession) -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with WaitingRoom("the database is away").open(listener):
        assert (await web.get(url + "/health/live")).status == 200
        ready = await web.get(url + "/health/ready")
        assert ready.status == 503
        assert (await ready.json())["reason"] == "the database is away"
        called = await web.post(url + "/v1/completions", json={})
        assert called.status == 503
        assert (await called.json())["error"]["code"] == "not_started"
        assert "Retry-After" in called.headers
    assert listener.fileno() != -1
    async with WaitingRoom("something else").open(listener):
        assert (await (await web.get(url + "/health/ready")).json())["reason"] == "something else"
    listener.close()


async def test_a_missing_secret_is_named_until_the_process_has_to_be_renewed(
    settings: Settings, web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(monkeypatch, NOT_SET_HERE="field url of secret db")
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    seen: list[str] = []

    async def look(pause_s: float) -> None:
        seen.append((await (await web.get(url + "/health/ready")).json())["reason"])

    with pytest.raises(NotStarted, match="field url of secret db"):
        await wait_for_needs(settings, listener, look)
    assert seen == ["NOT_SET_HERE is empty: field url of secret db is not there"]
    listener.close()


async def test_a_database_that_is_away_is_waited_for(
    settings: Settings, tmp_path: Path, web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(monkeypatch)
    monkeypatch.setenv("STOKER_REQUIRED", json.dumps({"HOME": "the container"}))
    blocked = tmp_path / "there"
    blocked.write_text("a file where a folder should be")
    database = DatabaseSettings(url=f"sqlite:///{blocked}/stoker.db")
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    pauses = 0

    async def look(pause_s: float) -> None:
        nonlocal pauses
        pauses += 1
        ready = await web.get(url + "/health/ready")
        assert ready.status == 503
        if pauses == 2:
            blocked.unlink()
            blocked.mkdir()

    async with asyncio.timeout(20):
        await wait_for_needs(Settings(data_dir=settings.data_dir, database=database), listener, look)
    assert pauses == 2
    listener.close()


async def test_where_nothing_would_start_it_again_it_does_not_wait(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_REQUIRED", raising=False)

    async def never(pause_s: float) -> None:
        raise AssertionError("it waited")

    listener = bind("127.0.0.1", 0)
    await wait_for_needs(settings, listener, never)
    listener.close()
