"""Who may have how many devices: quotas, weighted fair shares between tenants, and who makes room when there is none.

A tenant's share is its part of the devices by weighted max-min fairness, bounded by what its load needs and its quota:
what one does not need is the others' to use. Where devices are short, a tenant above its share makes room for one
below; within a tenant the function of lower priority makes room for that of higher, and an idle replica for a request
that waits. Of those that may be taken, the lowest priority goes first and then the replica with which least is lost.
Limits: all devices count alike (one of another kind is as good as any); a replica that is starting is never taken.

Sources: max-min fairness and its filling, Bertsekas and Gallager, Data Networks, 6.5.2; in whole units by the highest
averages of D'Hondt, which gives every tenant its share rounded down before it gives anybody more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Key: TypeAlias = tuple[str, str]
"""(tenant, function)"""

UNBOUNDED: Final = 1 << 30
"""Devices, where nothing bounds them."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant."""

    devices: int | None = None
    """Most it may hold at once; None: no bound of its own."""
    weight: float = 1.0
    """Its part of devices that are short, against the weights of the others."""


NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one tenant, now."""

    tenant: str
    held: int
    """Devices of its replicas, those that are starting too."""
    wanted: int
    """Devices that its observed load needs, with the replicas it keeps in any case. What is idle is not wanted."""
    quota: Quota = NO_QUOTA

    @property
    def bound(self) -> int:
        return self.wanted if self.quota.devices is None else min(self.wanted, self.quota.devices)


def fair_shares(capacity: int, standings: Iterable[Standing]) -> dict[str, int]:
    """Whole devices of each tenant; together `capacity`, or what all of them may use if that is less.

    Worked example: 8 devices, A (weight 1) wants 8, B (weight 1) wants 8, C (weight 2) wants 1: C gets its 1, and of
    the 7 left A gets 4 and B 3 (`test_a_share_nobody_needs_is_the_others`).
    """
    bounds = {standing.tenant: max(standing.bound, 0) for standing in standings}
    weights = {standing.tenant: max(standing.quota.weight, 1e-6) for standing in standings}
    left = min(max(capacity, 0), sum(bounds.values()))
    shares = _filled(left, bounds, weights)
    left -= sum(shares.values())
    # D'Hondt: the next device goes where the weight per device would still be largest.
    hungry = [(-weights[t] / (shares[t] + 1), t) for t in bounds if shares[t] < bounds[t]]
    heapq.heapify(hungry)
    while left > 0 and hungry:
        _, tenant = heapq.heappop(hungry)
        shares[tenant] += 1
        left -= 1
        if shares[tenant] < bounds[tenant]:
            heapq.heappush(hungry, (-weights[tenant] / (shares[tenant] + 1), tenant))
    return shares


def _filled(left: int, bounds: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Every tenant's share in fractions, rounded down: the level at which all that is there has run in."""
    shares = dict.fromkeys(bounds, 0)
    rest, weight = float(left), sum(weights.values())
    for tenant in sorted(bounds, key=lambda t: (bounds[t] / weights[t], t)):
        level = rest / weight if weight > 0 else 0.0
        share = min(float(bounds[tenant]), level * weights[tenant])
        shares[tenant] = math.floor(share - 1e-9) if share < bounds[tenant] else bounds[tenant]
        shares[tenant] = max(shares[tenant], 0)
        rest -= share
        weight -= weights[tenant]
    return shares


def may_have(tenant: str, standings: Sequence[Standing], capacity: int | None) -> int:
    """Devices that a tenant may still take. `capacity`: all there are, where they are short; None: nobody lacks any,
    and only its quota bounds it."""
    standing = next((each for each in standings if each.tenant == tenant), Standing(tenant, 0, 0))
    quota = UNBOUNDED if standing.quota.devices is None else standing.quota.devices
    if capacity is None:
        return max(quota - standing.held, 0)
    return max(min(fair_shares(capacity, standings).get(tenant, 0), quota) - standing.held, 0)


def strictness(tenant: str, standings: Sequence[Standing], capacity: int | None) -> float:
    """By how much the objectives of a tenant's functions are tightened: 1 within its share, and share / held above it
    while another one below its share lacks devices. So that who holds too much is refused first."""
    if capacity is None:
        return 1.0
    shares = fair_shares(capacity, standings)
    lacking = any(each.held < shares[each.tenant] for each in standings if each.tenant != tenant)
    held = next((each.held for each in standings if each.tenant == tenant), 0)
    share = shares.get(tenant, 0)
    return max(share, 0) / held if lacking and held > share else 1.0


# --- making room -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holding:
    """A replica and the devices it holds."""

    replica_id: str
    key: Key
    slot_id: str
    devices: int
    priority: int = 0
    ready: bool = True
    """Only such may be taken: what starts is never useless, and what is draining goes anyway."""
    in_flight: int = 0
    kept: bool = False
    """One of those that its function keeps whatever the load (`min_replicas`)."""
    lost_s: float = 0.0
    """Device-seconds that have to be spent again if it goes: its start, and what its requests had computed."""

    @property
    def tenant(self) -> str:
        return self.key[0]

    @property
    def idle(self) -> bool:
        return self.in_flight == 0 and not self.kept


