"""Every limit bounds one thing, says which, and leaves nothing behind."""

from __future__ import annotations

import pytest

from function_runtime.protocol import Cancel
from tests.control_plane.gateway.conftest import Plane, Stream, body, until
from tests.control_plane.gateway.fakes import Behaviour


@pytest.mark.parametrize(
    ("behaviour", "limit", "status", "code"),
    [
        pytest.param({"never_ready": True}, "cold_start_s", 503, "model_loading", id="cold start"),
        pytest.param({"silent": True}, "first_token_s", 504, "first_token_timeout", id="first token"),
        pytest.param({"stop_after": 2}, "idle_s", 504, "idle_timeout", id="silence between tokens"),
        pytest.param({"token_s": 0.01}, "total_s", 504, "total_timeout", id="total"),
    ],
)
async def test_each_limit_on_its_own(
    plane: Plane, behaviour: dict[str, object], limit: str, status: int, code: str
) -> None:
    for name, value in behaviour.items():
        setattr(plane.slot.behaviour, name, value)
    await plane.deploy(timeouts={limit: 0.2})
    async with plane.post(body(max_tokens=1000)) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (status, code)
    assert f"timeouts.{limit}" in error["message"]
    await until(lambda: not plane.context.dispatcher.requests)
    if plane.slot.living:
        await until(lambda: any(isinstance(word, Cancel) for word in plane.slot.living[0].words))


async def test_a_full_replica_counts_against_the_queue_limit_and_gets_429(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.02
    await plane.deploy(
        scaling={"max_concurrency": 1, "target_concurrency": 1}, timeouts={"queue_s": 0.2, "cold_start_s": 30}
    )
    running = await plane.post(body(stream=True, max_tokens=100))
    async with plane.post(body()) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (429, "saturated")
    assert "timeouts.queue_s" in error["message"]
    running.close()


async def test_waiting_for_a_start_does_not_count_against_the_queue_limit(plane: Plane) -> None:
    plane.slot.behaviour.start_s = 0.4
    await plane.deploy(timeouts={"queue_s": 0.1})
    async with plane.post(body()) as response:
        assert response.status == 200


async def test_a_limit_that_passes_in_mid_stream_is_the_streams_last_event(plane: Plane) -> None:
    plane.slot.behaviour = Behaviour(stop_after=2)
    await plane.deploy(timeouts={"idle_s": 0.2})
    async with plane.post(body(stream=True)) as response:
        events = await Stream(response).all()
    assert [place for place, _ in events[:2]] == [1, 2]
    assert events[-2][1]["error"]["code"] == "idle_timeout"
    assert events[-1][1] == "[DONE]"
