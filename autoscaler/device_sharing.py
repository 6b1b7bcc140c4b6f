"""How the memory of a device is divided among those who share it: weights as they are, KV by weighted max-min fairness.

    1. everyone has its least: what one request of its longest context needs
    2. what is left goes to all in the ratio of their predicted need, and nobody gets more than that need
    3. what nobody needs stays free for who comes next

Step 2 is progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): nobody can be given more without taking it
from somebody who has less of what it needs. Divided anew when a replica comes, goes, or needs another amount; small
changes are left alone (`worth_telling`). Limits: one device; needs are forecasts of tokens, turned to bytes elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADROOM = 0.05
"""Share of a device that is nobody's: activations, fragments, the context of the driver."""
WORTH = 0.125
"""Changes below this share of what there is are left alone: every change lays the memory out anew."""


@dataclass(frozen=True, slots=True)
class Sharer:
    """A replica on the device, or one that is to come."""

    name: str
    fixed_bytes: int
    """Weights and whatever else cannot be given up."""
    least_bytes: int
    """Of KV: with less it cannot serve a request of its longest context."""
    wanted_bytes: int
    """Of KV: for the concurrency and the contexts that are predicted."""
    weight: float = 1.0
    """How much more than others it counts (priority)."""


@dataclass(frozen=True, slots=True)
class Grant:
    name: str
    kv_bytes: int


def worth_telling(has_bytes: int, granted_bytes: int) -> bool:
    return abs(granted_bytes - has_bytes) > WORTH * has_bytes


def divide_anew(
    total_bytes: int, sharers: Sequence[Sharer], has_bytes: Sequence[int], headroom: float = HEADROOM
) -> tuple[Grant, ...] | None:
    """The same among those who have KV already (0: who has none yet): nobody gives up what nobody else needs. Who has
    more than its part keeps it as long as all the others have theirs beside it."""
    grants = divide(total_bytes, sharers, headroom)
    if grants is None:
        return None
    kept = tuple(Grant(grant.name, max(grant.kv_bytes, has)) for grant, has in zip(grants, has_bytes, strict=True))
    held = sum(each.fixed_bytes for each in sharers) + sum(each.kv_bytes for each in kept)
    return kept if held <= int(total_bytes * (1.0 - headroom)) else grants


def divide(total_bytes: int, sharers: Sequence[Sharer], headroom: float = HEADROOM) -> tuple[Grant, ...] | None:
    """KV memory for each; None: the device does not hold all their weights and least KV.

    Worked example (`test_memory_is_divided_by_need_above_the_least`): 100 GB, no headroom, weights of 20 and 40, least
    2 and 8, wanted 12 and 100. 30 are left: the first needs 10 more and the second 92, so in the ratio 10:92 they get
    2.9 and 27.1.
    """
    left = int(total_bytes * (1.0 - headroom)) - sum(each.fixed_bytes + each.least_bytes for each in sharers)
    if left < 0:
        return None
    granted = [each.least_bytes for each in sharers]
    wants = [max(each.wanted_bytes - each.least_bytes, 0) for each in sharers]
    open_ = [index for index, want in enumerate(wants) if want > 0 and sharers[index].weight > 0]
    while open_ and left > 0:
        # Everyone is filled at its own speed (need times weight) until the first has what it needs.
        speeds = {index: wants[index] * sharers[index].weight for index in open_}
        needed = {index: wants[index] - (granted[index] - sharers[index].least_bytes) for index in open_}
        together = sum(speeds.values())
        level = min(left / together, min(needed[index] / speeds[index] for index in open_))
        given = 0
        for index in open_:
            share = min(int(speeds[index] * level), needed[index])
            granted[index] += share
            given += share
        left -= given
        still = [index for index in open_ if granted[index] - sharers[index].least_bytes < wants[index] - 1]
        if given == 0 or len(still) == len(open_):
            break  # what is left is less than a byte each, or all of it is given
        open_ = still
    return tuple(Grant(each.name, kv_bytes) for each, kv_bytes in zip(sharers, granted, strict=True))


def fits(total_bytes: int, sharers: Sequence[Sharer], headroom: float = HEADROOM) -> bool:
    return sum(each.fixed_bytes + each.least_bytes for each in sharers) <= int(total_bytes * (1.0 - headroom))
