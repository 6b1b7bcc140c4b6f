"""Who waits and what runs on all gateways: what one tells the leader of the control loop, and what the leader makes of
what it was told.

A report holds everything at once and is sent at every change, at once where somebody waits, and every `REPEAT_S`: a
leader that has not heard a living gateway for `STALE_S` does not see everything, and holds; so it does while requests
of a dead gateway wait to be adopted, and when it is new.
Limits: peaks of several gateways are added up although they may have been at different moments.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from control_plane.gateways import Gateways
from control_plane.lanes import FunctionKey, Lane, Lanes
from control_plane.load_meter import LoadMeter
from control_plane.peers import DemandAnswer, DemandReport, LaneDemand, Peers, Refusal

REPEAT_S: Final = 1.0
STALE_S: Final = 4.0
SETTLED_S: Final = 1.5
"""After this long whoever adopted something has told of it."""
CALM_S: Final = 0.05
"""How late a change that leaves nobody waiting may be told."""
AGAIN_S: Final = 0.1
"""Pause after a report that nobody heard."""
REFUSED_S: Final = 5.0
"""How long the other gateways are told that a start was refused."""
WOKEN_S: Final = 5.0
"""How long interest without a request is passed on: until a start is seen, at most."""


@dataclass(slots=True)
class Elsewhere:
    """One function on all other gateways, added up."""

    waiting: int = 0
    peak_demand: int = 0
    generation: int = 0
    last_activity_s: float = 0.0
    woken: bool = False
    deferred: int = 0
    running: dict[str, int] = field(default_factory=dict)
    gaps_s: tuple[float, ...] = ()
    arrivals_in_10_s: int = 0
    arrivals_in_30_s: int = 0
    arrivals_in_60_s: int = 0
    first_token_s: float | None = None
    """The longest of any gateway's."""
    token_s: float | None = None
    waiting_tokens: int = 0
    running_tokens: int = 0
    waiting_since_s: float | None = None


class Demand:
    def __init__(self, lanes: Lanes, gateways: Gateways, load: LoadMeter) -> None:
        self._lanes = lanes
        self._load = load
        self._gateways = gateways
        self._reports: dict[str, tuple[DemandReport, float]] = {}
        self._lanes_of: dict[str, dict[FunctionKey, list[LaneDemand]]] = {}
        """Of each report, by function."""
        self._woken_s: dict[tuple[FunctionKey, str], float] = {}
        self._disturbed_s = float("-inf")

    # --- what is told ---

    def woken(self, key: FunctionKey, identity: str) -> None:
        self._woken_s[key, identity] = time.monotonic()

    def report(self) -> DemandReport:
        now_s = time.monotonic()
        self._woken_s = {which: at_s for which, at_s in self._woken_s.items() if now_s - at_s < WOKEN_S}
        lanes = tuple(self._lane(lane, now_s) for lane in self._lanes)
        return DemandReport(self._gateways.id, lanes, self._load.unsent())

    def told(self, until_s: float) -> None:
        """The leader has the windows up to the one that begins then."""
        self._load.sent(until_s)

    def _lane(self, lane: Lane, now_s: float) -> LaneDemand:
        tenant, function = lane.key
        recent = self._load.recent(lane.key)
        in_10_s, in_30_s, in_60_s = recent.arrivals(now_s)
        return LaneDemand(
            tenant=tenant,
            function=function,
            identity=lane.identity,
            waiting=len(lane.waiting),
            peak_demand=lane.peak_demand(),
            generation=lane.generation,
            idle_s=max(now_s - lane.last_activity_s(now_s), 0.0),
            woken=(lane.key, lane.identity) in self._woken_s and not lane.seats,
            running=tuple((seat.replica_id, len(seat.in_flight)) for seat in lane.seats.values() if seat.in_flight),
            gaps_s=tuple(lane.gaps_s),
            deferred=lane.deferred(),
            arrivals_in_10_s=in_10_s,
            arrivals_in_30_s=in_30_s,
            arrivals_in_60_s=in_60_s,
            first_token_s=recent.mean_s(recent.first_tokens, now_s),
            token_s=recent.mean_s(recent.tokens, now_s),
            waiting_tokens=lane.waiting_tokens,
            running_tokens=lane.running_tokens,
            waited_s=None if (since_s := lane.waiting_since_s) is None else max(now_s - since_s, 0.0),
        )

    # --- what was told ---

    def take(self, report: DemandReport) -> set[FunctionKey]:
        """The functions it says something new about."""
        known = self._reports.get(report.gateway)
        self._reports[report.gateway] = (report, time.monotonic())
        lanes_of: defaultdict[FunctionKey, list[LaneDemand]] = defaultdict(list)
        for lane in report.lanes:
            lanes_of[lane.tenant, lane.function].append(lane)
        self._lanes_of[report.gateway] = lanes_of
        before = {_said(lane) for lane in known[0].lanes} if known is not None else set()
        return {(tenant, function) for tenant, function, *_ in before ^ {_said(lane) for lane in report.lanes}}

    def forget_gone(self) -> set[FunctionKey]:
        """Gateways that do not live any more say nothing; what they had is adopted. The functions they spoke of."""
        gone = [name for name in self._reports if name not in self._gateways.peers]
        if gone or self._gateways.orphaned:
            self._disturbed_s = time.monotonic()
        reports = [self._reports.pop(name)[0] for name in gone]
        for name in gone:
            del self._lanes_of[name]
        return {(lane.tenant, lane.function) for report in reports for lane in report.lanes}

    @property
    def complete(self) -> bool:
        """Whether every living gateway has been heard lately, with whatever it has adopted."""
        now_s = time.monotonic()
        if self._gateways.orphaned or now_s - self._disturbed_s < SETTLED_S:
            return False
        return all(name in self._reports and now_s - self._reports[name][1] < STALE_S for name in self._gateways.peers)

    def elsewhere(self, key: FunctionKey) -> Elsewhere:
        found = Elsewhere()
        for name, (_, at_s) in self._reports.items():
            for lane in self._lanes_of[name].get(key, ()):
                found.waiting += lane.waiting
                found.peak_demand += lane.peak_demand
                found.generation += lane.generation
                found.last_activity_s = max(found.last_activity_s, at_s - lane.idle_s)
                found.woken = found.woken or lane.woken
                found.gaps_s += lane.gaps_s
                found.deferred += lane.deferred
                # Arrivals are counted by function: every lane of it tells the same.
                found.arrivals_in_10_s = max(found.arrivals_in_10_s, lane.arrivals_in_10_s)
                found.arrivals_in_30_s = max(found.arrivals_in_30_s, lane.arrivals_in_30_s)
                found.arrivals_in_60_s = max(found.arrivals_in_60_s, lane.arrivals_in_60_s)
                found.first_token_s = longest(found.first_token_s, lane.first_token_s)
                found.token_s = longest(found.token_s, lane.token_s)
                found.waiting_tokens += lane.waiting_tokens
                found.running_tokens += lane.running_tokens
                if lane.waited_s is not None:
                    found.waiting_since_s = earliest(found.waiting_since_s, at_s - lane.waited_s)
                for replica_id, count in lane.running:
                    found.running[replica_id] = found.running.get(replica_id, 0) + count
        return found

    def running_elsewhere(self) -> dict[str, int]:
        """Requests of every replica at all other gateways."""
        found: dict[str, int] = {}
        for report, _ in self._reports.values():
            for lane in report.lanes:
                for replica_id, count in lane.running:
                    found[replica_id] = found.get(replica_id, 0) + count
        return found

    def waiting_elsewhere(self, key: FunctionKey, identity: str) -> int:
        return sum(lane.waiting for lane in self._told_of(key) if lane.identity == identity)

    def identities_elsewhere(self, key: FunctionKey) -> set[str]:
        """Checkpoints of a function for which somebody waits at another gateway."""
        return {lane.identity for lane in self._told_of(key) if lane.waiting}

    def _told_of(self, key: FunctionKey) -> Iterator[LaneDemand]:
        for lanes_of in self._lanes_of.values():
            yield from lanes_of.get(key, ())


