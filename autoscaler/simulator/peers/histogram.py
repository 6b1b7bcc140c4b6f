"""The hybrid histogram policy: how long a function was idle before says when to load it and when to let it go.

Shahrad et al., Serverless in the Wild (ATC 2020), with its parameters: bins of one minute over four hours; the replica
goes as soon as it is idle, comes back at the 5th percentile of idle times less 10 %, and stays until the 99th plus
10 %; a head in the first bin means it is not let go at all. Bins whose counts vary by less than twice their mean say
nothing: the replica stays for the whole range. More than half the idle times beyond the range: the next one is
predicted as a time series, with a margin of 15 %.
Limits: the paper fits an ARIMA by a search over orders; here the autoregressive ones of order 0 to 2, differenced or
not, by AIC. The load begins a start time before the window, so that the replica is ready in it (kinder than the paper).
Replicas beyond the first are by load.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.peers.by_load import ByLoad
from autoscaler.simulator.policy import View, Wish
from autoscaler.simulator.result import Prices
from autoscaler.simulator.workload import Workload

BIN_S: Final = 60.0
SERIES_GAPS: Final = 64
"""The last ones, for the time series."""


@dataclass(frozen=True, slots=True)
class HistogramSpec:
    """The paper's values."""

    range_s: float = 4 * 3600.0
    head: float = 0.05
    tail: float = 0.99
    margin: float = 0.10
    cv_least: float = 2.0
    gaps_least: int = 10
    """Before so many idle times, the histogram is not representative."""
    outside_most: float = 0.5
    series_margin: float = 0.15


class Stage(enum.Enum):
    LOADED = "loaded"
    AWAY = "away"
    PREWARMED = "prewarmed"


@dataclass(slots=True)
class Idling:
    """What is known of one function's idle times, and where it is between two of them."""

    counts: list[int]
    start_s: float
    gaps: int = 0
    outside: int = 0
    squares: int = 0
    seen: int = 0
    """Of the view's gaps."""
    last: list[float] = field(default_factory=list)
    stage: Stage = Stage.LOADED
    arrivals: int = 0
    until_s: float = 0.0
    made_at: int = -1
    """`gaps` when the windows were worked out."""
    windows_s: tuple[float, float] = (0.0, 0.0)

    def note(self, gap_s: float) -> None:
        self.gaps += 1
        self.last.append(gap_s)
        if len(self.last) > 2 * SERIES_GAPS:
            del self.last[:-SERIES_GAPS]
        place = int(gap_s / BIN_S)
        if place >= len(self.counts):
            self.outside += 1
            return
        self.squares += 2 * self.counts[place] + 1
        self.counts[place] += 1

    def spread(self) -> float:
        """Coefficient of variation of the bins' counts."""
        inside, bins = self.gaps - self.outside, len(self.counts)
        if inside == 0:
            return 0.0
        mean = inside / bins
        return float(max(self.squares / bins - mean * mean, 0.0) ** 0.5 / mean)

    def percentile(self, share: float) -> int:
        """The bin that holds it."""
        needed = share * (self.gaps - self.outside)
        passed = 0
        for place, count in enumerate(self.counts):
            passed += count
            if passed >= needed and count:
                return place
        return len(self.counts) - 1


