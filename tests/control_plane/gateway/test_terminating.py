"""A slot that terminates gets nothing new, finishes what it runs, and says nothing against the functions it refuses."""

from __future__ import annotations

import asyncio

from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text

LONG = 40


async def test_a_terminating_slot_finishes_its_streams_and_new_requests_wait_for_another(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    async with plane.post(body(stream=True, max_tokens=LONG)) as response:
        stream = Stream(response)
        first = await anext(aiter(stream.events()))
        await plane.slot.terminate()
        late = asyncio.ensure_future(plane.post(body()))
        events = [first, *await stream.all()]
    assert text_of(events) == "".join(token_text(7, 0, position) for position in range(LONG))
    await until(lambda: not plane.context.fleet.living())
    assert len(plane.slot.started) == 1 and plane.slot.refused == 0, "something was placed on a slot that goes away"
    async with plane.get("/api/v1/slots") as asked:
        assert [slot["terminating"] for slot in (await asked.json())["data"]] == [True]
    plane.slot.terminating, plane.slot.incarnation = False, "two"
    plane.slot.come_back()
    async with await late as response:
        assert response.status == 200
    assert len(plane.slot.started) == 2


async def test_a_start_that_a_terminating_slot_refuses_is_no_failure_of_the_function(plane: Plane) -> None:
    """The refusal may come before the news: it is the news then, and asked is once."""
    await plane.deploy()
    plane.slot.terminating = True
    late = asyncio.ensure_future(plane.post(body()))
    await until(lambda: plane.slot.refused)
    await asyncio.sleep(0.05)
    assert plane.slot.refused == 1
    assert not plane.context.loop.start_error(("default", "fn"), 1)
    plane.slot.terminating, plane.slot.incarnation = False, "two"
    plane.slot.come_back()
    async with await late as response:
        assert response.status == 200
