"""Sampling: a pure function, each parameter doing what it says, and nothing drawn from what is no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from function_runtime.engine.sampler import Row, sample
from function_runtime.engine.uniform import uniform
from function_runtime.protocol import Sampling

VOCABULARY = 40
logit_rows = st.lists(st.integers(-30, 30).map(lambda x: x / 4), min_size=VOCABULARY, max_size=VOCABULARY)
"""Quarters, so that ties happen."""


def make_row(position: int = 7, choice: int = 0, generated: tuple[int, ...] = (), **sampling: Any) -> Row:
    chosen = Sampling(**{"seed": 3, "max_tokens": 10, **sampling})
    return Row(chosen, choice, position, (1, 2), generated)


def draws(logits: list[float], count: int = 60, **sampling: Any) -> set[int]:
    """Tokens drawn at many positions."""
    rows = [make_row(position, **sampling) for position in range(count)]
    return {s.token_id for s in sample(torch.tensor([logits] * count), rows) if s is not None}


def ranked(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


@given(logit_rows)
@settings(deadline=None, max_examples=50)
def test_greedy_is_the_first_of_the_best(logits: list[float]) -> None:
    assert draws(logits, 2, temperature=0.0) == {ranked(logits)[0]}


@given(logit_rows, st.integers(1, 45))
@settings(deadline=None, max_examples=50)
def test_top_k_draws_from_the_k_best(logits: list[float], k: int) -> None:
    assert draws(logits, temperature=2.0, top_k=k) <= set(ranked(logits)[:k])


@given(logit_rows, st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=50)
def test_top_p_draws_from_the_smallest_set_that_reaches_p(logits: list[float], p: float) -> None:
    probabilities = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    allowed: set[int] = set()
    total = 0.0
    for token in ranked(logits):
        if total >= p + 1e-6:
            break
        allowed.add(token)
        total += float(probabilities[token])
    assert draws(logits, top_p=p) <= allowed


@given(logit_rows, st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=50)
def test_min_p_draws_nothing_below_its_share_of_the_best(logits: list[float], p: float) -> None:
    floor = max(logits) + math.log(p)
    assert all(logits[token] >= floor - 1e-4 for token in draws(logits, min_p=p))


@given(logit_rows, st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_a_draw_depends_on_seed_position_and_choice_only(
    logits: list[float], seed: int, position: int, choice: int
) -> None:
    row = make_row(position, choice, seed=seed)
    alone = sample(torch.tensor([logits]), [row])
    others = [make_row(1, seed=9), row, make_row(2, seed=8, top_k=3)]
    assert sample(torch.tensor([logits] * 3), others)[1] == alone[0]


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    count = 4000
    rows = [make_row(position) for position in range(count)]
    tokens = [s.token_id for s in sample(logits.expand(count, -1), rows) if s]
    for token, expected in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert abs(tokens.count(token) / count - expected) < 0.03


def test_numbers_are_the_same_in_every_process() -> None:
    assert uniform(1, 2, 3) == 0.7195171768790272
    numbers = [uniform(seed, position, choice) for seed in range(5) for position in range(20) for choice in range(3)]
    assert len(set(numbers)) == 300 and all(0.0 <= u < 1.0 for u in numbers)
    assert 0.4 < sum(numbers) / 300 < 0.6


@pytest.mark.parametrize(
    ("sampling", "generated", "expected"),
    [
        ({"logit_bias": {5: 100.0}}, (), 5),
        ({"logit_bias": {0: -100.0}}, (), 1),
        ({"presence_penalty": 2.0}, (0,), 1),
        ({"frequency_penalty": 0.6}, (0, 0), 1),
        ({"frequency_penalty": 0.4}, (0, 0), 0),
        ({"repetition_penalty": 2.0}, (0,), 3),
    ],
    ids=["bias-up", "bias-down", "presence", "frequency-twice", "frequency-too-little", "repetition"],
)
def test_what_bias_and_penalties_do(sampling: dict[str, Any], generated: tuple[int, ...], expected: int) -> None:
    """Best tokens 0 (4.0), 1 (3.0), 3 (2.5), 2 (2.4); the prompt is 1, 2."""
    logits = torch.zeros(1, 8)
    logits[0, 0], logits[0, 1], logits[0, 2], logits[0, 3] = 4.0, 3.0, 2.4, 2.5
    (sampled,) = sample(logits, [make_row(generated=generated, temperature=0.0, **sampling)])
    assert sampled is not None and sampled.token_id == expected


def test_forbidden_tokens_are_not_drawn() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 3] = 50.0
    row = Row(Sampling(seed=1, max_tokens=5), 0, 4, (1,), (), forbidden=(3,))
    (sampled,) = sample(logits, [row])
    assert sampled is not None and sampled.token_id != 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = [float(i) * 20 for i in range(VOCABULARY)]
    tokens = draws(logits, temperature=temperature)
    assert tokens == {VOCABULARY - 1} if temperature < 1 else len(tokens) > 3


def test_log_probabilities_are_the_model_s_own() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expected = logits[0].log_softmax(-1)
    row = make_row(temperature=5.0, logit_bias={3: 50.0}, logprobs=2)
    (sampled,) = sample(logits, [row])
    assert sampled is not None and sampled.token_id == 3
    assert sampled.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in sampled.top] == [0, 1]
    assert sampled.top[0][1] == pytest.approx(float(expected[0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_drawn_from_what_is_no_number(bad: float) -> None:
    logits: Tensor = torch.zeros(2, 8)
    logits[0, 5] = bad
    first, second = sample(logits, [make_row(), make_row()])
    assert first is None and second is not None


def test_a_large_vocabulary_with_a_flat_distribution_is_sorted_whole() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {s.token_id for i in range(200) for s in sample(logits, [make_row(i, top_p=0.9)]) if s}
    assert max(tokens) < 901 and len(tokens) > 100
