"""Reads a request's KV back: which of its stored chunks are of use, which are worth reading, and what came of it.

    records -> candidates (ranges and chains agree) -> a gapless path per choice -> plan -> reads (`fetch`)

Chunks whose chain is not that of the request's own tokens are not even read. Anything missing, short, altered, late or
of another identity, scope or token sequence is left out, with its reason. Limits: `read_kv` waits for everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from function_runtime.engine_like import KvRun, RestoredKv
from function_runtime.errors import KvError
from function_runtime.kv.arrival import Arrival, ArrivingChunk, ChunkState
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.contention import WhatComes, left_s, nothing
from function_runtime.kv.fetch import Fetch, Wanted
from function_runtime.kv.forms import flight_identity, identity_of, known_form
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.plan import MAX_DEADLINE_S, Candidate, Known, Plan, plan
from function_runtime.kv.sealing import ChunkSeal
from function_runtime.kv.speeds import Measured, Speeds
from function_runtime.kv.steering import PROBES, Steering
from function_runtime.kv.supply import SPAN_BYTES, Item, Order, Supply
from function_runtime.passes import NONE, recorded, with_steps
from function_runtime.protocol import KvChunk, Work
from model_loader.objects import ObjectStore
from model_loader.objects.resilience import DEFAULT_LIMITS

FAR_S: Final = 3600.0
"""No deadline: what is late is computed."""
MEASURED_LATELY_S: Final = 60.0
PROBE_EVERY_S: Final = 1.0
MOST_BEHIND: Final = 5.0
"""A store is looked at every 25 s, however slow it was: what is read costs the line and the processor."""
PROBE_LEAST_S: Final = 0.1
"""What takes less is not worth looking whether it could be read faster."""


def sequences(work: Work) -> list[tuple[int, ...]]:
    """Per choice the prompt and the tokens generated so far."""
    made: list[list[int]] = [[] for _ in range(work.sampling.n)]
    for event in work.produced:
        made[event.choice].append(event.token_id)
    return [(*work.prompt, *tokens) for tokens in made]


@dataclass
class Restoration:
    """What became of a read."""

    restored: RestoredKv | None
    misses: list[str] = field(default_factory=list)
    sound: list[KvChunk] = field(default_factory=list)
    """Those that are used."""
    bad: list[tuple[KvChunk, str]] = field(default_factory=list)
    """Those that are not what their records say, or not there at all; not those that only came too late."""

    @property
    def detail(self) -> str:
        return "; ".join(self.misses)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the plan has to know of the engine."""

    layers: int = 1
    pass_tokens: int = 512
    coming: WhatComes = nothing
    """The weights, while they are not here."""


