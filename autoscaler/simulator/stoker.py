"""Stoker as a policy of the simulator: `scaling.decide` with the forecasts of `choosing`, as they run live.

Each function is decided upon at the same events as live (a request that waits, idleness, a start that is over, a moment
the decision named), its forecast made anew before a decision once it is `refit_s` old. Limits: a change of demand that
leaves nobody waiting is looked at when more run than the replicas have places for, and not 50 ms after each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from autoscaler.admission import Line, Load, Server, judge, line_up
from autoscaler.choosing import Choosing
from autoscaler.cold_waiters import ColdWaiters
from autoscaler.decision import Decision, Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.forecast import Costs, Forecast
from autoscaler.homes import POOL
from autoscaler.needs import places_of
from autoscaler.peaks import Peaks
from autoscaler.pooling import Use, chance_of_use
from autoscaler.scaling import decide
from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.memory import Memory
from autoscaler.simulator.policy import Asked, View, Wish
from autoscaler.simulator.result import Prices
from autoscaler.simulator.workload import SimFunction, Workload

REFIT_S: Final = 60.0
QUIET_REFIT_S: Final = 600.0
"""While nothing happens."""
IDLE_LOOK_S: Final = 0.5
"""Idleness below this is not looked at: no keep-alive is shorter."""
GAPS_KEPT: Final = 64
STARTS_KEPT: Final = 16
WANTED_S: Final = 60.0
LINE_S: Final = 0.05
"""How old the line of places may be by which admission judges, as live (`control_plane.objectives`)."""


@dataclass(slots=True)
class _Known:
    """What is kept of one function."""

    function: SimFunction
    spec: ScalingSpec
    memory: Memory
    choosing: Choosing | None
    forecast: Forecast | None = None
    fitted_s: float = float("-inf")
    peaks: Peaks = field(default_factory=Peaks)
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    gaps_seen: int = 0
    starts_seen: int = -1
    asked_s: float = 0.0
    """When a replica was last asked for."""
    waiters: ColdWaiters = field(default_factory=ColdWaiters)
    start_s: float = 0.0
    start_high_s: float = 0.0
    lined: tuple[float, int, int, Line] | None = None
    """When places were last lined up, with how many ready and starting replicas."""
    epoch_s: float = 0.0
    """What its wall clock is ahead of the simulation's."""
    clock_set: int = 0
    """How often it was set."""


