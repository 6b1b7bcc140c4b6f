"""Load or recompute: which stored chunks of a request are read, decided from what reading and computing cost here.

    seconds = max(compute [0, a), read [a, b)) + compute [b, known)        over all runs of chunks [a, b)

(where weights are still coming, each of the three as `contention` says)

The beginning is computed while the rest is read: KV depends on what is before it only, so what is computed from the
front and what is read behind it fit together where they meet. Recomputing everything is the empty run, loading
everything the longest one from 0; the fastest is taken. Where nothing is computed in front, the first pass over the
rest can begin with the first layers: a chunk is then read in several pieces, in the order of layers, if that is faster.
Limits: pure, and as good as the speeds it is given (`speeds.py` measures them); reads are thought of as equally fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from function_runtime.kv.contention import Coming
from function_runtime.kv.speeds import Speeds

Seconds: TypeAlias = NDArray[np.float64]
_Number = TypeVar("_Number", float, Seconds)

MIN_DEADLINE_S: Final = 0.25
"""A read is waited for this long whatever recomputing would cost: less is the noise of a busy machine."""
MAX_DEADLINE_S: Final = 10.0
SLACK: Final = 2.0
"""A read that is expected after t is given up after SLACK * t and what recomputing its chunk costs: waiting then never
costs much more than not having asked."""

READ_S: Final = 0.002
"""Of the processor, for asking for a range, landing and checking it, one after the other however near the store is (1
to 2.5 ms seen beside computing): why a chunk is not read in pieces for nothing."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored chunk of the path from which is chosen; `nbytes` and `reads` are those of all choices together."""

    start: int
    end: int
    nbytes: int
    reads: int = 1


@dataclass(frozen=True, slots=True)
class Known:
    """What there is to have KV of: `prompt` tokens, then generated ones, `total` in all. The last is always computed.

    `boundaries`: where the first attempt's prefill began and where its chunks ended. An exact resume computes prefill
    in these very chunks and generated tokens one by one; a fast one (`fast`) computes all in chunks of its own.
    """

    prompt: int
    total: int
    boundaries: tuple[int, ...] = ()
    fast: bool = False
    layers: int = 1
    """Stages in which a pass can follow the layers of its chunks; 1: it waits for all of them."""
    pass_tokens: int = 512
    from_start: bool = False
    """What is computed in front would not be what lies behind it (a lossy prefix): loaded from token 0 on, or not."""


@dataclass(frozen=True, slots=True)
class Decision:
    start: int
    end: int
    load: bool
    deadline_s: float
    """From the beginning of the read; 0 for what is computed."""


@dataclass(frozen=True, slots=True)
class Plan:
    start: int
    """Positions [start, end) are loaded; equal: nothing is."""
    end: int
    pieces: int
    """In how many reads a chunk comes, in the order of its layers."""
    decisions: tuple[Decision, ...]
    nbytes: int
    predicted_s: float
    load_s: float
    """Loading everything there is, and computing what is missing after it."""
    recompute_s: float
    reason: str
    must: bool = False
    """The beginning is not to be computed."""

    @property
    def loads(self) -> bool:
        return self.end > self.start


def plan(known: Known, candidates: Sequence[Candidate], speeds: Speeds, coming: Coming | None = None) -> Plan:
    """`candidates` follow one another without a gap; what reaches beyond the prompt is of use only with all before.
    `coming`: the weights, if they are not here yet."""
    cost = Costs(known, speeds)
    coming = coming or Coming(0.0, False)
    first_s = cost.between(0, _end_of_first_pass(known))
    recompute_s = coming.computed_s(cost.between(0, known.total), first_s)
    usable = [c for c in candidates if c.start < known.total - 1]
    if not usable:
        return Plan(0, 0, 1, (), 0, recompute_s, recompute_s, recompute_s, "no stored KV is of use")
    table = _Table(known, usable, speeds, cost, coming, first_s)
    must = _must_begin_at_0(known, usable)
    first, last, pieces, predicted_s = table.best(must or known.from_start)
    load_s = float(min(table.from_front(pieces)[-1] for pieces in table.pieces)) if usable[0].start == 0 else np.inf
    if predicted_s == np.inf or (predicted_s >= recompute_s and not must):
        decisions = tuple(Decision(c.start, c.end, False, 0.0) for c in usable)
        reason = f"recomputing takes {recompute_s:.3g} s, loading at best {predicted_s:.3g} s"
        return Plan(0, 0, 1, decisions, 0, recompute_s, load_s, recompute_s, reason)
    chosen = usable[first : last + 1]
    deadlines = _deadlines(known, chosen, speeds, cost, coming)
    decisions = tuple(
        Decision(c.start, c.end, first <= i <= last, deadlines[i - first] if first <= i <= last else 0.0)
        for i, c in enumerate(usable)
    )
    return Plan(
        start=chosen[0].start,
        end=chosen[-1].end,
        pieces=pieces,
        decisions=decisions,
        nbytes=sum(c.nbytes for c in chosen),
        predicted_s=predicted_s,
        load_s=load_s,
        recompute_s=recompute_s,
        reason=_reason(known, chosen, usable, predicted_s, recompute_s),
        must=must,
    )


