"""Windows in which so many requests came: traffic that was published as rates, and requests drawn from it.

A window of n requests whose gaps had a coefficient of variation cv gets n requests whose n + 1 gaps are gamma
distributed with shape 1/cv^2 and scaled to fill it: the count is kept exactly, the spacing is drawn. cv = 1 is a
Poisson process given its count. Limits: bursts do not reach over the edge of a window; gaps of one window are
independent; whole functions are chosen before anything is drawn, so that what is left out costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from control_plane.errors import InvalidRequest
from control_plane.simulation.lengths import TokenLengths
from control_plane.simulation.trace import Floats, Ints, Trace

CV_MIN: Final = 1e-3
REQUESTS_MAX: Final = 50_000_000
"""More than this is 1 GB of columns: choose fewer functions, or thin."""


@dataclass(frozen=True, slots=True)
class Rates:
    source: str
    names: tuple[str, ...]
    window_s: float
    function: Ints
    start_s: Floats
    count: NDArray[np.int64]
    cv: Floats
    length_s: float
    origin_s: float = 0.0
    notes: tuple[str, ...] = ()

    def requests_by_function(self) -> NDArray[np.int64]:
        totals = np.zeros(len(self.names), np.int64)
        np.add.at(totals, self.function, self.count)
        return totals

    def of_functions(self, places: Sequence[int]) -> Rates:
        new_place = np.full(len(self.names), -1, np.int32)
        new_place[list(places)] = np.arange(len(places), dtype=np.int32)
        kept = new_place[self.function] >= 0
        return replace(
            self,
            names=tuple(self.names[place] for place in places),
            function=new_place[self.function[kept]],
            start_s=self.start_s[kept],
            count=self.count[kept],
            cv=self.cv[kept],
            notes=(*self.notes, f"{len(places)} of {len(self.names)} functions"),
        )

    def between(self, from_s: float, until_s: float) -> Rates:
        """The windows that begin within [from_s, until_s)."""
        kept = (self.start_s >= from_s) & (self.start_s < until_s)
        return replace(
            self,
            function=self.function[kept],
            start_s=self.start_s[kept],
            count=self.count[kept],
            cv=self.cv[kept],
            notes=(*self.notes, f"seconds {from_s:g} to {until_s:g} only"),
        )

    def thinned(self, share: float, seed: int) -> Rates:
        """Each request of a window is kept with chance `share`, before any is drawn."""
        if not 0 < share <= 1:
            raise InvalidRequest(f"a share of {share} cannot be kept: give one above 0 and at most 1")
        if share == 1:
            return self
        # Of gaps between every k-th request of independent gaps, the variance per mean falls with k; what is kept at
        # random tends to Poisson: cv^2 - 1 shrinks by the share (Cox and Isham, Point Processes, 1980, section 4.3).
        cv = np.sqrt(np.maximum(1.0 + share * (self.cv**2 - 1.0), CV_MIN**2))
        kept = np.random.default_rng(seed).binomial(self.count, share)
        note = f"thinned: each request kept with a chance of {share:g} (seed {seed})"
        return replace(self, count=kept, cv=cv, notes=(*self.notes, note))

    def drawn(self, lengths: TokenLengths, seed: int) -> Trace:
        """Requests, by the seed alone: the same rates and seed give the same requests."""
        total = int(self.count.sum())
        if total > REQUESTS_MAX:
            raise InvalidRequest(
                f"{self.source} has {total:,} requests, more than the {REQUESTS_MAX:,} that are replayed one by one: "
                "choose fewer functions, bound the requests, or thin them",
                code="too_many_requests",
            )
        rng = np.random.default_rng(seed)
        some = self.count > 0
        counts = self.count[some]
        offsets_s = spaced(counts, self.cv[some], self.window_s, rng)
        arrival_s = np.repeat(self.start_s[some], counts) + offsets_s
        function = np.repeat(self.function[some], counts)
        order = np.argsort(arrival_s, kind="stable")
        prompt_tokens, output_tokens = lengths.drawn(total, rng)
        drawn = f"arrivals drawn from {self.window_s:g} s counts and cv (seed {seed})"
        return Trace(
            source=self.source,
            names=self.names,
            arrival_s=arrival_s[order],
            function=function[order],
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            length_s=self.length_s,
            origin_s=self.origin_s,
            notes=(*self.notes, drawn, f"lengths drawn: {lengths.told()}"),
        )


def spaced(counts: NDArray[np.int64], cv: Floats, window_s: float, rng: np.random.Generator) -> Floats:
    """For each window its requests' offsets, ascending within the window and below its length."""
    shape = 1.0 / np.maximum(cv, CV_MIN) ** 2
    gaps = rng.standard_gamma(np.repeat(shape, counts + 1))
    ends = np.cumsum(counts + 1)
    span = np.add.reduceat(gaps, ends - (counts + 1)) if len(counts) else gaps
    # Each window's gaps sum to 1 before they are added up, so that a quiet one keeps its digits behind busy ones.
    reached = np.cumsum(gaps / np.repeat(np.where(span > 0, span, 1.0), counts + 1))
    before = np.concatenate([[0.0], reached[ends[:-1] - 1]]) if len(counts) else span
    inside = np.ones(len(gaps), bool)
    inside[ends - 1] = False  # the last gap of a window is the one behind its last request
    share = (reached - np.repeat(before, counts + 1))[inside]
    # A shape below 1e-4 can draw nothing but zeros: one burst, somewhere in the window.
    burst_at = np.repeat(rng.random(len(counts)), counts)
    share = np.where(np.repeat(span > 0, counts), share, burst_at)
    within: Floats = np.clip(share, 0.0, 1.0 - 1e-9) * window_s
    return within


def at_quantiles(totals: NDArray[np.int64], wanted: int, requests_at_most: int | None = None) -> list[int]:
    """`wanted` functions at fixed quantiles of their requests, among the quietest that together stay within a bound.

    Of the functions with traffic, in the order of their requests, the longest beginning is taken of which the ones at
    the quantiles (i + 0.5) / wanted make at most `requests_at_most`. Fewer than `wanted`: all there are.
    """
    order = np.argsort(totals, kind="stable")
    order = order[totals[order] > 0]
    for among in range(len(order), 0, -1):
        taken = min(wanted, among)
        places = order[((np.arange(taken) + 0.5) / taken * among).astype(int)]
        if requests_at_most is None or int(totals[places].sum()) <= requests_at_most:
            return sorted(int(place) for place in places)
    return []
