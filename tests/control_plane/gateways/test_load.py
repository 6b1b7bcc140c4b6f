"""Load of two gateways: the leader has all of it, and only the leader forecasts and decides by it."""

from __future__ import annotations

import math
import time

from control_plane.load_meter import WINDOW_S
from tests.control_plane.gateway.conftest import body, until
from tests.control_plane.gateways.conftest import Gateway

KEY = ("default", "fn")


class Calendar:
    """The same wall clock for all of them, far ahead, moved by hand and by the passing of time."""

    def __init__(self, *gateways: Gateway) -> None:
        self.ahead_s = 4_000_000_000.0 - time.monotonic()
        self.meters = [gateway.context.dispatcher.load for gateway in gateways]
        for gateway, meter in zip(gateways, self.meters, strict=True):
            meter._wall = self.now
            gateway.context.loop.observations._wall = self.now
            meter._start_s = math.floor(self.now() / WINDOW_S) * WINDOW_S
        self.move(0.0)

    def now(self) -> float:
        return time.monotonic() + self.ahead_s

    def move(self, seconds: float) -> None:
        self.ahead_s += seconds
        for meter in self.meters:
            meter._offset_s = self.ahead_s


async def test_the_leader_has_the_load_of_both_and_only_it_forecasts(pair: tuple[Gateway, Gateway]) -> None:
    leader, other = pair
    await leader.context.loop.observations.restore()
    calendar = Calendar(leader, other)
    for gateway in (leader, other, other):
        async with gateway.post(body()) as response:
            assert response.status == 200, await response.text()
    calendar.move(WINDOW_S)
    for gateway in pair:
        gateway.context.dispatcher.load._whole = True
        assert gateway.context.dispatcher.load.close(())
    other.context.sender.changed(waiting=True)
    observations = leader.context.loop.observations
    observations.take(leader.context.gateways.id, leader.context.dispatcher.load.unsent())
    await until(lambda: not other.context.dispatcher.load.unsent())
    await observations.settle()
    load = observations.of(KEY)
    assert load is not None
    until_s = load.history.observed_until_s
    assert until_s is not None
    assert load.history.total("arrivals", 10, until_s - WINDOW_S, until_s) == 3
    assert not other.context.loop.observations.loads
    assert not other.context.loop.leads
    await leader.context.loop.forecasting.look()
    assert leader.context.loop.forecasting.of(KEY) is not None
    async with other.get("/api/v1/why/fn") as response:
        assert (await response.json())["scaling"]["leads"] is False
