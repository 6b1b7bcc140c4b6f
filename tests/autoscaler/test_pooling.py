"""What pools should hold, how likely a checkpoint is to be wanted, and how many workers wait."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.pooling import (
    GAPS_NEEDED,
    Pool,
    Use,
    Want,
    chance_of_use,
    chances,
    starts_by_slot,
    to_load,
    workers,
)

GB = 10**9
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


def test_a_forecast_only_raises_a_chance() -> None:
    sure = Use("a", 61, EVERY_MINUTE, False, expected=3.0)
    assert chance_of_use(sure) == pytest.approx(1 - math.exp(-3))
    assert chance_of_use(Use("a", 30, EVERY_MINUTE, False, expected=0.1)) == 20 / 21
    assert chance_of_use(Use("a", 30, (), False, expected=0.5)) == pytest.approx(1 - math.exp(-0.5))


# --- what pools hold ---


def pool(slot_id: str = "s", used: int = 0, **fields: Any) -> Pool:
    return Pool(slot_id, 100 * GB, used * GB, **fields)


def want(identity: str, chance: float = 0.9, gb: int = 10, load_s: float = 20.0, **fields: Any) -> Want:
    return Want(identity, chance, gb * GB, load_s, **fields)


def test_what_saves_most_per_byte_is_loaded_first_and_what_is_unlikely_not_at_all() -> None:
    wants = [want("large", gb=80, load_s=100.0), want("small", gb=5), want("unlikely", 0.4), want("held")]
    loads = to_load(wants, [pool(used=10, held={"held": 10 * GB})])
    assert [load.identity for load in loads] == ["small"], "the large one has no room beside it"
    loads = to_load(wants, [pool(used=10, held={"held": 10 * GB}), pool("t")])
    assert [(load.identity, load.slot_id) for load in loads] == [("small", "t"), ("large", "t")]


def test_a_full_pool_lets_go_only_what_is_clearly_worth_less_and_nobody_uses() -> None:
    held = {"cold": 30 * GB, "warm": 30 * GB, "used": 30 * GB}
    full = pool(used=90, held=held, pinned=frozenset({"used"}))
    wants = [want("new", 0.9, 20), want("warm", 0.8, 30), want("cold", 0.01, 30)]
    loads = to_load(wants, [full])
    assert [(load.identity, load.instead_of) for load in loads] == [("new", ("cold",))]
    close = [want("new", 0.9, 30), want("warm", 0.8, 30), want("cold", 0.6, 30)]
    assert to_load(close, [full]) == ()


def test_second_copies_come_after_first_ones_and_save_what_a_peer_leaves() -> None:
    wants = [want("busy", 1.0, 10, 20.0, peer_s=2.0, copies=2), want("other", 0.9, 10, 20.0)]
    loads = to_load(wants, [pool("s", held={"busy": 10 * GB}, used=10), pool("t")])
    assert [load.identity for load in loads] == ["other", "busy"]
    assert loads[1].slot_id == "t" and loads[1].saves_s == pytest.approx(2.0)


def test_loads_go_to_quiet_pools_and_only_so_many_at_once() -> None:
    loads = to_load([want(str(n), gb=1) for n in range(9)], [pool("s", busy=1.0), pool("t")], most=3)
    assert [load.slot_id for load in loads] == ["t", "t", "t"]


@given(
    wants=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60), st.floats(0.1, 100)), max_size=8),
    used=st.lists(st.integers(0, 100), min_size=1, max_size=3),
)
def test_pools_are_never_filled_beyond_their_share(wants: list[tuple[float, int, float]], used: list[int]) -> None:
    pools = [pool(f"s{n}", gb) for n, gb in enumerate(used)]
    loads = to_load([want(str(n), c, gb, s, copies=2) for n, (c, gb, s) in enumerate(wants)], pools)
    assert len({(load.slot_id, load.identity) for load in loads}) == len(loads)
    for each in pools:
        added = sum(wants[int(load.identity)][1] * GB for load in loads if load.slot_id == each.slot_id)
        assert not added or added + each.used_bytes <= 0.9 * each.budget_bytes


# --- warm workers ---


def test_workers_wait_where_they_save_more_than_they_hold() -> None:
    assert workers(0.5, 3.0, 1.5, 30.0, 0.05) == 7
    assert workers(0.0, 3.0, 1.5, 30.0, 0.02) == 0
    assert workers(0.0, 3.0, 1.5, 30.0, 0.02, least=1) == 1
    assert workers(0.001, 3.0, 1.5, 30.0, 0.02) == 1


def test_starts_are_expected_where_the_weights_are() -> None:
    pools = [pool("s", held={"a": GB}), pool("t")]
    assert starts_by_slot({"a": 0.4, "b": 0.2}, pools) == {"s": 0.5, "t": 0.1}
