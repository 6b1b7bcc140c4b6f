"""When the first token of a new request would come, and whether it is refused early for it.

A place is where a request is computed; a replica has `max_requests` of them. Every place that is or will be had is
lined up by the moment it is free: now, when what runs there has ended, or when a replica that starts is ready; those
that wait take them in that order, and each holds its own for a full batch's service time. The new request is the next;
its first token comes when its turn has, the prompts before it at that replica are prefilled, and its own is.
Limits: who runs is expected to end as the function's outputs do on average; requests are taken to be alike but for
their prompts; what other gateways' requests still have to do is taken to be half of an average one.

Source: early rejection by predicted load of Mooncake (FAST'25, 7.2: refuse before anything is spent on a request that
would come too late). Here one bound decides, the function's objective for the time to first token; a prompt that is
longer than the objective allows even at an empty replica is not refused for that, since coming back would not help:
only its wait is judged, by a part of the objective.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from autoscaler.service import ServiceModel

LENGTHS_NEEDED: Final = 4
"""Measured outputs below which a request is expected to make as many tokens as it may."""
LONG_WAIT_SHARE: Final = 0.25
"""Of the objective: what a prompt that cannot keep it at all may wait. With nothing, short ones would always take the
places before it."""
RETRY_MIN_S: Final = 0.05
AHEAD_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """A ready replica as a new request finds it."""

    left_tokens: tuple[float, ...]
    """Of each request that runs there: output tokens it is expected to make still."""
    max_requests: int
    unread_tokens: int = 0
    """Of prompts that were taken and are not prefilled."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of one function, over all gateways."""

    service: ServiceModel
    servers: tuple[Server, ...]
    """Ready ones only: nobody is refused for an objective where there is none."""
    coming_s: tuple[float, ...] = ()
    """Seconds until each replica that is starting, or may be started for this load, is ready."""
    prompt_tokens: float = 1.0
    """Of a request that waits, on average."""
    output_tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    first_token_s: float
    """Predicted, from now."""
    bound_s: float
    ahead: int
    """Requests that wait before it."""
    retry_after_s: float | None = None
    """None: it is taken. Else: when one like it would be, if those told to come back earlier do so."""

    @property
    def refused(self) -> bool:
        return self.retry_after_s is not None


def left_tokens(made: int, most: int, lengths: Sequence[int]) -> float:
    """Output tokens expected of a request that has made `made` and may make `most`: the mean rest of those of the
    measured `lengths` (ascending) that were longer, never more than it may."""
    room = max(most - made, 0)
    if len(lengths) < LENGTHS_NEEDED:
        return float(room)
    first = bisect_right(lengths, made)
    longer = lengths[first:]
    if not longer:
        return float(min(room, max(made, 1)))  # it is past all that was seen: as much again as it has
    return min(float(room), sum(longer) / len(longer) - made)


@dataclass(frozen=True, slots=True)
class Line:
    """Places by the moment they are free, and how long each is held from then on."""

    ready_s: tuple[float, ...]
    """When a prompt that takes this place begins to be prefilled, ascending."""
    cycle_s: float

    def wait_s(self, ahead: int) -> float:
        """Until the turn of who has `ahead` before it: of all turns of all places the one after so many."""
        ready, cycle_s = self.ready_s, self.cycle_s
        count = len(ready)
        if not count:
            return math.inf
        if cycle_s <= 0:
            return ready[0]
        if ready[-1] - ready[0] <= cycle_s:
            return ready[ahead % count] + (ahead // count) * cycle_s
        # Some places are free again before others are for the first time. In each cycle from the first turn on, every
        # place that has begun has one turn: those that begin within the same cycle are counted together.
        first_s, left = ready[0], ahead
        begins = [int((each - first_s) / cycle_s) for each in ready]
        for begun in range(1, count + 1):
            if begun < count and begins[begun] == begins[begun - 1]:
                continue
            if begun == count or left < begun * (begins[begun] - begins[begun - 1]):
                cycle = begins[begun - 1] + left // begun
                turns = sorted(ready[each] - begins[each] * cycle_s for each in range(begun))
                return turns[left % begun] + cycle * cycle_s
            left -= begun * (begins[begun] - begins[begun - 1])
        raise AssertionError("the last place takes all that are left")

    def depth(self, within_s: float) -> int:
        """How many may line up so that the turn of the last comes `within_s`."""
        if within_s < 0:
            return 0
        if self.cycle_s <= 0:
            return AHEAD_MAX if self.ready_s and self.ready_s[0] <= within_s else 0
        return min(sum(_turns(ready, within_s, self.cycle_s) for ready in self.ready_s), AHEAD_MAX)


def _turns(ready_s: float, until_s: float, cycle_s: float) -> int:
    """How many a place has by then, one at that very moment too."""
    return int((until_s - ready_s) / cycle_s) + 1 if ready_s <= until_s else 0


def line_up(load: Load) -> Line:
    service = load.service
    per_token_s = 1.0 / service.prefill_tokens_per_s
    ready: list[float] = []
    for server in load.servers:
        running = len(server.left_tokens)
        step_s = service.step_s(running)
        unread_s = server.unread_tokens * per_token_s
        free = max(server.max_requests - running, 0)
        ready += [unread_s + place * load.prompt_tokens * per_token_s for place in range(free)]
        # Steps pause while prompts are prefilled: what runs there ends that much later.
        ready += [unread_s + left * step_s for left in server.left_tokens]
    for coming_s in load.coming_s:
        ready += [coming_s + place * load.prompt_tokens * per_token_s for place in range(service.max_requests)]
    ready.sort()
    prompt, output = round(load.prompt_tokens), round(load.output_tokens)
    cycle_s = service.service_s(prompt, output, service.full_batch(prompt, output))
    return Line(tuple(ready), cycle_s)


def own_s(service: ServiceModel, prompt_tokens: int) -> float:
    """From its turn to its first token, with the others decoding beside it."""
    return service.first_token_s(prompt_tokens, service.max_requests)


def _bound_s(own: float, objective_s: float, strictness: float) -> float:
    allowed_s = objective_s * min(max(strictness, 0.0), 1.0)
    return allowed_s if own <= allowed_s else own + LONG_WAIT_SHARE * allowed_s


def judge(
    line: Line,
    service: ServiceModel,
    prompt_tokens: int,
    ahead: int,
    objective_s: float,
    *,
    strictness: float = 1.0,
    deferred: int = 0,
) -> Verdict:
    """Whether a request with `ahead` before it is taken. `strictness` tightens the objective (of a tenant above its
    share); `deferred`: requests that were told to come back and have not yet."""
    own = own_s(service, prompt_tokens)
    bound_s = _bound_s(own, objective_s, strictness)
    predicted_s = line.wait_s(ahead) + own
    # Rounding must not refuse what is at the bound.
    if predicted_s <= bound_s * (1 + 1e-9):
        return Verdict(predicted_s, bound_s, ahead)
    later_s = line.wait_s(ahead + deferred) + own - bound_s
    return Verdict(predicted_s, bound_s, ahead, max(later_s, RETRY_MIN_S))


def depth(line: Line, service: ServiceModel, prompt_tokens: int, objective_s: float, strictness: float = 1.0) -> int:
    """How many requests like this may wait at all gateways together so that the last still meets the objective."""
    own = own_s(service, prompt_tokens)
    bound_s = _bound_s(own, objective_s, strictness)
    return line.depth((bound_s - own) * (1 + 1e-9))
