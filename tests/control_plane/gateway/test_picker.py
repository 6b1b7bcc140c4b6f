"""What an endpoint picker reads of a gateway: one sample each, under the names it looks for."""

from __future__ import annotations

import asyncio

from function_runtime.protocol import Progress, ReplicaTime
from tests.control_plane.gateway.conftest import Plane, body, until


async def read(plane: Plane) -> dict[str, float]:
    async with plane.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("vllm:"))}


async def test_a_gateway_says_what_waits_what_runs_and_how_full_its_replicas_are(plane: Plane) -> None:
    at_rest = {"vllm:num_requests_waiting": 0.0, "vllm:num_requests_running": 0.0, "vllm:kv_cache_usage_perc": 0.0}
    assert await read(plane) == at_rest
    plane.slot.behaviour.max_requests = 2
    plane.slot.behaviour.token_s = 30.0
    await plane.deploy(scaling={"max_concurrency": 2, "target_concurrency": 2, "max_replicas": 1})
    tasks = [asyncio.ensure_future(plane.post(body())) for _ in range(5)]
    lanes = plane.context.dispatcher.lanes
    await until(lambda: sum(lane.in_flight for lane in lanes) == 2 and sum(len(lane.waiting) for lane in lanes) == 3)
    seat = await until(lambda: next((seat for lane in lanes for seat in lane.seats.values()), None))
    seat.link.progress = Progress(1, 2, 0, 30, 40, ReplicaTime())
    assert await read(plane) == {
        "vllm:num_requests_waiting": 3.0, "vllm:num_requests_running": 2.0, "vllm:kv_cache_usage_perc": 0.75,
    }  # fmt: skip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
