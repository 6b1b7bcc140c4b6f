"""What is remembered of a function's load: `Window`, the numbers of a few seconds, and `History`, all that count.

A history keeps windows of 10 s for an hour, of 60 s for a day and of 600 s for 15 days, each made of the finer ones,
and the last gaps between activity and the next request. Only windows in which something happened take a row; which
times were watched at all is kept apart: a quiet window (0) and one nobody saw (NaN) are different things.
Times are seconds since the Unix epoch, because seasons follow the calendar. Limits: a window that comes more than one
window late is refused; after `STEPPED_BACK_AFTER` of them in a row the clock was put back, and what lies ahead of it
goes; a coarse window that was watched for less than half of its time counts as not seen.
"""

from __future__ import annotations

import enum
import json
import math
import operator
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Seconds: TypeAlias = npt.NDArray[np.float64]
Values: TypeAlias = npt.NDArray[np.float64]

RESOLUTIONS_S: Final = (10, 60, 600)
CAPACITY: Final = {10: 360, 60: 1440, 600: 2160}
"""Windows kept of each resolution: an hour, a day, 15 days."""
GAPS_KEPT: Final = 512
SPANS_KEPT: Final = 256
"""Watched times that are remembered apart from one another; of more, the oldest are forgotten."""
STEPPED_BACK_AFTER: Final = 6
SEEN_SHARE: Final = 0.5
"""A window watched for less of its time counts as not seen; one watched for more is scaled up to the whole."""
_MAGIC: Final = b"stkh1"
_HEAD: Final = struct.Struct("<5sII")


class Refusal(enum.StrEnum):
    """Why a window does not count."""

    NOT_A_NUMBER = "not_a_number"
    NEGATIVE = "negative"
    UNEVEN = "uneven"
    """Not of a known length, or not beginning at a multiple of it."""
    LATE = "late"
    DUPLICATED = "duplicated"


@dataclass(frozen=True, slots=True)
class Window:
    """What happened to one function from `start_s` on, for `length_s`, on all gateways together."""

    start_s: float
    length_s: float
    arrivals: float = 0
    refused: float = 0
    """Of the arrivals, those that were turned away."""
    peak_concurrency: float = 0
    """Most requests waiting and running at once."""
    mean_concurrency: float = 0.0
    prompt_tokens: float = 0
    """Of the arrivals."""
    output_tokens: float = 0
    """Made within the window."""
    peak_queue: float = 0
    kv_used_share: float = 0.0
    """Largest share of its KV memory that any replica had in use."""
    first_token_s_sum: float = 0.0
    """Over first tokens delivered within the window, seconds since arrival."""
    first_token_count: float = 0
    first_token_s_max: float = 0.0
    token_s_sum: float = 0.0
    """Over requests that ended within the window, their mean seconds between tokens."""
    token_count: float = 0
    late: float = 0
    """First tokens that came after the function's objective."""
    ended: float = 0
    """Requests that ended within the window."""
    ended_output_tokens: float = 0
    """What they had made altogether."""
    service_s_sum: float = 0.0
    """How long they had occupied a place at a replica."""
    ended_output_tokens_sq: float = 0
    """Over requests that ended, the squares of the tokens each had made: how unlike they are."""


_NAMES: Final = tuple(field.name for field in fields(Window))[2:]
_PEAKS: Final = ("peak_concurrency", "peak_queue", "kv_used_share", "first_token_s_max")
COLUMNS: Final = tuple(name for name in _NAMES if name not in _PEAKS) + _PEAKS
"""Rows hold sums first, then peaks. Concurrency is kept in request-seconds, so that it adds up like the others."""
_SUMS: Final = len(COLUMNS) - len(_PEAKS)
_COLUMN: Final = {name: number for number, name in enumerate(COLUMNS)}
_MEAN: Final = _COLUMN["mean_concurrency"]
_numbers: Final = operator.attrgetter(*COLUMNS)


def combined(windows: Iterable[Window]) -> Window:
    """Of the same seconds, seen at several places: sums add up; so do the peaks of what waits and runs, although they
    may have been at different moments."""
    together = list(windows)
    first = together[0]
    values: dict[str, float] = {}
    for name in _NAMES:
        numbers = [float(getattr(window, name)) for window in together]
        values[name] = max(numbers) if name in ("kv_used_share", "first_token_s_max") else sum(numbers)
    return Window(first.start_s, first.length_s, **values)


