"""Idle-time histogram: the law of the next gap from the gaps there were, all of them or those most like this one.

Serverless in the Wild (Shahrad et al., ATC 2020) counts idle times in bins of a minute over four hours. Here every gap
has a cell of its own, as wide as its neighbours are far, so that a caller of every 6 s and one of every day are both
told sharply; what was never seen has the weight of one gap with the tail 1/(1 + t), under which holding pays for just
as long as the break-even keep-alive. Limits: the last 512 gaps; no more than `GROUPS` cells.
"""

from __future__ import annotations

import numpy as np

from autoscaler.forecasting.outlook import DAY_S, NOTHING, GapLaw, Numbers, Outlook, Past

GAPS_NEEDED = 4
GROUPS = 64
UNSEEN_GAPS = 1.0
TAIL_S = 1.0
"""The unseen gap is longer than t with chance 1/(1 + t/TAIL_S)."""
WIDEST, NARROWEST = 0.05, 0.0005
"""How far around a gap its like are expected: as far as its neighbours, within these shares of it."""
JITTER_S = 0.2
COARSE_S = np.concatenate([[0.0], 0.25 * 1.5 ** np.arange(39)])
"""Edges where no gap was seen, up to 14 days."""
HOURS_NEAR_S = 3_600.0
PACE_MEMORY = 0.2
PACE_NEAR = 0.3
"""Paces (mean logarithms of the last gaps) this near count as like."""
OTHERS_WEIGHT = 0.05
"""Of all gaps together, over that of those that are like this one."""
LIKE_NEEDED = 24


def gaps_of(history: Past, now_s: float) -> tuple[Numbers, Numbers, float]:
    """Starts and lengths of the gaps and how precise they are: those noted, or those between windows with arrivals."""
    lengths = history.gaps_s
    if len(lengths) >= GAPS_NEEDED:
        return history.gap_starts_s, lengths, JITTER_S
    for resolution_s, days in ((60, 1), (600, 14)):
        starts, counts = history.arrivals(resolution_s, now_s - days * DAY_S, now_s)
        seen = ~np.isnan(counts)
        active = starts[seen & (counts > 0)]
        if len(active) <= GAPS_NEEDED:
            continue
        between = np.diff(active)
        apart = between > resolution_s
        if apart.sum() >= GAPS_NEEDED:
            return active[:-1][apart] + resolution_s, between[apart] - resolution_s / 2, resolution_s / 2.0
    return np.empty(0), np.empty(0), JITTER_S


def gap_law(lengths_s: Numbers, weights: Numbers | None = None, jitter_s: float = JITTER_S) -> GapLaw:
    """Cells around the gaps, in groups of neighbours; each group's weight spread evenly over its cell."""
    order = np.argsort(lengths_s)
    lengths = lengths_s[order]
    weight = np.ones(len(lengths)) if weights is None else weights[order]
    size = -(-len(lengths) // GROUPS)
    firsts = np.arange(0, len(lengths), size)
    lasts = np.append(firsts[1:], len(lengths)) - 1
    low, high = lengths[firsts], lengths[lasts]
    middle = 0.5 * (high[:-1] + low[1:])
    # What lies outside is as far again as the outermost neighbours are apart.
    outside = (2.0 * (middle[0] - high[0]), 2.0 * (low[-1] - middle[-1])) if len(middle) else (np.inf, np.inf)
    left = np.concatenate([[low[0] - outside[0]], middle])
    right = np.concatenate([middle, [high[-1] + outside[1]]])
    # Neighbours' cells meet half way; none is wider than WIDEST, nor narrower than what the clock can tell.
    reach = np.maximum(np.maximum(low, high) * NARROWEST, jitter_s)
    left = np.minimum(np.maximum(left, low * (1 - WIDEST)), low - reach)
    right = np.maximum(np.minimum(right, high * (1 + WIDEST)), high + reach)
    sums = np.add.reduceat(weight, firsts)
    edges = np.unique(np.concatenate([COARSE_S, left[left > 0.0], right]))
    # Cells may overlap by their jitter: the distribution is the sum of their ramps.
    known = np.clip((edges[:, None] - left) / (right - left), 0.0, 1.0) @ sums
    unseen = 1.0 - 1.0 / (1.0 + edges / TAIL_S)
    ended = (known - known[0] + UNSEEN_GAPS * unseen) / (float(sums.sum()) + UNSEEN_GAPS)
    return GapLaw(edges, np.maximum(np.diff(ended), 0.0))


def _likeness(apart: Numbers) -> Numbers:
    """Weights of gaps so many spreads apart from the present one."""
    near = np.exp(-0.5 * apart**2)
    return np.asarray(near + OTHERS_WEIGHT * float(near.mean()), dtype=np.float64)


def idle_histogram(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    """All gaps alike."""
    _, lengths, jitter_s = gaps_of(history, now_s)
    if len(lengths) < GAPS_NEEDED:
        return NOTHING
    return Outlook(law=gap_law(lengths, None, jitter_s))


def idle_histogram_hour(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    """Those that began at about this time of day."""
    starts, lengths, jitter_s = gaps_of(history, now_s)
    if len(lengths) < LIKE_NEEDED or now_s - float(starts[0]) < 2 * DAY_S:
        return NOTHING
    apart = np.abs(np.remainder(starts - now_s + DAY_S / 2, DAY_S) - DAY_S / 2)
    return Outlook(law=gap_law(lengths, _likeness(apart / HOURS_NEAR_S), jitter_s))


def paces(lengths_s: Numbers) -> Numbers:
    """Before each gap and after the last: the exponentially weighted mean of the logarithms of those before it."""
    logs = np.log(lengths_s + 0.5).tolist()
    pace, kept = logs[0], []
    for value in logs:
        kept.append(pace)
        pace += PACE_MEMORY * (value - pace)
    kept.append(pace)
    return np.array(kept)


def idle_histogram_pace(history: Past, now_s: float, horizon_s: float, steps: int) -> Outlook:
    """Those that came after others as long as the last ones were."""
    _, lengths, jitter_s = gaps_of(history, now_s)
    if len(lengths) < LIKE_NEEDED:
        return NOTHING
    pace = paces(lengths)
    return Outlook(law=gap_law(lengths, _likeness((pace[:-1] - pace[-1]) / PACE_NEAR), jitter_s))
