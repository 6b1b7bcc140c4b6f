"""Stored KV that is still on its way: passes that follow its layers, beginnings computed meanwhile, what never comes.

Whatever happens to it, a request goes on byte for byte as the undisturbed run.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from function_runtime.engine.engine import Engine
from function_runtime.engine.output import Admitted, StepOutput
from function_runtime.engine.restoring import Race
from function_runtime.engine.shadow import Doubt
from function_runtime.kv.arrival import Arrival, ArrivingChunk
from function_runtime.kv.plan import Known
from function_runtime.kv.speeds import PRIOR
from function_runtime.kv.steering import Steering
from function_runtime.kv.supply import Item, Order, Supply
from function_runtime.protocol import KvChunk, TokenEvent, Work
from tests.function_runtime.engine.support import Checkpoint, Driver, Transcript, make_work, run_one

OPTIONS: dict[str, Any] = {"step_tokens": 20, "prefix_cache": False}
PROMPT_TOKENS = 75
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 30, "ignore_eos": True},
    "seeded": {"max_tokens": 30, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True},
    "two-choices": {"max_tokens": 26, "temperature": 1.2, "n": 2, "seed": 5, "ignore_eos": True},
}  # fmt: skip
LAYERS = 2


class Arriving:
    """A request's stored KV, given to the engine as the test says."""

    def __init__(self, first: Transcript, work: Work, *, since: int = 0, layered: bool = False) -> None:
        self.chunks: list[ArrivingChunk] = []
        self.whole: list[bytes] = []
        prompt = len(work.prompt)
        for (choice, start, end), tensor in sorted(first.kv.items()):
            known = prompt + sum(event.choice == choice for event in work.produced) - 1
            if (choice == 0 and start < since) or end > max(prompt, known):
                continue
            longer = [key for key in first.kv if key[:2] == (choice, start) and end < key[2] <= max(prompt, known)]
            if longer:
                continue
            data = tensor.contiguous().flatten().numpy().tobytes()
            record = KvChunk(choice, start, end, "kv/packs/00/00", 0, len(data), "", "")
            self.whole.append(data)
            self.chunks.append(ArrivingChunk(record, LAYERS, memoryview(bytearray(len(data)))))
        self.arrival = Arrival(self.chunks, layered=layered)

    def layer(self, layer: int) -> None:
        for chunk, data in zip(self.chunks, self.whole, strict=True):
            size = len(data) // LAYERS
            chunk.data[layer * size : (layer + 1) * size] = data[layer * size : (layer + 1) * size]
            self.arrival.has_layers(chunk, layer, layer + 1)

    def sound(self, chunks: Sequence[ArrivingChunk] | None = None) -> None:
        for chunk, data in zip(self.chunks, self.whole, strict=True):
            if chunks is None or chunk in chunks:
                chunk.data[:] = data
                self.arrival.is_sound(chunk)

    def fill_with_rubbish(self) -> None:
        for chunk in self.chunks:
            chunk.data[:] = b"\x7f" * len(chunk.data)  # 3.4e38: whoever mixes it in gets no numbers
            self.arrival.has_layers(chunk, 0, LAYERS)


