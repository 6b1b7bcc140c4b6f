"""Who is found to wait for a start from zero."""

from __future__ import annotations

import pytest

from autoscaler.cold_waiters import NEWEST, ColdWaiters


def start(waiters: ColdWaiters, before: int, waiting: int) -> int:
    """A start from zero that `waiting` wait for, one after another; arrivals so far."""
    for count in range(1, waiting + 1):
        waiters.note(0, count, before + count)
    waiters.note(1, waiting, before + waiting)
    return before + waiting


def test_one_is_expected_until_more_were_found() -> None:
    waiters = ColdWaiters()
    assert waiters.mean == 1.0
    start(waiters, 0, 6)
    assert waiters.mean == pytest.approx(1.0 + NEWEST * 5)


def test_the_mean_follows_what_starts_find() -> None:
    waiters, arrivals = ColdWaiters(), 0
    for _ in range(40):
        arrivals = start(waiters, arrivals, 4)
        waiters.note(0, 0, arrivals)  # at zero again
    assert waiters.mean == pytest.approx(4.0, abs=0.01)


def test_who_meets_a_ready_replica_waits_for_no_start() -> None:
    waiters = ColdWaiters()
    for arrivals in range(100):
        waiters.note(1, arrivals % 7, arrivals)
    assert waiters.mean == 1.0


def test_arrivals_that_fall_are_counted_anew() -> None:
    """A gateway went, and with it what it had counted."""
    waiters = ColdWaiters()
    waiters.note(0, 2, 1000)
    waiters.note(0, 2, 10)
    waiters.note(1, 3, 11)
    assert waiters.mean == pytest.approx(1.0 + NEWEST * 2)
