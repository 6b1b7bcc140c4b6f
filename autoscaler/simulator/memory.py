"""What Stoker remembers of a simulated function: the same `History` as live, filled in bulk instead of every ten
seconds.

Limits: requests are told as ended when they came, with the service time of a request that shares its replica as those
lately did; both are within a window of what would be observed live.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoscaler.service import ServiceModel
from autoscaler.simulator.policy import View
from autoscaler.simulator.workload import Workload
from autoscaler.windows import History

Numbers: TypeAlias = NDArray[np.float64] | NDArray[np.int32]
FINE_S: Final = 10
_SPANS: Final = ((600, 86_400.0), (60, 3_600.0), (10, 0.0))
"""Windows of the past: of this length, up to this long before now."""


class Memory:
    def __init__(self, service: ServiceModel, epoch_s: float) -> None:
        self.history = History()
        self._service = service
        self._epoch_s = epoch_s
        self._arrivals = 0
        self._gaps = 0
        self._fed_s = 0.0
        """On the simulation's clock: up to here everything is in the history."""
        self._blind_s = float("-inf")
        """Until then the wall clock was being set."""
        self._prompt_tokens = self._output_tokens = 0
        self.prompt_tokens = 0.0
        """Mean of the last requests'."""
        self.output_tokens = 0.0

    def learn(self, past: Workload, index: int, now_s: float) -> None:
        """What was before `now_s`: the function's own requests of `past`."""
        mine = np.flatnonzero(past.function == index)
        arrival_s = past.arrival_s[mine]
        prompts, outputs = past.prompt_tokens[mine], past.output_tokens[mine]
        self._fed_s = _floor(now_s)
        if not len(mine):
            if past.arrival_s.size:
                self.history.observed(_floor(float(past.arrival_s[0])) + self._epoch_s, self._fed_s + self._epoch_s)
            return
        self.prompt_tokens, self.output_tokens = float(prompts[-1000:].mean()), float(outputs[-1000:].mean())
        begin_s = _floor(float(past.arrival_s[0]), 600)
        for length_s, before_s in _SPANS:
            end_s = max(_floor(now_s - before_s, 600 if before_s else FINE_S), begin_s)
            self._add(length_s, begin_s, end_s, arrival_s, prompts, outputs)
            begin_s = end_s
        ends = np.maximum.accumulate(arrival_s + self._alone_s(prompts, outputs))
        for where in np.flatnonzero(arrival_s[1:] > ends[:-1])[-512:]:
            self._gap(float(ends[where]), float(arrival_s[where + 1] - ends[where]))

    def feed(self, view: View, now_s: float) -> None:
        """What has happened since."""
        until_s = _floor(now_s)
        if until_s <= self._fed_s:
            return
        times = view.arrival_times_s
        new = len(times) - self._arrivals
        if new:
            prompts = (view.prompt_tokens_sum - self._prompt_tokens) / new
            outputs = (view.output_tokens_sum - self._output_tokens) / new
            self._prompt_tokens, self._output_tokens = view.prompt_tokens_sum, view.output_tokens_sum
            share = min(new / 100.0, 1.0) if self.prompt_tokens else 1.0
            self.prompt_tokens += share * (prompts - self.prompt_tokens)
            self.output_tokens += share * (outputs - self.output_tokens)
            arrived = np.array(times[self._arrivals :])
            begin_s = max(_floor(float(arrived[0])), self._fed_s)
            self.history.observed(self._fed_s + self._epoch_s, begin_s + self._epoch_s)
            whole = arrived[arrived < until_s]
            self._add(
                FINE_S,
                begin_s,
                max(until_s, begin_s),
                whole,
                np.full(len(whole), prompts),
                np.full(len(whole), outputs),
            )
            self._arrivals += len(whole)
            # Those of the window that has not ended come with the next.
            self._prompt_tokens -= round(prompts * (new - len(whole)))
            self._output_tokens -= round(outputs * (new - len(whole)))
        else:
            self.history.observed(self._fed_s + self._epoch_s, until_s + self._epoch_s)
        self._fed_s = until_s
        gaps: Sequence[float] = view.gaps_s
        for number in range(max(self._gaps, len(gaps) - 512), len(gaps)):
            if view.gap_starts_s[number] >= self._blind_s:
                self._gap(view.gap_starts_s[number], gaps[number])
        self._gaps = len(gaps)

    def set_clock(self, by_s: float, now_s: float) -> None:
        """The wall clock was set by whole windows. As live, the window in which it was is not told of, nor is a gap
        that reaches over it, and what an earlier clock had shown of the time ahead goes."""
        self._epoch_s += by_s
        self._fed_s = self._blind_s = _floor(now_s) + FINE_S
        if by_s < 0:
            self.history.forget_after(_floor(now_s) + self._epoch_s)

    def _gap(self, start_s: float, length_s: float) -> None:
        self.history.note_gap(start_s + self._epoch_s, length_s)

    def _alone_s(self, prompts: Numbers, outputs: Numbers) -> NDArray[np.float64]:
        service = self._service
        return np.asarray(prompts / service.prefill_tokens_per_s + np.maximum(outputs, 1) * service.step_s(1))

    def _add(
        self,
        length_s: int,
        begin_s: float,
        end_s: float,
        arrival_s: NDArray[np.float64],
        prompts: Numbers,
        outputs: Numbers,
    ) -> None:
        steps = round((end_s - begin_s) / length_s)
        if steps <= 0:
            return
        first, last = np.searchsorted(arrival_s, [begin_s, end_s])
        cells = ((arrival_s[first:last] - begin_s) // length_s).astype(np.int64)
        prompts, outputs = prompts[first:last], outputs[first:last]

        def summed(values: Numbers | None = None) -> NDArray[np.float64]:
            return np.bincount(cells, weights=values, minlength=steps)[:steps].astype(np.float64)

        arrivals, busy_s = summed(), summed(self._alone_s(prompts, outputs))
        self.history.add_many(
            length_s,
            begin_s + self._epoch_s,
            end_s + self._epoch_s,
            {
                "arrivals": arrivals,
                "prompt_tokens": summed(prompts),
                "output_tokens": summed(outputs),
                "ended": arrivals,
                "ended_output_tokens": summed(outputs),
                "ended_output_tokens_sq": summed(outputs.astype(np.float64) ** 2),
                "service_s_sum": busy_s,
                "mean_concurrency": busy_s / length_s,
            },
        )


def _floor(at_s: float, length_s: int = FINE_S) -> float:
    return float(at_s // length_s * length_s)
