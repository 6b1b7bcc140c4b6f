"""When being warm pays: from the law of the next gap and what a start costs, the intervals of least expected cost.

After an activity a replica is warm. Each cell of the law is worth `chance x cost of a start` if it is spent warm and
costs `devices x the time expected to be spent in it`; going warm again costs the devices for one start. The best set
of intervals is found exactly, by dynamic programming over the cells (a hold-or-release rule on the hazard: hold while
chance-of-arrival-rate x cost of a start > devices held; Serverless in the Wild, ATC 2020, has the same two windows,
with fixed percentiles for edges). Limits: one gap is decided by itself, which is exact as long as every gap ends warm.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from autoscaler.forecast import Costs
from autoscaler.forecasting.outlook import GapLaw

Windows: TypeAlias = tuple[tuple[float, float], ...]

EARLY_SHARE = 0.5
"""Of a whole start's cost, what an arrival in the middle of an early start saves, on average over the start."""


def warm_windows(law: GapLaw, costs: Costs, waiters: float = 1.0) -> Windows:
    """Ordered intervals in seconds since the last activity; () is never.

    Called every 60 s, 0.25 s to start, weight 30: ((59.7, 60.4),), and cold for the rest
    (`test_a_steady_caller_is_awaited_and_not_kept`)."""
    edges, chances = law.edges_s, law.chances
    if len(chances) == 0:
        return ()
    start_cost, devices, start_s = costs.of_start(waiters), float(costs.devices), costs.start_s
    ended = np.concatenate([[0.0], np.cumsum(chances)])
    alive = np.maximum(1.0 - ended, 0.0)
    spent = np.concatenate([[0.0], np.cumsum(0.5 * (alive[1:] + alive[:-1]) * np.diff(edges))])
    gain = (start_cost * chances - devices * np.diff(spent)).tolist()
    began = np.maximum(edges - start_s, 0.0)
    early = EARLY_SHARE * start_cost * (ended - np.interp(began, edges, ended))
    opening = (early - devices * (spent - np.interp(began, edges, spent))).tolist()
    cold_at = (np.searchsorted(edges, edges - start_s, side="right") - 1).tolist()

    cells = len(gain)
    best_cold = [0.0] * (cells + 1)
    closing: list[tuple[int, int] | None] = [None] * (cells + 1)
    warm, run = 0.0, (0, -1)
    for cell in range(cells):
        if cell and cold_at[cell] >= 0:
            opened = best_cold[cold_at[cell]] + opening[cell]
            if opened > warm:
                warm, run = opened, (cell, cold_at[cell])
        warm += gain[cell]
        if warm > best_cold[cell]:
            best_cold[cell + 1], closing[cell + 1] = warm, run
        else:
            best_cold[cell + 1] = best_cold[cell]

    found: list[tuple[float, float]] = []
    cell = cells
    while cell > 0:
        closed = closing[cell]
        if closed is None:
            cell -= 1
            continue
        opens_s = float(edges[closed[0]])
        found.append((opens_s, float(edges[cell])))
        if closed[1] < 0:
            break
        cell = closed[1]
    return tuple(reversed(found))


def gap_cost(windows: Windows, gap_s: float, costs: Costs, waiters: float = 1.0, *, ended: bool = True) -> float:
    """Device-seconds a gap of that length has cost under these windows; `ended`: by a request, which may have to wait.

    A start that the request finds half done is waited for half as long."""
    devices, start_s = costs.devices, costs.start_s
    total, cold_since_s = 0.0, 0.0
    for opens_s, closes_s in windows:
        begun_s = max(opens_s - start_s, cold_since_s) if opens_s > 0.0 else 0.0
        if gap_s < begun_s:
            break
        if gap_s < opens_s:
            waited = costs.waiting_weight * waiters * (opens_s - gap_s) if ended else 0.0
            rest = devices * (opens_s - begun_s) if ended else devices * (gap_s - begun_s)
            return total + rest + waited
        if gap_s < closes_s:
            return total + devices * (gap_s - begun_s)
        total += devices * (closes_s - begun_s)
        cold_since_s = closes_s
    return total + (costs.of_start(waiters) if ended else 0.0)


def is_cold(windows: Windows, gap_s: float) -> bool:
    """Whether a request after so long a gap finds nothing, not even a start under way that is sooner than its own."""
    for opens_s, closes_s in windows:  # noqa: SIM110 (a generator costs twice as much, and this is asked a lot)
        if opens_s <= gap_s < closes_s:
            return False
    return True


def worst_loss(windows: Windows, against: Windows, costs: Costs, waiters: float = 1.0) -> float:
    """The most a gap of any length can cost more under `windows` than under `against`; infinity if there is no such."""
    points = {0.0}
    for opens_s, closes_s in (*windows, *against):
        points |= {max(opens_s - costs.start_s, 0.0), opens_s, closes_s, math.nextafter(closes_s, 0.0)}
    if any(math.isinf(point) for point in points):
        ends_open = [bool(each) and math.isinf(each[-1][1]) for each in (windows, against)]
        if ends_open[0] and not ends_open[1]:
            return math.inf
        points = {point for point in points if math.isfinite(point)}
    return max(
        gap_cost(windows, point, costs, waiters, ended=ended) - gap_cost(against, point, costs, waiters, ended=ended)
        for point in points
        for ended in (True, False)
    )


def spliced(before: Windows, after: Windows, at_s: float) -> Windows:
    """`before` up to `at_s`, `after` from there on: a plan that is changed while its gap runs."""
    if at_s <= 0.0:
        return after
    parts = [(opens_s, min(closes_s, at_s)) for opens_s, closes_s in before if opens_s < at_s]
    for opens_s, closes_s in after:
        if closes_s <= at_s:
            continue
        if parts and parts[-1][1] >= max(opens_s, at_s):
            parts[-1] = (parts[-1][0], closes_s)
        else:
            parts.append((max(opens_s, at_s), closes_s))
    return tuple(parts)


def within(windows: Windows, against: Windows, costs: Costs, room: float, waiters: float = 1.0) -> Windows | None:
    """The same windows, cut from the end until no gap can lose more than `room`; None: not even the first fits."""
    kept = list(windows)
    while True:
        if worst_loss(tuple(kept), against, costs, waiters) <= room:
            return tuple(kept)
        if not kept:
            return None
        opens_s, closes_s = kept.pop()
        if opens_s > 0.0:
            continue
        held_s = room / max(costs.devices, 1e-9) + (against[0][1] if against else 0.0)
        if held_s < closes_s and worst_loss(((0.0, held_s),), against, costs, waiters) <= room:
            return ((0.0, held_s),)
