"""How KV was computed: which pass gave each position its bits, from position 0 on, whoever ran it.

    parts: (upto, how) each, from where the part before ended
    how >= upto   one pass of prefill over [begin of the part, how); only the part was taken of it
    how == 0      not known
    how < 0       one by one, in decode steps of -how rows
    how <= LOADED not computed but taken from a lossy chunk, of which it is a hash

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

Part: TypeAlias = tuple[int, int]

UNKNOWN: Final = 0
ALONE: Final = -1
LOADED: Final = -(1 << 62)
_PART: Final = struct.Struct("<qq")
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Passes:
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Passes:
        """From `numbers`; raises `ValueError` for what no passes can be."""
        parts = tuple(zip(numbers[::2], numbers[1::2], strict=False))
        before = 0
        for upto, how in parts:
            if upto <= before or 0 < how < upto:
                raise ValueError(f"no pass computes [{before}, {upto}) in the way {how}")
            before = upto
        if len(numbers) % 2:
            raise ValueError("a part that is not whole")
        return cls(parts)

    @classmethod
    def unknown(cls, end: int) -> Passes:
        return cls(((end, UNKNOWN),)) if end > 0 else NONE

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for part in self.parts for number in part)

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
            kept.append((min(upto, position), how))
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
        return max((upto for upto, how in self.parts if how <= LOADED), default=0)

    def with_unknown(self, upto: int) -> Passes:
        return self._longer(upto - self.end, UNKNOWN)

    def _longer(self, count: int, how: int) -> Passes:
        if count <= 0:
            return self
        parts, end = self.parts, self.end + count
        if parts and parts[-1][1] == how:
            return Passes((*parts[:-1], (end, how)))
        return Passes((*parts, (end, how)))

    def part_at(self, position: int) -> tuple[int, int, int] | None:
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
            if how <= UNKNOWN and how != ALONE:
                found = upto
        return found

    def cut_back(self, position: int) -> int:
        """The last place at or before `position` from which the rest can be computed in the same passes."""
        part = self.part_at(position)
        return part[0] if part is not None and part[2] > 0 else position

    def boundaries(self) -> tuple[int, ...]:
        """Places at which computing again may begin or end, the first one being that before which it cannot."""
        first = self.repeatable_from
        found = [first]
        begin = 0
        for upto, how in self.parts:
            if upto > first:
                found += [upto] if how > 0 else range(max(begin, first) + 1, upto + 1)
            begin = upto
        return tuple(found)

    def block_aligned(self, size: int) -> Passes:
        """What was taken of a pass but ends inside a block cannot be repeated beside its own blocks: not known then."""
        if all(how <= upto or upto % size == 0 for upto, how in self.parts):
            return self
        return Passes(tuple((upto, UNKNOWN if how > upto and upto % size else how) for upto, how in self.parts))

    @property
    def digest(self) -> str:
        """Equal for equal bits of equal tokens; empty where that cannot be said."""
        if not self.parts or any(LOADED < how <= UNKNOWN and how != ALONE for _, how in self.parts):
            return ""
        return hashlib.sha256(b"stoker-passes-1\0" + self.to_bytes()).hexdigest()[: 2 * _DIGEST_BYTES]

    def to_bytes(self) -> bytes:
        return b"".join(_PART.pack(*part) for part in self.parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Passes:
        """Raises `ValueError`."""
        if len(data) % _PART.size:
            raise ValueError("a part that is not whole")
        return cls.of([number for part in _PART.iter_unpack(data) for number in part])


NONE: Final = Passes()


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
    """Of what was put together from runs of KV, (start, end, passes) each: those of a run are worth something only
    where what lies before it was computed as what it was computed after."""
    passes = before
    while passes.end < end:
        at = passes.end
        here = [run for run in runs if run[0] <= at < run[1]]
        if not here:
            return passes.with_unknown(end)
        _, run_end, own = max(here, key=lambda run: run[1])
        upto = min(run_end, end)
        fits = own is not None and own.end >= upto and own.upto(at) == passes
        passes = own.upto(upto) if own is not None and fits else passes.with_unknown(upto)
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