class _Spans:
    """Times that were watched, as ordered [since, until) that do not touch."""

    __slots__ = ("spans",)

    def __init__(self, spans: list[list[float]] | None = None) -> None:
        self.spans = spans if spans is not None else []

    @property
    def until_s(self) -> float:
        return self.spans[-1][1] if self.spans else -math.inf

    def overlaps(self, since_s: float, until_s: float) -> bool:
        for span in reversed(self.spans):
            if span[1] <= since_s:
                return False
            if span[0] < until_s:
                return True
        return False

    def cover(self, since_s: float, until_s: float) -> None:
        spans = self.spans
        if spans and spans[-1][0] <= since_s <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], until_s)
            return
        if not spans or since_s > spans[-1][1]:
            spans.append([since_s, until_s])
            del spans[:-SPANS_KEPT]
            return
        merged: list[list[float]] = []
        for since, until in sorted([*spans, [since_s, until_s]]):
            if merged and since <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], until)
            else:
                merged.append([since, until])
        self.spans = merged[-SPANS_KEPT:]

    def forget_before(self, at_s: float) -> None:
        while self.spans and self.spans[0][1] <= at_s:
            del self.spans[0]

    def forget_after(self, at_s: float) -> None:
        self.spans = [[since, min(until, at_s)] for since, until in self.spans if since < at_s]

    def shares(self, edges_s: Seconds) -> Values:
        """Of each cell between two edges, the share that was watched."""
        if not self.spans:
            return np.zeros(len(edges_s) - 1)
        times: list[float] = []
        watched: list[float] = []
        total = 0.0
        for since, until in self.spans:
            times += (since, until)
            watched += (total, total + until - since)
            total = watched[-1]
        return np.asarray(np.diff(np.interp(edges_s, times, watched)) / np.diff(edges_s), dtype=np.float64)


