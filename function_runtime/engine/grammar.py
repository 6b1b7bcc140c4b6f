"""Which tokens may come next where an answer has to match a grammar: a pure function of the tokens so far.

A `Grammars` belongs to an engine: it compiles (llguidance) and keeps what was compiled lately, by digest. A `Guide`
belongs to a choice; it is made from a compiled grammar and the choice's known tokens, so that a resumed request's is
the undisturbed one's. Where a text is forced, its tokens are those the model's tokenizer would give. Limits: made and
compiled off the engine's thread (`guides`); llguidance and the table of tokens are loaded at the first use. Measured at
128,000 tokens: 0.8 s for the table, 10 ms for a schema, 2 ms to take up 300 tokens, and of a step 0.3 ms a choice for
JSON, up to 8 ms for expressions with large counts.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from function_runtime.engine.errors import GrammarStuck, InvalidGrammar
from function_runtime.engine.grammar_source import Pieces, compiled, fault_of, name_of, table_of
from function_runtime.engine.grammar_trial import Trial
from function_runtime.protocol import Grammar, GrammarKind
from model_loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_TEXT_BYTES: Final = 256 * 1024
KEPT: Final = 64
"""Compiled grammars kept, and"""
KEPT_TEXT_BYTES: Final = 4 << 20
"""bytes of grammar they may have been compiled from."""


class Guide:
    """One choice's place in its grammar."""

    __slots__ = ("_matcher", "_size", "allowed", "may_end")

    def __init__(self, matcher: LLMatcher, vocab_size: int, known: Sequence[int]) -> None:
        self._matcher = matcher
        self._size = vocab_size
        if known and not matcher.consume_tokens(list(known)):
            raise GrammarStuck(f"the log does not match the grammar: {fault_of(matcher)}")
        self.allowed: Tensor
        """One bool per token of the vocabulary; end-of-text tokens are not among them."""
        self.may_end: bool
        self._look()

    def advance(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise GrammarStuck(f"token {token_id} is not in the grammar: {fault_of(self._matcher)}")
        self._look()

    def _look(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        fault = fault_of(self._matcher)
        if fault:
            raise GrammarStuck(f"the grammar cannot go on: {fault}")
        flags = np.unpackbits(bits, count=self._size + 1, bitorder="little").view(np.bool_)
        self.may_end = bool(flags[self._size])
        self.allowed = torch.from_numpy(flags[: self._size])


class Grammars:
    """Compiles; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._table: LLTokenizer | None = None
        self._trial: Trial | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Why, so that a grammar that costs seconds to refuse costs them once."""
        self._keeping = threading.Lock()

    def guides(self, grammar: Grammar, known: Sequence[Sequence[int]]) -> list[Guide]:
        """A guide for each choice's known tokens. Raises `InvalidGrammar`, or `GrammarStuck` where they do not fit."""
        matchers = self._matchers(grammar, len(known))
        return [Guide(matcher, self._size, tokens) for matcher, tokens in zip(matchers, known, strict=True)]

    def _matchers(self, grammar: Grammar, count: int) -> list[LLMatcher]:
        nbytes = len(grammar.text.encode())
        if nbytes > MAX_TEXT_BYTES:
            raise InvalidGrammar(f"{name_of(grammar)} has {nbytes} bytes; at most {MAX_TEXT_BYTES} are compiled")
        digest = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()
        with self._keeping:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
                return [found[0].deep_copy() for _ in range(count)]
        matcher = self._compile(grammar, digest)
        with self._keeping:
            if digest not in self._kept:
                self._kept[digest] = (matcher, nbytes)
                self._kept_bytes += nbytes
            while len(self._kept) > KEPT or (self._kept_bytes > KEPT_TEXT_BYTES and len(self._kept) > 1):
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
            return [matcher.deep_copy() for _ in range(count)]

    def _compile(self, grammar: Grammar, digest: bytes) -> LLMatcher:
        name = name_of(grammar)
        table, trial = self._loaded()
        known = grammar.kind is GrammarKind.JSON_OBJECT
        fault = "" if known else self._refused.get(digest) or trial.fault(grammar)
        if fault:
            self._refused[digest] = fault
            while len(self._refused) > KEPT:
                self._refused.popitem(last=False)
            raise InvalidGrammar(f"{name}: {fault}")
        matcher = compiled(table, grammar)
        try:
            if fault := fault_of(matcher):
                raise GrammarStuck(fault)
            first = Guide(matcher.deep_copy(), self._size, ())
        except GrammarStuck as stuck:
            raise InvalidGrammar(f"{name}: {stuck}") from stuck
        if not first.allowed.any():
            raise InvalidGrammar(f"{name}: it matches {'the empty answer only' if first.may_end else 'nothing'}")
        return matcher

    def _loaded(self) -> tuple[LLTokenizer, Trial]:
        with self._loading:
            if self._table is None or self._trial is None:
                tokenizer, size = self._tokenizer, self._size
                pieces = Pieces(
                    [tokenizer.token_bytes(token_id) for token_id in range(size)],
                    [token_id for token_id in range(size) if tokenizer.is_special(token_id)],
                    lambda text: tokenizer.encode(text, add_special_tokens=False),
                )
                self._table, self._trial = table_of(pieces), Trial.over(pieces)
            return self._table, self._trial
