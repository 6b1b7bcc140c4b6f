"""Grammars: which tokens a mask allows, what a rebuilt state is like, and what becomes of grammars that are no good."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from function_runtime.engine.errors import EngineError, GrammarStuck, InvalidGrammar
from function_runtime.engine.grammar import Grammars
from function_runtime.engine.grammar_source import Pieces
from function_runtime.protocol import FinishReason, Grammar, GrammarKind
from tests.function_runtime.engine.kinds import EXPRESSION, LARK, PERSON, REGEX, grammar
from tests.function_runtime.engine.support import Checkpoint, Driver, make_work, run_one

FORMS: dict[str, Grammar] = {
    "json_object": grammar(GrammarKind.JSON_OBJECT),
    "json_schema": grammar(GrammarKind.JSON_SCHEMA, PERSON),
    "any json": grammar(GrammarKind.JSON_SCHEMA, {}),
    "regex": REGEX,
    "regex of characters": grammar(GrammarKind.REGEX, "[éß€😀ы ]{0,9}."),
    "lark": grammar(GrammarKind.LARK, LARK),
    "a special token as text": grammar(GrammarKind.JSON_SCHEMA, {"enum": ["<|end|>", "<|user|> x"]}),
}


def grammars(checkpoint: Checkpoint) -> Grammars:
    return Grammars(checkpoint.tokenizer, checkpoint.manifest.config.vocab_size)


def walk(made: Grammars, form: Grammar, seed: int, steps: int) -> Iterator[tuple[list[int], Any]]:
    """Random allowed tokens, and the guide after each."""
    chance, tokens = random.Random(seed), list[int]()
    [guide] = made.guides(form, [()])
    for _ in range(steps):
        yield list(tokens), guide
        allowed = guide.allowed.nonzero().flatten().tolist()
        if not allowed:
            return
        tokens.append(chance.choice(allowed))
        guide.advance(tokens[-1])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_state_rebuilt_from_the_tokens_is_that_of_the_walk(llama2: Checkpoint, form: Grammar) -> None:
    first, fresh = grammars(llama2), grammars(llama2)
    for seed in range(3):
        for tokens, guide in walk(first, form, seed, 40):
            [rebuilt] = fresh.guides(form, [tokens])
            assert rebuilt.may_end == guide.may_end and rebuilt.allowed.equal(guide.allowed), tokens


def viable(pattern: str, text: str) -> bool:
    """Whether a text begins a match of `EXPRESSION`: some ending of digits, dashes and letters completes it."""
    endings = ("", "aaa", "aa", "a", "1", "-1-1", "1-1", "-1", "aaa-1-1", "aa-1-1", "a-1-1")
    return any(re.fullmatch(pattern, text + ending) for ending in endings)


def test_a_mask_allows_what_can_still_match_and_nothing_else(llama2: Checkpoint) -> None:
    size = llama2.manifest.config.vocab_size
    pieces = [llama2.tokenizer.token_bytes(token) for token in range(size)]
    special = {token for token in range(size) if llama2.tokenizer.is_special(token)}
    for seed in range(4):
        for tokens, guide in walk(grammars(llama2), REGEX, seed, 30):
            text = b"".join(pieces[token] for token in tokens).decode()
            allowed = set(guide.allowed.nonzero().flatten().tolist())
            possible = {
                token
                for token, piece in enumerate(pieces)
                if token not in special and piece.isascii() and piece and viable(EXPRESSION, text + piece.decode())
            }
            # Where the next bytes are forced, the one token the model's own tokenizer would give is allowed.
            assert allowed == possible or (len(allowed) == 1 and allowed <= possible), text
            assert guide.may_end == bool(re.fullmatch(EXPRESSION, text))


def test_special_tokens_that_a_text_spells_are_not_taken_for_the_text(llama2: Checkpoint) -> None:
    for seed in range(3):
        tokens, guide = list(walk(grammars(llama2), FORMS["a special token as text"], seed, 60))[-1]
        assert guide.may_end and not any(llama2.tokenizer.is_special(token) for token in tokens)
        assert json.loads(llama2.tokenizer.decode(tokens)) in ("<|end|>", "<|user|> x")


def test_a_tokenizer_that_puts_a_blank_before_a_text_forces_no_blank() -> None:
    """SentencePiece: the whole word alone is cut as if it began a sentence."""
    tokens = [b" ", b"na", b"me", b" name", b"\x02", b"n", b"a", b"m", b"e"]
    cuts = {"name": [3], "\x02name": [0, 4, 1, 2]}
    assert Pieces(tokens, [], cuts.__getitem__)("name") == [1, 2]
    assert Pieces(tokens, [], lambda text: [99])("name") == [1, 2]
    assert Pieces(tokens, [1], None)("name") == [5, 6, 2]


BAD: dict[str, tuple[Grammar, str]] = {
    "regex that does not parse": (grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
    "look-around": (grammar(GrammarKind.REGEX, "(?=a)a"), "look-around"),
    "nothing but the empty text": (grammar(GrammarKind.REGEX, ""), "empty answer"),
    "lark with an unknown name": (grammar(GrammarKind.LARK, "start: nowhere"), "nowhere"),
    "schema that is none": (grammar(GrammarKind.JSON_SCHEMA, {"type": "cheese"}), "cheese"),
    "keyword that is not enforced": (grammar(GrammarKind.JSON_SCHEMA, {"not": {"type": "null"}}), "not"),
    "schema that nothing satisfies": (grammar(GrammarKind.JSON_SCHEMA, {"enum": []}), "nsatisfiable"),
    "schema that is only itself": (grammar(GrammarKind.JSON_SCHEMA, {"$ref": "#"}), ""),
    "schema from elsewhere": (grammar(GrammarKind.JSON_SCHEMA, {"$ref": "http://127.0.0.1:1/x"}), "retriev"),
    "too large": (grammar(GrammarKind.REGEX, "a" * 300_000), "300000 bytes"),
    "too deep for the stack": (
        grammar(
            GrammarKind.JSON_SCHEMA,
            {
                "$ref": "#/$defs/a0",
                "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(4000)}
                | {"a4000": {"type": "null"}},
            },
        ),
        "nested too deeply",
    ),
    "too long to compile": (
        grammar(GrammarKind.JSON_SCHEMA, {"properties": {f"p{i}": {"type": "integer"} for i in range(8000)}}),
        "longer than",
    ),
}


@pytest.mark.parametrize(("form", "reason"), BAD.values(), ids=BAD.keys())
def test_a_grammar_that_is_no_good_ends_its_request_before_the_first_token(
    llama2: Checkpoint, form: Grammar, reason: str
) -> None:
    engine = llama2.engine()
    driver = Driver(engine)
    bad = driver.submit(make_work(llama2.prompt(5), "bad", grammar=form))
    good = driver.submit(make_work(llama2.prompt(5), "good", max_tokens=5, ignore_eos=True))
    driver.run()
    assert isinstance(bad.error, InvalidGrammar) and not bad.error.retry and not bad.events
    assert reason in bad.error.message
    assert good.ended and len(good.events) == 5
    assert engine.stats.kv_used_blocks == 0


def test_steps_of_others_do_not_wait_for_a_compiler(llama2: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llama2.engine()
    compiled, release = engine._guides._grammars.guides, threading.Event()

    def slow(form: Grammar, known: Any) -> Any:
        assert release.wait(60)
        return compiled(form, known)

    monkeypatch.setattr(engine._guides._grammars, "guides", slow)
    driver = Driver(engine)
    waiting = driver.submit(make_work(llama2.prompt(5), "waiting", grammar=REGEX, max_tokens=60, temperature=1.0))
    other = driver.submit(make_work(llama2.prompt(5), "other", max_tokens=20, ignore_eos=True))
    cancelled = driver.submit(make_work(llama2.prompt(5), "cancelled", grammar=REGEX))
    while not other.ended:
        driver.step()
    assert not waiting.events and engine.stats.waiting == 2
    assert engine.cancel("cancelled")
    release.set()
    driver.run()
    assert cancelled.cancelled and not cancelled.events
    assert re.fullmatch(EXPRESSION, waiting.text())


def test_an_answer_that_can_only_end_ends_with_its_last_token(llama2: Checkpoint) -> None:
    form = grammar(GrammarKind.REGEX, "yes")
    for limits in ({}, {"min_tokens": 9}, {"ignore_eos": True}):
        said = run_one(llama2.engine(), make_work(llama2.prompt(9), max_tokens=10, grammar=form, **limits))
        assert said.text() == "yes" and said.events[-1].finish is FinishReason.STOP
        assert said.events[-1].stop_reason is None


def test_an_answer_that_may_end_or_go_on_ends_with_end_of_text_only(llama2: Checkpoint) -> None:
    (eos,) = llama2.manifest.eos_token_ids
    form = grammar(GrammarKind.REGEX, "a{3,}")
    keen = {"grammar": form, "logit_bias": {eos: 1000.0}, "max_tokens": 20}
    said = run_one(llama2.engine(), make_work(llama2.prompt(9), **keen))
    assert said.text() == "aaa" and said.tokens()[-1] == eos
    later = run_one(llama2.engine(), make_work(llama2.prompt(9), min_tokens=7, **keen))
    assert len(later.text()) >= 7 and later.tokens()[-1] == eos and set(later.text()) == {"a"}
    never = run_one(llama2.engine(), make_work(llama2.prompt(9), ignore_eos=True, **keen))
    assert never.events[-1].finish is FinishReason.LENGTH and eos not in never.tokens()


def test_a_stop_token_may_come_where_the_answer_may_end(llama2: Checkpoint) -> None:
    stop = 4
    assert llama2.tokenizer.is_special(stop)
    form = grammar(GrammarKind.REGEX, "a{3,}")
    said = run_one(
        llama2.engine(),
        make_work(llama2.prompt(9), grammar=form, stop_token_ids=(stop,), logit_bias={stop: 1000.0}, max_tokens=20),
    )
    assert said.text() == "aaa" and said.events[-1].stop_reason == stop


def test_a_place_where_no_token_can_follow_ends_the_request_with_an_error(llama2: Checkpoint) -> None:
    """After two letters the grammar wants a special token and nothing else, and that one is not to be had before
    `min_tokens`: the request ends, its neighbour goes on."""
    form = grammar(GrammarKind.LARK, 'start: "ab" <[4]> "c"')
    driver = Driver(llama2.engine())
    stuck = driver.submit(
        make_work(llama2.prompt(9), "stuck", grammar=form, min_tokens=9, stop_token_ids=(4,), max_tokens=20, n=2)
    )
    other = driver.submit(make_work(llama2.prompt(9), "other", max_tokens=12, ignore_eos=True))
    driver.run()
    assert isinstance(stuck.error, GrammarStuck) and stuck.error.code == "grammar_stuck" and not stuck.error.retry
    assert len(other.events) == 12
    assert driver.engine.stats.kv_used_blocks == 0 and not driver.engine._requests


def test_a_log_of_another_grammar_is_refused(llama2: Checkpoint) -> None:
    first = run_one(llama2.engine(), make_work(llama2.prompt(9), max_tokens=20, ignore_eos=True))
    engine = llama2.engine()
    again = run_one(
        engine, make_work(llama2.prompt(9), max_tokens=20, grammar=REGEX, produced=first.events[:9], ignore_eos=True)
    )
    assert isinstance(again.error, EngineError) and not again.events


def test_compiled_grammars_are_kept_within_bounds(llama2: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("function_runtime.engine.grammar.KEPT", 3)
    made = grammars(llama2)
    for count in range(1, 8):
        made.guides(grammar(GrammarKind.REGEX, f"a{{{count}}}"), [()])
    assert len(made._kept) == 3
    monkeypatch.setattr("function_runtime.engine.grammar.KEPT_TEXT_BYTES", 5)
    made.guides(grammar(GrammarKind.REGEX, "b{8}"), [()])
    assert len(made._kept) == 1 and made._kept_bytes == 4
