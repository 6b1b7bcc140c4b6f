"""What of an arrival has not been asked for yet, what is being read, and when it will all be here.

    items -> take: the next range in the order that holds now -> being read -> done | failed

Order: by layers while passes follow them, from the front where that must be loaded, else from the back, so that what is
computed from the front meets it. As much is asked for at once as keeps the store busy, and no more: what is not asked
for yet can still be left. What is left is asked after for every range there is, so that its bytes are kept in an array
in the order of their ends. Limits: not locked, no clock: `steering` brings both.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from function_runtime.kv.fit import Fit
from function_runtime.kv.speeds import READERS, TYPICAL_READS, Speeds

SPAN_BYTES: Final = 17 * 1024 * 1024
"""Neighbouring chunks are read together up to this size: a pack of 16 MiB with its headers is one request. A store that
is far or slow gets it in parts, side by side."""
GAP_BYTES: Final = 64
BUSY_S: Final = 0.05
"""Besides twice what fits into the store's latency, so much is asked for ahead."""
LONGER_EVERY: Final = 3
LONGER: Final = 3
"""One range in three is three times as long: ranges of one length do not tell latency from bandwidth."""
FIRST_READERS: Final = 2
"""Until the first range is here, of a store that was not measured lately."""


class Order(enum.Enum):
    LAYERS = "layers"
    FRONT = "front"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Item:
    """A chunk to be read, in `edges[-1]` bytes; `edges`: where its pieces begin and end."""

    index: int
    choice: int
    start: int
    end: int
    pack: str
    offset: int
    edges: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.edges[-1]

    @property
    def pieces(self) -> int:
        return len(self.edges) - 1


@dataclass(slots=True)
class Job:
    """One range: whole neighbouring chunks, or pieces [first, last) of one."""

    items: tuple[Item, ...]
    first: int
    last: int
    nbytes: int
    begin_s: float = 0.0
    _shared: float = field(default=0.0, repr=False)


