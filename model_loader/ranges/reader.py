"""Reads spans of files in the order wanted, from several threads, and lets nothing pass that is not verified.

    spans -> the chunks that hold them, in order -> ranges of neighbouring chunks -> threads: read, digest, write

A thread reads into one small buffer that it keeps, digests what came while it is in the processor's cache, and hands it
on with the place it is for; a group of spans has *landed* when every chunk that holds any of it was right. A range that
fails is asked for again, elsewhere if there is another source; a bad chunk is fetched again likewise, then refused with
file, offset and expected value. Whoever writes must not show anything of a group before it has landed.
Limits: chunks are read whole, so that spans at their edges cost up to 4 MiB more each; a source that hangs against its
own deadline holds its thread.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import xxhash

from model_loader.chunks import CHUNK_BYTES, ChunkList
from model_loader.errors import IntegrityError, LoaderError, SourceError, SourceMissing, SourceUnavailable
from model_loader.ranges.source import Digest, RangeSource, ReadStats, Tier

Write = Callable[[int, memoryview], None]
"""(place, bytes): called from any thread, with every byte of a span at least once; again where a chunk was bad."""


class Landing(Protocol):
    """The destination's own memory, for bytes that can be read straight into it."""

    def view(self, to: int, nbytes: int) -> memoryview | None:
        """None: hand the bytes to `Write`."""
        ...

    def moved(self, nbytes: int) -> None:
        """So many bytes were read into a view."""
        ...


@runtime_checkable
class CachedSource(Protocol):
    """A source that can say at once whether it has bytes at hand."""

    def read_cached(self, file: str, offset: int, view: memoryview, digest: Digest) -> tuple[int, bool]:
        """As `read_into`, and has what came digested; none where it would have to wait. True: what was digested is not
        what is in `view`, but equal to it as long as the source `holds` the file."""
        ...

    def holds(self, file: str) -> bool:
        """Whether the file cannot have changed between what was copied of it and what was given."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    file: str
    offset: int
    nbytes: int
    to: int
    """The place of its first byte."""
    group: int


@dataclass(frozen=True, slots=True)
class ReadLimits:
    attempts: int = 3
    """Of each source, for one range."""
    first_pause_s: float = 0.05
    """After every source failed once; doubled each time."""
    range_s: float = 60.0
    """Deadline of one request."""
    good_again: int = 1
    """How often a source that gave a bad chunk is asked for it again where there is no other."""


DEFAULT_LIMITS: Final = ReadLimits()
_LEAST_DIRECT_BYTES: Final = 64 * 1024
"""Of memory that follows on itself: for less, a read of its own costs more than a copy."""
_DELIVER_BYTES: Final = 1024 * 1024
"""Digested and handed on at a time."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Neighbouring chunks of one file."""

    file: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bytes of a file that are read in one go."""

    file: str
    begin: int
    end: int
    to: int | None
    """Where the first byte goes, if all of them follow one another there."""


class _Digested:
    """The digests of chunks whose bytes come one after another, in pieces of any size."""

    def __init__(self, first: int, chunks: ChunkList) -> None:
        self._chunks = chunks
        self.at = chunks.bounds(first)[0]
        self._whole: list[tuple[int, bytes]] = []
        self.has_lent = False
        """Any of it was the source's own memory."""
        self._begin(first)

    def _begin(self, index: int) -> None:
        self._index = index
        # Behind the last one nothing comes.
        self._left = self._chunks.bounds(index)[1] if index < len(self._chunks) else CHUNK_BYTES
        self._state = xxhash.xxh3_128()

    def add(self, view: memoryview) -> None:
        while len(view) >= self._left:
            self._state.update(view[: self._left])
            self._whole.append((self._index, self._state.digest()))
            view, self.at = view[self._left :], self.at + self._left
            self._begin(self._index + 1)
        self._state.update(view)
        self.at, self._left = self.at + len(view), self._left - len(view)

    def take_whole(self) -> list[tuple[int, bytes]]:
        """The chunks whose last byte has come since, and their digests."""
        whole, self._whole = self._whole, []
        return whole


class _Stopped(Exception):
    """Another thread failed."""


