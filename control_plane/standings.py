"""Who holds how many devices, and who needs how many: what `autoscaler.shares` looks at, of all tenants.

What is held is read off the fleet's mirror, which every gateway has; what is needed is noted by whoever decides, at
each decision. Devices are short from the moment a start found none (or a quota in its way) until `SHORT_S` have
passed without another: meanwhile what all hold together is what there is. Limits: a gateway that does not lead knows
what is held, and of what is needed only what the leader told it (`told`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from autoscaler.shares import UNBOUNDED, Standing, fair_shares, may_have, strictness
from control_plane.fleet import Fleet
from control_plane.lanes import FunctionKey
from control_plane.quotas import Quotas
from control_plane.serving import Serving
from function_runtime.protocol import ReplicaStatus

SHORT_S: Final = 10.0
TOLD_S: Final = 4.0
"""How long what the leader told holds."""


class Standings:
    def __init__(
        self, fleet: Fleet, serving: Serving, quotas: Quotas, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._serving = serving
        self._quotas = quotas
        self._clock = clock
        self._wanted: dict[FunctionKey, int] = {}
        self._short_until_s = float("-inf")
        self._told: tuple[Mapping[str, float], float] = ({}, float("-inf"))

    # --- noted by whoever decides ---

    def wants(self, key: FunctionKey, devices: int) -> None:
        """What the observed load of a function needs, with the replicas it keeps in any case."""
        if devices:
            self._wanted[key] = devices
        else:
            self._wanted.pop(key, None)

    def lacking(self) -> None:
        """A start found no device, or a quota in its way."""
        self._short_until_s = self._clock() + SHORT_S

    def forget(self) -> None:
        """Another gateway decides from here on."""
        self._wanted.clear()
        self._short_until_s = float("-inf")

    def told(self, strict: Mapping[str, float]) -> None:
        """By the leader: whose objectives are tightened."""
        self._told = strict, self._clock()

    # --- what is ---

    @property
    def short(self) -> bool:
        return self._clock() < self._short_until_s

    def devices_of(self, status: ReplicaStatus) -> int:
        revision = self._serving.revision((status.spec.tenant, status.function), status.revision)
        return revision.spec.resources.devices if revision is not None else 1

    def held(self) -> dict[str, int]:
        """Devices by tenant: of all replicas that live."""
        held: dict[str, int] = {}
        for status in self._fleet.living():
            tenant = status.spec.tenant
            held[tenant] = held.get(tenant, 0) + self.devices_of(status)
        return held

    def all(self) -> tuple[Standing, ...]:
        held = self.held()
        wanted: dict[str, int] = {}
        for (tenant, _), devices in self._wanted.items():
            wanted[tenant] = wanted.get(tenant, 0) + devices
        return tuple(
            Standing(tenant, held.get(tenant, 0), wanted.get(tenant, 0), self._quotas.of(tenant))
            for tenant in sorted(held.keys() | wanted.keys() | self._quotas.tenants)
        )

    def capacity(self) -> int | None:
        """Devices there are, where they are short."""
        return sum(self.held().values()) if self.short else None

    def shares(self) -> dict[str, int] | None:
        """None: nobody lacks devices, so nobody has a share."""
        capacity = self.capacity()
        return None if capacity is None else fair_shares(capacity, self.all())

    def may_have(self, tenant: str) -> int | None:
        """Devices the tenant may still take; None: as many as it can get."""
        quota = self._quotas.of(tenant)
        if quota.devices is None and not self.short:
            return None
        more = may_have(tenant, self.all(), self.capacity())
        return None if more >= UNBOUNDED >> 1 else more

    def left_of_quota(self, tenant: str) -> int | None:
        """None: it has none."""
        devices = self._quotas.of(tenant).devices
        return None if devices is None else max(devices - self.held().get(tenant, 0), 0)

    def strict(self) -> dict[str, float]:
        """Of each tenant whose objectives are tightened, by how much."""
        capacity = self.capacity()
        if capacity is None:
            return {}
        standings = self.all()
        found = {each.tenant: strictness(each.tenant, standings, capacity) for each in standings}
        return {tenant: factor for tenant, factor in found.items() if factor < 1.0}

    def strictness(self, tenant: str, leads: bool) -> float:
        if leads:
            return self.strict().get(tenant, 1.0) if self.short else 1.0
        told, at_s = self._told
        return told.get(tenant, 1.0) if told and self._clock() - at_s < TOLD_S else 1.0