def longest(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return one_s if other_s is None else other_s
    return max(one_s, other_s)


def earliest(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return one_s if other_s is None else other_s
    return min(one_s, other_s)


class Refusals:
    """Starts that were refused here, for the gateways whose requests wait for them."""

    def __init__(self, unusable: Callable[[FunctionKey, str], str]) -> None:
        self._unusable = unusable
        self._refused: dict[tuple[FunctionKey, str], tuple[Refusal, float]] = {}

    def note(self, refusal: Refusal) -> None:
        key = (refusal.tenant, refusal.function)
        self._refused[key, refusal.identity] = (refusal, time.monotonic())

    def of(self, report: DemandReport) -> Iterator[Refusal]:
        now_s = time.monotonic()
        for lane in report.lanes:
            key = (lane.tenant, lane.function)
            if not lane.waiting:
                continue
            refused = self._refused.get((key, lane.identity))
            if refused is not None and now_s - refused[1] < REFUSED_S:
                yield refused[0]
            elif reason := self._unusable(key, lane.identity):
                yield Refusal(*key, lane.identity, "model_unusable", reason)


def _said(lane: LaneDemand) -> tuple[str, str, object]:
    """What of it is news; that time passes is none."""
    return (
        lane.tenant,
        lane.function,
        (lane.identity, lane.waiting, lane.running, lane.generation, lane.woken, lane.deferred),
    )


class DemandSender:
    """Tells the leader, one report at a time; what changes meanwhile goes with the next."""

    def __init__(self, demand: Demand, gateways: Gateways, peers: Peers) -> None:
        self._demand = demand
        self._gateways = gateways
        self._peers = peers
        self._due = asyncio.Event()
        self._calm: asyncio.TimerHandle | None = None
        self.on_refusals: Callable[[tuple[Refusal, ...]], None] = lambda refusals: None
        self.on_strict: Callable[[dict[str, float]], None] = lambda strict: None
        """Told by the leader of the tenants whose objectives are tightened."""

    def changed(self, *, waiting: bool) -> None:
        if waiting:
            self._due.set()
        elif self._calm is None:
            self._calm = asyncio.get_running_loop().call_later(CALM_S, self._calmed)

    def _calmed(self) -> None:
        self._calm = None
        self._due.set()

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REPEAT_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            answer = await self._send()
            if answer is not None:
                self.on_refusals(answer.refusals)
                self.on_strict(answer.strict)
                if answer.windows_until_s is not None:
                    self._demand.told(answer.windows_until_s)

    async def _send(self) -> DemandAnswer | None:
        url = self._gateways.url_of(self._gateways.leader)
        if not url:
            return None  # we lead, or nobody does yet
        answer = await self._peers.send_demand(url, self._demand.report())
        if answer is None:
            await asyncio.sleep(AGAIN_S)
            self._due.set()
        elif not answer.leads:
            self._gateways.look_soon()
        return answer

    def close(self) -> None:
        if self._calm is not None:
            self._calm.cancel()