@dataclass(frozen=True, slots=True)
class Claim:
    """A replica that cannot be started for want of devices."""

    key: Key
    devices: int
    priority: int = 0
    waiting: bool = True
    """Somebody waits for it. A forecast, or the replicas a function keeps, move no equal away."""

    @property
    def tenant(self) -> str:
        return self.key[0]


@dataclass(frozen=True, slots=True)
class Room:
    """What makes room for a claim."""

    victims: tuple[Holding, ...]
    reason: str


def make_room(
    claim: Claim,
    holdings: Sequence[Holding],
    standings: Sequence[Standing],
    capacity: int,
    *,
    of_quota: bool = False,
) -> Room | None:
    """The replicas that go so that `claim` can start; None: none may, it has to wait.

    `of_quota`: there is room, but the tenant's quota is used up: only its own replicas count, wherever they are.
    Never taken: what another tenant needs of its share, anything of higher priority in the same tenant, and nothing
    that would be wanted back by the same rules (`test_what_was_taken_is_not_taken_back`).
    """
    shares = fair_shares(capacity, standings)
    held = {standing.tenant: standing.held for standing in standings}
    below = held.get(claim.tenant, 0) + claim.devices <= shares.get(claim.tenant, 0)
    taken = [each for each in holdings if _may_take(claim, each, below=below and not of_quota)]
    places: dict[str, list[Holding]] = {}
    for holding in sorted(taken, key=lambda each: _worth(each, held, shares)):
        places.setdefault("" if of_quota else holding.slot_id, []).append(holding)
    found: list[tuple[tuple[float, ...], str, tuple[Holding, ...]]] = []
    for place, candidates in places.items():
        victims = _enough(claim, candidates, held, shares)
        if victims:
            loss = (
                float(max(each.priority for each in victims)),
                float(sum(each.in_flight for each in victims)),
                sum(each.lost_s for each in victims),
            )
            found.append((loss, place, victims))
    if not found:
        return None
    _, _, victims = min(found, key=lambda each: (each[0], each[1]))
    return Room(victims, _because(claim, victims, held, shares, of_quota))


def _may_take(claim: Claim, holding: Holding, *, below: bool) -> bool:
    if not holding.ready or holding.key == claim.key:
        return False
    if holding.tenant != claim.tenant:
        return below
    return holding.priority < claim.priority or (claim.waiting and holding.priority == claim.priority and holding.idle)


def _worth(holding: Holding, held: Mapping[str, int], shares: Mapping[str, int]) -> tuple[object, ...]:
    """The least first: low priority, of who is furthest above its share, with little to lose."""
    above = held.get(holding.tenant, 0) / max(shares.get(holding.tenant, 0), 0.5)
    return (holding.priority, holding.in_flight > 0, -above, holding.lost_s, holding.in_flight, holding.replica_id)


def _enough(
    claim: Claim, candidates: Sequence[Holding], held: Mapping[str, int], shares: Mapping[str, int]
) -> tuple[Holding, ...]:
    """The first candidates that free what is claimed, without those that turn out not to be needed."""
    chosen: list[Holding] = []
    left = dict(held)
    freed = 0
    for holding in candidates:
        if holding.tenant != claim.tenant:
            if left[holding.tenant] - holding.devices < shares.get(holding.tenant, 0):
                continue
            left[holding.tenant] -= holding.devices
        chosen.append(holding)
        freed += holding.devices
        if freed >= claim.devices:
            break
    if freed < claim.devices:
        return ()
    for holding in reversed(chosen[:-1]):
        if freed - holding.devices >= claim.devices:
            chosen.remove(holding)
            freed -= holding.devices
    return tuple(chosen)


def _because(
    claim: Claim, victims: Sequence[Holding], held: Mapping[str, int], shares: Mapping[str, int], of_quota: bool
) -> str:
    others = sorted({each.tenant for each in victims} - {claim.tenant})
    if others:
        above = ", ".join(f"{each} holds {held[each]} of its share of {shares.get(each, 0)}" for each in others)
        mine = f"{held.get(claim.tenant, 0)} of its share of {shares.get(claim.tenant, 0)}"
        return f"{claim.key[1]} lacks {claim.devices} of the devices: {above}; tenant {claim.tenant} {mine}"
    what = "the tenant's quota is used up" if of_quota else "no device is free"
    if any(each.priority < claim.priority for each in victims):
        return f"{what}, and {claim.key[1]} has the higher priority ({claim.priority})"
    return f"{what}, requests of {claim.key[1]} wait, and this one is idle"


def goes_before(first: Claim, second: Claim, standings: Sequence[Standing], capacity: int) -> bool:
    """Whether devices that become free are the first claim's before the second's."""
    if first.tenant == second.tenant:
        return (first.priority, first.waiting) > (second.priority, second.waiting)
    shares = fair_shares(capacity, standings)
    held = {standing.tenant: standing.held for standing in standings}
    lacks = [held.get(each.tenant, 0) < shares.get(each.tenant, 0) for each in (first, second)]
    return lacks[0] and not lacks[1]