class Costs:
    """Seconds to compute runs of positions, in the request's own way."""

    def __init__(self, known: Known, speeds: Speeds) -> None:
        self._prompt = known.total if known.fast else known.prompt
        self._speeds = speeds

    def up_to(self, positions: Sequence[int]) -> Seconds:
        """Of [0, position) each."""
        at = np.asarray(positions, np.float64)
        whole: Seconds = self._seconds(np.minimum(at, self._prompt), np.maximum(at - self._prompt, 0.0))
        return whole

    def between(self, start: int, end: int) -> float:
        """Of [start, end). Asked for at every range and pass, hence without arrays."""
        return self._at(max(start, end)) - self._at(start)

    def _at(self, position: int) -> float:
        return self._seconds(min(position, self._prompt), max(position - self._prompt, 0))

    def _seconds(self, prefill: _Number, steps: _Number) -> _Number:
        s = self._speeds
        decode = steps * s.decode_s + s.decode_position_s * steps * (2 * self._prompt + steps) / 2
        return prefill * s.prefill_s + s.prefill_position_s * prefill**2 / 2 + decode


class _Table:
    """Seconds of every run of candidates, first by last."""

    def __init__(
        self,
        known: Known,
        candidates: Sequence[Candidate],
        speeds: Speeds,
        cost: Costs,
        coming: Coming,
        first_s: float,
    ) -> None:
        self._coming = coming
        exact = () if known.fast else known.boundaries
        prompt = known.total if known.fast else known.prompt
        self._starts = np.array([c.start for c in candidates])
        self._speeds = speeds
        self._layers = max(1, known.layers)
        fronts = [_boundary_after(exact, c.start) for c in candidates]
        tails = [min(_boundary_before(exact, c.end) if c.end < prompt else c.end, known.total - 1) for c in candidates]
        # A run shorter than a chunk of prefill it would have to be cut back to is no run.
        self._valid = (np.array(fronts)[:, None] < np.array(tails)[None, :]) & (self._starts <= known.prompt)[:, None]
        self._valid |= (self._starts == 0)[:, None] & (np.array(tails) > 0)[None, :]
        self._taken = np.array([c.end < (exact[0] if exact else 0) for c in candidates])
        front = np.where(self._starts == 0, 0.0, cost.up_to(fronts))
        self._front = coming.computed_s(front, np.full_like(front, first_s))
        whole = float(cost.up_to((known.total,))[0])
        self._tail = whole - cost.up_to(tails)
        step = cost.up_to([min(t + known.pass_tokens, known.total) if t < prompt else t + 1 for t in tails])
        self._pass = np.minimum(step - cost.up_to(tails), self._tail)
        self._bytes = np.cumsum([0, *(c.nbytes for c in candidates)])
        self._reads = np.cumsum([0, *(c.reads for c in candidates)])
        self.pieces = sorted({1, *(p for p in (2, 4, 8, 16, 32, 64) if p < self._layers), self._layers})

    def _load(self, first: int | slice, pieces: int) -> Seconds:
        """Reading candidates from `first` to each last one."""
        nbytes = self._bytes[None, 1:] - self._bytes[:-1, None]
        # Neighbours are read together, of which `reads` speaks, but only as whole chunks.
        joined = np.maximum(self._reads[None, 1:] - self._reads[:-1, None], 1)
        places = np.arange(len(self._starts))
        reads = joined if pieces == 1 else (places[None, :] - places[:, None] + 1) * pieces
        load = np.asarray(self._speeds.reading_s(nbytes[first], reads[first]), np.float64) + READ_S * reads[first]
        # What is read is of no use before there are weights to compute the last token with.
        return np.maximum(load + self._coming.reading_waits_s, self._coming.left_s)

    def from_front(self, pieces: int) -> Seconds:
        """Loading from the first candidate to each last one, with the first pass after it following the layers."""
        load = self._load(0, pieces)
        longer, shorter = np.maximum(load, self._pass), np.minimum(load, self._pass)
        return longer + shorter / pieces + (self._tail - self._pass)

    def best(self, from_0: bool) -> tuple[int, int, int, float]:
        """(first, last, pieces, seconds)."""
        seconds = np.maximum(self._front[:, None], self._load(slice(None), 1)) + self._tail[None, :]
        count = len(self._starts)
        seconds[np.tril_indices(count, -1)] = np.inf
        if from_0:
            self._valid[self._starts > 0] = False
            self._valid[:, self._taken] = False
        seconds[~self._valid] = np.inf
        first, last = divmod(int(seconds.argmin()), count)
        best = (first, last, 1, float(seconds[first, last]))
        if self._starts[0] == 0:
            for pieces in self.pieces:
                row = np.where(self._valid[0], self.from_front(pieces), np.inf)
                place = int(row.argmin())
                if row[place] < best[3]:
                    best = (0, place, pieces, float(row[place]))
        return best


