"""Who may have how many devices: quotas, weighted fair shares between tenants, and who makes room when there is none.

A tenant's share is its part of the devices by weighted max-min fairness, bounded by what its load needs and its quota:
what one does not need is the others' to use. Where devices are short, a tenant above its share makes room for one
below; within a tenant the function of lower priority makes room for that of higher, and an idle replica for a request
that waits. `Rule.may_end` says so to placement, which knows where there is room to be made; `make_room` chooses where
room is not what lacks but the tenant's own allowance. Lowest priority first, then least loss; never what is starting.
Limits: all devices count alike (one of another kind is as good as any).

Sources: max-min fairness and its filling, Bertsekas and Gallager, Data Networks, 6.5.2; in whole units by the highest
averages of D'Hondt, which gives every tenant its share rounded down before it gives anybody more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from autoscaler.homes import Resident
from autoscaler.work import Work

Key: TypeAlias = tuple[str, str]
"""(tenant, function)"""


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


# --- who may have more, and who makes room -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows while `capacity` devices are all there are: who may have more, who is ended for whom."""

    standings: tuple[Standing, ...]
    capacity: int
    shares: Mapping[str, int] = field(init=False)
    held: Mapping[str, int] = field(init=False)
    lacking: frozenset[str] = field(init=False)
    """Tenants that have fewer than their shares."""
    wanted: int = field(init=False)
    """Devices that all of them could use."""

    def __post_init__(self) -> None:
        shares = fair_shares(self.capacity, self.standings)
        lacking = frozenset(each.tenant for each in self.standings if each.held < shares[each.tenant])
        object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "held", {standing.tenant: standing.held for standing in self.standings})
        object.__setattr__(self, "lacking", lacking)
        object.__setattr__(self, "wanted", sum(max(standing.bound, 0) for standing in self.standings))

    def most(self, tenant: str, quota: int | None) -> int | None:
        """Devices that a tenant may hold: no more than its share while another has fewer than its own. Otherwise only
        the quota bounds it (None: nothing does): more devices may be had, and the wish for them is not to be hidden."""
        if not self.lacking - {tenant}:
            return quota
        share = self.shares.get(tenant, 0)
        return share if quota is None else min(share, quota)

    def strictness(self, tenant: str) -> float:
        """By how much the objectives of a tenant's functions are tightened: 1 within its share, and share / held above
        it while another one below its share lacks devices. So that who holds too much is refused first."""
        held, share = self.held.get(tenant, 0), self.shares.get(tenant, 0)
        return max(share, 0) / held if held > share and self.lacking - {tenant} else 1.0

    def may_end(self, resident: Resident, work: Work) -> bool:
        """As `autoscaler.room.MayEnd`; what its function must have whatever the load has an infinite loss. Another
        tenant's replica goes only where that holds more than its share and this one, with what it asks for, no more
        than its own: so what was taken is not taken back."""
        if (
            resident.starting
            or resident.loss_s == math.inf
            or (resident.tenant, resident.function) == (work.tenant, work.function)
        ):
            return False
        if resident.tenant == work.tenant:
            if resident.priority < work.priority:
                return True
            equal = resident.priority == work.priority and resident.idle
            return equal and resident.loss_s < work.waiting * work.room_wait_s
        asked = self.held.get(work.tenant, 0) + work.devices
        return asked <= self.shares.get(work.tenant, 0) and self.allows({resident.tenant: 1}, work.tenant)

    def allows(self, ended: Mapping[str, int], tenant: str) -> bool:
        """Whether all tenants but this one keep their shares when so many devices of theirs are taken together."""
        return all(
            self.held.get(other, 0) - devices >= self.shares.get(other, 0)
            for other, devices in ended.items()
            if other != tenant
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A replica that waits for devices."""

    key: Key
    devices: int
    priority: int = 0
    waiting: bool = True
    """Somebody waits for it. A forecast, or the replicas a function keeps, move no equal away."""

    @property
    def tenant(self) -> str:
        return self.key[0]


@dataclass(frozen=True, slots=True)
class Holding:
    """A replica of a tenant and the devices it holds."""

    replica_id: str
    key: Key
    devices: int
    priority: int = 0
    ready: bool = True
    """Only such may be taken: what starts is never useless, and what is draining goes anyway."""
    in_flight: int = 0
    kept: bool = False
    """One that its function must have whatever the load (`min_replicas`)."""
    lost_s: float = 0.0
    """Device-seconds that have to be spent again if it goes."""


def make_room(claim: Claim, holdings: Iterable[Holding], needed: int) -> tuple[Holding, ...]:
    """Of the claim's own tenant, which may take no more devices: the replicas that go so that it may take `needed`
    more; (): none may, it has to wait."""
    able = [each for each in holdings if each.key[0] == claim.tenant and _gives_way(each, claim)]
    able.sort(key=lambda each: (each.priority, each.in_flight > 0, each.lost_s, each.in_flight, each.replica_id))
    chosen: list[Holding] = []
    freed = 0
    for holding in able:
        if freed >= needed:
            break
        chosen.append(holding)
        freed += holding.devices
    if freed < needed:
        return ()
    for holding in reversed(chosen):
        if freed - holding.devices >= needed:
            chosen.remove(holding)
            freed -= holding.devices
    return tuple(chosen)


def _gives_way(holding: Holding, claim: Claim) -> bool:
    if not holding.ready or holding.kept or holding.key == claim.key:
        return False
    idle_equal = holding.in_flight == 0 and holding.priority == claim.priority
    return holding.priority < claim.priority or (claim.waiting and idle_equal)


def goes_before(first: Claim, second: Claim, rule: Rule) -> bool:
    """Whether devices that become free are the first claim's before the second's."""
    if first.tenant == second.tenant:
        return (first.priority, first.waiting) > (second.priority, second.waiting)
    lacks = [rule.held.get(each.tenant, 0) < rule.shares.get(each.tenant, 0) for each in (first, second)]
    return lacks[0] and not lacks[1]
