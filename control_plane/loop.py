"""The control loop: for each function whose demand, replicas or spec changed, ask `autoscaler.decide` and do so.

Events only mark a function; it is looked at once in the same turn of the event loop, so that however many requests wake
it, it is woken once. Deciding and acting is one step without a pause, so a decision never acts on an older state. Where
all are to be looked at, that is done a slice at a time, and whatever has news of its own goes before.
Of several gateways the leader decides, by what all of them have; the others tell it (`demand`), and see to what waits
with them. Limits: a wake-up through a leader that has just died waits until another leads
(`GatewaySettings.lead_within_s`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from autoscaler.decision import Decision, Observed, Phase, Reason
from autoscaler.scaling import choose_victims, decide
from control_plane.decisions import Decisions
from control_plane.demand import SETTLED_S, Demand, DemandSender
from control_plane.dispatch import Dispatcher
from control_plane.errors import InvalidRequest
from control_plane.fleet import GONE, STARTING, Fleet
from control_plane.forecasting import Forecasting
from control_plane.functions import ChangeKind, Function, FunctionChange, FunctionStore, Revision
from control_plane.gateways import Gateways
from control_plane.lanes import FunctionKey, Lane
from control_plane.observation import WINDOW_S, Observation
from control_plane.observations import Observations
from control_plane.parking import Parking
from control_plane.peers import DemandAnswer, DemandReport, Refusal
from control_plane.records import OutcomeError, RequestState
from control_plane.seating import Seating
from control_plane.serving import Servable, Serving
from control_plane.settings import Settings
from control_plane.starting import Starting
from control_plane.warming import Warming
from function_runtime.protocol import ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from control_plane.spec import FunctionSpec

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.01
"""For so long functions are decided upon before anything else runs."""
CALM_S: Final = 0.05
"""How late a change of demand that leaves nobody waiting may be seen."""
_WELL: Final = frozenset({Reason.AT_TARGET, Reason.KEEP_ALIVE})


class ControlLoop:
    def __init__(
        self,
        settings: Settings,
        functions: FunctionStore,
        serving: Serving,
        dispatcher: Dispatcher,
        fleet: Fleet,
        seating: Seating,
        decisions: Decisions,
        gateways: Gateways,
        demand: Demand,
        sender: DemandSender,
        observations: Observations,
    ) -> None:
        self._functions = functions
        self._serving = serving
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._seating = seating
        self._decisions = decisions
        self._gateways = gateways
        self.demand = demand
        self._sender = sender
        self.observation = Observation(serving, dispatcher, fleet, seating, demand)
        self.observations = observations
        self.forecasting = Forecasting(observations, functions, self.observation.idle_since_s)
        self.forecasting.on_forecast = self.poke
        self.forecasting.cold_waiters = self.observation.cold_waiters
        self._leads = False
        self.starting = Starting(settings, serving, dispatcher, fleet, decisions, self._ask_again)
        self.observation.loads = observations.of
        self.observation.restarts = self.starting.restarts_of
        self._dirty: dict[FunctionKey, None] = {}
        self._rest: dict[FunctionKey, None] = {}
        """Those to be looked at without news of their own: behind the others."""
        self._due: asyncio.Handle | None = None
        self._timers: dict[FunctionKey, asyncio.TimerHandle] = {}
        self._calm: dict[FunctionKey, asyncio.TimerHandle] = {}
        self._told: dict[FunctionKey, str] = {}
        self._warming = Warming(functions, fleet, settings.slot.warm_workers, lambda: self.leads)
        self._was_in_sight = False
        self.stopped = False
        self.parking: Parking | None = None
        """Carries out what operators have drained."""
        self.on_decided: Callable[[FunctionKey, Revision, Decision], None] = lambda key, revision, decision: None
        """Told of every decision, before it is carried out."""
        self.on_new_agent: Callable[[str], None] = lambda slot_id: None
        """Told of a slot that has a new agent, which knows nothing yet."""
        self.on_lead: Callable[[bool], None] = lambda leads: None
        """Told when this gateway begins or ceases to decide."""
        sender.on_refusals = self._refusals
        dispatcher.on_demand = self._demand_changed
        dispatcher.unusable = self.starting.unusable_identity
        serving.wake = self.wake
        serving.unusable = self.unusable
        fleet.on_replica = self._replica_changed
        fleet.on_slot = self._slot_changed
        functions.subscribe(self._function_changed)
        functions.check = self._check

    # --- events ---

    def poke(self, key: FunctionKey) -> None:
        self._dirty[key] = None
        self._rest.pop(key, None)
        self._run_soon()

    def poke_later(self, key: FunctionKey) -> None:
        """Behind those that have news of their own."""
        if key not in self._dirty:
            self._rest[key] = None
        self._run_soon()

    def _run_soon(self) -> None:
        if self._due is None and not self.stopped:
            self._due = asyncio.get_running_loop().call_soon(self._run)

    def _demand_changed(self, key: FunctionKey, waiting: bool) -> None:
        """Who waits is looked after at once; that demand moved within what there is can wait a little, so that a busy
        function is not decided upon twice per request."""
        if waiting:
            self.poke(key)
        elif key not in self._calm and not self.stopped:
            self._calm[key] = asyncio.get_running_loop().call_later(CALM_S, self._calmed, key)

    def _calmed(self, key: FunctionKey) -> None:
        self._calm.pop(key, None)
        self.poke(key)
        self._fleet.placing.room_came()  # who has just become idle may make room

    def wake(self, servable: Servable) -> None:
        """Somebody is interested but does not wait: as good as one waiting request, for one start."""
        self.observation.woken(servable.key)
        self.demand.woken(servable.key, servable.identity)
        self._dispatcher.lanes.of(servable.key, servable.identity).touch()
        self.poke(servable.key)

    # --- leading ---

    @property
    def leads(self) -> bool:
        return self._leads and self._gateways.leads

    def gateways_changed(self) -> None:
        """A gateway came or went, or the lead did."""
        for key in self.demand.forget_gone():
            self.poke(key)
        leads = self._gateways.leads
        if leads != self._leads:
            self._leads = leads
            # Nothing is known of the time before: the window begins anew, and nothing ends until it has passed.
            self.observation.begin()
            self.observations.begin()
            self.forecasting.begin()
            self._told.clear()
            self._warming.forget()
            self.on_lead(leads)
            self._warming.settle()
        self.poke_all()
        if not self._gateways.alone and not self.stopped:
            asyncio.get_running_loop().call_later(SETTLED_S + 0.1, self.poke_all)
        self._sender.changed(waiting=True)

    def poke_all(self) -> None:
        for function in self._functions.list():
            self.poke_later((function.tenant, function.name))
        for status in self._fleet.living():
            self.poke_later((status.spec.tenant, status.function))

    def take_demand(self, report: DemandReport) -> DemandAnswer:
        """Another gateway tells what it has; it is told what cannot be had."""
        if not self.leads:
            return DemandAnswer(leads=False)
        was_complete = self.demand.complete
        changed = self.demand.take(report)
        for key in changed:
            self.poke(key)
        if not was_complete and self.demand.complete:
            self.poke_all()
        until_s = self.observations.take(report.gateway, report.windows) if report.windows else None
        return DemandAnswer(True, tuple(self.starting.refused.of(report)), windows_until_s=until_s)

    def _refusals(self, refusals: tuple[Refusal, ...]) -> None:
        for refusal in refusals:
            lane = self._dispatcher.lanes.find((refusal.tenant, refusal.function), refusal.identity)
            if lane is not None and not lane.ready:
                self._dispatcher.fail_waiting(lane, OutcomeError(503, refusal.code, refusal.message))

    def stop(self) -> None:
        self.stopped = True
        for timer in (*self._timers.values(), *self._calm.values()):
            timer.cancel()
        if self._due is not None:
            self._due.cancel()

    def _check(self, spec: FunctionSpec, tenant: str) -> None:
        """Refuse objectives that a ready replica of the same model was measured not to keep: of this function, or of
        another of the tenant's with the same model on the same kind of device."""
        from control_plane.scaling_spec import Objectives, too_fast

        if spec.scaling.objectives == Objectives():
            return
        for known in sorted(self._functions.list(tenant), key=lambda each: each.name != spec.name):
            if not known.spec.computes_as(spec):
                continue
            service = self.observation.service((tenant, known.name), known.current.identity or "")
            fault = None if service is None else too_fast(spec.scaling.objectives, service)
            if fault is not None:
                param, reason = fault
                by = "" if known.name == spec.name else f" (by {known.name})"
                raise InvalidRequest(f"{param}: {reason}{by}", param=param, code="invalid_spec")
            if service is not None:
                return

    def _function_changed(self, change: FunctionChange) -> None:
        key = (change.function.tenant, change.function.name)
        objective_s = change.function.spec.scaling.objectives.first_token_s
        if objective_s is None or change.kind is ChangeKind.DELETED:
            self._dispatcher.load.objective_s.pop(key, None)
        else:
            self._dispatcher.load.objective_s[key] = objective_s
        if change.kind is ChangeKind.DELETED:
            self.observations.forget(key)
            self.observation.forget(key)
        self.poke(key)
        self._warming.settle()

    def _slot_changed(self, slot_id: str, anew: bool) -> None:
        """What a slot says of itself concerns those that found no room, and those that run there; everybody only where
        it decides whether everything is in sight."""
        self._seating.slot_changed()
        if anew:
            self.on_new_agent(slot_id)
        self._look_whether_in_sight()
        self._fleet.placing.room_came()
        if anew or slot_id not in self._fleet.slots or self._fleet.is_closed(slot_id):
            for status in self._fleet.on(slot_id):
                self.poke((status.spec.tenant, status.function))
        self._warming.slot_changed(slot_id)

    def _look_whether_in_sight(self) -> bool:
        """Who was decided upon without all slots' being in sight was held, and is looked at again once they are."""
        in_sight = self._fleet.in_sight
        if in_sight != self._was_in_sight:
            self._was_in_sight = in_sight
            self.poke_all()
        return in_sight

    def _replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        self.starting.seen(status)
        if not self.observation.note(status):
            return
        key = (status.spec.tenant, status.function)
        if status.state is ReplicaState.READY:
            self.starting.record(key, status.revision).succeeded()
            if status.ready_us and status.created_us:
                self._serving.note_start(status.spec.identity, (status.ready_us - status.created_us) / 1e6)
            if self.leads:
                self.observations.started(status)
        elif status.state is ReplicaState.FAILED and not status.ready_us and status.error is not None:
            self.starting.failed(key, status, leads=self.leads)
        if status.state is ReplicaState.DRAINING or status.state in GONE:
            self.starting.left(key, status)
        if status.state is ReplicaState.ENDED and status.ready_us and self.leads:
            self.observations.ended(status)
        self._seating.replica_changed(status)
        self.poke(key)

    def start_error(self, key: FunctionKey, revision: int) -> str:
        """The last start's error, for people; empty if it went well."""
        return self.starting.error(key, revision)

    def unusable(self, key: FunctionKey, revision: int) -> str:
        return self.starting.unusable(key, revision)

    # --- deciding ---

    def _run(self) -> None:
        self._due = None
        # Once for all that is decided now: it is a look at every slot.
        self.observation.in_sight = self._look_whether_in_sight()
        dirty, self._dirty = self._dirty, {}
        leads, until_s = self.leads, time.monotonic() + SLICE_S
        if not leads and dirty:
            lanes = (lane for key in dirty for lane in self._dispatcher.lanes.of_function(key))
            waiting = any(lane.waiting for lane in lanes) or any(map(self.observation.is_woken, dirty))
            self._sender.changed(waiting=waiting)
        while (dirty or self._rest) and time.monotonic() < until_s:
            marked = dirty or self._rest
            key = next(iter(marked))
            del marked[key]
            try:
                if leads:
                    self._tick(key)
                else:
                    self._tend_own(key)
            except Exception:
                logger.exception("event=tick_failed function=%s", key[1])
        self._dirty = {**dirty, **self._dirty}
        if self._dirty or self._rest:
            self._run_soon()

    def _ask_again(self, key: FunctionKey, at_s: float) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        delay_s = max(at_s - time.monotonic(), 0.0) + 0.001
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self.poke, key)

    def _tend_own(self, key: FunctionKey) -> None:
        """Another gateway decides; what waits here for nothing is this one's to end."""
        function = self._functions.find(key[1], key[0])
        lanes = self._dispatcher.lanes.of_function(key)
        if function is None:
            self._end_waiting(key, lanes)
            return
        target = self._serving.target(function)
        if target is None:
            self._without_target(function, lanes)
            return
        self.observation.passed_on(key)
        for lane in lanes:
            if lane.identity != target.identity:
                self._dispatcher.lanes.drop(lane)
                self._end_revisionless(key, lane)

    def _tick(self, key: FunctionKey) -> None:
        function = self._functions.find(key[1], key[0])
        lanes = self._dispatcher.lanes.of_function(key)
        living = self._fleet.living(key)
        if function is None:
            self._wind_up(key, lanes, living)
            return
        if self.parking is not None and self.parking.tend(key, living):
            return
        target = self._serving.target(function)
        if target is None:
            self._without_target(function, lanes)
            return
        # One that starts to take another's place is none too many, nor does it make the other one so.
        moving = self._fleet.successors
        current = [s for s in living if s.revision == target.revision and s.replica_id not in moving]
        old = [status for status in living if status.revision != target.revision]
        forecast = self.forecasting.of(key)
        observed = self.observation.of(
            key, target, lanes, current, old, self.unusable(key, target.revision), forecast=forecast
        )
        spec = target.spec.scaling.to_decide(target.spec.resources.devices, WINDOW_S)
        now_s = time.monotonic()
        decision = decide(spec, observed, forecast, now_s)
        if decision.ask_again_s is not None:
            self._ask_again(key, decision.ask_again_s)
        self.on_decided(key, target, decision)
        have = observed.count(Phase.READY) + observed.count(Phase.STARTING)
        rolling = any(status.state is ReplicaState.READY for status in old) and have == 0 and decision.desired == 0
        desired = 1 if rolling else decision.desired
        if desired > have:
            self.starting.start(key, target, desired - have, decision)
        elif desired < have:
            self._end(key, target, observed, have - desired, decision)
        self._tell(key, decision, have)
        self._retire_old(target, current, old)
        self._tend_orphans(key, target, lanes)

    # --- acting ---

    def _end(self, key: FunctionKey, revision: Revision, observed: Observed, count: int, decision: Decision) -> None:
        for replica_id in choose_victims(observed.replicas, count):
            self.starting.stopped(key)
            self._drain(replica_id, revision.spec.drain_s, f"{decision.reason}: {decision.detail}")
            self._decisions.record(
                "drain", revision.function, replica_id, None, decision.detail, decision.inputs, tenant=key[0]
            )

    def _drain(self, replica_id: str, grace_s: float, reason: str, *, meant: bool = True) -> None:
        """`meant`: by a decision about its own function."""
        if meant:
            self.starting.meant(replica_id)
        seat = self._seating.seat(replica_id)
        if seat is not None:
            if not seat.accepting:
                return
            self._dispatcher.seat_closing(seat)
        self._fleet.end_replica(replica_id, grace_s, reason)

    def end_replica(self, replica_id: str, reason: str) -> bool:
        """An operator's wish; False if there is no such living replica."""
        status = self._fleet.replicas.get(replica_id)
        if status is None or status.state in GONE:
            return False
        revision = self._serving.revision((status.spec.tenant, status.function), status.revision)
        self._drain(replica_id, revision.spec.drain_s if revision is not None else 0.0, reason, meant=False)
        return True

    def _retire_old(self, target: Revision, current: list[ReplicaStatus], old: list[ReplicaStatus]) -> None:
        """Older revisions go as soon as the new one serves, except where requests can be served by nothing else."""
        if not old or not any(self._accepts(status) for status in current):
            return
        for status in old:
            key = (status.spec.tenant, status.function)
            lane = self._dispatcher.lanes.find(key, status.spec.identity)
            waits = lane is not None and bool(lane.waiting)
            waits = waits or self.demand.waiting_elsewhere(key, status.spec.identity) > 0
            needed = status.spec.identity != target.identity and waits
            if status.state is not ReplicaState.DRAINING and not needed:
                revision = self._serving.revision(key, status.revision)
                grace_s = (revision or target).spec.drain_s
                self._drain(status.replica_id, grace_s, f"revision {target.revision} has taken over")

    def _accepts(self, status: ReplicaStatus) -> bool:
        seat = self._seating.seat(status.replica_id)
        return seat is not None and seat.accepting

    def _tend_orphans(self, key: FunctionKey, target: Revision, lanes: list[Lane]) -> None:
        """Requests of an older checkpoint whose replicas are gone need one of their own."""
        for lane in lanes:
            if lane.identity != target.identity:
                self._dispatcher.lanes.drop(lane)
                self._end_revisionless(key, lane)
        wanted = {lane.identity for lane in lanes if lane.waiting} | self.demand.identities_elsewhere(key)
        orphans = wanted - {target.identity}
        if not orphans or not self._fleet.in_sight:
            return
        for identity in orphans:
            if any(s.spec.identity == identity and self._may_serve(s) for s in self._fleet.living(key)):
                continue
            revision = self._serving.with_identity(key, identity)
            if revision is not None:
                self.starting.start(key, revision, 1, None)

    def _end_revisionless(self, key: FunctionKey, lane: Lane) -> None:
        """Requests of a checkpoint that no revision has any more can be served by nothing."""
        if lane.waiting and self._fleet.in_sight and self._serving.with_identity(key, lane.identity) is None:
            self._dispatcher.fail_waiting(
                lane, OutcomeError(503, "model_unusable", "the revision this request was accepted for is gone")
            )

    def _may_serve(self, status: ReplicaStatus) -> bool:
        return status.state in STARTING or status.state is ReplicaState.READY

    def _without_target(self, function: Function, lanes: list[Lane]) -> None:
        """Nothing of this function can be started now: what waits learns why, once it is sure."""
        key = (function.tenant, function.name)
        reason = self.unusable(key, function.revision)
        if reason:
            for lane in lanes:
                if not lane.ready:
                    self._dispatcher.fail_waiting(lane, OutcomeError(503, "model_unusable", reason))

    def _wind_up(self, key: FunctionKey, lanes: list[Lane], living: list[ReplicaStatus]) -> None:
        """The function was deleted."""
        self._end_waiting(key, lanes)
        for status in living:
            revision = self._serving.revision(key, status.revision)
            self._drain(
                status.replica_id, revision.spec.drain_s if revision is not None else 0.0, "the function was deleted"
            )

    def _end_waiting(self, key: FunctionKey, lanes: list[Lane]) -> None:
        for lane in lanes:
            for request in list(lane.waiting):
                error = OutcomeError(404, "function_deleted", f"the function {key[1]} was deleted")
                self._dispatcher.fail(request, RequestState.REFUSED, error)

    def _tell(self, key: FunctionKey, decision: Decision, have: int) -> None:
        """Recorded is what changes something, or holds something for another reason than before. That all is well is
        only news after it was not."""
        advised = decision.advised if decision.advised != decision.desired else None
        if decision.desired == have and decision.reason in _WELL and advised is None:
            self._told.pop(key, None)
            return
        told = f"{decision.reason}:{have}:{decision.desired}:{advised}"
        if self._told.get(key) == told:
            return
        self._told[key] = told
        logger.info(
            "event=scale function=%s have=%d desired=%d reason=%s detail=%s",
            key[1], have, decision.desired, decision.reason, decision.detail,
        )  # fmt: skip
        self._decisions.record(
            "scale", key[1], None, None, f"{decision.reason}: {decision.detail}",
            {**decision.inputs, "have": have, "desired": decision.desired}, tenant=key[0],
        )  # fmt: skip
