"""What the warm pools should hold, and how many warm workers wait where: memory is spent on what saves most waiting.

A form in a pool saves the seconds of its load with the chance that it is wanted within the horizon. That chance, from
the gaps: of those longer than the present one, the share that ends in time (Serverless in the Wild, ATC 2020, keeps
a histogram of them; here they are themselves); from a forecast of n arrivals: 1 - exp(-n), if they are independent. The
larger counts. Memory goes to the largest saving per byte (GreedyDual-Size, Cao and Irani, USITS 1997), second copies at
what a peer leaves to be saved.
Limits: sizes are those of the last form; a pool evicts by itself, by the chances it is told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

GAPS_NEEDED = 8
HORIZON_S = 120.0
"""What is wanted within this time should be in the pool: longer than any load, shorter than most habits."""
PRELOAD_CHANCE = 0.5
"""Nothing is loaded ahead that is not wanted more likely than not: a load takes a link from those who wait."""
FULL_SHARE = 0.9
"""Of a pool that loads ahead may fill: what is asked for at once finds room without an eviction."""
CLEARLY = 2.0
"""A form is worth another's place if it saves this many times as much per byte: pools do not flap."""
MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Use:
    """Of one function."""

    identity: str
    idle_s: float
    gaps_s: tuple[float, ...]
    in_use: bool
    """A replica lives, or somebody waits."""
    expected: float = 0.0
    """Arrivals that a forecast expects within the horizon."""


def chance_of_use(use: Use, horizon_s: float = HORIZON_S) -> float | None:
    """None: too little is known. One pseudo-gap that has not ended keeps it below 1 and, past the longest gap, at 0."""
    if use.in_use:
        return 1.0
    forecast = 1.0 - math.exp(-use.expected) if use.expected > 0 else None
    if len(use.gaps_s) < GAPS_NEEDED:
        return forecast
    longer = [gap for gap in use.gaps_s if gap > use.idle_s]
    soon = sum(gap <= use.idle_s + horizon_s for gap in longer)
    return max(soon / (len(longer) + 1), forecast or 0.0)


def chances(uses: Iterable[Use], horizon_s: float = HORIZON_S) -> dict[str, float]:
    """By checkpoint: that any of its functions wants it. Functions of which too little is known say nothing."""
    spared: dict[str, float] = {}
    for use in uses:
        chance = chance_of_use(use, horizon_s)
        if chance is not None:
            spared[use.identity] = spared.get(use.identity, 1.0) * (1.0 - chance)
    return {identity: 1.0 - none for identity, none in spared.items()}


# --- what pools hold ---


@dataclass(frozen=True, slots=True)
class Want:
    """A checkpoint that may be wanted."""

    identity: str
    chance: float
    nbytes: int
    """Of its form; 0: unknown, taken for a part of a pool's room."""
    load_s: float
    """Seconds it takes to load where no pool has it."""
    peer_s: float | None = None
    """Seconds from another slot's pool; None: as long."""
    copies: int = 1
    """Slots it is expected to be started on."""


@dataclass(frozen=True, slots=True)
class Pool:
    slot_id: str
    budget_bytes: int
    used_bytes: int
    held: Mapping[str, int] = field(default_factory=dict)
    """Forms with their bytes, on their way included."""
    pinned: frozenset[str] = frozenset()
    """Forms that replicas use."""
    busy: float = 0.0
    """How much is being started there: loads go to quiet slots first."""


@dataclass(frozen=True, slots=True)
class Load:
    slot_id: str
    identity: str
    saves_s: float
    """Expected seconds of waiting."""
    instead_of: tuple[str, ...] = ()
    """Forms that the pool will let go for it."""


