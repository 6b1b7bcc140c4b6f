"""Loaded KV is computed again when there is nothing else to do; what differs is said, and nothing else is disturbed."""

from __future__ import annotations

from function_runtime.engine.shadow import Doubt
from function_runtime.protocol import Work
from tests.function_runtime.engine.support import Checkpoint, make_work
from tests.function_runtime.engine.test_arriving import OPTIONS, SAMPLINGS, Arriving, Watching, resumption, undisturbed


def loaded(checkpoint: Checkpoint, *, wrong: bool, sampled: bool = True) -> tuple[Watching, list[Doubt], Work]:
    first = undisturbed(checkpoint, "greedy")
    work = resumption(checkpoint, first, "greedy", 11)
    arriving = Arriving(first, work)
    if wrong:
        # As a store would give it that kept the wrong bytes with all their checksums: one value, in the last layer.
        raw = bytearray(arriving.whole[0])
        raw[-4:] = b"\x00\x00\x00\x41"
        arriving.whole[0] = bytes(raw)
    arriving.arrival.is_sampled = sampled
    arriving.sound()
    driver = Watching(checkpoint.engine(**OPTIONS))
    doubts: list[Doubt] = []
    step = driver.engine.step

    def watched() -> object:
        output = step()
        doubts.extend(output.doubts)
        return output

    driver.engine.step = watched  # type: ignore[method-assign, assignment]
    driver.submit(work, arriving.arrival)  # type: ignore[arg-type]
    return driver, doubts, work


def test_what_was_loaded_is_found_equal_to_the_last_bit(llama2: Checkpoint) -> None:
    driver, doubts, _ = loaded(llama2, wrong=False)
    driver.run()
    shadow = driver.engine.shadow
    assert not doubts and shadow.compared == shadow.equal_bits > 0
    assert driver.engine.stats.kv_used_blocks == 0


def test_wrong_kv_with_sound_checksums_is_doubted(llama2: Checkpoint) -> None:
    driver, doubts, work = loaded(llama2, wrong=True)
    driver.run()
    (doubt,) = doubts
    assert (doubt.request_id, doubt.epoch) == (work.request_id, 2)
    assert (doubt.chunk.start, doubt.chunk.end) == (0, 32) and "differs" in doubt.reason


def test_nothing_is_computed_twice_that_was_not_sampled(llama2: Checkpoint) -> None:
    driver, doubts, _ = loaded(llama2, wrong=True, sampled=False)
    driver.run()
    assert not doubts and not driver.engine.shadow.compared


def test_whatever_else_is_to_be_computed_comes_first(llama2: Checkpoint) -> None:
    driver, doubts, _ = loaded(llama2, wrong=True)
    transcript = driver.transcripts["again"]
    while not transcript.ended:
        driver.step()
    driver.step()
    assert driver.engine.stats.kv_used_blocks > 0, "the shadow has begun"
    other = driver.submit(make_work(llama2.prompt(10, 1), "other", **SAMPLINGS["greedy"]))
    driver.step()
    assert driver.engine.stats.kv_used_blocks == 1, "the shadow made way"
    driver.run()
    assert other.ended and len(doubts) == 1


def test_a_shadow_that_is_always_disturbed_is_given_up(llama2: Checkpoint) -> None:
    driver, doubts, _ = loaded(llama2, wrong=True)
    transcript = driver.transcripts["again"]
    while not transcript.ended:
        driver.step()
    for index in range(3):
        driver.step()
        other = driver.submit(make_work(llama2.prompt(10, 1), f"other-{index}", max_tokens=1, ignore_eos=True))
        while not other.ended:
            driver.step()
    driver.run()
    assert not doubts and driver.engine.stats.kv_used_blocks == 0
