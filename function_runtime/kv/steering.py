"""A resume under way: computing from the front and reading from the back race, and whoever is slower is left behind.

    wait      what is on its way is here in a fraction of what the next pass takes
    compute   else, or when it is late; a pass that is overtaken by what it computes is given up at its next layer
    read on   as long as a chunk is here before computing gets to it

So a resume takes what the faster of the two takes, whatever was predicted: a load that turns out slow costs the wait
before the first pass (of a store that is not known `PATIENCE` of it while nothing has come), one that turns out quick
at most a layer. While weights are coming that need the link, nothing is read if the pass that follows them saves
reading. Limits: a pass that other requests share is not given up; on a device that runs behind, giving up is no gain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from function_runtime.kv.contention import WhatComes, nothing
from function_runtime.kv.plan import Costs, Known
from function_runtime.kv.speeds import Speeds
from function_runtime.kv.supply import Item, Job, Order, Supply

PATIENCE: Final = 0.08
"""Share of a pass that is waited before anything has come at all."""
LATE: Final = 2.0
LATE_S: Final = 0.05
"""And of a store that was measured lately: as long as it should take, twice, and this much for a busy machine. What is
expected within this time is waited for, however short the pass."""
ON_TRACK: Final = 0.4
"""Share of a pass in which everything is expected here and computing does not begin: giving the pass up could cost as
much as a layer, and reading has the processor to itself."""
SMALL: Final = 0.15
"""Share of computing everything, for the same: computing beside it could save a seventh of the read at most, and slows
it by more where both need the processor (a store on the same two cores: by half)."""
STALL: Final = 0.03
"""Share of computing everything that is waited, whatever is late, where less than `SMALL` was expected: a machine that
stalls for a tenth of a second is no sign of a slow store."""
PROBES: Final = 2


class Steering:
    """Of one arrival. `known` None: everything is read and waited for."""

    def __init__(
        self,
        supply: Supply,
        known: Known | None = None,
        speeds: Callable[[], Speeds] | None = None,
        *,
        must: bool = False,
        probes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        coming: WhatComes = nothing,
    ) -> None:
        """`must`: the beginning cannot be computed as the first attempt had it. `probes`: so many ranges are read
        whatever is expected of them, to know better (of two, one is longer than the other)."""
        self._lock = threading.Lock()
        self._supply = supply
        self._known = known if speeds is not None else None
        self._speeds = speeds
        self._must = must
        self._probes = probes
        self._clock = clock
        self._coming = coming
        self._position = 0
        self._computing_since_s: float | None = None
        self._waiting_since_s: float | None = None
        self._waited_s = 0.0
        self._expected_s = 0.0
        """What the wait was thought to take when it began."""

    # --- by readers -----------------------------------------------------------------------------------------------

    def wants_more(self, coming: int) -> bool:
        """Whether another reader would have something to do, besides those that are `coming`."""
        with self._lock:
            return not self._leaves_link() and self._supply.wants_more(coming, self._is_of_use)

    def take(self) -> Job | None:
        with self._lock:
            if self._leaves_link():
                return None
            job = self._supply.take(self._clock(), self._is_of_use)
            if job is not None:
                self._probes = max(0, self._probes - 1)
            return job

    def done(self, job: Job, is_sound: bool) -> tuple[float, float]:
        """The range is here, or failed. Gives what it was measured to take."""
        with self._lock:
            return self._supply.done(job, self._clock(), is_sound)

    def drop(self, index: int) -> None:
        with self._lock:
            self._supply.drop(index)

    @property
    def leaves_link(self) -> bool:
        """Nothing is read for now: the weights come first."""
        with self._lock:
            return self._leaves_link()

    def _leaves_link(self) -> bool:
        known, speeds = self._known, self._speeds
        coming = self._coming() if known is not None and not self._must and not known.from_start else None
        if known is None or speeds is None or coming is None or not coming.has_link:
            return False
        # Of use only if the pass that follows the weights is over before everything would have been read.
        now_s = self._clock()
        pass_s = Costs(known, speeds()).between(self._position, self._end_of_pass(self._position, known))
        if self._computing_since_s is not None:
            pass_s = max(0.0, pass_s - (now_s - self._computing_since_s))
        read_s = coming.left_s + self._supply.remaining_s(self._position, now_s)
        return coming.computed_s(pass_s, pass_s) < read_s

    def _is_of_use(self, item: Item) -> bool:
        """Whether computing would still be before the end of the pass it is in by the time that pass is all here."""
        known = self._known
        if known is None or self._must or self._probes > 0:
            return True
        begin, end = self._pass_of(item.start, known)
        now_s = self._clock()
        return self._supply.remaining_s(begin, now_s) < self._computing_s(max(end, item.end), now_s)

    def _pass_of(self, position: int, known: Known) -> tuple[int, int]:
        """Of a recorded schedule the pass that computes `position`; else the position is its own."""
        if known.fast or position >= known.prompt:
            return position, position
        end = next((edge for edge in known.boundaries if edge > position), position)
        begin = max((edge for edge in known.boundaries if edge <= position), default=position)
        return (begin, end) if end > position else (position, position)

    def _computing_s(self, to: int, now_s: float) -> float:
        """Until computing has got to `to`."""
        known, speeds = self._known, self._speeds
        if known is None or speeds is None:
            return 0.0
        costs = Costs(known, speeds())
        whole_s = costs.between(self._position, to)
        left_s = whole_s - (now_s - self._computing_since_s if self._computing_since_s is not None else 0.0)
        coming = self._coming()
        if coming is None:
            return left_s
        first_s = costs.between(self._position, self._end_of_pass(self._position, known))
        return max(left_s, coming.computed_s(whole_s, first_s))

    # --- by the engine --------------------------------------------------------------------------------------------

    def is_at(self, position: int) -> None:
        """Everything before `position` is here or computed."""
        with self._lock:
            if position != self._position:
                self._position = position
                self._computing_since_s = None
                self._supply.drop_before(position)

    def turn_back(self) -> None:
        """The front is computed: what is left is read from the back."""
        with self._lock:
            if self._supply.order is Order.LAYERS:
                self._supply.order = Order.BACK

    @property
    def only_from_start(self) -> bool:
        """What is computed in front is of no use together with what lies behind it."""
        return self._known is not None and self._known.from_start

    def waits(self, position: int, alone: bool) -> bool:
        """Whether the next pass, from `position` on, is not to be computed now. `alone`: it can be given up."""
        with self._lock:
            known, speeds = self._known, self._speeds
            if known is None or speeds is None or (self._must and position < known.boundaries[0]):
                return True
            now_s = self._clock()
            waits = not self._leaves_link() and self._is_better_to_wait(
                position, alone, now_s, known, Costs(known, speeds())
            )
            if not waits:
                if self._waiting_since_s is not None:
                    self._waited_s += now_s - self._waiting_since_s
                self._waiting_since_s = None
                self._computing_since_s = now_s
            elif self._waiting_since_s is None:
                self._waiting_since_s = now_s
                self._expected_s = max(self._expected_s, self._supply.remaining_s(position, now_s))
            return waits

    def _is_better_to_wait(self, position: int, alone: bool, now_s: float, known: Known, costs: Costs) -> bool:
        pass_s = costs.between(position, self._end_of_pass(position, known))
        left_s = self._supply.remaining_s(position, now_s)
        waited_s = self._waited_s + (now_s - self._waiting_since_s if self._waiting_since_s is not None else 0.0)
        if not alone:
            return left_s < pass_s and waited_s < pass_s
        whole_s = costs.between(0, known.total)
        most_s = max(ON_TRACK * pass_s, SMALL * whole_s, LATE_S)
        if self._supply.is_known and 0 < self._expected_s < most_s and waited_s < STALL * whole_s:
            return True
        return left_s < most_s and waited_s < (most_s if self._supply.completed else self._patience_s(pass_s, most_s))

    def _patience_s(self, pass_s: float, most_s: float) -> float:
        """Nothing has come at all."""
        least_s = PATIENCE * pass_s
        if not self._supply.is_known:
            return least_s
        return max(least_s, min(most_s, LATE * self._expected_s + LATE_S))

    def _end_of_pass(self, position: int, known: Known) -> int:
        prompt = known.total if known.fast else known.prompt
        if position >= prompt:
            return position + 1
        if not known.fast and known.boundaries and position >= known.boundaries[0]:
            end = next((edge for edge in known.boundaries if edge > position), prompt)
            return min(end, prompt)
        return min(position + known.pass_tokens, prompt)

    def is_hopeless(self, position: int) -> bool:
        """A pass that waits for its layers would be done sooner if everything were computed."""
        with self._lock:
            known, speeds = self._known, self._speeds
            if known is None or speeds is None or self._must:
                return False
            left_s = self._supply.remaining_s(position, self._clock())
            return left_s > Costs(known, speeds()).between(position, known.total) / 2

    def meeting(self, position: int, starts: list[int], end: int) -> int:
        """Where a pass from `position` had better end, at most at `end`: the first of `starts` from where on all is
        here by the time computing gets there."""
        with self._lock:
            known, speeds = self._known, self._speeds
            if known is None or speeds is None:
                return min([*starts, end])
            now_s = self._clock()
            costs = Costs(known, speeds())
            for start in sorted(starts):
                if start >= end:
                    break
                if self._supply.remaining_s(start, now_s) <= costs.between(position, start):
                    return start
            return end
