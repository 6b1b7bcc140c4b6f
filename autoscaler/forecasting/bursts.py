"""Bursts: a function that is either calm or in a burst, and how long its bursts last.

Windows of the last hour are told apart by their counts: more than a Poisson process of the calm rate would hold once in
a hundred thousand windows is a burst. How often a burst went on into the next window, and began in one, was counted;
two states with those chances (a Gilbert model: Gilbert, Bell System Technical Journal, 1960) give the rate ahead.
Limits: an hour's memory; the height of a burst is that of its last windows; the first window of one is not foreseen.
"""

from __future__ import annotations

import numpy as np

from autoscaler.forecasting.outlook import NOTHING, Numbers, Outlook, Past, high
from autoscaler.forecasting.rates import recent

SPAN_S = 3_600.0
DEVIATIONS = 4.3
"""Standard deviations above the calm rate: once in 100,000 windows."""
LEAST_CALLS = 4.0
WINDOWS_NEEDED = 12


def in_burst(counts: Numbers) -> tuple[Numbers, float]:
    """Which windows were in a burst (1 or 0), and the calm rate a window. Twice told: the first telling finds the
    calm ones, the second measures by them. With heaps in more than half of the windows, heaps are the calm."""
    calm = float(np.median(counts))
    for _ in range(2):
        burst = counts > np.maximum(calm + DEVIATIONS * np.sqrt(max(calm, 0.05)), LEAST_CALLS)
        calm = float(counts[~burst].mean()) if not burst.all() else float(counts.mean())
    return burst.astype(np.float64), calm


def burst(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    counts, resolution_s = recent(history, now_s, SPAN_S, 4 * WINDOWS_NEEDED)
    counts = counts[~np.isnan(counts)]
    if len(counts) < WINDOWS_NEEDED:
        return NOTHING
    state, calm = in_burst(counts)
    before, after = state[:-1], state[1:]
    # Half a pseudo-observation each: no chance is 0 or 1 after an hour.
    goes_on = (float(before @ after) + 0.5) / (float(before.sum()) + 1.0)
    begins = (float((1.0 - before) @ after) + 0.25) / (float((1.0 - before).sum()) + 1.0)
    heights = counts[state > 0]
    height = float(heights[-3:].mean() if state[-1] else heights.mean()) if len(heights) else calm
    step_s = horizon_s / steps
    windows = (np.arange(steps) + 0.5) * step_s / resolution_s
    settled = begins / max(begins + 1.0 - goes_on, 1e-9)
    chance = settled + (float(state[-1]) - settled) * np.maximum(goes_on - begins, 0.0) ** windows
    rate = (calm + chance * (height - calm)) / resolution_s
    above = np.where(chance >= 0.1, height / resolution_s, rate)
    return Outlook(rate, np.maximum(high(rate, step_s), high(above, step_s)))
