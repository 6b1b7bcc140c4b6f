"""Whether a replica more saves more waiting than it costs: the marginal rule for 1 -> N, on a fluid model of the queue.

Work arrives at a rate and is drained by full batches; a replica begun now drains from when it is ready, and is held
until the queue is gone and its own keep-alive over. Cost of n replicas = devices held + weight * area under the queue;
the least is taken, from what there is upwards (the cost is convex in n, so the first rise ends the search).
Limits: requests are taken as alike (mean prompt and output); inside a batch nobody is preferred.
"""

from __future__ import annotations

import math
from typing import Final

from autoscaler.decision import Observed, Phase, ScalingSpec
from autoscaler.service import ServiceModel

HORIZON_S: Final = 60.0
"""How long beyond a start a queue that never ends is followed: by then it is decided upon anew."""
TRIED_MAX: Final = 64
"""Replicas more that one decision may find worth it."""


def capacity(service: ServiceModel, prompt_tokens: float, output_tokens: float) -> tuple[int, float, float]:
    """Of one replica: places, requests a second at a full batch, and seconds of prefill a request."""
    prompt, output = round(prompt_tokens), round(output_tokens)
    places = service.full_batch(prompt, output)
    service_s = service.service_s(prompt, output, places)
    return places, places / service_s if service_s > 0 else math.inf, service.first_token_s(prompt, 1)


def waited_s(backlog: float, rate: float, drain: float, seconds: float) -> tuple[float, float]:
    """(seconds of waiting of all together, backlog at the end) over `seconds`, drained at `drain` a second."""
    if seconds <= 0:
        return 0.0, backlog
    slope = rate - drain
    end = backlog + slope * seconds
    if end >= 0:
        return (backlog + end) / 2 * seconds, end
    return backlog * backlog / (-2 * slope), 0.0


def worth_having(
    spec: ScalingSpec,
    observed: Observed,
    service: ServiceModel,
    rates: tuple[float, float],
    start_s: float,
    now_s: float,
    kept_s: float,
) -> tuple[int, float]:
    """Replicas (ready and starting) at which the expected J is least, no fewer than there are, and what the last of
    them saves (device-seconds; 0 if none is added).

    `rates`: arrivals a second expected until a start begun now is over, and after it.

    Worked example: one ready replica of 1 place and 10 s a request, 3 waiting, no arrivals, weight 1, a start of 20 s:
    alone they wait 10 + 20 + 30 s (fluid: 45); a second replica would come when 1 is left, saving 2.5 s of waiting for
    20 s of a device: not worth it. At a weight of 30 it saves 75 and is
    (`test_a_second_replica_is_worth_it_by_the_weight_of_waiting`).
    """
    rate, rate_after = rates
    places, drain, prefill_s = capacity(service, observed.prompt_tokens, observed.output_tokens)
    ready = starting = free = 0
    soonest_s = start_s
    for replica in observed.replicas:
        if replica.phase is Phase.READY:
            ready += 1
            free += max(places - replica.in_flight, 0)
        elif replica.phase is Phase.STARTING:
            starting += 1
            soonest_s = min(soonest_s, max(start_s - (now_s - replica.since_s), 0.1 * start_s))
    have = ready + starting
    backlog = max(observed.waiting - free, 0)
    held = spec.devices * observed.device_price
    weight = spec.waiting_weight
    most = min(max(spec.max_replicas, have), have + TRIED_MAX)

    # Until what is starting is ready, nothing that is decided now makes a difference.
    _, queue = waited_s(backlog, rate, ready * drain, soonest_s)
    queue = max(queue - starting * places, 0.0)
    _, queue = waited_s(queue, rate, have * drain, start_s - soonest_s)

    def cost(more: int) -> float:
        left = max(queue - more * places, 0.0)
        at_once = queue - left
        replicas = have + more
        slope = replicas * drain - rate_after
        waits_s, rest = waited_s(left, rate_after, replicas * drain, HORIZON_S)
        # Those that are taken at once are still prefilled one after another, on each replica.
        absorbed_s = at_once * at_once * prefill_s / (2 * more) if more else 0.0
        busy_s = HORIZON_S if rest > 0 else (left / slope if left else 0.0)
        return more * held * (start_s + busy_s + kept_s) + weight * (waits_s + absorbed_s)

    more, least, saved = 0, cost(0), 0.0
    if have == 0 and most > 0:
        more, least = 1, cost(1)
    while have + more < most:
        following = cost(more + 1)
        if following >= least:
            break
        saved = least - following
        more, least = more + 1, following
    return have + more, saved


def steady(
    spec: ScalingSpec,
    service: ServiceModel,
    rate: float,
    prompt_tokens: float,
    output_tokens: float,
    price: float = 1.0,
) -> int:
    """Replicas at which devices and waiting together cost least a second, while requests come at `rate`.

    Waiting for a place is that of a queue with as many servers as places (Sakasegawa's approximation of M/M/c, 1977).
    """
    if rate <= 0:
        return 0
    places, drain, _ = capacity(service, prompt_tokens, output_tokens)
    least_n = max(math.ceil(rate / drain), 1)
    best_n, best = least_n, math.inf
    for replicas in range(least_n, least_n + TRIED_MAX):
        load = rate / (drain * replicas)
        if load >= 1.0:
            continue
        servers = places * replicas
        wait_s = load ** (math.sqrt(2.0 * (servers + 1)) - 1.0) / (servers * (1.0 - load)) * places / drain
        total = replicas * spec.devices * price + spec.waiting_weight * rate * wait_s
        if total >= best:
            break
        best_n, best = replicas, total
    return best_n
