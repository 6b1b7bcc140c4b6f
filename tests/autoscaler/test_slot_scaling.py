"""`decide_slots`: out for replicas without room and ahead of expected load, in only for what has long been empty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.slot_scaling import (
    SlotClass,
    SlotDecision,
    SlotDemand,
    SlotPhase,
    SlotReason,
    SlotView,
    decide_slots,
    keep_empty_s,
    slots_for,
)

NODE = SlotClass("node", devices=8, max_slots=8, provision_s=120.0)
NOW_S = 10_000.0


def busy(name: str, used: float = 4.0) -> SlotView:
    return SlotView(name, SlotPhase.READY, 0.0, used)


def empty(name: str, for_s: float, warm_bytes: int = 0) -> SlotView:
    return SlotView(name, SlotPhase.READY, 0.0, 0.0, NOW_S - for_s, warm_bytes)


def coming(name: str) -> SlotView:
    return SlotView(name, SlotPhase.PROVISIONING, NOW_S - 10.0)


def decided(demand: SlotDemand, kind: SlotClass = NODE) -> SlotDecision:
    return decide_slots([kind], {kind.name: demand}, NOW_S)[kind.name]


@pytest.mark.parametrize(
    ("demand", "desired", "reason"),
    [
        pytest.param(SlotDemand((), unplaced=(1,)), 1, SlotReason.NO_ROOM, id="from no slot at all"),
        pytest.param(SlotDemand((busy("a", 8),), (4, 4, 8)), 3, SlotReason.NO_ROOM, id="as many as they fill"),
        pytest.param(SlotDemand((busy("a", 8), coming("b")), (4, 4)), 2, SlotReason.ENOUGH, id="what comes has room"),
        pytest.param(SlotDemand((busy("a", 8),), (8,) * 99), 8, SlotReason.NO_ROOM, id="bounded by max_slots"),
        pytest.param(SlotDemand((busy("a"),), (16,)), 1, SlotReason.ENOUGH, id="what fits no slot asks for none"),
        pytest.param(
            SlotDemand((busy("a"),), expected=((NOW_S, 4), (NOW_S + 300, 20))), 3, SlotReason.EXPECTED, id="ahead"
        ),
        pytest.param(
            SlotDemand((busy("a"),), expected=((NOW_S, 4), (NOW_S + 3600, 20))),
            1,
            SlotReason.ENOUGH,
            id="not too early",
        ),
        pytest.param(SlotDemand((busy("a"), empty("b", 571))), 1, SlotReason.SCALE_IN, id="long empty"),
        pytest.param(SlotDemand((busy("a"), empty("b", 569))), 2, SlotReason.HOLD_EMPTY, id="not yet"),
        pytest.param(
            SlotDemand((busy("a"), empty("b", 9000), coming("c"))), 3, SlotReason.HOLD_PROVISIONING, id="one comes"
        ),
        pytest.param(
            SlotDemand((busy("a"), empty("b", 571)), peaks=((NOW_S - 300, 12),)),
            2,
            SlotReason.HOLD_WINDOW,
            id="lately twelve devices were in use",
        ),
        pytest.param(
            SlotDemand((busy("a"), empty("b", 9000)), expected=((NOW_S, 9.5),)), 2, SlotReason.HOLD_WINDOW, id="soon"
        ),
        pytest.param(
            SlotDemand((busy("a"), empty("b", 9000)), complete=False), 2, SlotReason.HOLD_NO_DATA, id="not in sight"
        ),
        pytest.param(SlotDemand((busy("a"),), (8,), complete=False), 1, SlotReason.HOLD_NO_DATA, id="nobody waits"),
        pytest.param(
            SlotDemand((busy("a"),), (8,), waiting=1, complete=False), 2, SlotReason.NO_ROOM, id="somebody waits"
        ),
        pytest.param(
            SlotDemand((busy("a"), empty("b", 9000)), watched_s=5), 2, SlotReason.HOLD_WINDOW, id="just restarted"
        ),
        pytest.param(SlotDemand((busy("a", math.nan),), (8,)), 1, SlotReason.HOLD_BAD_DATA, id="not a number"),
        pytest.param(SlotDemand((busy("a"),), (8,), seen_s=NOW_S - 60), 1, SlotReason.HOLD_BAD_DATA, id="late"),
    ],
)
def test_decides(demand: SlotDemand, desired: int, reason: SlotReason) -> None:
    decision = decided(demand)
    assert (decision.desired, decision.reason) == (desired, reason), decision


def test_a_minimum_is_got_without_any_demand_and_kept() -> None:
    kind = SlotClass("node", devices=8, min_slots=1, max_slots=4)
    assert decided(SlotDemand(()), kind).desired == 1
    assert decided(SlotDemand((empty("a", 1e6),)), kind).reason is SlotReason.BOUND


def test_the_longest_empty_goes_first_and_the_one_with_the_fuller_pool_last() -> None:
    slots = (busy("a"), empty("young", 600), empty("full", 900, warm_bytes=10**9), empty("bare", 900))
    assert decided(SlotDemand(slots)).victims == ("bare", "full", "young")
    fewer = SlotDemand(slots, peaks=((NOW_S - 10, 24),))
    assert decided(fewer).victims == ("bare",)


def test_an_unusable_slot_is_no_capacity() -> None:
    lost = SlotView("lost", SlotPhase.UNUSABLE, NOW_S - 5, 8.0)
    assert decided(SlotDemand((lost,), unplaced=(8,))).desired == 1


def test_a_slot_is_kept_for_the_break_even_of_getting_it_again() -> None:
    assert keep_empty_s(NODE) == pytest.approx(120 * (8 + 30) / 8)


def test_a_class_of_which_nothing_is_known_holds() -> None:
    assert decide_slots([NODE], {}, NOW_S)["node"].reason is SlotReason.HOLD_NO_DATA


@given(unplaced=st.lists(st.integers(1, 8), max_size=30))
def test_packing_is_no_worse_than_it_is_known_to_be(unplaced: list[int]) -> None:
    fresh = slots_for(unplaced, [], 8)
    assert math.ceil(sum(unplaced) / 8) <= fresh <= max(11 / 9 * math.ceil(sum(unplaced) / 8) * 1.5 + 1, 0)


@given(
    used=st.lists(st.floats(0, 8), max_size=6),
    unplaced=st.lists(st.integers(1, 8), max_size=6),
    empty_for_s=st.lists(st.floats(0, 2000), max_size=4),
    on_the_way=st.integers(0, 2),
    complete=st.booleans(),
)
def test_always_holds(
    used: list[float], unplaced: list[int], empty_for_s: list[float], on_the_way: int, complete: bool
) -> None:
    slots = (
        *(busy(f"b{i}", max(share, 0.1)) for i, share in enumerate(used)),
        *(empty(f"e{i}", seconds) for i, seconds in enumerate(empty_for_s)),
        *(coming(f"c{i}") for i in range(on_the_way)),
    )
    decision = decided(SlotDemand(slots, tuple(unplaced), complete=complete))
    assert decision.desired >= len(used), "what is in use is never given up"
    assert len(decision.victims) == max(len(slots) - decision.desired, 0)
    assert all(victim.startswith("e") for victim in decision.victims)
    if on_the_way or not complete:
        assert not decision.victims