class _Rows:
    """Rows of one resolution, in the order of their windows; those older than the capacity go."""

    __slots__ = ("capacity", "count", "newest", "numbers", "values")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.newest = -1
        """The last row's window."""
        self.numbers: npt.NDArray[np.int64] = np.empty(8, dtype=np.int64)
        """The how-manieth window since the epoch."""
        self.values: npt.NDArray[np.float32] = np.empty((8, len(COLUMNS)), dtype=np.float32)

    def row(self, number: int) -> npt.NDArray[np.float32]:
        """The row of a window, made where there is none yet."""
        count = self.count
        if number == self.newest:
            return self.values[count - 1]  # type: ignore[no-any-return]
        place = count
        if number < self.newest:
            place = int(np.searchsorted(self.numbers[:count], number))
            if self.numbers[place] == number:
                return self.values[place]  # type: ignore[no-any-return]
        else:
            self.newest = number
        if count == len(self.numbers):
            place -= self._make_room(number)
        if place < self.count:
            for array in (self.numbers, self.values):
                array[place + 1 : self.count + 1] = array[place : self.count]
        self.numbers[place] = number
        self.values[place] = 0.0
        self.count += 1
        return self.values[place]  # type: ignore[no-any-return]

    def _make_room(self, newest: int) -> int:
        """Rows that went from the front."""
        gone = int(np.searchsorted(self.numbers[: self.count], newest - self.capacity, side="right"))
        if gone:
            self.forget(slice(gone, self.count))
            return gone
        size = min(2 * self.count, max(self.capacity + self.capacity // 8, self.count + 1))
        self.numbers = np.concatenate([self.numbers, np.empty(size - self.count, dtype=np.int64)])
        more = np.empty((size - self.count, len(COLUMNS)), dtype=np.float32)
        self.values = np.concatenate([self.values, more])
        return 0

    def forget(self, kept: slice) -> None:
        size = len(self.numbers[: self.count][kept])
        self.numbers[:size] = self.numbers[: self.count][kept].copy()
        self.values[:size] = self.values[: self.count][kept].copy()
        self.count = size

    def forget_from(self, number: int) -> None:
        self.count = int(np.searchsorted(self.numbers[: self.count], number))
        self.newest = int(self.numbers[self.count - 1]) if self.count else -1

    def column(self, column: int, first: int, end: int) -> Values:
        low, high = np.searchsorted(self.numbers[: self.count], (first, end))
        dense = np.zeros(end - first)
        dense[self.numbers[low:high] - first] = self.values[low:high, column]
        return dense


class History:
    """Of one function. `add` says why a window does not count; everything else reads."""

    __slots__ = ("_gap_lengths", "_gap_starts", "_late_run", "_rows", "_spans", "refusals")

    def __init__(self) -> None:
        self._rows = {resolution: _Rows(CAPACITY[resolution]) for resolution in RESOLUTIONS_S}
        self._spans = {resolution: _Spans() for resolution in RESOLUTIONS_S}
        self._gap_starts: list[float] = []
        self._gap_lengths: list[float] = []
        self._late_run = (0, -math.inf)
        self.refusals: Counter[Refusal] = Counter()

    # --- writing ---

    def add(self, window: Window) -> Refusal | None:
        """Takes a window of 10, 60 or 600 s; None: it counts."""
        numbers = _numbers(window)
        refusal = self._fault(window, numbers)
        if refusal is not None:
            self.refusals[refusal] += 1
            return refusal
        length_s = int(window.length_s)
        end_s = window.start_s + length_s
        new: npt.NDArray[np.float32] | None = None
        if any(numbers):
            new = np.array(numbers, dtype=np.float32)
            new[_MEAN] *= length_s
        for resolution in RESOLUTIONS_S:
            if resolution < length_s:
                continue
            self._spans[resolution].cover(window.start_s, end_s)
            if new is not None:
                row = self._rows[resolution].row(math.floor(window.start_s / resolution))
                sums, peaks = row[:_SUMS], row[_SUMS:]
                sums += new[:_SUMS]
                np.maximum(peaks, new[_SUMS:], out=peaks)
        return None

    def _fault(self, window: Window, numbers: tuple[float, ...]) -> Refusal | None:
        length_s = window.length_s
        if not math.isfinite(window.start_s + length_s + sum(numbers)):
            return Refusal.NOT_A_NUMBER
        if min(window.start_s, length_s, *numbers) < 0:
            return Refusal.NEGATIVE
        if length_s not in RESOLUTIONS_S or window.start_s % length_s:
            return Refusal.UNEVEN
        spans = self._spans[int(length_s)]
        if window.start_s + 2 * length_s < spans.until_s:
            run, last_s = self._late_run
            run = run + 1 if window.start_s > last_s else 1
            self._late_run = (run, window.start_s)
            if run < STEPPED_BACK_AFTER:
                return Refusal.LATE
            self.forget_after(window.start_s)
        elif spans.overlaps(window.start_s, window.start_s + length_s):
            return Refusal.DUPLICATED
        self._late_run = (0, -math.inf)
        return None

    def observed(self, since_s: float, until_s: float) -> None:
        """Watched from then to then, and what was not told by a window was quiet. Costs nothing per window."""
        if not (math.isfinite(since_s) and math.isfinite(until_s)) or until_s <= since_s:
            return
        for spans in self._spans.values():
            spans.cover(since_s, until_s)

    def add_many(self, length_s: int, since_s: float, until_s: float, columns: Mapping[str, npt.ArrayLike]) -> None:
        """Windows of one length, one after the other from `since_s`, all at once; later than all there is.

        Raises ValueError for what `add` would refuse."""
        steps = round((until_s - since_s) / length_s)
        if length_s not in RESOLUTIONS_S or since_s % length_s or steps * length_s != until_s - since_s:
            raise ValueError(f"{since_s} to {until_s} are no whole windows of {length_s} s")
        if since_s < self._spans[length_s].until_s:
            raise ValueError(f"windows from {since_s} on come before what there is already")
        self.put(length_s, np.round(since_s + length_s * np.arange(steps)), columns)
        for resolution in RESOLUTIONS_S:
            if resolution >= length_s:
                self._spans[resolution].cover(since_s, until_s)

    def put(self, length_s: int, starts_s: npt.ArrayLike, columns: Mapping[str, npt.ArrayLike]) -> None:
        """What is known of some windows, in order; which times were watched is said apart (`observed`). Raises
        ValueError for what `add` would refuse."""
        starts = np.asarray(starts_s, dtype=np.float64)
        table = np.zeros((len(starts), len(COLUMNS)))
        for name, given in columns.items():
            table[:, _COLUMN[name]] = given
        if not np.isfinite(table).all() or (table < 0).any():
            raise ValueError("windows hold finite numbers from 0 on")
        table[:, _MEAN] *= length_s
        busy = table.any(axis=1)
        table, starts = table[busy], starts[busy]
        for resolution in RESOLUTIONS_S:
            if resolution < length_s or not len(starts):
                continue
            rows, numbers = self._rows[resolution], np.floor(starts / resolution).astype(np.int64)
            kept = numbers > numbers[-1] - CAPACITY[resolution]
            unique, where = np.unique(numbers[kept], return_inverse=True)
            merged = np.zeros((len(unique), len(COLUMNS)))
            np.add.at(merged[:, :_SUMS], where, table[kept, :_SUMS])
            np.maximum.at(merged[:, _SUMS:], where, table[kept, _SUMS:])
            for number, row in zip(unique, merged, strict=True):
                into = rows.row(int(number))
                into[:_SUMS] += row[:_SUMS]
                np.maximum(into[_SUMS:], row[_SUMS:], out=into[_SUMS:])

    def note_gap(self, start_s: float, length_s: float) -> bool:
        """A time without any request that a request has ended; False: no such thing, or known already."""
        if not (math.isfinite(start_s) and math.isfinite(length_s)) or length_s < 0:
            self.refusals[Refusal.NOT_A_NUMBER if length_s >= 0 or length_s != length_s else Refusal.NEGATIVE] += 1
            return False
        if self._gap_starts and start_s <= self._gap_starts[-1]:
            self.refusals[Refusal.DUPLICATED if start_s == self._gap_starts[-1] else Refusal.LATE] += 1
            return False
        self._gap_starts.append(start_s)
        self._gap_lengths.append(length_s)
        if len(self._gap_starts) > GAPS_KEPT + GAPS_KEPT // 4:
            del self._gap_starts[:-GAPS_KEPT], self._gap_lengths[:-GAPS_KEPT]
        return True

    def forget_after(self, at_s: float) -> None:
        """The clock was put back to `at_s`: what it had shown beyond was not so. Coarse windows go as a whole."""
        for resolution in RESOLUTIONS_S:
            self._rows[resolution].forget_from(math.floor(at_s / resolution))
            self._spans[resolution].forget_after(math.floor(at_s / resolution) * resolution)
        while self._gap_starts and self._gap_starts[-1] >= at_s:
            del self._gap_starts[-1], self._gap_lengths[-1]

    # --- reading ---

    @property
    def observed_since_s(self) -> float | None:
        """The first watched moment that is remembered at any resolution."""
        starts = [spans.spans[0][0] for spans in self._spans.values() if spans.spans]
        return min(starts) if starts else None

    @property
    def observed_until_s(self) -> float | None:
        ends = [spans.until_s for spans in self._spans.values() if spans.spans]
        return max(ends) if ends else None

    @property
    def gaps_s(self) -> Values:
        """Lengths of the last gaps, oldest first."""
        return np.array(self._gap_lengths[-GAPS_KEPT:], dtype=np.float64)

    @property
    def gap_starts_s(self) -> Seconds:
        return np.array(self._gap_starts[-GAPS_KEPT:], dtype=np.float64)

    def gaps_after(self, start_s: float) -> list[tuple[float, float]]:
        """(start, length) of those that began later than that; cheap where there are few."""
        first = max(bisect_right(self._gap_starts, start_s), len(self._gap_starts) - GAPS_KEPT)
        return list(zip(self._gap_starts[first:], self._gap_lengths[first:], strict=True))

    def last_gaps(self, count: int) -> tuple[float, ...]:
        """Lengths of the last few, without an array."""
        return tuple(self._gap_lengths[-count:])

    def arrivals(self, resolution_s: int, since_s: float, until_s: float) -> tuple[Seconds, Values]:
        """Starts of the windows between, and the requests that came in each; NaN where nobody watched."""
        return self.series("arrivals", resolution_s, since_s, until_s)

    def series(self, name: str, resolution_s: int, since_s: float, until_s: float) -> tuple[Seconds, Values]:
        """The same of any field of a window. Sums of a window watched in part are scaled up to the whole."""
        first, end = math.floor(since_s / resolution_s), math.ceil(until_s / resolution_s)
        first = max(first, end - CAPACITY[resolution_s])
        edges = np.arange(first, max(end, first) + 1, dtype=np.float64) * resolution_s
        values = self._rows[resolution_s].column(_COLUMN[name], first, max(end, first))
        shares = self._spans[resolution_s].shares(edges)
        unseen = shares < SEEN_SHARE
        if _COLUMN[name] < _SUMS:
            values = values / np.where(unseen, 1.0, shares)
            if name == "mean_concurrency":
                values = values / resolution_s
        values[unseen] = np.nan
        return edges[:-1], values

    def total(self, name: str, resolution_s: int, since_s: float, until_s: float) -> float:
        """Of what was seen; not scaled for what was not."""
        first, end = math.floor(since_s / resolution_s), math.ceil(until_s / resolution_s)
        first = max(first, end - CAPACITY[resolution_s])
        column = self._rows[resolution_s].column(_COLUMN[name], first, max(end, first))
        if _COLUMN[name] >= _SUMS:
            return float(column.max(initial=0.0))
        total = float(column.sum())
        return total / ((end - first) * resolution_s) if name == "mean_concurrency" and end > first else total

    def window_at(self, resolution_s: int, start_s: float) -> Window | None:
        """What was seen within a window, not scaled up for what was not; None: nothing happened."""
        rows, number = self._rows[resolution_s], math.floor(start_s / resolution_s)
        place = int(np.searchsorted(rows.numbers[: rows.count], number))
        if place == rows.count or rows.numbers[place] != number:
            return None
        values = dict(zip(COLUMNS, rows.values[place].tolist(), strict=True))
        values["mean_concurrency"] /= resolution_s
        return Window(number * resolution_s, resolution_s, **values)

    # --- keeping ---

    def to_bytes(self) -> bytes:
        head: dict[str, object] = {
            "columns": COLUMNS,
            "rows": [rows.count for rows in self._rows.values()],
            "spans": [spans.spans for spans in self._spans.values()],
            "gaps": len(self.gaps_s),
        }
        parts = [json.dumps(head).encode(), b"\0"]
        for rows in self._rows.values():
            parts.append(rows.numbers[: rows.count].astype("<i8").tobytes())
            parts.append(rows.values[: rows.count].astype("<f4").tobytes())
        parts.append(self.gap_starts_s.astype("<f8").tobytes())
        parts.append(self.gaps_s.astype("<f8").tobytes())
        body = zlib.compress(b"".join(parts), 1)
        return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes) -> History:
        """Raises ValueError for anything but what `to_bytes` gave. Columns this version has not are left out."""
        try:
            magic, length, checksum = _HEAD.unpack_from(data)
            body = data[_HEAD.size :]
            if magic != _MAGIC or len(body) != length or zlib.crc32(body) != checksum:
                raise ValueError("damaged")
            raw = zlib.decompress(body)
            text, _, numbers = raw.partition(b"\0")
            head = json.loads(text)
            return cls._from_parts(head, numbers)
        except (struct.error, zlib.error, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"these {len(data)} bytes are no history: {error}") from None

    @classmethod
    def _from_parts(cls, head: Mapping[str, list[object]], data: bytes) -> History:
        history, offset = cls(), 0

        def take(kind: str, count: int) -> npt.NDArray[np.float64]:
            nonlocal offset
            array = np.frombuffer(data, dtype=kind, count=count, offset=offset)
            offset += array.nbytes
            return array

        names = [str(name) for name in head["columns"]]
        known = [(place, _COLUMN[name]) for place, name in enumerate(names) if name in _COLUMN]
        counts = [int(str(count)) for count in head["rows"]]
        for (resolution, rows), count in zip(history._rows.items(), counts, strict=True):
            numbers = take("<i8", count).astype(np.int64)
            table = take("<f4", count * len(names)).reshape(count, len(names))
            rows.newest = int(numbers[-1]) if count else -1
            rows.numbers, rows.count = np.append(numbers, np.zeros(1, dtype=np.int64)), min(count, len(numbers))
            rows.values = np.zeros((count + 1, len(COLUMNS)), dtype=np.float32)
            for place, column in known:
                rows.values[:count, column] = table[:, place]
            spans = head["spans"][RESOLUTIONS_S.index(resolution)]
            history._spans[resolution] = _Spans([[float(since), float(until)] for since, until in spans])  # type: ignore[attr-defined]
        gaps = int(str(head["gaps"]))
        history._gap_starts = take("<f8", gaps).tolist()
        history._gap_lengths = take("<f8", gaps).tolist()
        return history
