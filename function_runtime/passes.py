"""How KV was computed: which pass gave each position its bits, from position 0 on, whoever ran it.

    parts: (upto, how) each, from where the part before ended
    how >= upto   one pass of prefill over [begin of the part, how); only the part was taken of it
    how == 0      not known
    how < 0       one by one, in decode steps of -how rows
    how <= LOADED not computed but taken from a lossy chunk, of which it is a hash
    Passes        taken from where others computed it, after another beginning: these tell all of theirs up to here

Rows of a pass do not influence one another but by their number, so a part is computed again by a pass of the same shape
with any tokens behind it. Limits: of the rows beside it in a decode step nothing is kept, so that only steps of one row
can be repeated by themselves; requests that shared a batch are not named at all.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

UNKNOWN: Final = 0
ALONE: Final = -1
LOADED: Final = -(1 << 62)
TAKEN: Final = -(2**32)
"""Among numbers: `TAKEN - n` is followed by the n parts of a source."""
MAX_PARTS: Final = 4096
MAX_DEPTH: Final = 16
"""Sources of sources included; beyond either it is not kept how something was computed."""
_PART: Final = struct.Struct("<qq")
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Passes:
    parts: tuple[Part, ...] = ()
    """Sources, where there are any, are repeatable and end where their part does."""

    @classmethod
    def of(cls, numbers: Sequence[int], depth: int = 0) -> Passes:
        """From `numbers`; raises `ValueError` for what no passes can be."""
        if len(numbers) % 2 or len(numbers) > 2 * MAX_PARTS or depth > MAX_DEPTH:
            raise ValueError("a part that is not whole, or too many of them")
        parts: list[Part] = []
        at = before = 0
        while at < len(numbers):
            upto, way = numbers[at : at + 2]
            at += 2
            how: int | Passes = way
            if LOADED < way < TAKEN:
                how = cls.of(numbers[at : at + 2 * (TAKEN - way)], depth + 1)
                at += 2 * (TAKEN - way)
            if upto <= before or not _is_sound(before, upto, how):
                raise ValueError(f"no pass computes [{before}, {upto}) in the way {way}")
            before = upto
            parts.append((upto, how))
        return cls(tuple(parts))

    @classmethod
    def unknown(cls, end: int) -> Passes:
        return cls(((end, UNKNOWN),)) if end > 0 else NONE

    @property
    def numbers(self) -> tuple[int, ...]:
        found: list[int] = []
        for upto, how in self.parts:
            if isinstance(how, Passes):
                inner = how.numbers
                found += (upto, TAKEN - len(inner) // 2, *inner)
            else:
                found += (upto, how)
        return tuple(found)

    @property
    def end(self) -> int:
        return self.parts[-1][0] if self.parts else 0

    def upto(self, position: int) -> Passes:
        """Those of [0, position), as far as they reach."""
        parts = self.parts
        if not parts or position >= parts[-1][0]:
            return self
        kept: list[Part] = []
        begin = 0
        for upto, how in parts:
            if begin >= position:
                break
            end = min(upto, position)
            kept.append((end, how.upto(end) if isinstance(how, Passes) else how))
            begin = upto
        return Passes(tuple(kept))

    def with_pass(self, upto: int, end: int) -> Passes:
        """And a pass over [self.end, end), of which [self.end, upto) counts."""
        return Passes((*self.parts, (upto, end)))

    def with_rows(self, count: int, rows: int) -> Passes:
        """And `count` positions one by one, each in a step of `rows` rows."""
        return self._longer(count, -rows)

    def with_loaded(self, upto: int, digest: str) -> Passes:
        """And what was taken from the lossy chunk of this digest (hex)."""
        return Passes((*self.parts, (upto, LOADED - (int(digest[:16], 16) >> 2))))

    @property
    def loaded_until(self) -> int:
        """Where the last part ends that comes from a lossy chunk: another attempt has to take it from there too."""
        return max((upto for upto, how in self.parts if not isinstance(how, Passes) and how <= LOADED), default=0)

    def with_unknown(self, upto: int) -> Passes:
        return self._longer(upto - self.end, UNKNOWN)

    def with_taken(self, source: Passes) -> Passes:
        """And what others computed up to where `source` ends, after a beginning of their own."""
        numbers = len(self.numbers) + len(source.numbers) + 2
        if source.repeatable_from or numbers > 2 * MAX_PARTS or source.depth >= MAX_DEPTH:
            return self.with_unknown(source.end)
        parts = self.parts
        last = parts[-1][1] if parts else UNKNOWN
        if isinstance(last, Passes) and source.upto(last.end) == last:
            parts = parts[:-1]
        return Passes((*parts, (source.end, source)))

    def _longer(self, count: int, how: int) -> Passes:
        if count <= 0:
            return self
        parts, end = self.parts, self.end + count
        if parts and parts[-1][1] == how:
            return Passes((*parts[:-1], (end, how)))
        return Passes((*parts, (end, how)))

    def part_at(self, position: int) -> tuple[int, int, int | Passes] | None:
        """(begin, upto, how) of the part that holds `position`."""
        begin = 0
        for upto, how in self.parts:
            if position < upto:
                return begin, upto, how
            begin = upto
        return None

    @property
    def repeatable_from(self) -> int:
        """Where the last part ends that cannot be computed again as it was; 0: all can."""
        found = 0
        for upto, how in self.parts:
            if not isinstance(how, Passes) and how <= UNKNOWN and how != ALONE:
                found = upto
        return found

    @property
    def taken_until(self) -> int:
        """Where the last part ends that was taken from others' computing: what is before is computed again as a
        whole."""
        return next((upto for upto, how in reversed(self.parts) if isinstance(how, Passes)), 0)

    @property
    def depth(self) -> int:
        return max((how.depth + 1 for _, how in self.parts if isinstance(how, Passes)), default=0)

    def sources(self) -> list[tuple[int, Passes]]:
        """(begin, source) of every part that was taken, in an order in which none is needed before it was computed."""
        found: list[tuple[int, Passes]] = []
        begin = 0
        for upto, how in self.parts:
            if isinstance(how, Passes):
                found += [source for source in (*how.sources(), (begin, how)) if source not in found]
            begin = upto
        return found

    def cut_back(self, position: int) -> int:
        """The last place at or before `position` from which the rest can be computed in the same passes."""
        if position < self.taken_until:
            return 0
        part = self.part_at(position)
        return part[0] if part is not None and not isinstance(part[2], Passes) and part[2] > 0 else position

    def boundaries(self) -> tuple[int, ...]:
        """Places at which computing again may begin or end, the first one being that before which it cannot."""
        first, taken = self.repeatable_from, self.taken_until
        found = [first]
        begin = 0
        for upto, how in self.parts:
            if upto > first:
                found += range(max(begin, first) + 1, upto + 1) if how == ALONE else [upto]
            begin = upto
        return tuple(at for at in found if at == first or at >= taken)

    def block_aligned(self, size: int) -> Passes:
        """What was taken of a pass but ends inside a block cannot be repeated beside its own blocks: not known then."""
        parts: list[Part] = []
        for upto, how in self.parts:
            fits = how.block_aligned(size) == how if isinstance(how, Passes) else how <= upto or upto % size == 0
            parts.append((upto, how if fits else UNKNOWN))
        return self if tuple(parts) == self.parts else Passes(tuple(parts))

    @property
    def digest(self) -> str:
        """Equal for equal bits of equal tokens; empty where that cannot be said."""
        ways = [how for _, how in self.parts if not isinstance(how, Passes)]
        if not self.parts or any(LOADED < how <= UNKNOWN and how != ALONE for how in ways):
            return ""
        return hashlib.sha256(b"stoker-passes-1\0" + self.to_bytes()).hexdigest()[: 2 * _DIGEST_BYTES]

    def to_bytes(self) -> bytes:
        numbers = self.numbers
        return struct.pack(f"<{len(numbers)}q", *numbers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Passes:
        """Raises `ValueError`."""
        if len(data) % _PART.size:
            raise ValueError("a part that is not whole")
        return cls.of([number for part in _PART.iter_unpack(data) for number in part])


Part: TypeAlias = tuple[int, int | Passes]
NONE: Final = Passes()


def _is_sound(begin: int, upto: int, how: int | Passes) -> bool:
    if isinstance(how, Passes):
        return begin > 0 and how.end == upto and not how.repeatable_from
    return how <= 0 or how >= upto


def recorded(ends: Sequence[int], prefix: Sequence[int]) -> Passes:
    """The prefill of a first attempt: `prefix` are the passes of others up to `ends[0]`, then come its own. What a
    record does not say is not known."""
    if not ends:
        return NONE
    try:
        passes = Passes.of(prefix)
    except ValueError:
        passes = NONE
    if passes.end != ends[0]:
        passes = Passes.unknown(ends[0])
    for end in ends[1:]:
        if end > passes.end:
            passes = passes.with_pass(end, end)
    return passes


def assembled(before: Passes, runs: Sequence[tuple[int, int, Passes | None]], end: int) -> Passes:
    """Of what was put together from runs of KV, (start, end, passes) each: a run continues what lies before it where
    that was computed as what it was computed after; else it is taken from a computing of its own."""
    passes = before
    while passes.end < end:
        at = passes.end
        here = [run for run in runs if run[0] <= at < run[1]]
        if not here:
            return passes.with_unknown(end)
        _, run_end, own = max(here, key=lambda run: run[1])
        upto = min(run_end, end)
        if own is None or own.end < upto:
            passes = passes.with_unknown(upto)
        elif own.upto(at) == passes:
            passes = own.upto(upto)
        else:
            passes = passes.with_taken(own.upto(upto))
    return passes


def with_steps(prefill: Passes, lengths: Sequence[tuple[int, bool]], end: int) -> Passes:
    """And the decode steps after a prefill up to `end`, all choices in lock-step; `lengths`: per choice the tokens that
    are known, and whether it ended."""
    passes = prefill.upto(end)
    steps = end - prefill.end
    ends = {min(tokens - 1, steps) for tokens, ended in lengths if ended and tokens > 1}
    step = 0
    for until in sorted(ends | {steps}) if steps > 0 else ():
        rows = sum(1 for tokens, ended in lengths if not ended or step < tokens - 1)
        passes = passes.with_rows(until - step, max(1, rows))
        step = until
    return passes
