"""Threads share products: the same numbers whichever thread is when, and errors come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from function_runtime.engine import crew as crews
from function_runtime.engine import openblas
from function_runtime.engine.crew import Crew
from tests.function_runtime.engine.support import Checkpoint, make_work, run_one, stored_kv


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest products are shared."""
    monkeypatch.setattr(crews, "_PART_PRODUCTS", 16)


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1, 7, 3), (1, 64, 512), (5, 33, 100), (40, 64, 48)])
def test_a_shared_product_is_the_product(threads: int, shape: tuple[int, int, int]) -> None:
    count, inputs, outputs = shape
    chance = np.random.default_rng(0)
    rows = chance.standard_normal((count, inputs)).astype(np.float32)
    matrix = chance.standard_normal((inputs, outputs)).astype(np.float32)
    crew = Crew(threads)
    results = []
    for _ in range(3):
        out = np.full((count, outputs), np.nan, dtype=np.float32)
        crew.multiply(rows, matrix, out)
        results.append(out)
    np.testing.assert_allclose(results[0], rows @ matrix, rtol=1e-4, atol=1e-4)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.usefixtures("splitting")
def test_an_error_of_any_thread_comes_back_and_the_crew_goes_on() -> None:
    crew = Crew(2)
    matrix, out = np.ones((4, 64), np.float32), np.empty((2, 64), np.float32)
    crew._parts.put((np.ones((2, 9), np.float32), matrix, out))
    error = crew._done.get()
    assert isinstance(error, ValueError)
    crew.multiply(np.ones((2, 4), np.float32), matrix, out)
    assert (out == 4.0).all()


@pytest.mark.usefixtures("splitting")
def test_requests_resume_exactly_with_several_threads(llama2: Checkpoint) -> None:
    options: dict[str, Any] = {"threads": 2, "step_tokens": 20, "prefix_cache": False}
    prompt = llama2.prompt(45)
    sampling = {"max_tokens": 30, "ignore_eos": True, "n": 2, "temperature": 0.8, "logprobs": 2}
    first = run_one(llama2.engine(**options), make_work(prompt, **sampling))
    for cut in (2, 17, 40):
        log = first.events[:cut]
        work = make_work(prompt, epoch=2, produced=log, prefill_ends=first.prefill_ends, **sampling)
        for restored in (None, stored_kv(first, 45, log, 2)):
            assert log + run_one(llama2.engine(**options), work, restored).events == first.events


def test_without_openblas_torch_multiplies(llama2: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(llama2.prompt(45), max_tokens=20, ignore_eos=True)
    expected = run_one(llama2.engine(), work)
    monkeypatch.setattr(openblas, "is_faster", lambda: False)
    assert run_one(llama2.engine(), work).tokens() == expected.tokens()
