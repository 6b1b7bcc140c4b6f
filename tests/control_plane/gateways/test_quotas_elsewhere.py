"""Quotas and shares at several gateways: what one sets bounds what the leader starts, and the leader tells the rest."""

from __future__ import annotations

import asyncio

from autoscaler.shares import Quota
from tests.control_plane.gateway.conftest import body, until
from tests.control_plane.gateways.conftest import Gateway


async def ask(gateway: Gateway) -> int:
    async with gateway.post(body()) as response:
        await response.read()
        return int(response.status)


async def test_a_quota_set_at_one_gateway_bounds_what_the_leader_starts_and_that_tells_whose_objectives_are_tightened(
    pair: tuple[Gateway, Gateway],
) -> None:
    leader, other = pair
    # The route says so to the other gateways; here nobody has asked over HTTP.
    await other.context.quotas.put("default", Quota(devices=0))
    await other.context.peers.tell_all("keys")
    await until(lambda: leader.context.quotas.of("default") == Quota(devices=0))
    task = asyncio.create_task(ask(other))
    await until(lambda: leader.context.allowances._claims)
    assert not other.slot.started
    await other.context.quotas.put("default", Quota(devices=1))
    await other.context.peers.tell_all("keys")
    assert await task == 200
    assert len(other.slot.started) == 1
    standings = leader.context.standings
    await leader.context.quotas.put("elsewhere", Quota(weight=9.0))
    standings.wants(("default", "fn"), 1)
    standings.wants(("elsewhere", "gn"), 1)
    standings.lacking()
    assert standings.strictness("default", True) == 0.0
    await until(lambda: other.context.standings.strictness("default", False) == 0.0)
    assert other.context.standings.strictness("elsewhere", False) == 1.0
