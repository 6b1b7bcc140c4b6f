"""KV that others computed after a beginning of their own is computed again with that beginning first, and laid down.

    rehearse a source from position 0 in its own passes -> keep what was taken of it -> the schedule itself, and where
    it comes to a part that was taken: what was kept

While a source is rehearsed the request's blocks hold its KV, which nobody else may see. Limits: all of a source is
computed, however little was taken of it.
"""

from __future__ import annotations

from function_runtime.engine.kv_cache import KvCache
from function_runtime.engine.request import Request
from function_runtime.passes import Passes


def go_on(cache: KvCache, request: Request) -> None:
    """After a pass of prefill: ends a rehearsal that is through, and lays down what comes next and is there."""
    first = request.choices[0]
    while True:
        followed = request.followed
        part = followed.part_at(first.computed)
        if part is not None and isinstance(part[2], Passes):
            begin, upto, source = part[0], part[1], part[2]
            cache.write(first.blocks, begin, request.rehearsed[begin, source])
            first.computed = upto
            if not request.rehearsals:
                first.passes = request.schedule.upto(upto)
        elif request.rehearsals and first.computed >= followed.end:
            begin, source = request.rehearsals.pop(0)
            request.rehearsed[begin, source] = cache.read(first.blocks, begin, source.end)
            first.computed = 0
        else:
            break
    if not request.rehearsals and first.computed >= request.schedule.taken_until:
        request.rehearsed = {}