class Reading:
    """The stored KV of one request: the paths that could be read, and the reads."""

    def __init__(self, work: Work, identity: KvIdentity) -> None:
        self.work = work
        self.outcome = Restoration(None)
        self._usable = _candidates(work, identity, self.outcome)
        self._is_lossy = any(w.head.form != "raw" for w in self._usable)
        prompt = len(work.prompt)
        self._paths = [_path(self._usable, choice, prompt) for choice in range(work.sampling.n)]
        self._paths[0] = _loaded(self._paths[0])
        if not (self._paths[0] and self._paths[0][0].chunk.start == 0) and not self.outcome.misses:
            self.outcome.misses.append("no chunk begins at position 0")
        self._tried = {w.place for path in self._paths for w in path}

    @property
    def wanted(self) -> list[Wanted]:
        return [w for path in self._paths for w in path]

    def _known(self, engine: Capabilities) -> Known:
        work = self.work
        return Known(
            prompt=len(work.prompt),
            total=max(len(tokens) for tokens in sequences(work)),
            boundaries=recorded(work.prefill_ends, work.begun.passes).boundaries() if work.prefill_ends else (),
            fast=work.fast and bool(work.produced),
            layers=engine.layers,
            pass_tokens=engine.pass_tokens,
            from_start=self._is_lossy,
        )

    def plan(self, speeds: Speeds, engine: Capabilities) -> Plan:
        first = self._paths[0]
        begins = {id(w) for w in first[:1]}
        span = 0
        for before, w in itertools.pairwise(first):
            span += before.chunk.nbytes
            if before.chunk.pack != w.chunk.pack or span + w.chunk.nbytes > SPAN_BYTES:
                begins.add(id(w))
                span = 0
        others = [0] * len(first)
        for w in (w for path in self._paths[1:] for w in path):
            # Of use only with all of the first choice's up to there.
            place = next((i for i, f in enumerate(first) if f.chunk.end >= w.chunk.end), len(first) - 1)
            if first:
                others[place] += w.chunk.nbytes
        candidates = [
            Candidate(w.chunk.start, w.chunk.end, w.chunk.nbytes + extra, int(id(w) in begins))
            for w, extra in zip(first, others, strict=True)
        ]
        return plan(self._known(engine), candidates, speeds, engine.coming())

    def begin(self, chosen: Plan, store: ObjectStore, executor: Executor) -> Arrival:
        """Begins the reads that the plan chose, all of them; at least one."""
        deadline_of = {(d.start, d.end): d.deadline_s for d in chosen.decisions if d.load}
        wanted = [w for w in self._paths[0] if (w.chunk.start, w.chunk.end) in deadline_of]
        deadlines = [deadline_of[w.chunk.start, w.chunk.end] for w in wanted]
        if chosen.end > len(self.work.prompt):
            latest = max(deadlines)
            rest = [w for path in self._paths[1:] for w in path]
            wanted, deadlines = [*wanted, *rest], [*deadlines, *(latest for _ in rest)]
        order = Order.LAYERS if chosen.pieces > 1 else Order.BACK if chosen.start else Order.FRONT
        fetch = self._fetch(store, executor, None)
        return fetch.begin(
            wanted, deadlines, order=order, pieces=chosen.pieces, reason=chosen.reason, other=self._instead
        )

    def begin_all(
        self, within_s: float, store: ObjectStore, executor: Executor, coming: WhatComes = nothing
    ) -> Arrival:
        """`within_s`: besides what the bytes take at a store's slowest, and the weights, which have the link first. A
        store whose bytes still come is slow, not ill."""
        wanted = self.wanted
        fetch = self._fetch(store, executor, None)
        nbytes = sum(each.chunk.nbytes for each in wanted)
        latest_s = within_s + left_s(coming) + nbytes / DEFAULT_LIMITS.slowest_bytes_s
        return fetch.begin(wanted, [latest_s] * len(wanted), other=self._instead)

    def begin_steered(
        self, chosen: Plan, measured: Measured, engine: Capabilities, store: ObjectStore, executor: Executor
    ) -> Arrival | None:
        """Begins with what the plan says, and goes on as it turns out. Where the plan is to read nothing, one range is
        read all the same if the store has not been measured for a while; None: not even that."""
        if not self._paths[0] or not (chosen.loads or may_probe(chosen, measured.read_ago_s)):
            return None
        known = self._known(engine)
        wanted = self.wanted
        largest = max(w.chunk.nbytes for w in wanted)
        pieces = min(max(chosen.pieces, -(-largest // SPAN_BYTES)), engine.layers)
        from_front = chosen.must or known.from_start
        order = Order.LAYERS if chosen.pieces > 1 else Order.FRONT if from_front else Order.BACK

        def speeds() -> Speeds:
            return measured.speeds

        def steer(items: Sequence[Item]) -> Steering:
            supply = Supply(items, order, speeds, is_known=measured.read_ago_s < MEASURED_LATELY_S)
            probes = 1 if chosen.loads else PROBES
            return Steering(supply, known, speeds, must=chosen.must, probes=probes, coming=engine.coming)

        fetch = self._fetch(store, executor, lambda nbytes, seconds: measured.read(nbytes, 1, seconds))
        weights = engine.coming()
        within_s = MAX_DEADLINE_S + (weights.left_s if weights is not None else 0.0) if chosen.must else FAR_S
        return fetch.begin(
            wanted, [within_s] * len(wanted), order=order,
            pieces=pieces, reason=chosen.reason, other=self._instead, steer=steer,
        )  # fmt: skip

    def _fetch(self, store: ObjectStore, executor: Executor, took: Callable[[float, float], None] | None) -> Fetch:
        seal = ChunkSeal(self.work.kv_key)
        return Fetch(store, executor, lambda chunk, why: self.outcome.bad.append((chunk, why)), seal, took)

    def _instead(self, failed: KvChunk) -> Wanted | None:
        own = [
            w
            for w in self._usable
            if w.chunk.choice == failed.choice and w.chunk.start == failed.start and w.place not in self._tried
        ]
        if not own:
            return None
        best = max(own, key=lambda w: w.chunk.end)
        self._tried.add(best.place)
        return best

    def conclude(self, arrival: Arrival) -> None:
        """What came of it, once nothing more will come."""
        outcome = self.outcome
        sound = [c for c in arrival.chunks if c.state is ChunkState.SOUND]
        # The index does not say how a chunk was computed; its header does.
        lineages = [c.passes.digest if c.passes is not None else "" for c in sound]
        outcome.sound = [msgspec.structs.replace(c.record, lineage=x) for c, x in zip(sound, lineages, strict=True)]
        late = [c for c in arrival.chunks if c.state is ChunkState.FAILED]
        outcome.misses += [f"[{c.start}, {c.end}) of choice {c.choice}: {c.reason}" for c in late]


def may_probe(chosen: Plan, read_ago_s: float) -> bool:
    """Whether a plan that reads nothing is worth a little reading, to see how the store is now. The further loading is
    behind, the rarer: what would have to be four times as fast is looked at a sixteenth as often as what is nearly as
    good."""
    behind = min(max(chosen.load_s / max(chosen.recompute_s, 1e-9), 1.0), MOST_BEHIND)
    return chosen.recompute_s > PROBE_LEAST_S and read_ago_s > PROBE_EVERY_S * behind**2


def read_kv(work: Work, identity: KvIdentity, store: ObjectStore, executor: Executor, within_s: float) -> Restoration:
    """Everything there is, at once: per choice the longest gapless run of chunks that are beyond doubt."""
    reading = Reading(work, identity)
    if not reading.wanted:
        return reading.outcome
    arrival = reading.begin_all(within_s, store, executor)
    while not arrival.resolved:
        arrival.wait(1.0)
    arrival.abandon()
    reading.conclude(arrival)
    outcome, prompt = reading.outcome, len(work.prompt)
    lengths = arrival.lengths(work.sampling.n, prompt, 0)
    if lengths[0]:
        runs = tuple(_runs(arrival, choice, length) for choice, length in enumerate(lengths))
        outcome.restored = RestoredKv(choices=runs, lengths=lengths)
    return outcome


def _runs(arrival: Arrival, choice: int, length: int) -> tuple[KvRun, ...]:
    """The chunks that lead to `length`, from its end to where they begin."""
    own = [c for c in arrival.chunks if c.choice == choice and c.state is ChunkState.SOUND]
    found: list[ArrivingChunk] = []
    position = length
    while position and (before := [c for c in own if c.end == position]):
        found.append(min(before, key=lambda c: c.start))
        position = found[-1].start
    return tuple(KvRun(tokens=c.end - c.start, data=c.data) for c in reversed(found))


def _candidates(work: Work, raw: KvIdentity, outcome: Restoration) -> list[Wanted]:
    """The chunks whose records do not already say that they are of something else."""
    known = sequences(work)
    chains: dict[tuple[int, str], Chain] = {}
    lineage_of = _Lineages(work)
    found: list[Wanted] = []
    for chunk in work.kv:
        where = f"[{chunk.start}, {chunk.end}) of choice {chunk.choice}"
        if not 0 <= chunk.choice < len(known) or not 0 <= chunk.start < chunk.end <= len(known[chunk.choice]):
            outcome.misses.append(f"{where} lies beyond the known tokens")
            continue
        key = (chunk.choice, chunk.form)
        if key not in chains:
            try:
                chains[key] = Chain(_identity(work, chunk, raw), work.kv_scope)
            except KvError as error:
                outcome.misses.append(f"{where}: {error}")
                continue
        tokens, chain, identity = known[chunk.choice], chains[key], chains[key].identity
        if chunk.form != "raw" and not work.prefill_ends and chunk.end >= len(work.prompt):
            # The last token is always computed, and what is taken of a lossy chunk is all of it.
            continue
        head = ChunkHead(
            identity=identity,
            scope=work.kv_scope,
            parent=chain.at(tokens, chunk.start),
            chain=chain.at(tokens, chunk.end),
            start=chunk.start,
            end=chunk.end,
            tokens=tuple(tokens[chunk.start : chunk.end]),
        )
        if chunk.chain != head.chain.hex():
            outcome.misses.append(f"{where} is of other tokens, another model or another tenant")
            continue
        if chunk.lineage and chunk.lineage != (lineage_of(chunk.end) or chunk.lineage):
            outcome.misses.append(f"{where} was computed in other passes than the first attempt's")
            continue
        wanted = Wanted(chunk, head)
        try:
            wanted.check_record()
        except KvError as error:
            outcome.misses.append(f"{where}: {error}")
            outcome.bad.append((chunk, str(error)))
            continue
        found.append(wanted)
    return found


def _identity(work: Work, chunk: KvChunk, raw: KvIdentity) -> KvIdentity:
    """Of the chunks a record may name for this request: raw ones that are its own, or prefixes in its function's form.
    Raises `KvError` for others."""
    own, form = known_form(work.prefix_form), known_form(chunk.form)
    if form == "raw":
        return flight_identity(own, raw)
    if form != own or chunk.choice or (work.prefill_ends and not chunk.lineage):
        # A request that has begun goes on with the very chunks it began on: its records name them.
        raise KvError(f"it is stored as {form}, which this request did not begin on")
    return identity_of(form, raw)


def _loaded(path: list[Wanted]) -> list[Wanted]:
    """What is taken from lossy chunks is named by them, each after those before it."""
    passes = NONE
    found: list[Wanted] = []
    for wanted in path:
        if wanted.head.form != "raw" and passes.end == wanted.chunk.start:
            passes = passes.with_loaded(wanted.chunk.end, wanted.chunk.digest)
            wanted = replace(wanted, passes=passes)
        found.append(wanted)
    return found


class _Lineages:
    """What the lineage of a position's KV is where a schedule is followed; empty where any will do."""

    def __init__(self, work: Work) -> None:
        prefill = NONE if work.fast and work.produced else recorded(work.prefill_ends, work.begun.passes)
        made = [sum(event.choice == choice for event in work.produced) for choice in range(work.sampling.n)]
        ended = {event.choice for event in work.produced if event.finish is not None}
        lengths = [(count, choice in ended) for choice, count in enumerate(made)]
        self._passes = with_steps(prefill, lengths, len(work.prompt) + max(made)) if prefill.parts else NONE

    def __call__(self, end: int) -> str:
        return self._passes.upto(end).digest


def _path(candidates: Sequence[Wanted], choice: int, prompt_tokens: int) -> list[Wanted]:
    """A gapless path, each step to the furthest end. Choice 0 begins at 0, or where it can, others anywhere in the
    prompt (the part before is choice 0's) and only where they reach beyond it."""
    own = [candidate for candidate in candidates if candidate.chunk.choice == choice]
    starts = sorted({c.chunk.start for c in own if c.chunk.start <= prompt_tokens})
    if choice == 0 and 0 in starts:
        starts = [0]
    best: list[Wanted] = []
    for start in starts:
        path: list[Wanted] = []
        position = start
        while following := [c for c in own if c.chunk.start == position]:
            path.append(max(following, key=lambda c: c.chunk.end))
            position = path[-1].chunk.end
        if path and (not best or position > best[-1].chunk.end):
            best = path
    return best if choice == 0 or (best and best[-1].chunk.end > prompt_tokens) else []
