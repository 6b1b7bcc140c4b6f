"""Reads a request's KV back: per choice the longest gapless run of chunks that are beyond doubt.

    plan (by ranges and chains alone) -> read and verify in parallel -> plan again without what failed -> runs

Chunks whose chain is not that of the request's own tokens are not even read. Anything missing, short, altered or of
another identity, scope or token sequence is left out, with its reason. Limits: a deadline for the whole; what comes
later is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field

from function_runtime.engine_like import KvRun, RestoredKv
from function_runtime.errors import KvError
from function_runtime.kv.chunk import ChunkHead, open_chunk
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.protocol import KvChunk, Work
from model_loader.errors import LoaderError, MissingObject
from model_loader.objects import ObjectStore


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


def read_kv(work: Work, identity: KvIdentity, store: ObjectStore, executor: Executor, within_s: float) -> Restoration:
    deadline_s = time.monotonic() + within_s
    outcome = Restoration(None)
    usable = _candidates(work, identity, outcome)
    opened: dict[_Place, memoryview] = {}
    while True:
        plans = [_plan(usable, choice, len(work.prompt)) for choice in range(work.sampling.n)]
        missing = {c.place: c for plan in plans for c in plan if c.place not in opened}
        if not missing:
            break
        failed = _read_all(list(missing.values()), opened, store, executor, deadline_s, outcome)
        usable = [candidate for candidate in usable if candidate.place not in failed]
    runs = tuple(_runs(plan, opened) for plan in plans)
    if runs[0]:
        lengths = tuple(plan[-1].chunk.end if plan else 0 for plan in plans)
        outcome.restored = RestoredKv(choices=runs, lengths=lengths)
        outcome.sound = [candidate.chunk for plan in plans for candidate in plan]
    elif not outcome.misses:
        outcome.misses.append("no chunk begins at position 0")
    return outcome


_Place = tuple[str, int, str]


@dataclass(frozen=True)
class _Candidate:
    chunk: KvChunk
    head: ChunkHead
    """What it has to be for the request's tokens."""

    @property
    def place(self) -> _Place:
        return self.chunk.pack, self.chunk.offset, self.chunk.digest


def _candidates(work: Work, identity: KvIdentity, outcome: Restoration) -> list[_Candidate]:
    """The chunks whose records do not already say that they are of something else."""
    known = sequences(work)
    chains = [Chain(identity, work.kv_scope) for _ in known]
    found: list[_Candidate] = []
    for chunk in work.kv:
        where = f"[{chunk.start}, {chunk.end}) of choice {chunk.choice}"
        if not 0 <= chunk.choice < len(known) or not 0 <= chunk.start < chunk.end <= len(known[chunk.choice]):
            outcome.misses.append(f"{where} lies beyond the known tokens")
            continue
        tokens, chain = known[chunk.choice], chains[chunk.choice]
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
        found.append(_Candidate(chunk, head))
    return found


def _plan(candidates: Sequence[_Candidate], choice: int, prompt_tokens: int) -> list[_Candidate]:
    """A gapless path, each step to the furthest end. Choice 0 begins at 0, others anywhere in the prompt (the part
    before is choice 0's) and only where they reach beyond it."""
    own = [candidate for candidate in candidates if candidate.chunk.choice == choice]
    starts = [0] if choice == 0 else sorted({c.chunk.start for c in own if c.chunk.start <= prompt_tokens})
    best: list[_Candidate] = []
    for start in starts:
        path: list[_Candidate] = []
        position = start
        while following := [c for c in own if c.chunk.start == position]:
            path.append(max(following, key=lambda c: c.chunk.end))
            position = path[-1].chunk.end
        if path and (not best or position > best[-1].chunk.end):
            best = path
    return best if choice == 0 or (best and best[-1].chunk.end > prompt_tokens) else []


def _read_all(
    wanted: Sequence[_Candidate],
    opened: dict[_Place, memoryview],
    store: ObjectStore,
    executor: Executor,
    deadline_s: float,
    outcome: Restoration,
) -> set[_Place]:
    """Reads and verifies; gives the places of those that failed."""
    failed: set[_Place] = set()
    futures: dict[Future[memoryview], _Candidate] = {executor.submit(_read, store, c): c for c in wanted}
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, max(0.0, deadline_s - time.monotonic()), FIRST_COMPLETED)
        if not done:
            for future in waiting:
                future.cancel()
                failed.add(futures[future].place)
            outcome.misses.append(f"{len(waiting)} chunks were not read in time")
            break
        for future in done:
            chunk, place = futures[future].chunk, futures[future].place
            try:
                opened[place] = future.result()
            except (KvError, LoaderError, OSError) as error:
                failed.add(place)
                outcome.misses.append(f"[{chunk.start}, {chunk.end}) of choice {chunk.choice}: {error}")
                if isinstance(error, KvError | MissingObject):
                    outcome.bad.append((chunk, str(error)))
    return failed


def _read(store: ObjectStore, candidate: _Candidate) -> memoryview:
    chunk = candidate.chunk
    limit = candidate.head.data_bytes + 1024 * 1024 + 8 * len(candidate.head.tokens)
    if not 0 < chunk.nbytes <= limit or chunk.offset < 0:
        raise KvError(f"its record says {chunk.nbytes} bytes")
    raw = memoryview(bytearray(chunk.nbytes))
    store.get_into(chunk.pack, chunk.offset, raw)
    return open_chunk(raw, chunk.digest, candidate.head)


def _runs(plan: Sequence[_Candidate], opened: dict[_Place, memoryview]) -> tuple[KvRun, ...]:
    return tuple(KvRun(tokens=c.chunk.end - c.chunk.start, data=opened[c.place]) for c in plan)
