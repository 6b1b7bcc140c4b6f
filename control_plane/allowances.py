"""Who may take devices, at each decision about a function, and who has to give some back for it.

The control loop asks `may_have` before it decides and tells `decided` afterwards. A function that may take no more than
it has, though its load needs more, has a claim: while that stands nothing of lower rank takes what becomes free, and
replicas of its own tenant that rank below it make room (`autoscaler.shares`). Where room is what lacks, placement asks
`may_end`. Requests of who has to go are parked and go on later, as with any drain.
Limits: only the leader decides; claims are forgotten with it and made again at its successor's first look.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Final

from autoscaler.decision import Decision, Phase, Reason
from autoscaler.homes import Resident
from autoscaler.scaling import decide
from autoscaler.shares import Claim, Holding, goes_before, make_room
from autoscaler.work import Work
from control_plane.decisions import Decisions
from control_plane.fleet import GONE, STARTING, Fleet
from control_plane.functions import FunctionStore, Revision
from control_plane.lanes import FunctionKey
from control_plane.seating import Seating
from control_plane.serving import Serving
from control_plane.standings import Standings
from function_runtime.protocol import ReplicaState, ReplicaStatus

CLEARING_S: Final = 20.0
"""How long room that is being made is kept for whom it is made: longer than parking takes."""
CLAIM_S: Final = 3.0
"""A claim that was not repeated for this long is over; the loop looks at what lacks devices every second."""


class Allowances:
    def __init__(
        self,
        standings: Standings,
        functions: FunctionStore,
        serving: Serving,
        fleet: Fleet,
        seating: Seating,
        decisions: Decisions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._standings = standings
        self._functions = functions
        self._serving = serving
        self._fleet = fleet
        self._seating = seating
        self._decisions = decisions
        self._clock = clock
        self._claims: dict[FunctionKey, tuple[Claim, float]] = {}
        self._clearing: dict[FunctionKey, float] = {}
        """Claims for which others are on their way out, and until when that is waited for."""
        self.poke: Callable[[FunctionKey], None] = lambda key: None
        """Look at a function anew."""
        self.end: Callable[[str, str], None] = lambda replica_id, reason: None
        """Has a replica make room: parks what it runs, and ends it."""
        self.may_grow: Callable[[FunctionKey], bool] = lambda key: False
        """Whether slots may still come for a function: then it waits for one, and nobody's devices are short."""
        self.has_slots: Callable[[FunctionKey], bool] = lambda key: True
        """Whether there are slots such as a function needs: of those that nobody has nobody has too many."""

    # --- before a decision ---

    def may_have(self, key: FunctionKey) -> int | None:
        """Devices the function may take besides those it has; None: any number."""
        more = self._standings.may_have(key[0])
        if more is None:
            return None
        mine = self._claim(key)
        return max(more - sum(claim.devices for claim in self._before(mine) if claim.tenant == key[0]), 0)

    def outranked(self, key: FunctionKey) -> bool:
        """Whether room that becomes free is another's first."""
        return bool(self._before(self._claim(key)))

    def _claim(self, key: FunctionKey) -> Claim:
        known = self._claims.get(key)
        return known[0] if known is not None else Claim(key, 0, self.priority(key))

    def _before(self, mine: Claim) -> list[Claim]:
        """Claims that others are making room for, and that go before this one: nothing takes that room meanwhile."""
        now_s = self._clock()
        self._clearing = {key: until_s for key, until_s in self._clearing.items() if now_s < until_s}
        if not self._clearing:
            return []
        standing = [claim for claim in self._standing() if claim.key in self._clearing and claim.key != mine.key]
        return [claim for claim in standing if goes_before(claim, mine, self._standings.rule())] if standing else []

    def _standing(self) -> list[Claim]:
        now_s = self._clock()
        self._claims = {key: known for key, known in self._claims.items() if now_s - known[1] < CLAIM_S}
        return [claim for claim, _ in self._claims.values()]

    # --- after one ---

    def decided(self, key: FunctionKey, revision: Revision, decision: Decision) -> None:
        """Notes what the load needs; where the tenant may not take that, others of it make room."""
        observed, spec = decision.observed, decision.spec
        if observed is None or spec is None:
            return
        devices, desired = revision.spec.resources.devices, decision.desired
        if decision.reason is Reason.QUOTA:
            unbound = dataclasses.replace(observed, may_have=None)
            desired = decide(spec, unbound, decision.forecast, decision.now_s).desired
        active = observed.waiting + observed.running > 0
        self._standings.wants(key, max(desired if active else 0, spec.min_replicas) * devices)
        if decision.reason is not Reason.QUOTA:
            if desired <= observed.count(Phase.READY) + observed.count(Phase.STARTING):
                self._over(key)
            return
        have = observed.count(Phase.READY) + observed.count(Phase.STARTING)
        self._lacks(key, devices, desired - have, observed.waiting)
        missing = (desired - have) * devices - (observed.may_have or 0)
        if missing > 0:
            self._make_room(self._claim(key), missing)

    def _over(self, key: FunctionKey) -> None:
        self._claims.pop(key, None)
        self._clearing.pop(key, None)

    def no_room(self, key: FunctionKey, count: int, waiting: int) -> None:
        """A start found no place: from now on devices are short, unless more of them can be had, or there are none such
        as it needs. What one function cannot have of its own class is no reason to bound and to end those of others."""
        if not self.may_grow(key) and self.has_slots(key):
            self._standings.lacking()
        self._lacks(key, self._devices(key), count, waiting)

    def clears(self, key: FunctionKey, victims: Iterable[str]) -> bool:
        """Whether these may make room for a function together. If so, what they leave is that function's first."""
        ended: dict[str, int] = {}
        for status in map(self._fleet.replicas.get, victims):
            if status is not None:
                ended[status.spec.tenant] = ended.get(status.spec.tenant, 0) + self._standings.devices_of(status)
        if not self._standings.rule().allows(ended, key[0]):
            return False
        self._clearing[key] = self._clock() + CLEARING_S
        return True

    def _lacks(self, key: FunctionKey, devices: int, count: int, waiting: int) -> None:
        claim = Claim(key, devices * max(count, 1), self.priority(key), waiting > 0)
        self._claims[key] = (claim, self._clock())

    def replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        """Where something has ended, who has a claim is looked at."""
        if status.state in GONE and self._claims:
            for claim in self._standing():
                self.poke(claim.key)

    def forget(self) -> None:
        """Another gateway decides from here on, or this one anew."""
        self._claims.clear()
        self._clearing.clear()
        self._standings.forget()

    # --- who makes room ---

    def _devices(self, key: FunctionKey) -> int:
        function = self._functions.find(key[1], key[0])
        return 1 if function is None else function.current.spec.resources.devices

    def priority(self, key: FunctionKey) -> int:
        function = self._functions.find(key[1], key[0])
        return 0 if function is None else function.current.spec.scaling.priority

    def may_end(self, resident: Resident, work: Work) -> bool:
        return self._standings.rule().may_end(resident, work)

    def _kept(self) -> frozenset[str]:
        """Replicas of functions that have no more than they keep whatever the load."""
        kept: list[str] = []
        for function in self._functions.list():
            least = function.current.spec.scaling.min_replicas
            if least:
                living = self._fleet.living((function.tenant, function.name))
                kept += [status.replica_id for status in living[:least]]
        return frozenset(kept)

    def _make_room(self, claim: Claim, missing: int) -> None:
        own = [status for status in self._fleet.living() if status.spec.tenant == claim.tenant]
        leaving = [status for status in own if self._leaves(status)]
        missing -= sum(self._standings.devices_of(status) for status in leaving)
        if missing <= 0:
            if leaving:
                self._clearing.setdefault(claim.key, self._clock() + CLEARING_S)
            return  # enough is on its way out
        victims = make_room(claim, self._holdings(own), missing)
        if not victims:
            return
        names = ", ".join(sorted({each.key[1] for each in victims}))
        reason = f"tenant {claim.tenant} may take no more devices, and requests of {claim.key[1]} wait"
        if any(each.priority < claim.priority for each in victims):
            rank = f"{claim.key[1]} has a higher priority ({claim.priority})"
            reason = f"tenant {claim.tenant} may take no more devices, and {rank}"
        inputs = {
            "missing_devices": missing,
            "priority": claim.priority,
            "victims": [each.replica_id for each in victims],
            "requests_parked": sum(each.in_flight for each in victims),
        }
        self._decisions.record(
            "claim", claim.key[1], None, None, f"{reason}: {names} makes room", inputs, tenant=claim.tenant
        )
        self._clearing[claim.key] = self._clock() + CLEARING_S
        for victim in victims:
            self.end(victim.replica_id, reason)

    def _leaves(self, status: ReplicaStatus) -> bool:
        if status.state is ReplicaState.DRAINING:
            return True
        seat = self._seating.seat(status.replica_id)
        return seat is not None and not seat.accepting

    def _holdings(self, living: Iterable[ReplicaStatus]) -> list[Holding]:
        kept = self._kept()
        found: list[Holding] = []
        for status in living:
            key, seat = (status.spec.tenant, status.function), self._seating.seat(status.replica_id)
            spent_us = 0
            if seat is not None:
                devices = (request.device for request in seat.in_flight.values())
                spent_us = sum(device.prefill_us + device.decode_us for device in devices)
            start_s = self._serving.cold_start_s(status.spec.identity) or 0.0
            found.append(
                Holding(
                    replica_id=status.replica_id,
                    key=key,
                    devices=self._standings.devices_of(status),
                    priority=self.priority(key),
                    ready=status.state not in STARTING and seat is not None and not self._leaves(status),
                    in_flight=seat.taken if seat is not None else 0,
                    kept=status.replica_id in kept,
                    lost_s=start_s + spent_us / 1e6,
                )
            )
        return found