def _must_begin_at_0(known: Known, candidates: Sequence[Candidate]) -> bool:
    """The first attempt took its beginning from a prefix cache: only stored KV of it is exact."""
    taken = known.boundaries[0] if known.boundaries and not known.fast else 0
    return taken > 0 and candidates[0].start == 0 and candidates[-1].end >= taken


def _boundary_after(boundaries: tuple[int, ...], position: int) -> int:
    return next((b for b in boundaries if b >= position), position)


def _boundary_before(boundaries: tuple[int, ...], position: int) -> int:
    if not boundaries or position <= boundaries[0]:
        return position
    return max(b for b in boundaries if b <= position)


def _end_of_first_pass(known: Known) -> int:
    if known.fast or not known.boundaries:
        return min(known.pass_tokens, known.total)
    return next((edge for edge in known.boundaries if edge > 0), known.total)


def _deadlines(known: Known, chosen: Sequence[Candidate], speeds: Speeds, cost: Costs, coming: Coming) -> list[float]:
    """In the order in which chunks are asked for: from the front, or from the back where the front is computed."""
    order = list(chosen) if chosen[0].start == 0 else list(reversed(chosen))
    found: dict[int, float] = {}
    nbytes = reads = 0
    keep = _must_begin_at_0(known, chosen)
    for candidate in order:
        nbytes, reads = nbytes + candidate.nbytes, reads + candidate.reads
        expected_s = float(speeds.reading_s(nbytes, reads))
        # After a hole in the generated part everything is computed, one by one; after one in the prompt only the hole.
        end = candidate.end if candidate.end <= known.prompt else known.total
        again_s = cost.between(candidate.start, end)
        deadline_s = max(MIN_DEADLINE_S, SLACK * expected_s + again_s)
        found[candidate.start] = coming.left_s + (MAX_DEADLINE_S if keep else min(deadline_s, MAX_DEADLINE_S))
    return [found[candidate.start] for candidate in chosen]


def _reason(
    known: Known, chosen: Sequence[Candidate], usable: Sequence[Candidate], predicted_s: float, recompute_s: float
) -> str:
    instead = f"{predicted_s:.3g} s, recomputing all {recompute_s:.3g} s"
    if _must_begin_at_0(known, usable):
        return f"loaded for exactness, the first attempt had its beginning from a prefix cache: {instead}"
    if chosen[0].start > 0:
        return f"computed up to {chosen[0].start} while the rest is read: {instead}"
    return f"loaded up to {chosen[-1].end}: {instead}"
