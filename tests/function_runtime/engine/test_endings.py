"""How a choice ends: end-of-text, stop tokens, stop strings, lengths; and what text comes with it."""

from __future__ import annotations

from function_runtime.protocol import FinishReason, TokenEvent
from tests.function_runtime.engine.support import Checkpoint, Transcript, make_work, run_one


def free_run(llama2: Checkpoint, count: int = 30) -> Transcript:
    return run_one(llama2.engine(), make_work(llama2.prompt(12), max_tokens=count, ignore_eos=True))


def last(transcript: Transcript) -> TokenEvent:
    return transcript.events[-1]


def test_the_text_is_what_the_tokenizer_decodes(llama2: Checkpoint) -> None:
    transcript = free_run(llama2)
    assert transcript.text() == llama2.tokenizer.decode(transcript.tokens())
    assert last(transcript).finish is FinishReason.LENGTH and last(transcript).stop_reason is None


def test_a_stop_token_ends_the_choice_and_is_not_shown(llama2: Checkpoint) -> None:
    tokens = free_run(llama2).tokens()
    stop = tokens[10]
    end = tokens.index(stop) + 1
    transcript = run_one(
        llama2.engine(), make_work(llama2.prompt(12), max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert transcript.tokens() == tokens[:end]
    assert last(transcript).finish is FinishReason.STOP and last(transcript).stop_reason == stop
    assert transcript.text() == llama2.tokenizer.decode(tokens[: end - 1])


def test_a_stop_string_ends_the_choice_and_cuts_the_text(llama2: Checkpoint) -> None:
    text = free_run(llama2).text()
    start = next(i for i in range(8, len(text) - 3) if "�" not in text[i : i + 3])
    stop = text[start : start + 3]
    transcript = run_one(llama2.engine(), make_work(llama2.prompt(12), max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert transcript.text() == text[: text.index(stop)]
    assert last(transcript).finish is FinishReason.STOP and last(transcript).stop_reason == stop


def test_end_of_text_ends_the_choice_unless_ignored(llama2: Checkpoint) -> None:
    (eos,) = llama2.manifest.eos_token_ids
    bias = {"logit_bias": {eos: 1000.0}}
    ended = run_one(llama2.engine(), make_work(llama2.prompt(12), max_tokens=5, **bias))
    assert ended.tokens() == [eos] and ended.text() == ""
    assert last(ended).finish is FinishReason.STOP and last(ended).stop_reason is None
    ignored = run_one(llama2.engine(), make_work(llama2.prompt(12), max_tokens=5, ignore_eos=True, **bias))
    assert ignored.tokens() == [eos] * 5


def test_a_least_length_holds_endings_back(llama2: Checkpoint) -> None:
    (eos,) = llama2.manifest.eos_token_ids
    transcript = run_one(
        llama2.engine(), make_work(llama2.prompt(12), max_tokens=9, min_tokens=4, logit_bias={eos: 1000.0})
    )
    assert len(transcript.events) == 5 and transcript.tokens()[-1] == eos


def test_choices_differ_and_each_has_its_own_text(llama2: Checkpoint) -> None:
    transcript = run_one(
        llama2.engine(), make_work(llama2.prompt(12), max_tokens=20, ignore_eos=True, n=3, temperature=1.0)
    )
    texts = [transcript.text(choice) for choice in range(3)]
    assert len(set(texts)) == 3
    assert [event.choice for event in transcript.events] == [0, 1, 2] * 20
    for choice in range(3):
        assert texts[choice] == llama2.tokenizer.decode(transcript.tokens(choice))


def test_log_probabilities_come_with_text(llama2: Checkpoint) -> None:
    transcript = run_one(llama2.engine(), make_work(llama2.prompt(12), max_tokens=3, ignore_eos=True, logprobs=4))
    for event in transcript.events:
        assert event.logprob is not None and len(event.top) == 4
        assert event.top[0].token_id == event.token_id and event.top[0].logprob == event.logprob
        assert event.token_text == llama2.tokenizer.token_text(event.token_id)
