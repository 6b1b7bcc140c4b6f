"""A tenant's devices are used up: lower priorities and idle equals make room, and what they ran goes on later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from autoscaler.shares import Quota
from control_plane.backends.base import SlotClass
from control_plane.functions import ImportState
from control_plane.live_request import Phase
from control_plane.settings import Settings
from control_plane.spec import parse_mapping
from function_runtime.protocol import Park
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import Behaviour, FakeSlot, token_text

LONG = 60


async def deploy(plane: Plane, name: str, priority: int = 0, **scaling: Any) -> None:
    await plane.deploy(name, scaling={"max_replicas": 1, "keep_alive": 60, "priority": priority, **scaling})


async def ask(plane: Plane, model: str, **fields: Any) -> int:
    async with plane.post(body(model=model, **fields)) as response:
        await response.read()
        return int(response.status)


def running(plane: Plane) -> list[str]:
    return sorted(status.function for status in plane.context.fleet.living())


async def why(plane: Plane, name: str) -> list[dict[str, Any]]:
    async with plane.get(f"/api/v1/why/{name}") as asked:
        return list((await asked.json())["timeline"])


async def test_a_higher_priority_takes_the_device_and_the_stream_it_took_it_from_goes_on_token_for_token(
    plane: Plane,
) -> None:
    plane.slot.behaviour.token_s = 0.01
    await deploy(plane, "low")
    await deploy(plane, "high", priority=5, keep_alive=0)
    await plane.context.quotas.put("default", Quota(devices=1))
    async with plane.post(body(model="low", stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        events: list[tuple[int, Any]] = []
        async for event in stream.events():
            events.append(event)
            if event[0] >= 5:
                break
        first = plane.slot.living[0]
        assert await ask(plane, "high") == 200
        assert [word for word in first.words if isinstance(word, Park)]
        events += await stream.all()
    assert text_of(events) == "".join(token_text(7, 0, position) for position in range(LONG))
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]
    assert [spec.function for spec in plane.slot.started] == ["low", "high", "low"]
    told = [event["what"] for event in await why(plane, "low")]
    assert "preempt" in told
    (claim,) = [event for event in await why(plane, "high") if event["what"] == "claim"]
    assert claim["detail"] == (
        "tenant default may take no more devices, and high has a higher priority (5): low makes room"
    )
    async with plane.get("/metrics") as asked:
        assert 'stoker_preempted_total{function="low"} 1.0' in await asked.text()


async def test_an_idle_replica_makes_room_for_a_request_of_an_equal_and_a_busy_one_does_not(plane: Plane) -> None:
    await deploy(plane, "one")
    await deploy(plane, "two")
    await plane.context.quotas.put("default", Quota(devices=1))
    assert await ask(plane, "one") == 200
    assert await ask(plane, "two") == 200
    await until(lambda: running(plane) == ["two"])
    plane.slot.behaviour.stop_after = 2
    busy = asyncio.create_task(ask(plane, "two"))
    await until(lambda: plane.context.dispatcher.requests)
    waiting = asyncio.create_task(ask(plane, "one"))
    await until(lambda: any(live.phase is Phase.QUEUED for live in plane.context.dispatcher.requests.values()))
    await until(lambda: [key for key in plane.context.allowances._claims if key[1] == "one"])
    assert running(plane) == ["two"]
    plane.slot.behaviour.stop_after = None
    # At its end it is idle, and makes room.
    assert (await busy, await waiting) == (200, 200)


async def test_a_quota_bounds_how_many_replicas_start_and_a_larger_one_lets_them(plane: Plane) -> None:
    plane.slot.behaviour.stop_after = 2
    await plane.deploy("fn", scaling={"max_replicas": 4, "target_concurrency": 1, "max_concurrency": 1})
    await plane.context.quotas.put("default", Quota(devices=2))
    tasks = [asyncio.create_task(ask(plane, "fn")) for _ in range(4)]
    await until(lambda: len(plane.slot.living) == 2)
    reasons = {event["detail"].split(":")[0] for event in await why(plane, "fn") if event["what"] == "scale"}
    assert "quota" in reasons
    assert len(plane.slot.started) == 2
    await plane.context.quotas.put("default", Quota())
    await until(lambda: len(plane.slot.living) == 4)
    plane.slot.behaviour.stop_after = None
    assert await asyncio.gather(*tasks) == [200] * 4


async def test_what_a_function_keeps_whatever_the_load_is_no_equals_to_take(plane: Plane) -> None:
    await deploy(plane, "kept", min_replicas=1)
    await until(lambda: running(plane) == ["kept"])
    await deploy(plane, "other")
    await plane.context.quotas.put("default", Quota(devices=1))
    waiting = asyncio.create_task(ask(plane, "other"))
    await until(lambda: [key for key in plane.context.allowances._claims if key[1] == "other"])
    assert running(plane) == ["kept"]
    await plane.context.quotas.put("default", Quota(devices=2))
    assert await waiting == 200


class Narrow(FakeSlot):
    """Takes two replicas."""

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        return (SlotClass(most_replicas=2),)


@pytest.fixture
async def narrow(settings: Settings, checkpoint: tuple[str, str, str]) -> AsyncIterator[Plane]:
    slot = Narrow(Behaviour(token_s=0.01))
    plane = Plane(settings, slot, checkpoint)
    await plane.start()
    yield plane
    await plane.stop()
    await slot.shut()


async def read(plane: Plane, response: Any, seed: int) -> None:
    """A whole stream, without a gap, a double or a change."""
    events = await Stream(response).all()
    assert text_of(events) == "".join(token_text(seed, 0, position) for position in range(LONG))
    assert [place for place, _ in events] == [*range(1, LONG + 1), LONG]


async def test_a_tenant_below_its_share_takes_what_another_holds_above_its_own_and_nothing_is_lost(
    narrow: Plane,
) -> None:
    context = narrow.context
    await narrow.deploy("fn", scaling={"max_replicas": 2, "target_concurrency": 1, "max_concurrency": 1})
    spec = parse_mapping({"name": "gn", "model": narrow.checkpoint[0], "engine": "stub", "scaling": {"keep_alive": 0}})
    other = await context.functions.put(spec, "other")
    await context.functions.set_import(
        "gn", "other", other.revision, ImportState.READY,
        identity=narrow.checkpoint[1], manifest_path=narrow.checkpoint[2],
    )  # fmt: skip
    _, key = await context.keys.create("other", "x")
    streams = [narrow.post(body(stream=True, max_tokens=LONG, seed=seed)) for seed in (1, 2)]
    async with streams[0] as one, streams[1] as two:
        reading = [asyncio.create_task(read(narrow, response, seed)) for response, seed in ((one, 1), (two, 2))]
        await until(lambda: len(narrow.slot.living) == 2)
        await until(lambda: all(live.log.last_seq > 3 for live in context.dispatcher.requests.values()))
        async with narrow.post(body(model="gn"), Authorization=f"Bearer {key}") as response:
            assert response.status == 200
        await asyncio.gather(*reading)
    assert [spec.function for spec in narrow.slot.started] == ["fn", "fn", "gn", "fn"]
    told = await why(narrow, "fn")
    assert [event["what"] for event in told].count("preempt") == 1
    (gone,) = [event for event in told if event["what"] == "preempt"]
    assert gone["detail"] == "its devices are another tenant's share"
    assert not [event for event in told if "gn" in event["detail"].split() or "other" in event["detail"].split()]


async def test_room_that_is_made_for_one_is_not_taken_by_whoever_made_it(narrow: Plane) -> None:
    """The function that made room has a request waiting and looks for room in the very moment it comes."""
    await deploy(narrow, "low", max_replicas=2, target_concurrency=1, max_concurrency=1)
    await deploy(narrow, "high", priority=1, keep_alive=0)
    low = [asyncio.create_task(ask(narrow, "low", max_tokens=LONG, seed=seed)) for seed in (1, 2)]
    await until(lambda: running(narrow) == ["low", "low"])
    await until(lambda: all(live.log.last_seq for live in narrow.context.dispatcher.requests.values()))
    assert await ask(narrow, "high") == 200
    assert [spec.function for spec in narrow.slot.started][:3] == ["low", "low", "high"]
    assert await asyncio.gather(*low) == [200, 200]
