"""Room where there is none: who would have to go, by what would be lost.

Of a device's residents those with the least loss per byte go first, lower priorities before higher (the greedy rule for
a weighted knapsack, taken back where it took too much). Limits: who is allowed to be ended is the caller's to say; each
device of a replica over several is looked at for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoscaler.homes import Resident
from autoscaler.work import Work

MayEnd = Callable[[Resident, Work], bool]


def loss_s(in_flight: int, resume_s: float, wanted: float, reload_s: float, cached_s: float = 0.0) -> float:
    """Expected seconds of people's waiting that ending a replica costs: those it runs go on elsewhere after `resume_s`
    each; with chance `wanted` it is asked for again while it would still have been there, and has to be started; what
    its cached prefixes would have saved is lost."""
    return in_flight * resume_s + wanted * reload_s + cached_s


def may_end_by_default(resident: Resident, work: Work) -> bool:
    """Lower priorities, and idle equals whose loss is less than what those who wait would lose. What is starting is
    never ended for others, nor what its function must have (an infinite loss)."""
    if resident.starting or resident.loss_s == float("inf"):
        return False
    if resident.priority < work.priority:
        return True
    if not resident.idle or resident.priority > work.priority:
        return False
    return resident.loss_s < work.waiting * work.room_wait_s


def choose_victims(
    residents: Sequence[Resident], needed_bytes: int, work: Work, may_end: MayEnd = may_end_by_default
) -> tuple[Resident, ...] | None:
    """Who of a device has to go so that this much more is free; nobody who is not needed in the end. None: not all of
    them together would do."""
    chosen: list[Resident] = []
    freed_bytes = 0
    able = [each for each in residents if may_end(each, work)]
    able.sort(key=lambda each: (each.priority, each.loss_s / _held(each), each.replica_id))
    for each in able:
        if freed_bytes >= needed_bytes:
            break
        chosen.append(each)
        freed_bytes += _held(each)
    if freed_bytes < needed_bytes:
        return None
    for each in sorted(chosen, key=lambda each: -each.loss_s):
        if freed_bytes - _held(each) >= needed_bytes:
            chosen.remove(each)
            freed_bytes -= _held(each)
    return tuple(chosen)


def _held(resident: Resident) -> int:
    """Where bytes are not told, each counts as one."""
    return max(resident.nbytes + resident.kv_bytes, 1)
