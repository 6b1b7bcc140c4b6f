"""Shares of devices between tenants, and who makes room: tables for the named cases, properties for the rules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.shares import (
    UNBOUNDED,
    Claim,
    Holding,
    Quota,
    Standing,
    fair_shares,
    goes_before,
    make_room,
    may_have,
    strictness,
)


def standing(tenant: str, held: int = 0, wanted: int = 0, devices: int | None = None, weight: float = 1.0) -> Standing:
    return Standing(tenant, held, wanted, Quota(devices, weight))


@pytest.mark.parametrize(
    ("capacity", "standings", "shares"),
    [
        pytest.param(8, [standing("a", wanted=3)], {"a": 3}, id="who is alone has what it needs"),
        pytest.param(8, [standing("a", wanted=9), standing("b", wanted=9)], {"a": 4, "b": 4}, id="halves"),
        pytest.param(9, [standing("a", wanted=9), standing("b", wanted=9, weight=2)], {"a": 3, "b": 6}, id="by weight"),
        pytest.param(
            8, [standing("a", wanted=8, devices=2), standing("b", wanted=8)], {"a": 2, "b": 6}, id="a quota bounds"
        ),
        pytest.param(0, [standing("a", wanted=1)], {"a": 0}, id="nothing is there"),
    ],
)
def test_shares(capacity: int, standings: list[Standing], shares: dict[str, int]) -> None:
    assert fair_shares(capacity, standings) == shares


def test_a_share_nobody_needs_is_the_others() -> None:
    three = [standing("a", wanted=8), standing("b", wanted=8), standing("c", wanted=1, weight=2)]
    assert fair_shares(8, three) == {"a": 4, "b": 3, "c": 1}


def one_by_one(capacity: int, standings: list[Standing]) -> dict[str, int]:
    """The definition: a device at a time, to the largest weight per device it would then have."""
    shares = {each.tenant: 0 for each in standings}
    for _ in range(capacity):
        hungry = [each for each in standings if shares[each.tenant] < each.bound]
        if not hungry:
            break
        best = min(hungry, key=lambda each: (-each.quota.weight / (shares[each.tenant] + 1), each.tenant))
        shares[best.tenant] += 1
    return shares


tenants = st.lists(
    st.builds(
        standing,
        st.sampled_from("abcdefg"),
        held=st.integers(0, 12),
        wanted=st.integers(0, 20),
        devices=st.none() | st.integers(0, 20),
        weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.tenant,
)


@given(st.integers(0, 60), tenants)
def test_shares_are_those_of_one_device_at_a_time(capacity: int, standings: list[Standing]) -> None:
    shares = fair_shares(capacity, standings)
    assert shares == one_by_one(capacity, standings)
    assert sum(shares.values()) == min(capacity, sum(each.bound for each in standings))


@given(st.integers(0, 40), tenants)
def test_nobody_may_take_more_than_its_quota_or_together_more_than_there_is(
    capacity: int, standings: list[Standing]
) -> None:
    for each in standings:
        more = may_have(each.tenant, standings, capacity)
        if each.quota.devices is not None and more:
            assert each.held + more <= each.quota.devices
    gain = sum(max(each.held, fair_shares(capacity, standings)[each.tenant]) for each in standings)
    assert sum(each.held + may_have(each.tenant, standings, capacity) for each in standings) == gain


def test_only_the_quota_bounds_while_nobody_lacks_devices() -> None:
    both = [standing("a", held=3, wanted=1, devices=4), standing("b", held=1, wanted=9)]
    assert (may_have("a", both, None), may_have("b", both, None), may_have("new", both, None)) == (
        1, UNBOUNDED - 1, UNBOUNDED,
    )  # fmt: skip


def test_who_is_above_its_share_is_judged_more_strictly_while_another_lacks_devices() -> None:
    short = [standing("a", held=6, wanted=8), standing("b", held=2, wanted=8)]
    assert strictness("a", short, 8) == pytest.approx(4 / 6)
    assert strictness("b", short, 8) == 1.0
    assert strictness("a", short, None) == 1.0
    content = [standing("a", held=6, wanted=8), standing("b", held=2, wanted=2)]
    assert strictness("a", content, 8) == 1.0


# --- making room ---------------------------------------------------------------------------------------------------


def holding(name: str, tenant: str = "a", function: str = "", **more: object) -> Holding:
    values: dict[str, object] = {"slot_id": "s", "devices": 1, **more}
    return Holding(name, (tenant, function or f"fn-{name}"), **values)  # type: ignore[arg-type]


def taken(claim: Claim, holdings: list[Holding], standings: list[Standing], **more: bool) -> list[str] | None:
    room = make_room(claim, holdings, standings, sum(each.devices for each in holdings), **more)
    return None if room is None else [each.replica_id for each in room.victims]


ONE = [standing("a", held=3, wanted=4)]


def test_lower_priority_makes_room_first_and_then_what_loses_least() -> None:
    claim = Claim(("a", "new"), 1, priority=5)
    held = [
        holding("r1", priority=4, in_flight=0),
        holding("r2", priority=1, in_flight=3, lost_s=9.0),
        holding("r3", priority=1, in_flight=3, lost_s=2.0),
    ]
    assert taken(claim, held, ONE) == ["r3"]


def test_an_equal_makes_room_only_where_it_is_idle_and_somebody_waits() -> None:
    busy, idle, kept = holding("r1", in_flight=1), holding("r2"), holding("r3", kept=True)
    assert taken(Claim(("a", "new"), 1), [busy, kept], ONE) is None
    assert taken(Claim(("a", "new"), 1), [busy, idle, kept], ONE) == ["r2"]
    assert taken(Claim(("a", "new"), 1, waiting=False), [busy, idle], ONE) is None


def test_what_is_starting_or_of_the_same_function_or_of_higher_priority_is_never_taken() -> None:
    claim = Claim(("a", "new"), 1, priority=1)
    held = [holding("r1", ready=False), holding("r2", function="new"), holding("r3", priority=2)]
    assert taken(claim, held, ONE) is None


def test_a_tenant_above_its_share_makes_room_for_one_below() -> None:
    short = [standing("a", held=4, wanted=4), standing("b", held=0, wanted=2)]
    held = [holding(f"r{n}", in_flight=1, lost_s=n) for n in range(4)]
    claim = Claim(("b", "new"), 1)
    room = make_room(claim, held, short, 4)
    assert room is not None and [each.replica_id for each in room.victims] == ["r0"]
    assert room.reason == ("new lacks 1 of the devices: a holds 4 of its share of 2; tenant b 0 of its share of 2")
    even = [standing("a", held=4, wanted=8), standing("b", held=4, wanted=8)]
    assert make_room(claim, held, even, 8) is None


def test_all_the_devices_of_a_replica_come_from_one_slot() -> None:
    claim = Claim(("a", "new"), 2, priority=1)
    held = [holding("r1", slot_id="s1"), holding("r2", slot_id="s2"), holding("r3", slot_id="s2", in_flight=9)]
    assert taken(claim, held, ONE) == ["r2", "r3"]


def test_a_used_up_quota_is_made_room_in_by_the_tenant_itself_wherever_its_replicas_are() -> None:
    both = [standing("a", held=2, wanted=3, devices=2), standing("b", held=9, wanted=1)]
    held = [holding("r1", slot_id="s1"), holding("r2", slot_id="s2"), holding("r3", tenant="b")]
    assert taken(Claim(("a", "new"), 2), held, both, of_quota=True) == ["r1", "r2"]


holdings = st.lists(
    st.builds(
        Holding,
        st.uuids().map(str),
        st.tuples(st.sampled_from("abc"), st.sampled_from(["f", "g", "h"])),
        st.sampled_from(["s1", "s2"]),
        st.integers(1, 3),
        priority=st.integers(-1, 2),
        ready=st.booleans(),
        in_flight=st.integers(0, 2),
        kept=st.booleans(),
        lost_s=st.floats(0, 10),
    ),
    max_size=10,
    unique_by=lambda each: each.replica_id,
)
claims = st.builds(
    Claim,
    st.tuples(st.sampled_from("abc"), st.sampled_from(["f", "g", "h"])),
    st.integers(1, 3),
    st.integers(-1, 2),
    st.booleans(),
)
wants = st.fixed_dictionaries({tenant: st.integers(0, 12) for tenant in "abc"})


def standings_of(holdings: list[Holding], wanted: dict[str, int]) -> list[Standing]:
    held = {tenant: sum(each.devices for each in holdings if each.tenant == tenant) for tenant in "abc"}
    return [Standing(tenant, held[tenant], wanted[tenant]) for tenant in "abc"]


@given(claims, holdings, wants, st.booleans())
def test_room_is_enough_and_no_more_and_takes_nobody_below_its_share(
    claim: Claim, held: list[Holding], wanted: dict[str, int], of_quota: bool
) -> None:
    standings = standings_of(held, wanted)
    capacity = sum(each.devices for each in held)
    room = make_room(claim, held, standings, capacity, of_quota=of_quota)
    if room is None:
        return
    shares = fair_shares(capacity, standings)
    freed = sum(each.devices for each in room.victims)
    assert freed >= claim.devices
    assert all(freed - each.devices < claim.devices for each in room.victims), "one of them need not have gone"
    assert of_quota or len({each.slot_id for each in room.victims}) == 1
    for victim in room.victims:
        assert victim.ready and victim.key != claim.key
        if victim.tenant == claim.tenant:
            assert victim.priority < claim.priority or (victim.idle and claim.waiting)
            assert victim.priority <= claim.priority
        else:
            assert not of_quota
    for each in standings:
        gone = sum(victim.devices for victim in room.victims if victim.tenant == each.tenant)
        if each.tenant != claim.tenant and gone:
            assert each.held - gone >= shares[each.tenant]


@given(claims, holdings, wants)
def test_what_was_taken_is_not_taken_back(claim: Claim, held: list[Holding], wanted: dict[str, int]) -> None:
    """A victim that claims its devices again gets none of what they made room for, unless it is now idle."""
    standings, capacity = standings_of(held, wanted), sum(each.devices for each in held)
    room = make_room(claim, held, standings, capacity)
    if room is None:
        return
    started = Holding("new", claim.key, "s1", claim.devices, claim.priority, in_flight=1)
    rest = [each for each in held if each not in room.victims]
    for victim in room.victims:
        after = [dataclasses.replace(started, slot_id=victim.slot_id), *rest]
        again = Claim(victim.key, victim.devices, victim.priority)
        back = make_room(again, after, standings_of(after, wanted), capacity)
        assert back is None or "new" not in [each.replica_id for each in back.victims]


def test_who_lacks_of_its_share_goes_before_who_does_not_and_priority_decides_within_a_tenant() -> None:
    short = [standing("a", held=4, wanted=5), standing("b", held=0, wanted=2)]
    a, b = Claim(("a", "f"), 1, priority=9), Claim(("b", "g"), 1)
    assert goes_before(b, a, short, 4) and not goes_before(a, b, short, 4)
    low = Claim(("a", "g"), 1, priority=1)
    assert goes_before(a, low, short, 4) and not goes_before(low, a, short, 4)
