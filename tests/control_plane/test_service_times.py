"""Service times are read off what replicas report, and off nothing else that takes time in the same moments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoscaler.admission import LENGTHS_NEEDED
from autoscaler.forecast import Forecast
from control_plane.lanes import Seat
from control_plane.live_request import LiveRequest
from control_plane.service_times import FIT_S, IDENTITIES_KEPT, LENGTHS_KEPT, ServiceTimes, token_s
from function_runtime.protocol import DeviceTime, Progress, ReplicaTime, Tokens

KEY = ("default", "fn")
STEP_BASE_S, STEP_PER_REQUEST_S, PREFILL_PER_S = 0.02, 0.005, 2000.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Replica:
    """Reports steps that take what they should, with so many running."""

    def __init__(self, times: ServiceTimes) -> None:
        self.times = times
        self.steps = 0
        self.busy_us = 0
        self.others = 0
        seat = SimpleNamespace(replica_id="rep-1", key=KEY, identity="id", max_requests=8, in_flight={})
        self.seat = cast(Seat, seat)

    def beat(self, running: int, steps: int = 4) -> None:
        self.steps += steps
        self.busy_us += round(steps * (STEP_BASE_S + STEP_PER_REQUEST_S * running) * 1e6)
        told = ReplicaTime(attributed_us=self.busy_us)
        self.times.beat(self.seat, Progress(self.steps, running, 0, 0, 1, told, self.others))

    def request(self, prompt_tokens: int, cached: int = 0) -> Any:
        origin = SimpleNamespace(prompt=(1,) * prompt_tokens, key=KEY, identity="id", sampling=SimpleNamespace(n=1))
        log = SimpleNamespace(last_seq=0)
        live = SimpleNamespace(seat=self.seat, origin=origin, log=log, complete=True, last_token_ns=0)
        prefill_us = round((prompt_tokens - cached) / PREFILL_PER_S * 1e6)
        message = Tokens("r", 1, 1, (), DeviceTime(prefill_us, 0), cached)
        self.times.first_token(cast(LiveRequest, live), message)
        return live


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(clock: Clock) -> Replica:
    return Replica(ServiceTimes(clock))


def test_steps_and_prefills_give_the_model_they_were_made_by(replica: Replica) -> None:
    assert replica.times.model(KEY, "id") is None
    for running in (1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 8):
        replica.beat(running)
    for tokens in (100, 400, 800, 1600):
        replica.request(tokens)
    model = replica.times.model(KEY, "id")
    assert model is not None and model.max_requests == 8
    assert model.step_s(8) == pytest.approx(STEP_BASE_S + 8 * STEP_PER_REQUEST_S, rel=0.1)
    assert model.prefill_tokens_per_s == pytest.approx(PREFILL_PER_S)


def test_what_a_prefill_costs_whatever_its_length_is_not_its_tokens() -> None:
    assert token_s([(100, 0.3), (400, 0.6), (800, 1.0)]) == pytest.approx(0.001)
    assert token_s([(100, 0.3), (110, 0.31)]) == pytest.approx(0.61 / 210)
    assert token_s([(100, 0.5), (400, 0.4)]) > 0


def test_steps_beside_a_prefill_are_not_taken_for_steps_of_generation(replica: Replica) -> None:
    for _ in range(10):
        replica.beat(2)
    before = replica.times.model(KEY, "id")
    replica.seat.in_flight["r"] = cast(LiveRequest, SimpleNamespace(last_token_ns=0))
    replica.busy_us += 5_000_000
    replica.beat(2)
    replica.seat.in_flight.clear()
    replica.busy_us += 5_000_000
    replica.beat(2)  # it had begun before the prefill's end
    replica.others = 1
    replica.busy_us += 5_000_000
    replica.beat(2)  # another gateway's request came
    served = replica.times._served[KEY, "id"]
    assert before is not None
    assert max(seconds for _, _, seconds in served.steps) == pytest.approx(before.step_s(2), rel=0.05)


def test_a_model_is_fitted_again_when_it_is_old_and_something_new_was_measured(replica: Replica, clock: Clock) -> None:
    for _ in range(10):
        replica.beat(2)
    first = replica.times.model(KEY, "id")
    replica.beat(2)
    assert replica.times.model(KEY, "id") is first
    clock.now_s += FIT_S
    assert replica.times.model(KEY, "id") is not first


def test_prompts_that_are_found_and_not_computed_are_told_apart(replica: Replica) -> None:
    live = replica.request(1000, cached=750)
    live.log.last_seq = 20
    replica.times.ended(live)
    assert replica.times.computed_share(KEY, "id") == 0.25
    assert replica.times.means(KEY, "id") == (250.0, 20.0)


def test_checkpoints_of_a_function_that_went_are_forgotten(replica: Replica) -> None:
    live = replica.request(10)
    for number in range(IDENTITIES_KEPT + 2):
        live.origin.identity = f"id-{number}"
        live.log.last_seq = 1
        replica.times.ended(live)
    assert [identity for _, identity in replica.times._served] == [f"id-{number}" for number in range(2, 6)]


def test_lengths_of_answers_are_those_of_the_last_and_in_order(replica: Replica) -> None:
    live = replica.request(10)
    for made in range(1, LENGTHS_KEPT + 11):
        live.log.last_seq = made
        replica.times.ended(live)
    lengths = replica.times.output_lengths(KEY, "id")
    assert lengths == sorted(lengths) == list(range(11, LENGTHS_KEPT + 11))


def test_before_enough_answers_ended_here_their_rest_is_what_the_forecast_expects(replica: Replica) -> None:
    replica.times.forecast = lambda key: Forecast("reactive", 0.0, output_tokens=100.0, output_spread=1.0)
    left = replica.times.left_tokens(KEY, "id")
    assert left(0, 1000) == 100.0 and left(500, 1000) == pytest.approx(266, abs=1)
    assert left(500, 600) == 100.0, "never more than it may"
    live = replica.request(10)
    for _ in range(LENGTHS_NEEDED):
        live.log.last_seq = 20
        replica.times.ended(live)
    assert replica.times.left_tokens(KEY, "id")(5, 1000) == 15.0
