"""The same time of other days, or of the same weekday: the mean of what was, at the level of today.

For each 600 s of the time ahead: the weighted mean of the same 600 s of earlier days (newer days weigh more), times
the recent level over the level of the same hours back then; and the share of those days in which anything came at all,
which for a rare function is the law of its next request. Plain seasonal means with a level, after the seasonal-naive
method of Hyndman and Athanasopoulos, Forecasting: Principles and Practice, 3rd ed., 5.2.
Limits: seasons of 86,400 s and 604,800 s of UTC; a change of summer time takes a few days to be learnt.
"""

from __future__ import annotations

import numpy as np

from autoscaler.forecasting.outlook import DAY_S, NOTHING, Numbers, Outlook, Past, high, law_of_rates

CELL_S = 600
SEASONS_KEPT = 14
NEWER_WEIGHS = 0.8
"""A season's weight over that of the next one."""
LEVEL_CELLS = 6
LEVEL_RANGE = (0.2, 5.0)
LAW_CELLS = 144
SPREAD = np.array([0.25, 0.5, 0.25])
"""Neighbouring cells speak for one another: no season is that punctual, or the histogram of gaps knows it."""
SEASONS_NEEDED = 2


def _seasonal(history: Past, now_s: float, horizon_s: float, steps: int, season_s: float) -> Outlook:
    cells = int(season_s / CELL_S)
    ahead = max(LAW_CELLS, -(-int(horizon_s) // CELL_S) + 2)
    first_s = now_s // CELL_S * CELL_S
    seasons = min(SEASONS_KEPT, int(14 * DAY_S / season_s))
    begin_s = first_s - seasons * season_s
    _, counts = history.arrivals(CELL_S, begin_s - LEVEL_CELLS * CELL_S, first_s)
    if len(counts) < seasons * cells + LEVEL_CELLS:
        return NOTHING
    # One row a season, each from LEVEL_CELLS before this time of the season; the time ahead wraps into the next season.
    rows = np.stack([counts[k * cells : (k + 1) * cells + LEVEL_CELLS] for k in range(seasons)])
    watched = ~np.isnan(rows)
    if (watched.mean(axis=1) > 0.5).sum() < SEASONS_NEEDED:
        return NOTHING
    weights = NEWER_WEIGHS ** np.arange(seasons - 1, -1, -1)
    heavy = watched * weights[:, None]
    total = np.maximum(heavy.sum(axis=0), 1e-9)
    filled = np.nan_to_num(rows)
    mean = (heavy * filled).sum(axis=0) / total
    active = ((heavy * (filled > 0)).sum(axis=0)) / (total + 0.5)
    variance = np.maximum((heavy * filled**2).sum(axis=0) / total - mean**2, 0.0)

    level = 1.0
    recent = counts[-LEVEL_CELLS:]
    known = ~np.isnan(recent)
    if known.any():
        seen, usual = float(recent[known].mean()), float(mean[:LEVEL_CELLS][known].mean())
        level = float(np.clip((seen + 1.0) / (usual + 1.0), *LEVEL_RANGE))
    coming = np.arange(ahead) % cells + LEVEL_CELLS
    expected = mean[coming] * level
    spread = np.sqrt(variance[coming]) * level
    step_s = horizon_s / steps
    # What comes on the hour comes on the hour: cells are not blurred into one another.
    cell = ((now_s - first_s + step_s * (np.arange(steps) + 0.5)) // CELL_S).astype(np.int64)
    rate, above = expected[cell] / CELL_S, spread[cell] / CELL_S
    hazard = np.convolve(np.pad(-np.log1p(-active[coming]), 1, mode="edge"), SPREAD, mode="valid")[:LAW_CELLS]
    return Outlook(
        rate,
        np.maximum(high(rate, step_s), rate + 1.2816 * above),
        law_of_rates(1.0 - np.exp(-_from_now(hazard, now_s - first_s)), float(CELL_S)),
    )


def _from_now(hazard: Numbers, past_s: float) -> Numbers:
    """Of cells that begin now, out of that of cells that began `past_s` ago."""
    share = past_s / CELL_S
    return np.asarray((1.0 - share) * hazard + share * np.append(hazard[1:], hazard[-1]), dtype=np.float64)


def seasonal_day(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    return _seasonal(history, now_s, horizon_s, steps, DAY_S)


def seasonal_week(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    return _seasonal(history, now_s, horizon_s, steps, 7 * DAY_S)
