"""How likely a checkpoint is to be wanted, and which are loaded ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.preload import GAPS_NEEDED, HORIZON_S, Use, chance_of_use, chances, to_preload

EVERY_MINUTE = tuple([60.0] * 20)


def use(idle_s: float, gaps_s: tuple[float, ...] = EVERY_MINUTE, identity: str = "a", in_use: bool = False) -> Use:
    return Use(identity, idle_s, gaps_s, in_use)


def test_what_is_used_is_certain_and_what_is_hardly_known_is_not_said() -> None:
    assert chance_of_use(use(0, (), in_use=True)) == 1.0
    assert chance_of_use(use(5, EVERY_MINUTE[: GAPS_NEEDED - 1])) is None


def test_a_habit_makes_it_likely_until_it_has_been_broken() -> None:
    assert chance_of_use(use(30)) == 20 / 21
    assert chance_of_use(use(61)) == 0.0


def test_only_gaps_that_are_not_over_count() -> None:
    gaps = tuple([1.0] * 10 + [300.0] * 9)
    assert chance_of_use(use(10, gaps), horizon_s=100) == 0.0
    assert chance_of_use(use(250, gaps), horizon_s=100) == 9 / 10


@given(
    gaps=st.lists(st.floats(0.1, 1e5), min_size=GAPS_NEEDED, max_size=64),
    idle_s=st.floats(0, 1e5),
    horizon_s=st.floats(1, 1e4),
)
def test_a_chance_is_one_and_grows_with_the_horizon(gaps: list[float], idle_s: float, horizon_s: float) -> None:
    near = chance_of_use(use(idle_s, tuple(gaps)), horizon_s)
    far = chance_of_use(use(idle_s, tuple(gaps)), 2 * horizon_s)
    assert near is not None and far is not None and 0.0 <= near <= far < 1.0


def test_functions_of_one_checkpoint_want_it_together() -> None:
    alone = chance_of_use(use(250, tuple([1.0] * 10 + [300.0] * 9)), 100)
    assert alone is not None
    both = chances([use(250, tuple([1.0] * 10 + [300.0] * 9))] * 2, 100)
    assert abs(both["a"] - (1 - (1 - alone) ** 2)) < 1e-12
    assert chances([use(0, (), "b")]) == {}


def test_the_likely_that_no_pool_holds_are_loaded_the_likeliest_first() -> None:
    likely = {"a": 0.6, "b": 0.9, "c": 0.4, "d": 1.0}
    assert to_preload(likely, frozenset({"d"})) == ["b", "a"]
    assert HORIZON_S > 0
