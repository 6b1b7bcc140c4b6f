"""What a step costs, and the model fitted to measured steps."""

from __future__ import annotations

import random

import pytest

from autoscaler.service import ServiceModel

MODEL = ServiceModel(prefill_tokens_per_s=10_000, step_base_s=0.02, step_per_request_s=0.001, max_requests=16)


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    assert MODEL.first_token_s(1000) == pytest.approx(0.1 + 0.021)
    assert MODEL.service_s(1000, 100) == pytest.approx(0.1 + 100 * 0.021)


def test_each_place_is_prefilled_anew_while_a_request_stays() -> None:
    assert MODEL.service_s(1000, 100, 8) == pytest.approx(8 * 0.1 + 100 * 0.028)


def test_the_least_device_time_is_a_share_of_a_full_batch() -> None:
    assert MODEL.full_batch_device_s(1000, 100) == pytest.approx(0.1 + 100 * 0.036 / 16)


def test_kv_bounds_the_full_batch() -> None:
    model = ServiceModel(10_000, 0.02, 0.001, max_requests=16, kv_tokens=4400, devices=2)
    assert model.full_batch(1000, 100) == 4
    assert model.full_batch_device_s(1000, 100) == pytest.approx(2 * (0.1 + 100 * 0.024 / 4))
    assert model.full_batch(100_000, 100) == 1


def test_measured_steps_give_the_model_back() -> None:
    chance = random.Random(7)
    samples = []
    for _ in range(200):
        running, prefilled = chance.randint(1, 16), chance.choice([0, 0, 256, 512])
        seconds = 0.02 + 0.001 * running + prefilled / 10_000
        samples.append((running, running + prefilled, seconds * chance.uniform(0.97, 1.03)))
    fitted = ServiceModel.fitted(samples, max_requests=16)
    assert fitted is not None
    assert fitted.step_s(8) == pytest.approx(MODEL.step_s(8), rel=0.03)
    assert fitted.prefill_tokens_per_s == pytest.approx(10_000, rel=0.03)


def test_no_fitted_coefficient_is_negative() -> None:
    falling = [(running, running, 0.05 - 0.001 * running) for running in range(1, 17)]
    fitted = ServiceModel.fitted(falling, max_requests=16)
    assert fitted is not None
    assert fitted.step_per_request_s == 0.0
    assert fitted.step_base_s > 0


def test_steps_that_are_all_alike_give_a_base_only() -> None:
    fitted = ServiceModel.fitted([(1, 1, 0.03)] * 20)
    assert fitted is not None
    assert fitted.step_s(1) == pytest.approx(0.03)
    assert ServiceModel.fitted([(1, 1, 0.03)] * 3) is None
