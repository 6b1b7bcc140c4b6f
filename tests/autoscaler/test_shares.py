"""Shares of devices between tenants, and who makes room: tables for the named cases, properties for the rules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.homes import Resident
from autoscaler.room import choose_victims
from autoscaler.shares import (
    Claim,
    Holding,
    Quota,
    Rule,
    Standing,
    fair_shares,
    goes_before,
    make_room,
)
from autoscaler.work import Work


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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), tenants)
def test_shares_are_those_of_one_device_at_a_time(capacity: int, standings: list[Standing]) -> None:
    shares = fair_shares(capacity, standings)
    assert shares == one_by_one(capacity, standings)
    assert sum(shares.values()) == min(capacity, sum(each.bound for each in standings))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), tenants)
def test_nobody_may_hold_more_than_its_quota_nor_than_its_share_while_another_has_fewer(
    capacity: int, standings: list[Standing]
) -> None:
    rule, shares = Rule(tuple(standings), capacity), fair_shares(capacity, standings)
    for each in standings:
        most = rule.most(each.tenant, each.quota.devices)
        if any(other.held < shares[other.tenant] for other in standings if other is not each):
            assert most == shares[each.tenant]
            assert (rule.strictness(each.tenant) < 1.0) == (each.held > shares[each.tenant])
        else:
            assert (most, rule.strictness(each.tenant)) == (each.quota.devices, 1.0)


def test_who_is_above_its_share_is_judged_more_strictly_while_another_lacks_devices() -> None:
    short = Rule((standing("a", held=6, wanted=8), standing("b", held=2, wanted=8)), 8)
    assert short.strictness("a") == pytest.approx(4 / 6)
    assert short.strictness("b") == 1.0
    content = Rule((standing("a", held=6, wanted=8), standing("b", held=2, wanted=2)), 8)
    assert content.strictness("a") == 1.0


# --- making room -----------------------------------------------------------------------------------------------------


def resident(name: str, tenant: str = "a", function: str = "", **more: object) -> Resident:
    return Resident(name, function or f"fn-{name}", tenant, **more)  # type: ignore[arg-type]


def work(tenant: str = "a", **more: object) -> Work:
    return Work("new", tenant, **{"waiting": 1, **more})  # type: ignore[arg-type]


ALONE = Rule((standing("a", held=3, wanted=4),), 3)
SHORT = Rule((standing("a", held=4, wanted=4), standing("b", held=0, wanted=2)), 4)


@pytest.mark.parametrize(
    ("held", "asks", "goes"),
    [
        pytest.param(resident("r", priority=-1, in_flight=9), work(waiting=0), True, id="a lower priority"),
        pytest.param(resident("r", priority=1), work(), False, id="a higher one never"),
        pytest.param(resident("r"), work(), True, id="an idle equal, for somebody who waits"),
        pytest.param(resident("r"), work(waiting=0), False, id="an equal not for a forecast"),
        pytest.param(resident("r", in_flight=1), work(), False, id="an equal that works"),
        pytest.param(resident("r", loss_s=40.0), work(), False, id="an equal that costs more than it gives"),
        pytest.param(resident("r", priority=-1, loss_s=math.inf), work(), False, id="what its function must have"),
        pytest.param(resident("r", priority=-1, starting=True), work(), False, id="what starts never"),
        pytest.param(resident("r", function="new", priority=-1), work(), False, id="the same function never"),
    ],
)
def test_within_a_tenant(held: Resident, asks: Work, goes: bool) -> None:
    assert ALONE.may_end(held, asks) is goes


def test_a_tenant_above_its_share_makes_room_for_one_below_whatever_the_priorities() -> None:
    busy = resident("r", priority=5, in_flight=3)
    assert SHORT.may_end(busy, work("b"))
    assert not SHORT.may_end(busy, work("b", devices=3)), "it would be above its own share"
    assert not SHORT.may_end(resident("r", "b"), work("a", priority=9))
    even = Rule((standing("a", held=4, wanted=8), standing("b", held=4, wanted=8)), 8)
    assert not even.may_end(busy, work("b", priority=9))


def test_several_at_once_take_nobody_below_its_share() -> None:
    assert SHORT.allows({"a": 2}, "b")
    assert not SHORT.allows({"a": 3}, "b")
    assert SHORT.allows({"a": 3}, "a")


def holding(name: str, **more: object) -> Holding:
    return Holding(name, ("a", f"fn-{name}"), **{"devices": 1, **more})  # type: ignore[arg-type]


def chosen(claim: Claim, held: list[Holding], needed: int = 1) -> list[str]:
    return [each.replica_id for each in make_room(claim, held, needed)]


def test_lower_priority_makes_room_first_and_then_what_loses_least() -> None:
    held = [
        holding("r1", priority=4),
        holding("r2", priority=1, in_flight=3, lost_s=9.0),
        holding("r3", priority=1, in_flight=3, lost_s=2.0),
    ]
    assert chosen(Claim(("a", "new"), 1, priority=5), held) == ["r3"]
    assert chosen(Claim(("b", "new"), 1, priority=5), held) == []


def test_no_more_goes_than_has_to() -> None:
    held = [holding("r1", lost_s=1.0), holding("r2", lost_s=2.0, devices=4), holding("r3", lost_s=3.0)]
    assert chosen(Claim(("a", "new"), 4), held, 4) == ["r2"]


holdings = st.lists(
    st.builds(
        Holding,
        st.uuids().map(str),
        st.tuples(st.sampled_from("ab"), st.sampled_from(["f", "g", "h"])),
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
    st.tuples(st.sampled_from("ab"), st.sampled_from(["f", "g", "h"])),
    st.integers(1, 3),
    st.integers(-1, 2),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(claims, holdings, st.integers(1, 5))
def test_room_within_an_allowance_is_enough_and_no_more_and_is_not_taken_back(
    claim: Claim, held: list[Holding], needed: int
) -> None:
    victims = make_room(claim, held, needed)
    if not victims:
        return
    freed = sum(each.devices for each in victims)
    assert freed >= needed
    assert all(freed - each.devices < needed for each in victims), "one of them need not have gone"
    started = Holding("new", claim.key, claim.devices, claim.priority, in_flight=1)
    for victim in victims:
        assert victim.ready and victim.key[0] == claim.tenant and victim.key != claim.key
        again = Claim(victim.key, victim.devices, victim.priority)
        rest = [started, *(each for each in held if each not in victims)]
        assert "new" not in [each.replica_id for each in make_room(again, rest, victim.devices)]


residents = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        st.sampled_from(["f", "g", "h"]),
        st.sampled_from("abc"),
        priority=st.integers(-1, 2),
        in_flight=st.integers(0, 2),
        loss_s=st.floats(0, 10),
        starting=st.booleans(),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda each: each.replica_id,
)
works = st.builds(
    Work,
    st.sampled_from(["f", "g", "h"]),
    st.sampled_from("abc"),
    waiting=st.integers(0, 1),
    priority=st.integers(-1, 2),
)
wants = st.fixed_dictionaries({tenant: st.integers(0, 12) for tenant in "abc"})


def rule_of(there: list[Resident], wanted: dict[str, int]) -> Rule:
    held = {tenant: sum(each.tenant == tenant for each in there) for tenant in "abc"}
    return Rule(tuple(Standing(tenant, held[tenant], wanted[tenant]) for tenant in "abc"), len(there))


@settings(max_examples=60, deadline=None)
@given(works, residents, wants)
def test_what_placement_takes_by_the_rule_is_nobodys_share_and_is_not_taken_back(
    asks: Work, there: list[Resident], wanted: dict[str, int]
) -> None:
    rule = rule_of(there, wanted)
    victims = choose_victims(there, 1, asks, rule.may_end)
    if not victims:
        return
    (victim,) = victims
    if victim.tenant != asks.tenant:
        assert rule.held[victim.tenant] - 1 >= rule.shares[victim.tenant]
        assert rule.held[asks.tenant] + 1 <= rule.shares[asks.tenant]
    new = Resident("new", asks.function, asks.tenant, asks.priority, in_flight=1)
    after = [new, *(each for each in there if each is not victim)]
    again = Work(victim.function, victim.tenant, waiting=1, priority=victim.priority)
    assert not rule_of(after, wanted).may_end(new, again)


def test_who_lacks_of_its_share_goes_before_who_does_not_and_priority_decides_within_a_tenant() -> None:
    a, b = Claim(("a", "f"), 1, priority=9), Claim(("b", "g"), 1)
    assert goes_before(b, a, SHORT) and not goes_before(a, b, SHORT)
    low = Claim(("a", "g"), 1, priority=1)
    assert goes_before(a, low, SHORT) and not goes_before(low, a, SHORT)
