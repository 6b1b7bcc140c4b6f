"""The cheapest plan for one function whose future is known: how many replicas from when to when.

Requests are cut into segments (bursts, or pieces of steady load). What n replicas would cost a segment is their time
plus the weight of its requests' waits, which are taken from a replay with n replicas throughout. Between segments a
replica is held over the gap or let go and started again in time, whichever costs less; dynamic programming over
segments and replicas finds the cheapest sequence (Bellman, 1957; the gaps alone are ski rental with hindsight).
A request at zero is never made to wait for a later one: starting at once is the rule for every policy here.
Limits: what waits at the end of a segment is counted at the replica count of that segment; the start of a replica is
ordered by the distribution of starts, not by the start that will be drawn; above `EACH_TO` replicas only each count
that is a third or so more than the one before is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoscaler.service import ServiceModel
from autoscaler.simulator.workload import SimFunction, Workload

DRAWS: Final = 64
EACH_TO: Final = 6
CUT_S: Final = 10.0
"""Steady load is planned in pieces of at least this length."""

Waits = Callable[[int], NDArray[np.float64]]
"""Seconds to each request's first token with so many replicas throughout."""


def counts(most: int) -> list[int]:
    """Replica counts that a plan chooses from."""
    found = list(range(1, min(most, EACH_TO) + 1))
    while found[-1] < most:
        found.append(min(-(-found[-1] * 4 // 3), most))
    return found


@dataclass(frozen=True, slots=True)
class StartCost:
    """When to order a start that is to be ready at a known moment, and what ordering it costs."""

    lead_s: float
    device_s: float
    """Device-seconds until it is ready, and what is expected to be waited for it, per replica."""


def start_cost(function: SimFunction, weight: float, waiters: float = 1.0) -> StartCost:
    """The lead with the least expected cost: earlier holds devices, later makes people wait (the newsvendor)."""
    devices = function.held_devices
    draws = np.asarray([function.starts.draw((place + 0.5) / DRAWS) for place in range(DRAWS)])
    costs = [
        float((devices * np.maximum(draws, lead_s) + weight * waiters * np.maximum(draws - lead_s, 0.0)).mean())
        for lead_s in draws
    ]
    best = int(np.argmin(costs))
    return StartCost(float(draws[best]), costs[best])


@dataclass(frozen=True, slots=True)
class Plan:
    """Replicas wanted from each moment on."""

    at_s: list[float]
    level: list[int]
    start: StartCost


@dataclass(frozen=True, slots=True)
class _Segments:
    first: NDArray[np.int64]
    """Place of each one's first request."""
    begin_s: NDArray[np.float64]


def plan_for(workload: Workload, waits: Waits, weight: float, most: int | None = None) -> Plan:
    """`workload`: of one function. `most`: replicas at most (None: as many as pay)."""
    function = workload.functions[0]
    start = start_cost(function, weight)
    arrival_s = workload.arrival_s
    if len(arrival_s) == 0:
        return Plan([], [], start)
    hold_s = start.device_s / function.held_devices
    segments = _cut(arrival_s, max(hold_s / 4, 1.0), max(hold_s, CUT_S))
    tried = counts(max(function.max_replicas if most is None else min(most, function.max_replicas), 1))
    costs, ends = _costs(workload, segments, waits, weight, start, tried)
    columns = [0] * len(segments.first)
    if costs.shape[1] > 1:
        columns = _cheapest(segments, costs, ends, start, function, tried)
    return _moments(segments, columns, tried, ends, start, hold_s)


def _cut(arrival_s: NDArray[np.float64], gap_s: float, length_s: float) -> _Segments:
    """A segment ends where a gap is longer than `gap_s`, and every `length_s` of what has no such gap."""
    bursts = np.concatenate([[0], np.flatnonzero(np.diff(arrival_s) > gap_s) + 1])
    burst_begin_s = np.repeat(arrival_s[bursts], np.diff(np.append(bursts, len(arrival_s))))
    burst_of = np.repeat(np.arange(len(bursts)), np.diff(np.append(bursts, len(arrival_s))))
    piece = np.floor((arrival_s - burst_begin_s) / length_s).astype(np.int64)
    changes = (np.diff(burst_of) != 0) | (np.diff(piece) != 0)
    first = np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64)
    return _Segments(first, arrival_s[first])


def _costs(
    workload: Workload,
    segments: _Segments,
    waits: Waits,
    weight: float,
    start: StartCost,
    tried: list[int],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By segment and replicas: device-seconds and weighted waits; and when its last request ends."""
    function = workload.functions[0]
    columns: list[NDArray[np.float64]] = []
    ended: list[NDArray[np.float64]] = []
    following_s = np.append(segments.begin_s[1:], np.inf)
    before_s, fewer = np.inf, 0
    for replicas in tried:
        waited_s = waits(replicas)
        if columns and weight * (before_s - float(waited_s.sum())) < start.device_s * (replicas - fewer):
            break  # the next replicas would not even earn their first start
        before_s, fewer = float(waited_s.sum()), replicas
        end_s = ends_of(workload, waited_s, replicas, function.service)
        segment_end_s = np.maximum.accumulate(np.maximum.reduceat(end_s, segments.first))
        held_until_s = np.minimum(segment_end_s, following_s)
        held_s = np.maximum(held_until_s - segments.begin_s, 0.0) * replicas * function.held_devices
        columns.append(held_s + weight * np.add.reduceat(waited_s, segments.first))
        ended.append(held_until_s)
    return np.stack(columns, axis=1), np.stack(ended, axis=1)


def ends_of(
    workload: Workload, waited_s: NDArray[np.float64], replicas: int, service: ServiceModel
) -> NDArray[np.float64]:
    """When each request ends, its steps taken as long as with the requests that run beside it."""
    arrival_s, prompt = workload.arrival_s, workload.prompt_tokens.astype(np.float64)
    output = np.maximum(workload.output_tokens, 1).astype(np.float64)
    context = prompt + output / 2
    place = np.arange(len(arrival_s))
    beside = np.ones(len(arrival_s))
    end_s = arrival_s
    for _ in range(2):
        step_s = service.step_base_s + beside * (
            service.step_per_request_s + service.step_per_context_token_s * context
        )
        end_s = arrival_s + waited_s + (output - 1) * step_s
        gone = np.searchsorted(np.sort(end_s), arrival_s)
        beside = np.clip((place + 1 - gone) / replicas, 1.0, service.max_requests)
    return end_s


def _cheapest(
    segments: _Segments,
    costs: NDArray[np.float64],
    ends: NDArray[np.float64],
    start: StartCost,
    function: SimFunction,
    tried: list[int],
) -> list[int]:
    """The column of each segment, by dynamic programming forward and the choices traced back."""
    levels = costs.shape[1]
    device, order = function.held_devices, start.device_s
    begin_s, cost_rows, end_rows = segments.begin_s.tolist(), costs.tolist(), ends.tolist()
    reached = [order * tried[level] + cost_rows[0][level] for level in range(levels)]
    came_from: list[list[int]] = []
    span = range(levels)
    for place in range(1, len(begin_s)):
        at_s, end_row, cost_row = begin_s[place], end_rows[place - 1], cost_rows[place]
        kept = [min(max(at_s - end_row[before], 0.0) * device, order) for before in span]
        following, choices = [], []
        for level in span:
            best, choice = float("inf"), 0
            for before in span:
                total = reached[before] + (
                    tried[level] * kept[before]
                    if level <= before
                    else tried[before] * kept[before] + (tried[level] - tried[before]) * order
                )
                if total < best:
                    best, choice = total, before
            following.append(best + cost_row[level])
            choices.append(choice)
        reached = following
        came_from.append(choices)
    level = min(span, key=reached.__getitem__)
    chosen = [level]
    for choices in reversed(came_from):
        level = choices[level]
        chosen.append(level)
    return chosen[::-1]


def _moments(
    segments: _Segments,
    columns: list[int],
    tried: list[int],
    ends: NDArray[np.float64],
    start: StartCost,
    hold_s: float,
) -> Plan:
    """Each segment's replicas from a lead before it begins until it ends, and over gaps that are held."""
    begin_s = segments.begin_s.tolist()
    spans: list[tuple[float, float, int]] = []
    for place, column in enumerate(columns):
        level, until_s = tried[column], float(ends[place, column])
        if place + 1 < len(columns):
            following_s = begin_s[place + 1]
            if following_s - until_s <= hold_s:
                shared = min(level, tried[columns[place + 1]])
                if until_s < following_s:
                    spans.append((until_s, following_s, shared))
        spans.append((begin_s[place] - start.lead_s, until_s, level))
    return Plan(*_highest(spans), start)


def _highest(spans: list[tuple[float, float, int]]) -> tuple[list[float], list[int]]:
    """The most of all spans that cover a moment, as steps."""
    spans.sort()
    moments = sorted({moment for begin_s, until_s, _ in spans for moment in (begin_s, until_s)})
    open_spans: list[tuple[int, float]] = []
    at_s: list[float] = []
    levels: list[int] = []
    following = 0
    for moment in moments:
        while following < len(spans) and spans[following][0] <= moment:
            heappush(open_spans, (-spans[following][2], spans[following][1]))
            following += 1
        while open_spans and open_spans[0][1] <= moment:
            heappop(open_spans)
        level = -open_spans[0][0] if open_spans else 0
        if not levels or levels[-1] != level:
            at_s.append(moment)
            levels.append(level)
    return at_s, levels
