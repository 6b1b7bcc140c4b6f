"""The simplest forecasts of a rate: the last value, and an exponentially weighted mean.

At the horizon of a cold start the last value is hard to beat (on ten Azure functions it errs by 0.08 of the volume five
minutes ahead, the same hour of yesterday by 0.23), so it is what every other forecast is measured against.
Limits: flat; what is coming is not told from what is going.
"""

from __future__ import annotations

import numpy as np

from autoscaler.forecasting.outlook import NOTHING, Numbers, Outlook, Past, dispersion, high

LAST_S = 60.0
MEMORY_S = 300.0
"""The weight of a window halves in 0.69 of this."""
EWMA_SPAN_S = 3_600.0


def recent(history: Past, now_s: float, span_s: float, least: int = 1) -> tuple[Numbers, float]:
    """Counts of the last windows (`least` or more), oldest first, and their length.

    Of 10 s where such are kept, of 600 s where the history was filled from coarse counts."""
    for resolution_s in (10, 60, 600):
        end_s = now_s // resolution_s * resolution_s
        _, counts = history.arrivals(resolution_s, end_s - max(span_s, least * resolution_s), end_s)
        if len(counts) and not np.isnan(counts).all():
            return counts, float(resolution_s)
    return np.empty(0), 10.0


def last_rate(history: Past, now_s: float, span_s: float = LAST_S) -> float | None:
    """Arrivals a second over the last minute (or the last window, if windows are longer); None: nobody watched."""
    counts, resolution_s = recent(history, now_s, span_s)
    seen = counts[~np.isnan(counts)]
    return float(seen.mean()) / resolution_s if len(seen) else None


def last_value(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    rate = last_rate(history, now_s)
    if rate is None:
        return NOTHING
    flat = np.full(steps, rate)
    return Outlook(flat, high(flat, horizon_s / steps))


def ewma(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    """Unseen windows have no weight, quiet ones have theirs."""
    counts, resolution_s = recent(history, now_s, EWMA_SPAN_S)
    seen = ~np.isnan(counts)
    if not seen.any():
        return NOTHING
    age_s = resolution_s * np.arange(len(counts) - 1, -1, -1)
    weights = np.exp(-age_s / MEMORY_S)[seen]
    flat = np.full(steps, float(weights @ counts[seen] / weights.sum()) / resolution_s)
    return Outlook(flat, high(flat, horizon_s / steps, dispersion(counts)))