class Supply:
    def __init__(
        self,
        items: Sequence[Item],
        order: Order,
        speeds: Callable[[], Speeds] | None = None,
        *,
        is_known: bool = True,
    ) -> None:
        """`speeds`: None, as many at once as there are readers. `is_known`: they were measured lately."""
        self._left = sorted(items, key=lambda item: (item.start, item.choice))
        self._largest = max((item.nbytes for item in items), default=1)
        by_end = sorted(items, key=lambda item: item.end)
        self._ends = [item.end for item in by_end]
        self._place_of = {item.index: place for place, item in enumerate(by_end)}
        self._unasked = np.array([item.nbytes for item in by_end], np.int64)
        """Bytes of each item, by its end, that are neither asked for nor dropped."""
        self._asked: dict[int, int] = {}
        """Pieces of an item that have been asked for, by its index."""
        self._layers = [(0, place, item) for place, item in enumerate(self._left)]
        """A heap: by how much of an item was asked for, then from the front. What was dropped is passed over."""
        self.order = order
        self._speeds = speeds
        self.is_known = is_known
        self._flying: list[Job] = []
        self._integral = 0.0
        """Of the number of ranges under way, over time."""
        self._at_s = 0.0
        self.completed = 0
        self._taken = 0
        self._own: Fit | None = None

    # --- asking ---------------------------------------------------------------------------------------------------

    def readers(self) -> int:
        return self._at_once()[0]

    def _at_once(self) -> tuple[int, int]:
        """How many ranges, and how long each may be."""
        largest = self._largest
        speeds = self._now()
        if speeds is None:
            return READERS, SPAN_BYTES
        if not self.is_known and not self.completed:
            return FIRST_READERS, largest
        wanted = speeds.bytes_per_s * (2 * speeds.latency_s + BUSY_S)
        readers = int(min(max(-(-wanted // max(largest, 1)), FIRST_READERS), READERS))
        return readers, int(min(max(wanted / readers, largest), SPAN_BYTES))

    def wants_more(self, coming: int, is_of_use: Callable[[Item], bool]) -> bool:
        """Whether there is work and room for one more than those that are `coming`."""
        if len(self._left) <= coming and self.order is not Order.LAYERS:
            return False
        if not self._left or len(self._flying) + coming >= self.readers():
            return False
        item = self._left[-1 if self.order is Order.BACK else 0]
        return self.order is Order.LAYERS or is_of_use(item)

    def take(self, now_s: float, is_of_use: Callable[[Item], bool]) -> Job | None:
        """The next range to be read, if there is one worth it and room for it."""
        readers, span_bytes = self._at_once()
        if len(self._flying) >= readers:
            return None
        if self._taken % LONGER_EVERY == 1:
            span_bytes = min(LONGER * span_bytes, SPAN_BYTES)
        job = self._next(span_bytes, is_of_use)
        if job is not None:
            self._taken += 1
            self._tick(now_s)
            job.begin_s, job._shared = now_s, self._integral
            self._flying.append(job)
        return job

    def _next(self, span_bytes: int, is_of_use: Callable[[Item], bool]) -> Job | None:
        if not self._left:
            return None
        if self.order is Order.LAYERS:
            return self._layer()
        from_back = self.order is Order.BACK
        item = self._left[-1 if from_back else 0]
        if not is_of_use(item):
            return None
        if item.pieces > 1:
            # Whatever is left of it, at once, unless it is very long.
            first = self._asked.get(item.index, 0)
            count = 1
            while first + count < item.pieces and item.edges[first + count + 1] - item.edges[first] <= span_bytes:
                count += 1
            return self._pieces(item, count)
        together = [item]
        rest = reversed(self._left[:-1]) if from_back else iter(self._left[1:])
        nbytes = item.nbytes
        for other in rest:
            a, b = (other, together[-1]) if from_back else (together[-1], other)
            gap = b.offset - (a.offset + a.nbytes)
            nbytes += other.nbytes + max(gap, 0)
            near = a.pack == b.pack and 0 <= gap < GAP_BYTES and other.pieces == 1
            if not near or nbytes > span_bytes or not is_of_use(other):
                break
            together.append(other)
        if from_back:
            together.reverse()
            del self._left[-len(together) :]
        else:
            del self._left[: len(together)]
        self._unasked[[self._place_of[each.index] for each in together]] = 0
        last = together[-1]
        return Job(tuple(together), 0, 1, last.offset + last.nbytes - together[0].offset)

    def _layer(self) -> Job | None:
        """The next piece of the item that is furthest behind."""
        while self._layers:
            asked, place, item = self._layers[0]
            if self._unasked[self._place_of[item.index]] == 0:
                heapq.heappop(self._layers)
                continue
            heapq.heapreplace(self._layers, (asked + 1, place, item))
            return self._pieces(item, 1)
        return None

    def _pieces(self, item: Item, count: int) -> Job:
        first = self._asked.get(item.index, 0)
        last = first + count
        self._asked[item.index] = last
        self._unasked[self._place_of[item.index]] = item.nbytes - item.edges[last]
        if last == item.pieces:
            self._left.remove(item)
        return Job((item,), first, last, item.edges[last] - item.edges[first])

    def done(self, job: Job, now_s: float, is_sound: bool) -> tuple[float, float]:
        """The range is here, or failed. Gives the bytes that came in its time, its own share of the line taken for
        that of each, and the time."""
        self._tick(now_s)
        self._flying.remove(job)
        self.completed += is_sound
        seconds = max(now_s - job.begin_s, 1e-9)
        nbytes = job.nbytes * max(1.0, (self._integral - job._shared) / seconds)
        if is_sound and self._speeds is not None:
            if self._own is None:
                before = self._speeds()
                self._own = Fit(before.latency_s, 1 / before.bytes_per_s, TYPICAL_READS)
            self._own.measure(1, nbytes, seconds)
        return nbytes, seconds

    def _now(self) -> Speeds | None:
        """What this arrival has seen itself counts before what was measured earlier."""
        if self._speeds is None:
            return None
        speeds = self._speeds()
        if self._own is None:
            return speeds
        latency_s, byte_s = self._own.values
        return replace(speeds, latency_s=latency_s, bytes_per_s=1 / max(byte_s, 1e-15))

    def drop_before(self, position: int) -> None:
        """What ends at or before `position` is computed."""
        self._unasked[: bisect_right(self._ends, position)] = 0
        self._left = [item for item in self._left if item.end > position]

    def drop(self, index: int) -> None:
        """The item failed."""
        self._unasked[self._place_of[index]] = 0
        self._left = [item for item in self._left if item.index != index]

    # --- expecting ------------------------------------------------------------------------------------------------

    def remaining_s(self, position: int, now_s: float) -> float:
        """Until all that lies behind `position` is here. What is late already is taken to be slow as a whole."""
        left = int(self._unasked[bisect_right(self._ends, position) :].sum())
        jobs = [job for job in self._flying if job.items[-1].end > position]
        speeds = self._now()
        if speeds is None or not (left or jobs):
            return 0.0
        flying = sum(job.nbytes for job in jobs)
        expected_s = speeds.latency_s + flying / speeds.bytes_per_s
        rest_s = left / speeds.bytes_per_s
        if not jobs:
            return speeds.latency_s + rest_s
        passed_s = now_s - min(job.begin_s for job in jobs)
        if passed_s <= expected_s:
            return expected_s - passed_s + rest_s
        return rest_s * passed_s / expected_s + max(passed_s / 4, passed_s - expected_s)

    def _tick(self, now_s: float) -> None:
        self._integral += len(self._flying) * max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
