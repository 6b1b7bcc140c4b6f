"""A client that reads through one gateway what another works on: its leaving is told apart from its gateway's death."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.readers import Readers
from control_plane.records import RequestState
from control_plane.settings import GatewaySettings
from tests.control_plane.gateway.conftest import Stream, body, text_of, until
from tests.control_plane.gateways.conftest import Gateway, Town
from tests.control_plane.gateways.test_two_gateways import answer_of, read_until

LONG = 400


async def begun(owner: Gateway, path: str = "/v1/completions") -> str:
    """A request whose first reader has gone, while another reads it."""
    owner.slot.behaviour.token_s = 0.01
    given = body(stream=True, max_tokens=LONG)
    if path == "/v1/responses":
        given = {"model": "fn", "input": "hello", "max_output_tokens": LONG, "stream": True}
    response = await owner.post(given, path)
    await response.content.readline()
    return str(response.headers["x-request-id"])


async def state_of(gateway: Gateway, request_id: str) -> RequestState:
    record = await gateway.context.journal.get(request_id)
    assert record is not None
    return record.state


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_relayed_readers_leaving_cancels_the_work(pair: tuple[Gateway, Gateway], path: str) -> None:
    owner, other = pair
    request_id = await begun(owner, path)
    live = owner.context.dispatcher.requests[request_id]
    where = f"{path}/{request_id}/stream" if path == "/v1/completions" else f"{path}/{request_id}?stream=true"
    relayed = await other.get(where)
    await relayed.content.readline()
    await until(lambda: live.readers.count == 2)
    await owner.client.session.close()  # the first reader
    await until(lambda: live.readers.count == 1)
    assert live.live
    relayed.close()
    await until(lambda: request_id not in owner.context.dispatcher.requests)
    assert await state_of(other, request_id) is RequestState.CANCELLED


@pytest.mark.deaths
async def test_the_death_of_the_gateway_between_cancels_nothing(pair: tuple[Gateway, Gateway]) -> None:
    owner, other = pair
    request_id = await begun(owner)
    live = owner.context.dispatcher.requests[request_id]
    relayed = await other.get(f"/v1/completions/{request_id}/stream")
    before = await read_until(Stream(relayed), 3)
    await owner.client.session.close()
    await until(lambda: live.readers.count == 1)
    await other.die()
    await until(lambda: live.readers.count == 0)
    assert live.live and live.cancelling is None
    del before
    await until(lambda: request_id not in owner.context.dispatcher.requests, 20.0)
    assert await state_of(owner, request_id) is RequestState.DONE


async def test_while_the_owners_own_reader_stays_the_work_goes_on(pair: tuple[Gateway, Gateway]) -> None:
    owner, other = pair
    owner.slot.behaviour.token_s = 0.01
    response = await owner.post(body(stream=True, max_tokens=100))
    request_id = response.headers["x-request-id"]
    before = await read_until(Stream(response), 3)
    live = owner.context.dispatcher.requests[request_id]
    relayed = await other.get(f"/v1/completions/{request_id}/stream")
    await relayed.content.readline()
    await until(lambda: live.readers.count == 2)
    relayed.close()
    await until(lambda: live.readers.count == 1)
    assert text_of(before + await Stream(response).all()) == answer_of(100)


async def test_a_dead_leaders_functions_are_woken_long_before_it_is_buried(town: Town) -> None:
    town.settings = replace(town.settings, gateway=GatewaySettings(lease_s=60.0, lead_cap_s=1.0))
    leader, other = await town.open(), await town.open()
    await leader.deploy()
    leader.context.peers.tell("functions")
    await until(lambda: other.context.functions.find("fn", "default"))
    await leader.die()
    async with other.post(body()) as response:
        assert (await response.json())["choices"][0]["text"] == answer_of(5)
    assert leader.id in other.context.gateways.peers  # nobody knows yet that it is dead
    assert len(other.slot.started) == 1


def test_the_last_to_leave_ends_it_and_a_lost_connection_is_no_leaving() -> None:
    readers = Readers()
    readers.come()
    readers.come()
    assert not readers.go("a")
    assert not readers.go(None)  # `a` may come back through another gateway
    assert readers.said_to_have_left("a")


def test_word_that_comes_before_the_connection_breaks_counts_as_well() -> None:
    readers = Readers()
    readers.come()
    assert not readers.said_to_have_left("a")
    assert readers.go("a")


def test_two_that_leave_through_the_same_gateway_are_told_apart() -> None:
    readers = Readers()
    readers.come()
    readers.come()
    assert not readers.go("a")
    assert not readers.said_to_have_left("a")
    assert not readers.go("b")
    assert readers.said_to_have_left("b")


def test_whoever_comes_back_decides_anew() -> None:
    readers = Readers()
    readers.come()
    assert not readers.go("a")
    readers.come()
    assert readers.go(None)
