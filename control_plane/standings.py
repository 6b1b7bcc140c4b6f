"""Who holds how many devices, and who needs how many: what `autoscaler.shares` looks at, of all tenants.

What is held is read off the fleet's mirror, which every gateway has; what is needed is noted by whoever decides, at
each decision. Devices are short from the moment a start found none until `SHORT_S` have passed without another:
meanwhile what all hold together is what there is. Limits: a gateway that does not lead knows
what is held, and of what is needed only what the leader told it (`told`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from autoscaler.shares import Rule, Standing
from control_plane.fleet import GONE
from control_plane.lanes import FunctionKey
from control_plane.quotas import Quotas
from control_plane.serving import Serving
from function_runtime.protocol import ReplicaStatus

SHORT_S: Final = 10.0
RULE_S: Final = 0.1
"""How old the view of all tenants may be: what it costs grows with them, and many functions ask in one turn."""
TOLD_S: Final = 4.0
"""How long what the leader told holds."""


class Standings:
    def __init__(self, serving: Serving, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._serving = serving
        self._quotas = quotas
        self._clock = clock
        self._holders: dict[str, tuple[str, int]] = {}
        """Tenant and devices of each replica that lives."""
        self._held: dict[str, int] = {}
        self._wanted: dict[FunctionKey, int] = {}
        self._wanted_of: Counter[str] = Counter()
        """The same by tenant: the rule is made anew at each start that finds no device."""
        self._short_until_s = float("-inf")
        self._most_held = 0
        self._rule: tuple[float, Rule] | None = None
        self._told: tuple[Mapping[str, float], float] = ({}, float("-inf"))

    def replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        """To be told of every change, so that what was only just asked for counts at the next decision."""
        known = self._holders.pop(status.replica_id, None)
        if known is not None:
            self._held[known[0]] -= known[1]
        if status.state not in GONE:
            holder = self._holders[status.replica_id] = status.spec.tenant, self.devices_of(status)
            self._held[holder[0]] = self._held.get(holder[0], 0) + holder[1]

    # --- noted by whoever decides ---

    def wants(self, key: FunctionKey, devices: int) -> None:
        """What the observed load of a function needs, with the replicas it keeps in any case."""
        self._wanted_of[key[0]] += devices - self._wanted.pop(key, 0)
        if devices:
            self._wanted[key] = devices

    def lacking(self) -> None:
        """A start found no device."""
        self._most_held = max(self._most_held if self.short else 0, sum(self.held().values()))
        self._short_until_s = self._clock() + SHORT_S
        self._rule = None

    def forget(self) -> None:
        """Another gateway decides from here on."""
        self._wanted.clear()
        self._wanted_of.clear()
        self._rule = None
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
        return {tenant: devices for tenant, devices in self._held.items() if devices}

    def all(self) -> tuple[Standing, ...]:
        held = self.held()
        wanted = {tenant: devices for tenant, devices in self._wanted_of.items() if devices}
        return tuple(
            Standing(tenant, held.get(tenant, 0), wanted.get(tenant, 0), self._quotas.of(tenant))
            for tenant in sorted(held.keys() | wanted.keys() | self._quotas.tenants)
        )

    def capacity(self) -> int | None:
        """Devices there are, where they are short: as many as were held at once since then. What somebody has made
        room with is nobody's yet, and there all the same."""
        return max(sum(self.held().values()), self._most_held) if self.short else None

    def rule(self) -> Rule:
        """What follows of it for shares; where nobody lacks devices, as if what is held were all there is."""
        now_s = self._clock()
        if self._rule is None or now_s - self._rule[0] > RULE_S:
            capacity = self.capacity()
            self._rule = now_s, Rule(self.all(), sum(self.held().values()) if capacity is None else capacity)
        return self._rule[1]

    def shares(self) -> Mapping[str, int] | None:
        """None: nobody lacks devices, so nobody has a share."""
        return self.rule().shares if self.short else None

    def may_have(self, tenant: str) -> int | None:
        """Devices the tenant may still take; None: as many as it can get."""
        most = self._quotas.of(tenant).devices
        if self.short:
            most = self.rule().most(tenant, most)
        return None if most is None else max(most - self._held.get(tenant, 0), 0)

    def device_price(self, tenant: str) -> float:
        """What a device is worth now against when there are free ones: how many are wanted of those there are, and for
        who holds more than its share as many times more as it does."""
        if not self.short:
            return 1.0
        rule = self.rule()
        return max(rule.wanted / max(rule.capacity, 1), 1.0) / max(rule.strictness(tenant), 0.1)

    def strict(self) -> dict[str, float]:
        """Of each tenant whose objectives are tightened, by how much."""
        if not self.short:
            return {}
        rule = self.rule()
        return {tenant: factor for tenant in rule.held if (factor := rule.strictness(tenant)) < 1.0}

    def strictness(self, tenant: str, leads: bool) -> float:
        if leads:
            return self.rule().strictness(tenant) if self.short else 1.0
        told, at_s = self._told
        return told.get(tenant, 1.0) if told and self._clock() - at_s < TOLD_S else 1.0
