"""Retries, their budget, deadlines and the breaker, on a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from model_loader.errors import MissingObject, StoreRefused, StoreUnavailable
from model_loader.objects.resilience import BreakerState, Deadline, Guard, Limits
from model_loader.objects.stats import StoreStats

LIMITS = Limits(
    attempts=4, first_pause_s=0.1, longest_pause_s=1.0, budget=10, budget_per_success=0.1,
    failures_to_open=5, cool_down_s=2.0, longest_cool_down_s=10.0,
)  # fmt: skip


class World:
    """A clock, and a guard that sleeps by it."""

    def __init__(self, limits: Limits = LIMITS, chance: Callable[[], float] = lambda: 0.0) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []
        self.stats = StoreStats()
        self.guard = Guard(self.stats, limits, clock=lambda: self.now_s, pause=self._pause, chance=chance)

    def _pause(self, deadline: Deadline, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def run(self, *answers: object, within_s: float = 60.0, takes_s: float = 0.0) -> object:
        """What the guard makes of a request that answers so, one after the other."""
        script = iter(answers)

        def request() -> object:
            self.now_s += takes_s
            answer = next(script)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return self.guard.run("get", self.guard.deadline(within_s), request)

    def fails(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(StoreUnavailable):
                self.run(down(), within_s=0.00001, takes_s=2.0)

    @property
    def state(self) -> BreakerState:
        return self.guard.breaker.state


def down(said: str = "503") -> StoreUnavailable:
    return StoreUnavailable(said)


def test_what_fails_is_tried_again_until_it_works() -> None:
    world = World()
    assert world.run(down(), down(), "done") == "done"
    use = world.stats.snapshot().kinds["get"]
    assert (use.requests, use.retries, use.failures) == (3, 2, 2)


def test_the_last_failure_is_told_when_tries_are_used_up() -> None:
    world = World()
    with pytest.raises(StoreUnavailable, match="four"):
        world.run(down("one"), down("two"), down("three"), down("four"), "never asked")


@pytest.mark.parametrize("answer", [MissingObject("no"), StoreRefused("not allowed")])
def test_answers_are_not_tried_again_and_not_held_against_the_store(answer: Exception) -> None:
    world = World()
    for _ in range(20):
        with pytest.raises(type(answer)):
            world.run(answer, "never asked")
    assert world.state is BreakerState.CLOSED
    assert world.stats.snapshot().failures == 0


def test_pauses_have_full_jitter_and_grow_to_a_bound() -> None:
    def pauses(chance: float) -> list[float]:
        world = World(Limits(attempts=6, first_pause_s=0.1, longest_pause_s=0.5, failures_to_open=99), lambda: chance)
        world.run(*[down()] * 5, "done")
        return world.pauses

    assert pauses(1.0) == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    assert pauses(0.5) == pytest.approx([0.05, 0.1, 0.2, 0.25, 0.25])
    assert pauses(0.0) == [0.0] * 5


def test_retries_of_all_operations_share_a_budget_that_successes_fill() -> None:
    world = World(Limits(attempts=2, budget=3, budget_per_success=0.5, failures_to_open=99))

    def fails_first() -> int:
        """How many requests an operation makes whose first one fails."""
        before = world.stats.snapshot().requests
        try:
            world.run(down(), "done")
        except StoreUnavailable:
            return world.stats.snapshot().requests - before
        return world.stats.snapshot().requests - before

    # Each success pays half of the next retry back: 3, 2.5, 2, 1.5, 1, then there is less than one left.
    assert [fails_first() for _ in range(6)] == [2, 2, 2, 2, 2, 1]
    world.run("done")
    assert fails_first() == 2


def test_nothing_is_tried_beyond_the_deadline() -> None:
    world = World(chance=lambda: 1.0)
    with pytest.raises(StoreUnavailable, match="one"):
        world.run(down("one"), "too late", within_s=0.05)
    assert world.now_s == 1000.0, "a pause that reaches the deadline is not even begun"
    with pytest.raises(StoreUnavailable, match="deadline"):
        world.run("never asked", within_s=0.0)


def test_the_end_of_a_store_ends_what_is_under_way_and_what_comes_after() -> None:
    world = World()
    under_way = world.guard.deadline(30)
    ended: list[str] = []
    under_way.attach(lambda: ended.append("woken"))
    world.guard.close()
    assert under_way.abandoned and ended == ["woken"]
    assert world.guard.deadline(30).passed


def test_an_operation_without_a_deadline_gets_one_by_its_size() -> None:
    world = World(Limits(operation_s=30, slowest_bytes_s=1000))
    assert world.guard.deadline(None).remaining_s() == 30
    assert world.guard.deadline(None, 5000).remaining_s() == 35
    assert world.guard.deadline(2, 5000).remaining_s() == 2


def test_the_breaker_opens_after_failures_in_a_row() -> None:
    world = World()
    world.fails(4)
    world.run("done")
    world.fails(4)
    assert world.state is BreakerState.CLOSED
    world.fails(1)
    assert world.state is BreakerState.OPEN
    with pytest.raises(StoreUnavailable, match=r"left alone for another 2\.0 s, after failures: 503"):
        world.run("not asked")
    use = world.stats.snapshot()
    assert (use.refused_unasked, use.breaker, use.breaker_opened) == (1, "open", 1)


def test_an_open_breaker_lets_one_through_after_its_cool_down_and_closes_if_that_succeeds() -> None:
    world = World()
    world.fails(5)
    world.now_s += 2.0
    era = world.guard.breaker.admit()
    assert world.state is BreakerState.HALF_OPEN
    with pytest.raises(StoreUnavailable, match="until one request"):
        world.run("not asked")
    world.guard.breaker.settle(era, _good())
    assert world.state is BreakerState.CLOSED
    assert world.run("done") == "done"


def test_the_cool_down_grows_while_the_store_stays_away_and_starts_anew_when_it_was_back() -> None:
    world = World()

    def cool_down() -> float:
        """How long the open breaker refuses."""
        waited = 0.0
        while True:
            try:
                era = world.guard.breaker.admit()
            except StoreUnavailable:
                world.now_s += 0.5
                waited += 0.5
                continue
            world.guard.breaker.settle(era, _bad())
            return waited

    world.fails(5)
    assert [cool_down() for _ in range(5)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    world.now_s += 10.0
    world.run("done")
    world.fails(5)
    assert cool_down() == 2.0


def test_a_probe_that_says_nothing_leaves_the_next_one_to_ask() -> None:
    world = World()
    world.fails(5)
    world.now_s += 2.0
    with pytest.raises(KeyboardInterrupt):
        world.guard.run("get", world.guard.deadline(1.0), _interrupted)
    assert world.state is BreakerState.OPEN
    assert world.run("done") == "done"
    assert world.state is BreakerState.CLOSED


def test_what_was_asked_before_the_breaker_opened_has_no_say_after() -> None:
    world = World()
    early = world.guard.breaker.admit()
    world.fails(5)
    world.guard.breaker.settle(early, _good())
    assert world.state is BreakerState.OPEN


def test_a_deadline_too_short_to_judge_by_is_not_held_against_the_store() -> None:
    world = World()
    for _ in range(20):
        with pytest.raises(StoreUnavailable):
            world.run(down(), within_s=0.1, takes_s=0.2)
    assert world.state is BreakerState.CLOSED
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            world.run(down(), within_s=1.5, takes_s=2.0)
    assert world.state is BreakerState.OPEN


def test_a_store_whose_bytes_still_came_at_the_deadline_is_slow_and_not_ill() -> None:
    world = World()

    def moves(silent_s: float) -> None:
        deadline = world.guard.deadline(10.0)

        def request() -> object:
            world.now_s += 10.0 - silent_s
            deadline.moved()
            world.now_s += silent_s
            raise down("did not answer within the deadline")

        with pytest.raises(StoreUnavailable):
            world.guard.run("get", deadline, request)

    for _ in range(20):
        moves(silent_s=0.5)
    assert world.state is BreakerState.CLOSED
    for _ in range(5):
        moves(silent_s=3.0)
    assert world.state is BreakerState.OPEN


def test_an_abandoned_deadline_is_over_and_wakes_who_waits() -> None:
    woken: list[str] = []
    deadline = Deadline(100.0)
    deadline.attach(_append(woken, "attached"))
    gone = _append(woken, "detached")
    deadline.attach(gone)
    deadline.detach(gone)
    deadline.abandon()
    assert deadline.passed and deadline.abandoned and woken == ["attached"]
    deadline.attach(_append(woken, "late"))
    assert woken == ["attached", "late"]
    deadline.wait(50.0)  # returns at once


def test_cool_downs_differ_from_process_to_process() -> None:
    waits: set[float] = set()
    for chance in (0.0, 0.5, 1.0):
        world = World(chance=lambda value=chance: value)
        world.fails(5)
        with pytest.raises(StoreUnavailable, match="left alone") as refused:
            world.run("not asked")
        waits.add(float(str(refused.value).split("another ")[1].split(" s")[0]))
    assert waits == {2.0, 2.2, 2.5}


def _append(to: list[str], word: str) -> Callable[[], None]:
    return lambda: to.append(word)


def _interrupted() -> Iterable[str]:
    raise KeyboardInterrupt


def _good() -> object:
    from model_loader.objects.resilience import Verdict

    return Verdict.GOOD


def _bad() -> object:
    from model_loader.objects.resilience import Verdict

    return Verdict.BAD