def to_load(wants: Sequence[Want], pools: Sequence[Pool], most: int = 4) -> tuple[Load, ...]:
    """What to load ahead, and where; at most so many at once."""
    held_by = Counter(identity for pool in pools for identity in pool.held)
    worth = {want.identity: want.chance * want.load_s / max(want.nbytes, 1) for want in wants}
    free = {pool.slot_id: int(pool.budget_bytes * FULL_SHARE) - pool.used_bytes for pool in pools}
    evicted: dict[str, set[str]] = {pool.slot_id: set() for pool in pools}
    loads: list[Load] = []
    for saves_s, want in _copies(wants, held_by):
        if len(loads) >= most:
            break
        options = []
        for pool in pools:
            taken = any(load.slot_id == pool.slot_id and load.identity == want.identity for load in loads)
            if want.identity in pool.held or taken:
                continue
            gone = _instead(want, pool, free[pool.slot_id], worth, evicted[pool.slot_id], saves_s)
            if gone is not None:
                options.append((len(gone), pool.busy, -free[pool.slot_id], pool.slot_id, gone, pool))
        if not options:
            continue
        _, _, _, slot_id, gone, pool = min(options, key=lambda option: option[:4])
        free[slot_id] += sum(pool.held[identity] for identity in gone) - _size(want, pool)
        evicted[slot_id] |= set(gone)
        loads.append(Load(slot_id, want.identity, saves_s, gone))
    return tuple(loads)


def _copies(wants: Sequence[Want], held_by: Mapping[str, int]) -> list[tuple[float, Want]]:
    """Copies that are missing, by what each saves per byte."""
    missing: list[tuple[float, float, str, Want]] = []
    for want in wants:
        if want.chance < PRELOAD_CHANCE:
            continue
        for number in range(held_by[want.identity], max(want.copies, 1)):
            seconds = want.load_s if number == 0 or want.peer_s is None else want.peer_s
            # A copy that is one of many is needed only if as many replicas start at once.
            saves_s = want.chance ** (number + 1) * seconds
            missing.append((-saves_s / max(want.nbytes, 1), -saves_s, want.identity, want))
    missing.sort(key=lambda each: each[:3])
    return [(-saves_s, want) for _, saves_s, _, want in missing]


def _size(want: Want, pool: Pool) -> int:
    return want.nbytes or pool.budget_bytes // 4


def _instead(
    want: Want, pool: Pool, free_bytes: int, worth: Mapping[str, float], gone: set[str], saves_s: float
) -> tuple[str, ...] | None:
    """What has to go for it: nothing where there is room, else what is clearly worth less; None: it stays out."""
    needed = _size(want, pool) - free_bytes
    if needed <= 0:
        return ()
    own = saves_s / max(want.nbytes, 1)
    able = [
        identity
        for identity in pool.held
        if identity not in pool.pinned and identity not in gone and worth.get(identity, 0.0) * CLEARLY <= own
    ]
    able.sort(key=lambda identity: (worth.get(identity, 0.0), identity))
    chosen: list[str] = []
    for identity in able:
        if needed <= 0:
            break
        chosen.append(identity)
        needed -= pool.held[identity]
    return tuple(chosen) if needed <= 0 else None


# --- warm workers ---


def workers(
    starts_per_s: float, refill_s: float, saved_s: float, waiting_weight: float, held_cost: float, least: int = 0
) -> int:
    """Workers that should wait in a slot: one more as long as it saves more waiting than its memory costs.

    The k-th is used by a start that finds k - 1 taken within `refill_s`, the time until a new one is forked: of starts
    that come independently, the share P(N >= k - 1). It saves `saved_s` of a person's waiting each time; it costs
    `held_cost` device-seconds a second (the news vendor's rule). With a start every 2 s, 3 s to refill, 1.5 s saved, a
    weight of 30 and a cost of 0.05 (`test_workers_wait_where_they_save_more_than_they_hold`): 7.
    """
    mean = max(starts_per_s * refill_s, 0.0)
    below, term, wanted = 0.0, math.exp(-mean), 0
    for k in range(1, MOST_WORKERS + 1):
        reached = 1.0 - below  # P(N >= k - 1)
        if starts_per_s * reached * saved_s * waiting_weight <= held_cost:
            break
        wanted = k
        below += term
        term *= mean / k
    return min(max(wanted, least), max(MOST_WORKERS, least))


def starts_by_slot(starts_per_s: Mapping[str, float], pools: Sequence[Pool]) -> dict[str, float]:
    """Starts a second that each slot should expect: a checkpoint is started where a pool has it, else anywhere."""
    found = dict.fromkeys((pool.slot_id for pool in pools), 0.0)
    for identity, rate in starts_per_s.items():
        holders = [pool.slot_id for pool in pools if identity in pool.held] or list(found)
        for slot_id in holders:
            found[slot_id] += rate / len(holders)
    return found