class VerifiedReader:
    """`sources` in the order of preference; each has all files, or says that it has not."""

    def __init__(
        self,
        files: Mapping[str, ChunkList],
        sources: Sequence[RangeSource],
        *,
        threads: int = 0,
        limits: ReadLimits = DEFAULT_LIMITS,
        stats: ReadStats | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if not sources:
            raise SourceMissing("there is no source to read from")
        self.files = files
        self.stats = stats or ReadStats()
        self._sources = sources
        # NOTE: what a runtime protocol's isinstance costs (60 us) is more than a block's copy.
        self._cached = {id(each): each for each in sources if isinstance(each, CachedSource)}
        self._threads = threads or sources[0].threads
        self._range_chunks = max(1, max(s.range_bytes for s in sources) // CHUNK_BYTES)
        self._limits = limits
        self._pause = pause
        self._lacks: set[tuple[int, str]] = set()
        """(number of a source, file it has not): found by `check_sizes`, and not asked for."""
        self._buffers = threading.local()
        self._stop = threading.Event()

    def check_sizes(self) -> None:
        """Raises where no source has a file as long as it was. The next one is asked only where one has not."""
        for file, chunks in self.files.items():
            failures: list[LoaderError] = []
            for number, source in enumerate(self._sources):
                try:
                    found = source.size(file)
                except SourceError as error:
                    if isinstance(error, SourceMissing):
                        self._lacks.add((number, file))
                    failures.append(error)
                    continue
                if found == chunks.nbytes:
                    break
                failures.append(
                    IntegrityError(f"{file} of {source.name} has {found} bytes, expected are {chunks.nbytes}")
                )
            else:
                raise next((each for each in failures if isinstance(each, IntegrityError)), failures[0])

    @property
    def threads(self) -> int:
        return self._threads

    def is_far(self, file: str) -> bool:
        """Whether its first source is over a network, as far as is known."""
        source = next((s for n, s in enumerate(self._sources) if (n, file) not in self._lacks), None)
        return source is not None and source.tier is not Tier.DISK

    def read(
        self,
        spans: Sequence[Span],
        write: Write,
        landed: Callable[[int], None] | None = None,
        landing: Landing | None = None,
    ) -> None:
        """Returns when every group has landed; raises the first failure once no thread writes any more. `landing`:
        what a source has at hand is read straight into it, and the rest given to `write`."""
        plan = _Plan(spans, self.files, landing)
        for group in plan.empty_groups:
            if landed is not None:
                landed(group)
        ranges = iter(plan.ranges(self._range_chunks))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            while not self._stop.is_set():
                with lock:
                    task = next(ranges, None)
                if task is None:
                    return
                try:
                    self._fetch(task, plan, write, landed)
                except _Stopped:
                    return
                except BaseException as error:
                    errors.append(error)
                    self._stop.set()

        helpers = [threading.Thread(target=work, name=f"read-{n}", daemon=True) for n in range(1, self._threads)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]
        if self._stop.is_set():
            raise SourceError("reading was stopped")

    def read_chunk(self, file: str, index: int, view: memoryview) -> None:
        """Fills `view`, which is as long as the chunk, with the verified chunk."""
        begin, _ = self.files[file].bounds(index)

        def write(to: int, piece: memoryview) -> None:
            view[to : to + len(piece)] = piece

        self._fetch(_Range(file, index, 1), _Plan([Span(file, begin, len(view), 0, 0)], self.files), write, None)

    def stop(self) -> None:
        """Ends a `read` in another thread after the ranges under way."""
        self._stop.set()

    # --- one range ------------------------------------------------------------------------------------------------

    def _fetch(self, task: _Range, plan: _Plan, write: Write, landed: Callable[[int], None] | None) -> None:
        """Tries the sources in turn until all chunks of the range are verified."""
        missing = list(range(task.first, task.first + task.count))
        sources = [s for n, s in enumerate(self._sources) if (n, task.file) not in self._lacks]
        failures: list[LoaderError] = []
        bad_from: set[int] = set()
        rounds = 0
        while missing:
            if self._stop.is_set():
                raise _Stopped
            number = rounds % len(sources)
            if rounds and number == 0:
                self._pause(self._limits.first_pause_s * 2 ** (rounds // len(sources) - 1))
            if rounds:
                self.stats.retried()
            source = sources[number]
            rounds += 1
            try:
                mismatches = self._fetch_from(source, task.file, missing, plan, write, landed)
            except (SourceError, IntegrityError) as error:
                failures.append(error)
                mismatches = []
            if mismatches:
                failures += mismatches
                bad_from.add(number)
            exhausted = rounds >= self._limits.attempts * len(sources)
            # A source that answers with other bytes twice has other bytes.
            refused = bool(bad_from) and rounds > (len(sources) - 1) + self._limits.good_again
            if missing and (exhausted or refused):
                told = next((f for f in reversed(failures) if isinstance(f, IntegrityError)), failures[-1])
                raise told

    def _fetch_from(
        self,
        source: RangeSource,
        file: str,
        missing: list[int],
        plan: _Plan,
        write: Write,
        landed: Callable[[int], None] | None,
    ) -> list[IntegrityError]:
        """Reads the chunks of `missing` and takes out of it those that are right."""
        chunks, mismatches, cached = self.files[file], list[IntegrityError](), self._cached.get(id(source))
        for first, count in list(_runs(missing)):
            begin, end = chunks.bounds(first)[0], sum(chunks.bounds(first + count - 1))
            state = _Digested(first, chunks)
            for piece in plan.segments(file, begin, end):
                while state.at < piece.end:
                    self._read_some(source, cached, piece, state, plan, write)
                    whole = state.take_whole()
                    # Of what was lent, other bytes than those digested may have been copied.
                    if whole and not (state.has_lent and cached is not None and not cached.holds(file)):
                        for index, digest in whole:
                            self._settle(source, file, index, digest, missing, mismatches, plan, landed)
                    if self._stop.is_set():
                        raise _Stopped
        if missing and not mismatches:
            raise SourceUnavailable(f"somebody opened {file} of {source.name} to write while it was read")
        return mismatches

    def _read_some(
        self,
        source: RangeSource,
        cached: CachedSource | None,
        piece: _Segment,
        state: _Digested,
        plan: _Plan,
        write: Write,
    ) -> None:
        """Brings bytes from where `state` is to where they belong, and has them digested."""
        begin_s, at = time.monotonic(), state.at
        view = plan.landing_view(piece, at)
        if view is not None and cached is not None:
            got, is_lent = cached.read_cached(piece.file, at, view, state.add)
            if got:
                self.stats.moved(source.tier, got, time.monotonic() - begin_s)
                plan.moved(got)
                state.has_lent = state.has_lent or is_lent
                return
        elif view is not None:
            got = source.read_into(piece.file, at, view, within_s=self._limits.range_s)
            self.stats.moved(source.tier, got, time.monotonic() - begin_s)
            plan.moved(got)
            state.add(view[:got])
            return
        buffer = self._buffer()
        got = source.read_into(
            piece.file, at, buffer[: min(len(buffer), piece.end - at)], within_s=self._limits.range_s
        )
        self.stats.moved(source.tier, got, time.monotonic() - begin_s)
        for taken in range(0, got, _DELIVER_BYTES):
            part = buffer[taken : min(got, taken + _DELIVER_BYTES)]
            plan.deliver(piece.file, at + taken, part, write)
            state.add(part)

    def _settle(
        self,
        source: RangeSource,
        file: str,
        index: int,
        found: bytes,
        missing: list[int],
        mismatches: list[IntegrityError],
        plan: _Plan,
        landed: Callable[[int], None] | None,
    ) -> None:
        """A whole chunk was read: it is right, or it stays missing."""
        chunks = self.files[file]
        if chunks.matches(index, found):
            missing.remove(index)
            self.stats.verified(1)
            plan.chunk_landed(file, index, landed)
        else:
            self.stats.found_bad()
            mismatches.append(chunks.mismatch(index, found, f"{file} of {source.name}"))

    def _buffer(self) -> memoryview:
        """This thread's own; page-aligned, as reads past the page cache need it."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, self._range_chunks * CHUNK_BYTES))
        view: memoryview = self._buffers.view
        return view


class _Plan:
    """Which chunks are needed, in which order, for whom, and what is still missing of each group."""

    def __init__(self, spans: Sequence[Span], files: Mapping[str, ChunkList], landing: Landing | None = None) -> None:
        self._landing = landing
        self._spans: dict[tuple[str, int], list[Span]] = {}
        left: dict[int, set[tuple[str, int]]] = {}
        for span in spans:
            chunks = files.get(span.file)
            if chunks is None or span.offset < 0 or span.offset + span.nbytes > chunks.nbytes:
                raise IntegrityError(f"bytes {span.offset} to {span.offset + span.nbytes} of {span.file} are not in it")
            waits_for = left.setdefault(span.group, set())
            for index in chunks.covering(span.offset, span.nbytes):
                self._spans.setdefault((span.file, index), []).append(span)
                waits_for.add((span.file, index))
        self.empty_groups = [group for group, waits_for in left.items() if not waits_for]
        self._left = {group: len(waits_for) for group, waits_for in left.items()}
        self._lock = threading.Lock()

    def ranges(self, most_chunks: int) -> Iterator[_Range]:
        """In the order of the spans; neighbours that follow each other are one range."""
        file, first, count = "", 0, 0
        for name, index in self._spans:
            if count and name == file and index == first + count and count < most_chunks:
                count += 1
                continue
            if count:
                yield _Range(file, first, count)
            file, first, count = name, index, 1
        if count:
            yield _Range(file, first, count)

    def segments(self, file: str, begin: int, end: int) -> list[_Segment]:
        """The bytes from `begin` to `end`, cut where what lies behind one another in the file does not do so in the
        destination; what is wanted twice, or not at all, or comes in short runs goes by way of a buffer."""
        if self._landing is None:
            return [_Segment(file, begin, end, None)]
        spans = sorted(self._between(file, begin, end), key=lambda span: span.offset)
        runs: list[_Segment] = []
        for span in spans:
            low, high = max(begin, span.offset), min(end, span.offset + span.nbytes)
            to = span.to + low - span.offset
            last = runs[-1] if runs else None
            if last is not None and low < last.end:
                runs[-1] = _Segment(file, last.begin, max(last.end, high), None)
            elif last is not None and last.to is not None and low == last.end and to == last.to + low - last.begin:
                runs[-1] = _Segment(file, last.begin, high, last.to)
            elif low < high:
                runs.append(_Segment(file, low, high, to))
        found: list[_Segment] = []
        at = begin
        for run in [each for each in runs if each.to is not None and each.end - each.begin >= _LEAST_DIRECT_BYTES]:
            if at < run.begin:
                found.append(_Segment(file, at, run.begin, None))
            found.append(run)
            at = run.end
        if at < end:
            found.append(_Segment(file, at, end, None))
        return found

    def _between(self, file: str, begin: int, end: int) -> set[Span]:
        chunks = range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        return {span for index in chunks for span in self._spans.get((file, index), ()) if span.nbytes}

    def landing_view(self, piece: _Segment, at: int) -> memoryview | None:
        """The destination's memory from the file's byte `at` on; None: by way of a buffer."""
        if self._landing is None or piece.to is None:
            return None
        return self._landing.view(piece.to + at - piece.begin, piece.end - at)

    def moved(self, nbytes: int) -> None:
        if self._landing is not None:
            self._landing.moved(nbytes)

    def deliver(self, file: str, at: int, piece: memoryview, write: Write) -> None:
        end = at + len(piece)
        for span in self._between(file, at, end):
            low, high = max(at, span.offset), min(end, span.offset + span.nbytes)
            if low < high:
                write(span.to + low - span.offset, piece[low - at : high - at])

    def chunk_landed(self, file: str, index: int, landed: Callable[[int], None] | None) -> None:
        done: list[int] = []
        with self._lock:
            for group in {span.group for span in self._spans.get((file, index), ())}:
                self._left[group] -= 1
                if self._left[group] == 0:
                    done.append(group)
        if landed is not None:
            for group in done:
                landed(group)


def _runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    first, count = -1, 0
    for index in indexes:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count
