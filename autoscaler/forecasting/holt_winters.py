"""Holt-Winters: level, damped trend and a daily season, additive, smoothed exponentially over 600 s windows.

Holt (1957), Winters (1960); damped after Gardner and McKenzie (1985). Counts are taken as square roots, which makes the
scatter of counts about even and keeps forecasts above zero. The smoothing constants are the best of a few on the last
day's errors one step ahead; a fit costs under a millisecond. Limits: two whole days are needed, and one season.
"""

from __future__ import annotations

import math

import numpy as np

from autoscaler.forecasting.outlook import DAY_S, NOTHING, Outlook, Past, high

CELL_S = 600
SEASON = int(DAY_S / CELL_S)
DAYS_READ = 4
DAYS_NEEDED = 2
DAMPING = 0.9
SMOOTHING = ((0.3, 0.02, 0.3), (0.6, 0.05, 0.2), (0.9, 0.0, 0.1))
"""Of level, trend and season."""


def smoothed(values: list[float], alpha: float, beta: float, gamma: float) -> tuple[float, float, list[float], float]:
    """Level, trend and season after the last value, and the mean squared error over the last season.

    NaN moves the state along and teaches nothing."""
    first = [value for value in values[:SEASON] if value == value]
    level, trend = math.fsum(first) / len(first) if first else 0.0, 0.0
    season = [value - level if value == value else 0.0 for value in values[:SEASON]]
    scored_from, scored, errors = max(len(values) - SEASON, SEASON), 0, 0.0
    for place in range(SEASON, len(values)):
        value, phase = values[place], place % SEASON
        trend *= DAMPING
        level += trend
        if value != value:
            continue
        error = value - level - season[phase]
        if place >= scored_from:
            errors += error * error
            scored += 1
        level += alpha * error
        trend += alpha * beta * error
        season[phase] += gamma * (1.0 - alpha) * error
    return level, trend, season, errors / max(scored, 1)


def holt_winters(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    end_s = now_s // CELL_S * CELL_S
    _, counts = history.arrivals(CELL_S, end_s - DAYS_READ * DAY_S, end_s)
    seen = np.flatnonzero(~np.isnan(counts))
    if len(seen) == 0 or len(counts) - seen[0] < DAYS_NEEDED * SEASON:
        return NOTHING
    values = np.sqrt(counts[int(seen[0]) :]).tolist()
    level, trend, season, variance = min((smoothed(values, *each) for each in SMOOTHING), key=lambda fit: fit[3])
    ahead = math.ceil(horizon_s / CELL_S) + 1
    phases = (len(values) + np.arange(ahead)) % SEASON
    drift = np.cumsum(DAMPING ** np.arange(1, ahead + 1)) * trend
    roots = np.maximum(level + drift + np.array(season)[phases], 0.0)
    step_s = horizon_s / steps
    cell = ((now_s - end_s + step_s * (np.arange(steps) + 0.5)) // CELL_S).astype(np.int64)
    # The mean of a square is the square of the mean and the variance.
    rate = (roots**2 + variance)[cell] / CELL_S
    above = ((roots + 1.2816 * math.sqrt(variance)) ** 2)[cell] / CELL_S
    return Outlook(rate, np.maximum(above, high(rate, step_s)))
