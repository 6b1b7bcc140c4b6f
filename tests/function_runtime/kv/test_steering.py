"""A resume takes about what the faster of loading and computing takes, whatever the store and whatever it was thought.

Simulated, to the event: readers share a line of some latency and bandwidth, an engine computes passes layer by layer
and lands what has come, and the clock is theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.kv.contention import Coming
from function_runtime.kv.plan import Candidate, Costs, Known, plan
from function_runtime.kv.speeds import PRIOR, Measured, Speeds
from function_runtime.kv.steering import PROBES, Steering
from function_runtime.kv.supply import Item, Job, Order, Supply

LAYERS = 30
TICK_S = 0.02
TOKEN_BYTES = 46_080
WEIGHTS_CONNECTIONS = 4
CHUNK_TOKENS = 32
COMPUTING = replace(PRIOR, prefill_s=3.3e-3, prefill_position_s=3e-7, decode_s=0.05)
"""SmolLM2 on two cores."""


@dataclass
class Line:
    """What is under way, and how far it is. Weights come by it as well, over some connections of their own."""

    real: Callable[[float], Speeds]
    weights_left: float = 0.0

    def __post_init__(self) -> None:
        self.under_way: list[tuple[Job, list[float]]] = []

    def begin(self, job: Job, now_s: float) -> None:
        self.under_way.append((job, [now_s + self.real(now_s).latency_s, float(job.nbytes)]))

    def _running(self, now_s: float) -> list[list[float]]:
        return [state for _, state in self.under_way if state[0] <= now_s]

    def _connections(self, running: list[list[float]]) -> int:
        return len(running) + (WEIGHTS_CONNECTIONS if self.weights_left else 0)

    def next_s(self, now_s: float) -> float:
        """When something changes."""
        running = self._running(now_s)
        share = self.real(now_s).bytes_per_s / max(1, self._connections(running))
        ends = [now_s + min(s[1] for s in running) / share] if running else []
        ends += [now_s + self.weights_left / (share * WEIGHTS_CONNECTIONS)] if self.weights_left else []
        return min([*ends, *(s[0] for _, s in self.under_way if s[0] > now_s)], default=math.inf)

    def advance(self, now_s: float, to_s: float) -> list[Job]:
        running = self._running(now_s)
        each = (to_s - now_s) * self.real(now_s).bytes_per_s / max(1, self._connections(running))
        for state in running:
            state[1] -= each
        self.weights_left = left if (left := self.weights_left - each * WEIGHTS_CONNECTIONS) > 1e-3 else 0.0
        done = [job for job, state in self.under_way if state[1] <= 1e-3]
        self.under_way = [(job, state) for job, state in self.under_way if state[1] > 1e-3]
        return done


@dataclass(frozen=True)
class Outcome:
    seconds: float
    nbytes: int
    computed_tokens: int


def resume(
    known: Known,
    real: Speeds | Callable[[float], Speeds],
    measured: Measured,
    *,
    alone: bool = True,
    known_lately: bool = True,
    loads: bool = False,
    computing: Speeds = COMPUTING,
    chunk_tokens: int = CHUNK_TOKENS,
    weights_bytes: float = 0.0,
    knows_weights: bool = True,
) -> Outcome:
    """As a replica does it; `loads`: everything is loaded, whatever it takes. `weights_bytes` come by the same line."""
    clock = [0.0]
    line = Line(real if callable(real) else lambda _: real, weights_bytes)

    def coming() -> Coming | None:
        """What the loader notes of the line."""
        bytes_per_s = line.real(clock[0]).bytes_per_s
        return Coming(line.weights_left / bytes_per_s, True) if line.weights_left and knows_weights else None

    stored = known.prompt
    edges = [*range(0, stored, chunk_tokens), stored]
    items = [
        Item(i, 0, a, b, "pack", a * TOKEN_BYTES, (0, (b - a) * TOKEN_BYTES))
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    chosen = plan(known, [Candidate(i.start, i.end, i.nbytes) for i in items], measured.speeds, coming())
    supply = Supply(items, Order.BACK, lambda: measured.speeds, is_known=known_lately)
    steering = Steering(
        supply, None if loads else known, lambda: measured.speeds,
        probes=0 if loads else 1 if chosen.loads else PROBES, clock=lambda: clock[0], coming=coming,
    )  # fmt: skip
    costs = Costs(known, computing)
    reads, sound = 0, [False] * len(items)
    position = computed = 0
    pass_end, pass_from_s, pass_to_s = 0, 0.0, 0.0

    def reach() -> int:
        end = position
        while (index := next((i.index for i in items if i.start <= end < i.end and sound[i.index]), None)) is not None:
            end = items[index].end
        if not known.fast and end < known.prompt:
            end = max((b for b in known.boundaries if b <= end), default=end)
        return max(end, position)

    def pump() -> None:
        nonlocal reads
        while (job := steering.take()) is not None:
            reads += job.nbytes
            line.begin(job, clock[0])

    pump()
    while position < known.prompt:
        now_s = clock[0]
        assert now_s < 3600
        if not pass_end:
            position = reach()
            steering.is_at(position)
            pump()
            if position >= known.prompt:
                break
            if not steering.waits(position, alone):
                if known.fast:
                    end = min(known.prompt, position + known.pass_tokens)
                    starts = [i.start for i in items if i.start > position]
                    pass_end = steering.meeting(position, starts, end)
                else:
                    pass_end = next(b for b in known.boundaries if b > position)
                pass_from_s, pass_to_s = now_s, now_s + costs.between(position, pass_end)
        layer_s = costs.between(position, pass_end) / LAYERS if pass_end else 0.0
        engine_s = now_s + TICK_S
        if pass_end and not line.weights_left:
            layer = math.floor((now_s - pass_from_s) / layer_s + 1e-6) + 1
            engine_s = min(pass_from_s + layer * layer_s, pass_to_s)
        next_s = max(min(engine_s, line.next_s(now_s)), now_s + 1e-9)
        done = line.advance(now_s, next_s)
        clock[0] = next_s
        if pass_end and line.weights_left:
            # The last layer is computed when its weights are here.
            pass_to_s = max(pass_to_s, next_s + layer_s)
            pass_from_s = pass_to_s - LAYERS * layer_s
        for job in done:
            nbytes, seconds = steering.done(job, True)
            measured.read(nbytes, 1, seconds)
            for item in job.items:
                sound[item.index] = True
        pump()
        if not pass_end:
            continue
        if next_s >= pass_to_s - 1e-9:
            computed += pass_end - position
            measured.prefilled(position, pass_end, pass_to_s - pass_from_s)
            position, pass_end = pass_end, 0
        elif alone and next_s >= engine_s - 1e-9 and reach() >= pass_end:
            pass_end = 0
    weights_s = line.weights_left / line.real(clock[0]).bytes_per_s
    return Outcome(clock[0] + weights_s + costs.between(known.prompt, known.total), reads, computed)


def prompt(tokens: int, *, fast: bool = False) -> Known:
    return Known(tokens, tokens + 4, (*range(0, tokens, 512), tokens), fast=fast, layers=LAYERS)


def store(latency_s: float, megabytes_per_s: float) -> Speeds:
    return replace(COMPUTING, latency_s=latency_s, bytes_per_s=megabytes_per_s * 1e6)


def measured_of(real: Speeds, computing: Speeds = COMPUTING) -> Measured:
    """After some resumes from this store."""
    found = Measured(replace(computing, latency_s=0.02, bytes_per_s=200e6))
    for size in (1, 1, 2, 4, 8, 1, 2, 4):
        nbytes = size * CHUNK_TOKENS * TOKEN_BYTES
        found.read(nbytes, 1, float(real.reading_s(nbytes, 1)))
    return found


def best(known: Known, real: Speeds) -> tuple[float, float]:
    """Loading and computing, in seconds."""
    load = resume(known, real, measured_of(real), loads=True)
    return load.seconds, Costs(known, COMPUTING).between(0, known.total)


STORES = [
    (0.0001, 2000), (0.005, 100), (0.02, 60), (0.02, 30), (0.05, 14), (0.05, 8), (0.05, 2), (0.5, 100), (0.3, 20),
]  # fmt: skip
LENGTHS = (256, 1024, 2048)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
@pytest.mark.parametrize(("latency_s", "megabytes_per_s"), STORES)
def test_from_a_store_that_is_known(tokens: int, latency_s: float, megabytes_per_s: float) -> None:
    known, real = prompt(tokens), store(latency_s, megabytes_per_s)
    load_s, recompute_s = best(known, real)
    took = resume(known, real, measured_of(real))
    assert took.seconds <= 1.1 * min(load_s, recompute_s)


def test_each_of_the_two_wins_somewhere_and_both_together_where_they_are_alike() -> None:
    known = prompt(4096)
    quick, slow = (resume(known, real, measured_of(real)) for real in (store(0.001, 1000), store(0.5, 1)))
    assert quick.computed_tokens == 0 and quick.nbytes == 4096 * TOKEN_BYTES
    assert slow.computed_tokens == 4096 and slow.nbytes < 300 * TOKEN_BYTES
    alike = store(0.02, 15)
    both = resume(known, alike, measured_of(alike))
    assert 0 < both.computed_tokens < 4096
    assert both.seconds < 0.75 * min(best(known, alike))


latencies = st.floats(-4, math.log10(0.5)).map(lambda power: 10**power)
megabytes = st.floats(0, 4).map(lambda power: 10**power)
stores = st.builds(store, latencies, megabytes)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(LENGTHS), stores, stores, st.booleans(), st.booleans())
def test_from_a_store_of_which_something_else_is_believed(
    tokens: int, real: Speeds, believed: Speeds, fast: bool, known_lately: bool
) -> None:
    known = prompt(tokens, fast=fast)
    load_s, recompute_s = best(known, real)
    took = resume(known, real, measured_of(believed), known_lately=known_lately)
    # What was not known of the store's latency takes a few round trips to be known.
    first_pass_s = Costs(known, COMPUTING).between(0, min(512, tokens))
    assert took.seconds <= 1.1 * min(load_s, recompute_s) + first_pass_s + 4 * real.latency_s


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(LENGTHS), stores, stores, st.floats(0, 5))
def test_a_store_that_gets_slow_in_between_never_costs_much_more_than_computing(
    tokens: int, before: Speeds, after: Speeds, change_s: float
) -> None:
    known = prompt(tokens)
    took = resume(known, lambda now_s: before if now_s < change_s else after, measured_of(before))
    recompute_s = Costs(known, COMPUTING).between(0, known.total)
    first_pass_s = Costs(known, COMPUTING).between(0, min(512, tokens))
    assert took.seconds <= 1.1 * recompute_s + first_pass_s


@pytest.mark.parametrize("stalled_s", [0.1, 0.4, 0.8])
def test_a_quick_store_is_waited_for_through_a_stall_of_the_machine(stalled_s: float) -> None:
    known, quick = prompt(8000, fast=True), store(0.02, 200)
    stalled = replace(quick, bytes_per_s=1e3)
    took = resume(known, lambda now_s: stalled if 0.1 < now_s < 0.1 + stalled_s else quick, measured_of(quick))
    loaded = resume(known, quick, measured_of(quick), loads=True)
    assert took.computed_tokens == 0
    assert took.seconds <= loaded.seconds + stalled_s + 2 * TICK_S


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(LENGTHS), stores, stores)
def test_beside_others_a_pass_is_not_given_up_and_costs_itself_at_most(
    tokens: int, real: Speeds, believed: Speeds
) -> None:
    known = prompt(tokens)
    load_s, recompute_s = best(known, real)
    took = resume(known, real, measured_of(believed), alone=False)
    costs = Costs(known, COMPUTING)
    longest_s = max(costs.between(a, b) for a, b in itertools.pairwise(known.boundaries))
    assert took.seconds <= 1.1 * min(load_s, recompute_s) + 2 * longest_s


@pytest.mark.parametrize("factor", [0.3, 3.0])
@pytest.mark.parametrize(("latency_s", "megabytes_per_s"), STORES)
def test_a_device_that_is_not_as_fast_as_was_thought(latency_s: float, megabytes_per_s: float, factor: float) -> None:
    known, real = prompt(2048), store(latency_s, megabytes_per_s)
    load_s, recompute_s = best(known, real)
    thought = replace(COMPUTING, prefill_s=COMPUTING.prefill_s * factor)
    took = resume(known, real, measured_of(real, thought))
    assert took.seconds <= 1.1 * min(load_s, recompute_s) + Costs(known, COMPUTING).between(0, 512)


def test_what_must_be_loaded_is_waited_for_and_only_that() -> None:
    supply = Supply([Item(0, 0, 0, 512, "p", 0, (0, 10**6))], Order.FRONT, lambda: store(0.5, 1))
    known = Known(prompt=1000, total=1004, boundaries=(256, 768, 1000))
    steering = Steering(supply, known, lambda: store(0.5, 1), must=True)
    assert steering.waits(0, True) and steering.waits(255, False) and not steering.waits(256, True)


def test_what_is_slower_than_computing_is_not_waited_for_layer_by_layer() -> None:
    known, real = prompt(1024), store(0.05, 8)
    now = [0.0]
    items = [Item(0, 0, 0, 1024, "p", 0, (0, *(1024 * TOKEN_BYTES * i // 4 for i in range(1, 5))))]
    measured = measured_of(store(0.001, 1000))
    supply = Supply(items, Order.LAYERS, lambda: measured.speeds)
    steering = Steering(supply, known, lambda: measured.speeds, clock=lambda: now[0])
    job = steering.take()
    assert job is not None and not steering.is_hopeless(0)
    now[0] = job.nbytes / real.bytes_per_s
    steering.done(job, True)
    assert steering.is_hopeless(0)
    steering.turn_back()
    after = supply.take(now[0], lambda _: True)
    assert after is not None and after.first == job.last, "what is left of it"
