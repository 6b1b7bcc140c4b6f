"""The load of every function, and of every slot, over all gateways, as the leader of the control loop knows it:
histories and start times.

Each gateway closes windows of ten seconds (`load_meter`) and tells the leader of them; a window counts once all living
gateways have told of it, or not at all: what somebody did not tell of was not seen, which is not the same as quiet.
Minutes and coarser windows go to the database; whoever comes to lead restores the histories from there and goes on.
Limits: nothing here blocks the event loop for more than `TURN_S`; peaks of several gateways are added up; gaps that
reach over a time nobody watched are not known.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from autoscaler.start_times import END, TOTAL, StartTimes
from control_plane.errors import StokerError
from control_plane.lanes import FunctionKey
from control_plane.load_meter import PAUSE_S, WINDOW_S, LoadMeter
from control_plane.load_store import COARSE_S, DAY_S, KEPT_S, MINUTE_S, Kept, LoadStore, Row
from control_plane.load_windows import SLOTS, STORED, ClosedWindow, FunctionWindow
from function_runtime.protocol import ReplicaStatus

if TYPE_CHECKING:
    from autoscaler.windows import History
    from control_plane.functions import FunctionStore
    from control_plane.gateways import Gateways

logger = logging.getLogger(__name__)

TURN_S: Final = 0.003
WRITTEN_AT_ONCE: Final = 200
UNWRITTEN_MAX: Final = 30
"""Minutes of a function that wait for a database that is away."""
TOLD_MAX: Final = 30
"""Windows that wait for what earlier leaders knew."""
SPANS_KEPT: Final = 256
_LEAVING: Final = frozenset({"flush", "exit"})
_FARTHEST: Final = ("store", "peer", "disk", "pool", "device")


class Turns:
    """Lets everything else run whenever `TURN_S` have been spent."""

    __slots__ = ("_since_s",)

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def over(self) -> None:
        if time.perf_counter() - self._since_s > TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()


class FunctionLoad:
    """What is known of one function."""

    __slots__ = (
        "active_until_s", "busy_until_s", "changed", "coarse_gaps", "fine", "fine_gaps", "history", "lock", "seen_s",
        "starts", "starts_changed", "unwritten",
    )  # fmt: skip

    def __init__(self, history: History, seen_s: float, starts: StartTimes) -> None:
        self.history = history
        self.seen_s = seen_s
        """Up to when the history has been told what was watched."""
        self.starts = starts
        self.starts_changed = False
        self.busy_until_s = -math.inf
        """The last activity that was told of, if everything since was watched."""
        self.active_until_s = -math.inf
        """The last activity that is known of, by the wall clock; after a restore to ten seconds only."""
        self.changed = False
        """Whether anything has come since the last refit."""
        self.fine: list[tuple[int, tuple[float, ...]]] = []
        """Windows of the minute that is not written yet: (start, values)."""
        self.fine_gaps: list[tuple[float, float]] = []
        self.coarse_gaps: list[tuple[float, float]] = []
        self.unwritten: deque[Row] = deque(maxlen=UNWRITTEN_MAX)
        self.lock = asyncio.Lock()
        """Held by whoever reads the history in another thread, and by whoever adds to it."""


class Observations:
    def __init__(
        self,
        meter: LoadMeter,
        gateways: Gateways,
        functions: FunctionStore,
        store: LoadStore,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.meter = meter
        self._gateways = gateways
        self._functions = functions
        self._store = store
        self._wall = wall
        self.loads: dict[FunctionKey, FunctionLoad] = {}
        self.spans: list[list[float]] = []
        """[since, until) that all gateways were watched, oldest first: as long ago as is remembered."""
        self._told: dict[float, dict[str, ClosedWindow]] = {}
        self._settled_s = -math.inf
        self._span_since_s: float | None = None
        """Where the span that this leader writes down begins."""
        self._kept_starts: dict[FunctionKey, str] = {}
        self._jumps = 0
        self._early: list[ReplicaStatus] = []
        """Starts from before that."""
        self.restored = False
        """Whether what earlier leaders knew is known."""
        self.refused: Counter[str] = Counter()
        """Windows that did not count, by reason."""
        self.on_window: Callable[[], None] = lambda: None

    # --- leading ---

    def begin(self) -> None:
        """This gateway has come to lead, or ceased to."""
        self.loads.clear()
        self.spans.clear()
        self._told.clear()
        self._settled_s = -math.inf
        self._span_since_s = None
        self.restored = False

    async def restore(self) -> None:
        """What earlier leaders have written down, function by function."""
        await asyncio.to_thread(importlib.import_module, "autoscaler.windows")
        now_s = self._wall()
        self.spans = [list(span) for span in (await self._store.spans(now_s - KEPT_S))[-SPANS_KEPT:]]
        self._kept_starts = await self._store.starts()
        for function in self._functions.list():
            await self._restored((function.tenant, function.name), function.created_us / 1e6, now_s)
        for slot_id in await self._store.slots(now_s - DAY_S):
            await self._restored((SLOTS, slot_id), now_s - DAY_S, now_s)
        self.restored = True
        early, self._early = self._early, []
        for status in early:
            self.started(status)
        logger.info("event=load_restored functions=%d spans=%d", len(self.loads), len(self.spans))

    async def _restored(self, key: FunctionKey, created_s: float, now_s: float) -> None:
        rows = await self._store.read(key, created_s, now_s)
        spans = [(max(since, created_s), until) for since, until in self.spans if until > created_s]
        history = await asyncio.to_thread(history_of, rows, spans, now_s)
        load = FunctionLoad(history, max((until for _, until in spans), default=created_s), self._starts_of(key))
        load.active_until_s = _active_until(rows)
        self.loads.setdefault(key, load)

    def _starts_of(self, key: FunctionKey) -> StartTimes:
        try:
            return StartTimes.from_json(self._kept_starts[key]) if key in self._kept_starts else StartTimes()
        except ValueError as error:
            logger.warning("event=start_times_damaged function=%s error=%s", key[1], error)
            return StartTimes()

    def forget(self, key: FunctionKey) -> None:
        """The function was deleted."""
        self.loads.pop(key, None)
        self._kept_starts.pop(key, None)

    def of(self, key: FunctionKey) -> FunctionLoad | None:
        return self.loads.get(key)

    def on_slot(self, slot_id: str) -> FunctionLoad | None:
        """What has run there; None: nothing that is known of."""
        return self.loads.get((SLOTS, slot_id))

    def _made(self, key: FunctionKey) -> FunctionLoad | None:
        """A function's, made where it has none; None: there is no such function (any more)."""
        from autoscaler.windows import History

        load = self.loads.get(key)
        if load is None and key[0] == SLOTS:
            # From now on: nobody knows since when there is such a slot.
            load = self.loads[key] = FunctionLoad(History(), self.spans[-1][1] - WINDOW_S, StartTimes())
        elif load is None:
            function = self._functions.find(key[1], key[0])
            if function is None:
                return None
            load = self.loads[key] = FunctionLoad(History(), function.created_us / 1e6, self._starts_of(key))
        return load

    # --- starts ---

    def started(self, status: ReplicaStatus) -> None:
        """A replica became ready: how long each stage took, by the farthest tier that it needed."""
        if not self.restored:
            self._early.append(status)
            return
        load = self._made((status.spec.tenant, status.function))
        if load is None or not status.ready_us or not status.created_us:
            return
        stages = [stage for stage in status.stages if stage.start_us <= status.ready_us]
        tiers = {stage.tier for stage in stages}
        tier = next((tier for tier in _FARTHEST if tier in tiers), "none")
        for stage in stages:
            load.starts.note(tier, stage.name, stage.duration_us / 1e6)
        load.starts.note(tier, TOTAL, (status.ready_us - status.created_us) / 1e6)
        load.starts_changed = True

    def ended(self, status: ReplicaStatus) -> None:
        """A replica that was ready is gone: how long its process took for that, what it still ran not counted."""
        seconds = sum(stage.duration_us for stage in status.stages if stage.name in _LEAVING) / 1e6
        load = self._made((status.spec.tenant, status.function)) if self.restored and seconds else None
        if load is not None:
            load.starts.note("none", END, seconds)
            load.starts_changed = True

    # --- windows ---

    def take(self, gateway: str, windows: Iterable[ClosedWindow]) -> float:
        """What a gateway tells; up to which window it need not tell it again."""
        self._follow_clock()
        until_s = -math.inf
        for window in windows:
            until_s = max(until_s, window.start_s)
            if not math.isfinite(window.start_s) or window.start_s % WINDOW_S:
                self.refused["uneven"] += 1
            elif window.start_s <= self._settled_s:
                self.refused["late"] += 1
            elif gateway in self._told.setdefault(window.start_s, {}):
                self.refused["duplicated"] += 1
            else:
                self._told[window.start_s][gateway] = window
        return until_s

    async def settle(self) -> None:
        """Count the windows of which every living gateway has told; give up those that stay incomplete for one
        window's time."""
        if not self.restored:
            while len(self._told) > TOLD_MAX:
                del self._told[min(self._told)]
            return
        self._follow_clock()
        now_s = self._wall()
        expected = {self._gateways.id, *self._gateways.peers}
        for start_s in sorted(self._told):
            told = self._told[start_s]
            missing = expected - told.keys()
            if missing and now_s < start_s + 2 * WINDOW_S:
                return
            del self._told[start_s]
            self._settled_s = start_s
            own = told.get(self._gateways.id)
            if missing or own is None or not own.whole:
                self.refused["missed"] += 1
                if missing:
                    logger.warning("event=load_not_told gateways=%s start_s=%.0f", ",".join(sorted(missing)), start_s)
                continue
            await self._count(start_s, told)
            self.on_window()

    def _follow_clock(self) -> None:
        """Where this gateway's own clock was put back, what lies ahead of it was not so."""
        if self.meter.clock_jumps == self._jumps:
            return
        self._jumps = self.meter.clock_jumps
        now_s = self._wall()
        self._told = {start_s: told for start_s, told in self._told.items() if start_s <= now_s}
        self._span_since_s = None
        if self._settled_s > now_s:
            self._settled_s = -math.inf
            self.spans = [[since, min(until, now_s)] for since, until in self.spans if since < now_s]
            for load in self.loads.values():
                load.history.forget_after(now_s)
                load.seen_s, load.busy_until_s = min(load.seen_s, now_s), -math.inf

    async def _count(self, start_s: float, told: dict[str, ClosedWindow]) -> None:
        end_s = start_s + WINDOW_S
        if self.spans and self.spans[-1][1] == start_s:
            self.spans[-1][1] = end_s
        else:
            self.spans.append([start_s, end_s])
            del self.spans[:-SPANS_KEPT]
        if self._span_since_s is None or self.spans[-1][0] == start_s:
            self._span_since_s = start_s
        parts: dict[FunctionKey, list[FunctionWindow]] = {}
        for window in told.values():
            for part in window.functions:
                parts.setdefault((part.tenant, part.function), []).append(part)
        turns = Turns()
        for key, of_function in parts.items():
            load = self._made(key)
            if load is not None:
                async with load.lock:
                    self._add(load, start_s, of_function)
            await turns.over()

    def _add(self, load: FunctionLoad, start_s: float, parts: list[FunctionWindow]) -> None:
        from autoscaler.windows import Window, combined

        self.catch_up(load, start_s)
        windows = [Window(start_s, WINDOW_S, **dict(zip(STORED, part.values, strict=False))) for part in parts]
        window = windows[0] if len(windows) == 1 else combined(windows)
        refusal = load.history.add(window)
        if refusal is not None:
            self.refused[refusal.value] += 1
            return
        load.seen_s, load.changed = start_s + WINDOW_S, True
        load.fine.append((round(start_s), tuple(float(getattr(window, name)) for name in STORED)))
        watched_s = self.spans[-1][0]
        for since_s, until_s in sorted(interval for part in parts for interval in part.busy):
            if load.busy_until_s >= watched_s and since_s - load.busy_until_s >= PAUSE_S:
                gap = (load.busy_until_s, since_s - load.busy_until_s)
                if load.history.note_gap(*gap):
                    load.fine_gaps.append(gap)
                    load.coarse_gaps.append(gap)
            load.busy_until_s = max(load.busy_until_s, until_s)
            load.active_until_s = max(load.active_until_s, until_s)

    def catch_up(self, load: FunctionLoad, until_s: float) -> None:
        """What was watched since, and brought no window, was quiet."""
        for since, until in reversed(self.spans):
            if until <= load.seen_s:
                break
            load.history.observed(max(since, load.seen_s), min(until, until_s))
        load.seen_s = max(load.seen_s, min(until_s, self.spans[-1][1] if self.spans else load.seen_s))

    # --- keeping ---

    async def keep(self, *, whole: bool = False) -> None:
        """Write down minutes that are over (`whole`: what there is), and start times that have changed."""
        if not self.restored:
            return
        over_s = math.inf if whole else self._settled_s + WINDOW_S
        rows: list[tuple[FunctionKey, Row]] = []
        turns = Turns()
        for key, load in list(self.loads.items()):
            if load.fine:
                self._gather(load, over_s)
            rows += [(key, row) for row in load.unwritten]
            await turns.over()
        for first in range(0, len(rows), WRITTEN_AT_ONCE):
            batch = rows[first : first + WRITTEN_AT_ONCE]
            await self._store.write(batch)
            for key, row in batch:
                if key in self.loads and row in self.loads[key].unwritten:
                    self.loads[key].unwritten.remove(row)
        if self.spans and self._span_since_s is not None:
            # Not beyond what is written: what a kill takes was not seen, and is not quiet.
            until_s = self.spans[-1][1] if whole else self.spans[-1][1] // MINUTE_S * MINUTE_S
            if until_s > self._span_since_s:
                await self._store.write_span(self._span_since_s, until_s)
        for key, load in list(self.loads.items()):
            await turns.over()
            if load.starts_changed:
                load.starts_changed = False
                try:
                    await self._store.write_starts(key, self._wall(), load.starts.to_json())
                except StokerError:
                    load.starts_changed = True
                    raise

    def _gather(self, load: FunctionLoad, over_s: float) -> None:
        minutes: dict[int, list[tuple[int, tuple[float, ...]]]] = {}
        for start_s, values in load.fine:
            minutes.setdefault(start_s // MINUTE_S * MINUTE_S, []).append((start_s, values))
        load.fine = []
        for minute_s, fine in minutes.items():
            if minute_s + MINUTE_S > over_s:
                load.fine += fine
                continue
            offsets = tuple((start_s - minute_s, values) for start_s, values in fine)
            load.unwritten.append(Row(MINUTE_S, minute_s, Kept((), offsets, tuple(load.fine_gaps[:32]))))
            load.fine_gaps.clear()
            self._gather_coarse(load, minute_s // COARSE_S * COARSE_S)

    def _gather_coarse(self, load: FunctionLoad, coarse_s: int) -> None:
        """The coarse window of a minute that was just written: written with each of its minutes, so that none is lost
        with a leader that ends in between."""
        window = load.history.window_at(COARSE_S, coarse_s)
        if window is None:
            return
        values = tuple(round(float(getattr(window, name)), 6) for name in STORED)
        load.coarse_gaps = [gap for gap in load.coarse_gaps if gap[0] + gap[1] >= coarse_s][-64:]
        known = [row for row in load.unwritten if (row.length_s, row.start_s) == (COARSE_S, coarse_s)]
        for row in known:
            load.unwritten.remove(row)
        load.unwritten.append(Row(COARSE_S, coarse_s, Kept(values, (), tuple(load.coarse_gaps))))

    async def sweep(self) -> int:
        """Rows that were too old, a little at a time, and slots on which nothing has run for a day."""
        old_s = self._wall() - DAY_S
        for key in [key for key, load in self.loads.items() if key[0] == SLOTS and load.active_until_s < old_s]:
            del self.loads[key]
        return await self._store.sweep(self._wall())


def _active_until(rows: list[Row]) -> float:
    """The end of the last window with any load."""
    ends = [row.start_s + offset + WINDOW_S for row in rows for offset, _ in row.kept.fine]
    return max([*ends, *(row.start_s + COARSE_S for row in rows if row.length_s == COARSE_S)], default=-math.inf)


def history_of(rows: list[Row], spans: list[tuple[float, float]], now_s: float) -> History:
    """A history from what was written down. A row that cannot be is left out."""
    from autoscaler.windows import History

    history = History()
    for since_s, until_s in spans:
        history.observed(since_s, until_s)
    gaps: set[tuple[float, float]] = set()
    coarse: dict[float, tuple[float, ...]] = {}
    fine: list[tuple[float, tuple[float, ...]]] = []
    for row in rows:
        gaps.update(row.kept.gaps)
        if row.length_s != COARSE_S:
            fine += [(row.start_s + offset, values) for offset, values in row.kept.fine]
        elif row.kept.values and row.kept.values > coarse.get(row.start_s, ()):
            # Whoever came to lead within it had restored what the one before had seen: the greater one is the whole.
            coarse[row.start_s] = row.kept.values
    _put(history, COARSE_S, sorted(coarse.items()))
    _put(history, WINDOW_S, sorted(fine))
    for start_s, gap_s in sorted(gaps):
        history.note_gap(start_s, gap_s)
    return history


def _put(history: History, length_s: int, windows: list[tuple[float, tuple[float, ...]]]) -> None:
    good = [
        (start_s, values)
        for start_s, values in windows
        if all(math.isfinite(value) and value >= 0 for value in values) and not start_s % length_s
    ]
    if not good:
        return
    columns = {
        name: [values[place] if place < len(values) else 0.0 for _, values in good] for place, name in enumerate(STORED)
    }
    history.put(length_s, [start_s for start_s, _ in good], columns)