class Stoker(Asked):
    def __init__(
        self,
        *,
        forecasts: bool = True,
        refit_s: float = REFIT_S,
        restarts_per_hour: float | None = None,
        clock_steps: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`clock_steps`: from when on the wall clock is by how much ahead of where it was (behind: negative)."""
        self.name = "stoker" if forecasts else "stoker:reactive"
        self.reasons: dict[Reason, int] = {}
        """Decisions by reason."""
        self._forecasts = forecasts
        self._refit_s = refit_s
        self._restarts_per_hour = restarts_per_hour
        self._clock_steps = clock_steps
        self._known: list[_Known] = []
        self._epoch_s = self._begin_s = 0.0

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        self._epoch_s, self._begin_s = workload.epoch_s, now_s
        self._known = []
        for index, function in enumerate(workload.functions):
            spec = ScalingSpec(
                min_replicas=function.min_replicas,
                max_replicas=function.max_replicas,
                target_concurrency=function.target_concurrency or None,
                keep_alive_s=function.keep_alive_s,
                waiting_weight=prices.waiting_weight,
                devices=function.held_devices,
                restarts_per_hour=self._restarts_per_hour,
                priority=function.priority,
            )
            memory = Memory(function.service, workload.epoch_s)
            memory.learn(workload, index, now_s)
            known = _Known(function, spec, memory, None, epoch_s=self._epoch_s)
            known.gaps_s.extend(memory.history.gaps_s[-GAPS_KEPT:].tolist())
            self._measure_starts(known, ())
            if self._forecasts:
                at_s = now_s + self._epoch_s
                known.choosing = Choosing.rebuilt(memory.history, at_s, self._costs(known), self._places(known))
            self._known.append(known)

    def on_arrival(self, view: View, now_s: float) -> Wish:
        return self._wish(view, now_s)

    def on_idle(self, view: View, now_s: float) -> Wish:
        return self._wish(view, now_s)

    def on_timer(self, view: View, now_s: float) -> Wish:
        return self._wish(view, now_s)

    def admits(self, view: View, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
        """Early refusal as live. Of outputs no more is known than their mean: half of it is left of what runs."""
        known = self._known[view.index]
        ahead = view.waiting - 1  # the one that is asked about is the last
        line = self._line(known, view, now_s)
        return not judge(line, known.function.service, prompt_tokens, ahead, known.function.objective_s).refused

    def _line(self, known: _Known, view: View, now_s: float) -> Line:
        lined = known.lined
        if lined is not None and now_s - lined[0] < LINE_S and lined[1:3] == (view.ready, view.starting):
            return lined[3]
        service = known.function.service
        prompts, outputs = self._tokens(known, view)
        load = Load(
            service,
            tuple(
                Server((outputs / 2,) * each, service.full_batch(round(prompts), round(outputs)))
                for each in view.running_by_replica()
            ),
            (known.start_s / 2,) * view.starting,
            max(prompts, 1.0),
            max(outputs, 1.0),
        )
        line = line_up(load)
        known.lined = (now_s, view.ready, view.starting, line)
        return line

    def loss_s(self, view: View, now_s: float) -> float | None:
        known = self._known[view.index]
        idle_s = now_s - (now_s if view.idle_since_s is None else view.idle_since_s)
        chance = chance_of_use(Use(known.function.name, idle_s, tuple(known.gaps_s), False), WANTED_S)
        return (0.5 if chance is None else chance) * known.start_s

    # --- one decision ---

    def _wish(self, view: View, now_s: float) -> Wish:
        known = self._known[view.index]
        self._look(known, view, now_s)
        quiet = not view.waiting and not view.running and not view.ready
        again_s = known.fitted_s + (QUIET_REFIT_S if quiet else self._refit_s)
        if known.choosing is not None and now_s >= again_s:
            self._refit(known, view, now_s)
            again_s = now_s + (QUIET_REFIT_S if quiet else self._refit_s)
        observed = self._observed(known, view, now_s)
        decision = decide(known.spec, observed, known.forecast, now_s)
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        return self._answer(known, view, observed, decision, again_s)

    def _answer(self, known: _Known, view: View, observed: Observed, decision: Decision, refit_s: float) -> Wish:
        ask_s = decision.ask_again_s
        if known.choosing is not None and (ask_s is None or ask_s > refit_s):
            ask_s = refit_s
        if decision.desired > view.ready + view.starting:
            known.asked_s = decision.now_s
        places = int(places_of(known.spec, observed) * max(view.ready, 1))
        return Wish(decision.desired, ask_s, IDLE_LOOK_S, places)

    def _look(self, known: _Known, view: View, now_s: float) -> None:
        known.waiters.note(view.ready, view.waiting, view.arrivals)
        demand = view.waiting + view.running
        known.peaks.note(now_s, max(view.take_peak(), demand))
        known.peaks.note(now_s, demand)
        gaps = view.gaps_s
        if len(gaps) > known.gaps_seen:
            known.gaps_s.extend(gaps[max(known.gaps_seen, len(gaps) - GAPS_KEPT) :])
            known.gaps_seen = len(gaps)
        if len(view.starts_s) != known.starts_seen:
            self._measure_starts(known, view.starts_s[-STARTS_KEPT:])
            known.starts_seen = len(view.starts_s)

    def _observed(self, known: _Known, view: View, now_s: float) -> Observed:
        times, service = view.arrival_times_s, known.function.service
        count = len(times)
        prompts, outputs = self._tokens(known, view)
        ready = tuple(ReplicaView("", Phase.READY, running, 0.0) for running in view.running_by_replica())
        idle_since_s = view.idle_since_s
        window_s = known.spec.scale_in_window_s
        return Observed(
            waiting=view.waiting,
            replicas=ready + (ReplicaView("", Phase.STARTING, 0, known.asked_s),) * view.starting,
            peak_demand=known.peaks.since(now_s - window_s),
            window_covered_s=min(now_s - self._begin_s, window_s),
            last_activity_s=now_s if idle_since_s is None else idle_since_s,
            generation=view.arrivals,
            cold_start_s=known.start_s,
            gaps_s=tuple(known.gaps_s),
            cold_start_high_s=known.start_high_s,
            service=service,
            prompt_tokens=prompts,
            output_tokens=outputs,
            waiting_since_s=view.waiting_since_s,
            waiting_tokens=int(view.waiting * prompts),
            running_tokens=int(view.running * (prompts + outputs / 2)),
            arrivals_in_10_s=count - bisect_left(times, now_s - 10.0),
            arrivals_in_30_s=count - bisect_left(times, now_s - 30.0),
            arrivals_in_60_s=count - bisect_left(times, now_s - 60.0),
            peaks=known.peaks.steps(),
            seen_s=now_s,
            cold_waiters=known.waiters.mean,
        )

    @staticmethod
    def _tokens(known: _Known, view: View) -> tuple[float, float]:
        """Means of prompts and outputs: of those remembered, or while nothing is, of those seen."""
        memory = known.memory
        if memory.prompt_tokens or not view.arrivals:
            return memory.prompt_tokens, memory.output_tokens
        return view.prompt_tokens_sum / view.arrivals, view.output_tokens_sum / view.arrivals

    def _measure_starts(self, known: _Known, starts_s: Sequence[float]) -> None:
        """As live: by the last ones measured; before there were any, by what is known of starts from the pool."""
        starts = known.function.starts
        if len(starts_s) >= 3:
            ordered = sorted(starts_s)
            known.start_s, known.start_high_s = median(ordered), ordered[int(0.9 * (len(ordered) - 1))]
            return
        tier = POOL if starts.expected_s(POOL) is not None else None
        known.start_s = starts.quantile_s(0.5, tier) or 0.0
        known.start_high_s = starts.quantile_s(0.9, tier) or known.start_s

    # --- forecasts ---

    def _refit(self, known: _Known, view: View, now_s: float) -> None:
        assert known.choosing is not None
        known.memory.feed(view, now_s)
        for at_s, by_s in self._clock_steps[known.clock_set :]:
            if at_s > now_s:
                break
            known.memory.set_clock(by_s, now_s)
            known.epoch_s += by_s
            known.clock_set += 1
        idle_since_s = view.idle_since_s
        said = known.choosing.refit(
            known.memory.history,
            now_s + known.epoch_s,
            self._costs(known),
            idle_since_s=None if idle_since_s is None else idle_since_s + known.epoch_s,
            places=self._places(known),
            waited=known.waiters.mean,
        )
        known.forecast = said.moved(-known.epoch_s)
        known.fitted_s = now_s

    def _costs(self, known: _Known) -> Costs:
        return Costs(known.start_s, max(round(known.spec.devices), 1), known.spec.waiting_weight)

    @staticmethod
    def _places(known: _Known) -> int:
        if known.spec.target_concurrency is not None:
            return max(int(known.spec.target_concurrency), 1)
        memory = known.memory
        return known.function.service.full_batch(round(memory.prompt_tokens), round(memory.output_tokens))
