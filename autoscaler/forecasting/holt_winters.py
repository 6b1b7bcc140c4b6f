"""Holt-Winters: level, damped trend and a daily season, additive, smoothed exponentially over 600 s windows.

Holt (1957), Winters (1960); damped after Gardner and McKenzie (1985). Counts are taken as square roots, which makes the
scatter of counts about even and keeps forecasts above zero. The smoothing constants are the best of a small grid on the
last two days' errors one step ahead. Limits: two whole days are needed, and one season.
"""

from __future__ import annotations

import numpy as np

from autoscaler.forecasting.outlook import DAY_S, NOTHING, Numbers, Outlook, Past, high

CELL_S = 600
SEASON = int(DAY_S / CELL_S)
DAYS_READ = 7
DAYS_NEEDED = 2
DAMPING = 0.9
GRID = ((0.5, 0.02, 0.2), (0.5, 0.1, 0.2), (0.8, 0.02, 0.1), (0.8, 0.1, 0.3), (0.2, 0.02, 0.3), (0.95, 0.0, 0.05))
"""Smoothing of level, trend and season."""
SCORED = 2 * SEASON


def smoothed(values: Numbers, season: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Levels, trends and seasons after the last value for each row of the grid, and the mean squared error one step
    ahead. All rows of the grid at once; NaN moves the state along and teaches nothing."""
    alpha, beta, gamma = (np.array(each) for each in zip(*GRID, strict=True))
    first = values[:season]
    mean = float(np.nanmean(first)) if not np.isnan(first).all() else 0.0
    seasons = np.tile(np.nan_to_num(first - mean)[:, None], (1, len(GRID)))
    level, trend, errors = np.full(len(GRID), mean), np.zeros(len(GRID)), np.zeros(len(GRID))
    scored_from, scored = max(len(values) - SCORED, season), 0
    for place, value in enumerate(values[season:].tolist(), start=season):
        phase = place % season
        damped = DAMPING * trend
        expected = level + damped
        if value != value:
            level, trend = expected, damped
            continue
        error = value - expected - seasons[phase]
        if place >= scored_from:
            errors += error * error
            scored += 1
        level = expected + alpha * error
        trend = damped + alpha * beta * error
        seasons[phase] += gamma * (1.0 - alpha) * error
    return level, trend, seasons, errors / max(scored, 1)


def holt_winters(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    end_s = now_s // CELL_S * CELL_S
    starts, counts = history.arrivals(CELL_S, end_s - DAYS_READ * DAY_S, end_s)
    seen = np.flatnonzero(~np.isnan(counts))
    if len(seen) == 0 or len(counts) - seen[0] < DAYS_NEEDED * SEASON:
        return NOTHING
    begun = int(seen[0])
    values = np.sqrt(counts[begun:])
    level, trend, seasons, errors = smoothed(values, SEASON)
    best = int(np.argmin(errors))
    ahead = -(-int(horizon_s) // CELL_S) + 1
    powers = np.cumsum(DAMPING ** np.arange(1, ahead + 1))
    phases = (len(values) + np.arange(ahead)) % SEASON
    roots = np.maximum(level[best] + powers * trend[best] + seasons[phases, best], 0.0)
    scatter = np.sqrt(errors[best])
    step_s = horizon_s / steps
    times = now_s - end_s + step_s * (np.arange(steps) + 0.5)
    at_s = CELL_S * (np.arange(ahead) + 0.5)
    # The mean of a square is the square of the mean and the variance.
    rate = np.interp(times, at_s, roots**2 + errors[best]) / CELL_S
    above = np.interp(times, at_s, (roots + 1.2816 * scatter) ** 2) / CELL_S
    return Outlook(rate, np.maximum(above, high(rate, step_s)))
