"""The memory of a device that several functions share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.device_sharing import Sharer, divide, fits

GB = 10**9


def test_memory_is_divided_by_need_above_the_least() -> None:
    grants = divide(100 * GB, [Sharer("a", 20 * GB, 2 * GB, 12 * GB), Sharer("b", 40 * GB, 8 * GB, 100 * GB)], 0.0)
    assert grants is not None
    assert [round(each.kv_bytes / GB, 1) for each in grants] == [4.9, 35.1]


def test_what_nobody_needs_stays_free_for_who_comes_next() -> None:
    grants = divide(100 * GB, [Sharer("a", 20 * GB, 2 * GB, 12 * GB)], 0.0)
    assert grants is not None and grants[0].kv_bytes == 12 * GB


def test_a_priority_counts_for_more() -> None:
    pair = [Sharer("a", 0, 0, 80 * GB, weight=3.0), Sharer("b", 0, 0, 80 * GB)]
    grants = divide(80 * GB, pair, 0.0)
    assert grants is not None
    assert [round(each.kv_bytes / GB) for each in grants] == [60, 20]


def test_weights_and_least_kv_that_do_not_fit_are_refused() -> None:
    pair = [Sharer("a", 50 * GB, GB, GB), Sharer("b", 48 * GB, 2 * GB, 9 * GB)]
    assert divide(100 * GB, pair, 0.0) is None
    assert not fits(100 * GB, pair, 0.0) and fits(101 * GB, pair, 0.0)


sharers = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 200), st.floats(0.1, 10)), min_size=1, max_size=6
)


@given(sharers, st.integers(1, 400))
def test_nobody_gets_less_than_its_least_or_more_than_it_needs_and_nothing_is_promised_twice(
    drawn: list[tuple[int, int, int, float]], total: int
) -> None:
    group = [Sharer(str(n), f * GB, least * GB, want * GB, w) for n, (f, least, want, w) in enumerate(drawn)]
    grants = divide(total * GB, group)
    if grants is None:
        assert not fits(total * GB, group)
        return
    held = sum(each.fixed_bytes for each in group) + sum(each.kv_bytes for each in grants)
    budget = int(total * GB * 0.95)
    assert held <= budget
    for sharer, grant in zip(group, grants, strict=True):
        assert sharer.least_bytes <= grant.kv_bytes <= max(sharer.wanted_bytes, sharer.least_bytes)
    wanting = [s for s, g in zip(group, grants, strict=True) if g.kv_bytes < s.wanted_bytes - 100]
    if wanting:
        assert budget - held < 1000, "somebody needs more, so everything is given away"


@given(sharers, st.integers(50, 400))
def test_who_leaves_takes_nothing_from_those_who_stay(drawn: list[tuple[int, int, int, float]], total: int) -> None:
    group = [Sharer(str(n), f * GB, least * GB, want * GB, w) for n, (f, least, want, w) in enumerate(drawn)]
    before, after = divide(total * GB, group), divide(total * GB, group[1:])
    if before is None or after is None:
        return
    for was, now in zip(before[1:], after, strict=True):
        assert now.kv_bytes >= was.kv_bytes - 1000