class Histogram(ByLoad):
    def __init__(
        self, spec: HistogramSpec | None = None, *, utilisation: float = 1.0, scale_in_s: float = 60.0
    ) -> None:
        super().__init__("histogram", utilisation=utilisation, scale_in_s=scale_in_s)
        self._spec = spec or HistogramSpec()
        self._functions: list[Idling] = []

    def begin(self, workload: Workload, cluster: Cluster, prices: Prices, now_s: float) -> None:
        super().begin(workload, cluster, prices, now_s)
        bins = max(int(self._spec.range_s / BIN_S), 1)
        self._functions = []
        for index, function in enumerate(workload.functions):
            idling = Idling([0] * bins, function.starts.expected_s() or 0.0)
            for gap_s in past_gaps(workload, index):
                idling.note(gap_s)
            self._functions.append(idling)

    def keep_alive_s(self, view: View) -> float:
        return self._idle_after_s(self._functions[view.index])

    def on_arrival(self, view: View, now_s: float) -> Wish:
        self._functions[view.index].stage = Stage.LOADED
        return self.by_load(view, now_s)

    def on_idle(self, view: View, now_s: float) -> Wish:
        idling = self._functions[view.index]
        gaps_s = view.gaps_s
        for place in range(idling.seen, len(gaps_s)):
            idling.note(gaps_s[place])
        idling.seen = len(gaps_s)
        idle_since_s = view.idle_since_s
        if idle_since_s is None:
            return self.by_load(view, now_s)
        back_s, gone_s = self._windows(idling)
        idling.arrivals = view.arrivals
        idling.until_s = idle_since_s + gone_s
        back_at_s = idle_since_s + back_s - idling.start_s
        if back_s > 0 and now_s < back_at_s:
            idling.stage = Stage.AWAY
            return Wish(0, back_at_s, self._idle_after_s(idling))
        if not view.ready and not view.starting:
            return Wish(0, None, self._idle_after_s(idling))  # nothing has come yet, so nothing is kept
        return self._warm(idling, now_s)

    def on_timer(self, view: View, now_s: float) -> Wish:
        idling = self._functions[view.index]
        if idling.stage is Stage.LOADED or view.arrivals != idling.arrivals or view.waiting or view.running:
            idling.stage = Stage.LOADED
            return self.by_load(view, now_s)
        return self._warm(idling, now_s)

    def _warm(self, idling: Idling, now_s: float) -> Wish:
        """Idle, and back (or never gone) until the keep-alive ends."""
        if now_s >= idling.until_s:
            idling.stage = Stage.AWAY
            return Wish(0, None, self._idle_after_s(idling))
        idling.stage = Stage.PREWARMED
        return Wish(1, idling.until_s, self._idle_after_s(idling))

    def _idle_after_s(self, idling: Idling) -> float:
        """Where nothing is let go at once, it is looked at after a bin's length, so that its gaps are learned."""
        back_s, gone_s = self._windows(idling)
        return 0.0 if back_s > 0 else min(gone_s, BIN_S)

    def _windows(self, idling: Idling) -> tuple[float, float]:
        """(when to be back, when to go), in seconds since the last activity."""
        if idling.made_at != idling.gaps:
            idling.made_at = idling.gaps
            idling.windows_s = self._made(idling)
        return idling.windows_s

    def _made(self, idling: Idling) -> tuple[float, float]:
        spec = self._spec
        if idling.gaps < spec.gaps_least:
            return 0.0, spec.range_s
        if idling.outside > spec.outside_most * idling.gaps:
            expected_s = next_of_series(idling.last[-SERIES_GAPS:])
            return max(expected_s * (1 - spec.series_margin), 0.0), expected_s * (1 + spec.series_margin)
        if idling.spread() < spec.cv_least:
            return 0.0, spec.range_s
        head_s = idling.percentile(spec.head) * BIN_S
        tail_s = (idling.percentile(spec.tail) + 1) * BIN_S
        return head_s * (1 - spec.margin), tail_s * (1 + spec.margin)


def past_gaps(workload: Workload, index: int) -> list[float]:
    """Idle times between what came before, each request taken to last as long as one alone."""
    mine = workload.function == index
    arrival_s = workload.arrival_s[mine]
    if len(arrival_s) < 2:
        return []
    service = workload.functions[index].service
    prompt, output = workload.prompt_tokens[mine].astype(float), workload.output_tokens[mine].astype(float)
    context = service.step_per_context_token_s * (prompt + output / 2)
    lasted_s = prompt / service.prefill_tokens_per_s + np.maximum(output, 1) * (service.step_s(1) + context)
    free_s = np.maximum.accumulate(arrival_s + lasted_s)
    gaps_s = arrival_s[1:] - free_s[:-1]
    return [float(gap_s) for gap_s in gaps_s[gaps_s > 0]]


def next_of_series(gaps_s: Sequence[float]) -> float:
    """The next value, by the autoregression that the AIC prefers; the mean where there is too little to fit."""
    series = np.asarray(gaps_s, np.float64)
    best_aic, best = np.inf, float(series.mean())
    for differenced in (False, True):
        values = np.diff(series) if differenced else series
        for order in (0, 1, 2):
            rows = len(values) - 2  # the same ones for every order, so that their AICs compare
            if rows < 8:
                continue
            wanted = values[2:]
            columns = [np.ones(rows)] + [values[2 - lag : len(values) - lag] for lag in range(1, order + 1)]
            design = np.stack(columns, axis=1)
            solved, *_ = np.linalg.lstsq(design, wanted, rcond=None)
            error = float(((wanted - design @ solved) ** 2).mean())
            aic = rows * np.log(max(error, 1e-12)) + 2 * (order + 2)
            if aic < best_aic:
                best_aic = aic
                latest = np.concatenate([[1.0], values[::-1][:order]])
                best = float(latest @ solved) + (float(series[-1]) if differenced else 0.0)
    return min(max(best, 0.0), 2.0 * float(series.max()))
