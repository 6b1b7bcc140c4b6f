"""What the next request will take, and how long answers are: means and spread over requests that have ended.

Lengths are taken as lognormal; with their mean and mean square, `forecast.remaining_tokens` gives the work still to be
done on a request that has made so many tokens and not ended. Both are sums over windows, so that any number of gateways
add up. Limits: lengths are alike whatever the prompt says; what was cut off by its limit counts as that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaler.forecasting.outlook import Past

REQUESTS_NEEDED = 8
HOUR_S, DAYS_S, ALL_S = 3_600.0, 86_400.0, 15 * 86_400.0


@dataclass(frozen=True, slots=True)
class Work:
    """Of the next request; 0: unknown."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    service_s: float = 0.0
    output_spread: float = 0.0
    """Standard deviation of the logarithm of the output tokens."""


def output_length(history: Past, now_s: float) -> Work:
    """Means over the last hour if enough ended in it, else over the last day, else over all there is."""
    for resolution_s, span_s in ((10, HOUR_S), (60, DAYS_S), (600, ALL_S)):
        since_s = now_s - span_s
        ended = history.total("ended", resolution_s, since_s, now_s)
        if ended < REQUESTS_NEEDED and resolution_s < 600:
            continue
        arrived = history.total("arrivals", resolution_s, since_s, now_s)

        def mean(name: str, of: float, resolution_s: int = resolution_s, since_s: float = since_s) -> float:
            return history.total(name, resolution_s, since_s, now_s) / of if of > 0 else 0.0

        output, square = mean("ended_output_tokens", ended), mean("ended_output_tokens_sq", ended)
        spread = math.sqrt(max(math.log(square / output**2), 0.0)) if output > 0 and square > 0 else 0.0
        return Work(mean("prompt_tokens", arrived), output, mean("service_s_sum", ended), spread)
    return Work()