class Watching(Driver):
    """Keeps what the engine says of admissions and of what it doubts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.admitted: list[Admitted] = []
        self.doubts: list[Doubt] = []
        step = engine.step

        def watched() -> StepOutput:
            output = step()
            self.admitted += output.admitted
            self.doubts += output.doubts
            return output

        engine.step = watched  # type: ignore[method-assign]


def undisturbed(checkpoint: Checkpoint, name: str) -> Transcript:
    first = run_one(checkpoint.engine(**OPTIONS), make_work(checkpoint.prompt(PROMPT_TOKENS), **SAMPLINGS[name]))
    assert first.ended and first.prefill_ends == (0, 20, 40, 60, 75)
    return first


def resumption(checkpoint: Checkpoint, first: Transcript, name: str, cut: int, **fields: Any) -> Work:
    work = make_work(
        checkpoint.prompt(PROMPT_TOKENS), "again", epoch=2, produced=first.events[:cut],
        prefill_ends=first.prefill_ends, **SAMPLINGS[name],
    )  # fmt: skip
    return type(work)(**{**{f: getattr(work, f) for f in work.__struct_fields__}, **fields})


def behind(actions: Sequence[Callable[[], None]], pause_s: float = 0.02) -> threading.Thread:
    def act() -> None:
        for action in actions:
            time.sleep(pause_s)
            action()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("cut", [1, 11, 24])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_pass_that_follows_the_layers_goes_on_exactly(llama2: Checkpoint, name: str, cut: int) -> None:
    first = undisturbed(llama2, name)
    work = resumption(llama2, first, name, cut)
    arriving = Arriving(first, work, layered=True)
    driver = Watching(llama2.engine(**OPTIONS))
    assert driver.engine.submit(work, arriving.arrival).pending
    transcript = driver.transcripts.setdefault("again", Transcript())
    driver.step()
    assert not driver.admitted, "nothing has come yet"
    reader = behind([lambda: arriving.layer(0), lambda: arriving.layer(1), arriving.sound])
    driver.run()
    reader.join()
    assert first.events[:cut] + transcript.events == first.events
    (admitted,) = driver.admitted
    # Where a choice has no token yet, the last chunk of the prompt is computed again to draw it from.
    assert admitted.exact and admitted.loaded_tokens >= (60 if cut == 1 and "two" in name else PROMPT_TOKENS)
    assert admitted.load_us > 0
    assert driver.engine.stats.kv_used_blocks == 0


def test_no_token_leaves_before_the_digest_is_known(llama2: Checkpoint) -> None:
    first = undisturbed(llama2, "greedy")
    work = resumption(llama2, first, "greedy", 11)
    arriving = Arriving(first, work, layered=True)
    arriving.layer(0)
    arriving.layer(1)
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    told: list[int] = []
    reader = behind([lambda: told.append(len(transcript.events)), arriving.sound], 0.2)
    driver.run()
    reader.join()
    assert told == [0] and first.events[:11] + transcript.events == first.events


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("what", ["rubbish", "a layer fails", "a layer is withheld", "nothing comes"])
def test_what_never_becomes_sound_leaves_no_trace(llama2: Checkpoint, name: str, what: str) -> None:
    first = undisturbed(llama2, name)
    work = resumption(llama2, first, name, 11)
    arriving = Arriving(first, work, layered=True)
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    victim = arriving.chunks[0]
    actions: list[Callable[[], None]] = []
    match what:
        case "rubbish":
            arriving.fill_with_rubbish()
            actions = [lambda: arriving.arrival.has_failed(victim, "its digest is another one")]
            others = [chunk for chunk in arriving.chunks if chunk is not victim]
            actions += [lambda chunk=chunk: arriving.arrival.has_failed(chunk, "so is this") for chunk in others]
        case "a layer fails":
            arriving.layer(0)
            actions = [lambda: arriving.arrival.has_failed(victim, "layer 1 does not have its checksum")]
            actions += [lambda: arriving.sound([c for c in arriving.chunks if c is not victim])]
        case "a layer is withheld":
            arriving.layer(0)
            for chunk in arriving.chunks:
                chunk.deadline_s = time.monotonic() + 0.15
        case _:
            for chunk in arriving.chunks:
                chunk.deadline_s = time.monotonic() + 0.05
    reader = behind(actions)
    driver.run()
    reader.join()
    assert first.events[:11] + transcript.events == first.events
    (admitted,) = driver.admitted
    assert admitted.exact and "[0, 32) of choice 0" in admitted.detail
    if what == "a layer fails":
        # The hole was computed again, in the first attempt's chunks, and what lies behind it was taken up.
        assert PROMPT_TOKENS - 40 <= admitted.loaded_tokens < PROMPT_TOKENS and admitted.recomputed_tokens >= 40
    else:
        assert admitted.loaded_tokens == 0
    assert driver.engine.stats.kv_used_blocks == 0 and not driver.engine.has_work


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_beginning_is_computed_while_the_rest_is_read(llama2: Checkpoint, name: str) -> None:
    first = undisturbed(llama2, name)
    work = resumption(llama2, first, name, 11)
    arriving = Arriving(first, work, since=32)
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    for _ in range(6):
        driver.step()
    assert not transcript.events and driver.engine.measured.speeds, "it waits where what is on its way begins"
    arriving.sound()
    driver.run()
    assert first.events[:11] + transcript.events == first.events
    (admitted,) = driver.admitted
    assert admitted.exact and admitted.loaded_tokens >= PROMPT_TOKENS - 40
    assert admitted.recomputed_tokens >= 40


def steering(latency_s: float, clock: Callable[[], float] = time.monotonic) -> Steering:
    """Of the prompt's chunks, still to be read from a store of this latency."""
    speeds = replace(PRIOR, latency_s=latency_s)
    items = [Item(i, 0, start, start + 32, "p", start, (0, 1000)) for i, start in enumerate((0, 32))]
    known = Known(prompt=PROMPT_TOKENS, total=PROMPT_TOKENS + 11, boundaries=(0, 20, 40, 60, 75), layers=LAYERS)
    return Steering(Supply(items, Order.BACK, lambda: speeds), known, lambda: speeds, clock=clock)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_pass_that_is_overtaken_by_what_it_computes_is_given_up(
    llama2: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = undisturbed(llama2, name)
    work = resumption(llama2, first, name, 11)
    arriving = Arriving(first, work)
    arriving.arrival.steering = steering(100.0)
    begun: list[int] = []
    look = Race.__call__

    def all_comes_in_the_second_pass(race: Race, layer: int) -> None:
        begun.append(layer)
        if begun.count(0) == 2:
            arriving.sound()
        look(race, layer)

    monkeypatch.setattr(Race, "__call__", all_comes_in_the_second_pass)
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.run()
    assert begun == [0, 1, 0], "the second pass ended at its first layer, and there was no third"
    assert first.events[:11] + transcript.events == first.events
    (admitted,) = driver.admitted
    assert admitted.exact and admitted.loaded_tokens >= PROMPT_TOKENS - 20
    assert driver.engine.stats.kv_used_blocks == 0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_is_late_is_waited_for_a_little_and_then_computed(llama2: Checkpoint, name: str) -> None:
    first = undisturbed(llama2, name)
    work = resumption(llama2, first, name, 11)
    arriving = Arriving(first, work)
    ticks = itertools.count()
    arriving.arrival.steering = steering(1e-6, lambda: next(ticks) * 1e-3)
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.step()
    assert not transcript.events and not arriving.arrival.abandoned, "it would be here in no time"
    driver.run()
    assert first.events[:11] + transcript.events == first.events
    assert driver.admitted[0].loaded_tokens == 0 and driver.admitted[0].exact
    assert arriving.arrival.abandoned


def test_others_go_on_while_one_waits_for_its_kv(llama2: Checkpoint) -> None:
    first = undisturbed(llama2, "greedy")
    work = resumption(llama2, first, "greedy", 11)
    arriving = Arriving(first, work, layered=True)
    driver = Watching(llama2.engine(**OPTIONS))
    other = driver.submit(make_work(llama2.prompt(10, 1), "other", max_tokens=8, ignore_eos=True))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    arriving.layer(0)
    for _ in range(12):
        driver.step()
        if other.ended:
            break
    assert other.ended and not transcript.events
    arriving.sound()
    driver.run()
    assert first.events[:11] + transcript.events == first.events


def test_what_comes_too_late_lands_nowhere(llama2: Checkpoint) -> None:
    first = undisturbed(llama2, "greedy")
    work = resumption(llama2, first, "greedy", 11)
    arriving = Arriving(first, work)
    for chunk in arriving.chunks:
        chunk.deadline_s = time.monotonic()
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.step()
    arriving.fill_with_rubbish()
    for chunk in arriving.chunks:
        arriving.arrival.is_sound(chunk)
    driver.run()
    assert first.events[:11] + transcript.events == first.events
    assert driver.admitted[0].loaded_tokens == 0 and "in time" in driver.admitted[0].detail


@pytest.mark.parametrize("since", [0, 32])
def test_a_request_that_is_cancelled_while_its_kv_comes_gives_everything_back(llama2: Checkpoint, since: int) -> None:
    first = undisturbed(llama2, "greedy")
    work = resumption(llama2, first, "greedy", 11)
    arriving = Arriving(first, work, since=since, layered=not since)
    arriving.layer(0)
    engine = llama2.engine(**OPTIONS)
    driver = Watching(engine)
    driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.step()
    assert engine.cancel("again")
    assert arriving.arrival.abandoned and engine.stats.kv_used_blocks == 0
    arriving.fill_with_rubbish()
    again = driver.submit(make_work(llama2.prompt(PROMPT_TOKENS), "next", **SAMPLINGS["greedy"]))
    driver.run()
    assert [e.token_id for e in again.events] == [e.token_id for e in first.events]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_fast_resume_computes_what_is_known_in_chunks(llama2: Checkpoint, name: str) -> None:
    first = undisturbed(llama2, name)
    cut = 22
    work = resumption(llama2, first, name, cut, fast=True)
    driver = Watching(llama2.engine(**{**OPTIONS, "step_tokens": 512}))
    admitted = driver.engine.submit(work)
    transcript = driver.transcripts.setdefault("again", Transcript())
    driver.step()
    driver.step()
    driver.step()
    assert transcript.events, "prompt, produced tokens, and the next one: three passes"
    driver.run()
    assert not admitted.exact and "fast" in admitted.detail
    if name == "greedy":
        assert [e.token_id for e in first.events[:cut] + transcript.events] == [e.token_id for e in first.events]
    assert transcript.ended and transcript.seqs == list(range(cut + 1, len(first.events) + 1))
    lengths = [sum(e.choice == c for e in first.events[:cut] + transcript.events) for c in range(work.sampling.n)]
    assert lengths == [work.sampling.max_tokens] * work.sampling.n
    assert driver.engine.stats.kv_used_blocks == 0


def test_a_fast_resume_from_stored_kv_is_exact_when_nothing_is_left_to_compute(llama2: Checkpoint) -> None:
    first = undisturbed(llama2, "greedy")
    cut = 22  # 75 + 21 = 96 positions: three whole chunks
    work = resumption(llama2, first, "greedy", cut, fast=True)
    arriving = Arriving(first, work)
    arriving.sound()
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.run()
    assert driver.admitted[0].loaded_tokens == 96 and driver.admitted[0].exact
    assert first.events[:cut] + transcript.events == first.events


def test_events_are_numbered_from_where_the_log_ends(llama2: Checkpoint) -> None:
    first = undisturbed(llama2, "two-choices")
    work = resumption(llama2, first, "two-choices", 11)
    arriving = Arriving(first, work, since=64)
    arriving.sound()
    driver = Watching(llama2.engine(**OPTIONS))
    transcript = driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    driver.run()
    assert transcript.seqs == list(range(12, len(first.events) + 1))
    assert isinstance(transcript.events[0], TokenEvent)
