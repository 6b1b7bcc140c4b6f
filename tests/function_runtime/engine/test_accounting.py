"""Shares of a step's time are integers and lose nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from function_runtime.engine.accounting import attribute, share


@given(st.integers(0, 10**9), st.lists(st.integers(0, 1000), max_size=40))
def test_shares_sum_to_the_whole(total: int, weights: list[int]) -> None:
    parts = share(total, weights)
    assert sum(parts) == (total if sum(weights) else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / max(1, sum(weights))) < 1


def test_a_request_may_prefill_and_decode_in_one_step() -> None:
    assert attribute(100, {"a": 30, "b": 10}, {"a": 10}) == {"a": (60, 20), "b": (20, 0)}
