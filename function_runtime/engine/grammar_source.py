"""What llguidance is given: a grammar in its own form, the vocabulary as bytes, bounds. Torch-free.

Limits: names llguidance only inside functions, so that nothing loads it before a request asks for a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from function_runtime.protocol import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE: Final = r"[ \t\r\n]{0,40}"
"""Between the parts of JSON; bounded, because models have been seen to go on with blanks until their limit."""


def name_of(grammar: Grammar) -> str:
    return grammar.field or grammar.kind.value


def compiled(table: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at its beginning; what is wrong with the grammar is the matcher's error."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(table, _source(grammar), log_level=0, limits=LLParserLimits(verbose_errors=False))


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on; empty where it can."""
    if matcher.is_error():
        return matcher.get_error().replace("<non-verbose/>", "").strip() or matcher.stop_reason()
    # NOTE: a place where no token can follow is no error to the library: its mask allows the end of the text there,
    # though the grammar does not.
    return "NoExtensionBias" if matcher.stop_reason() == "NoExtensionBias" else ""


def table_of(pieces: Pieces) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(pieces))


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type":"object"}', defaults={"whitespace_pattern": WHITESPACE})
        case GrammarKind.JSON_SCHEMA:
            says = "x-guidance" in json.loads(grammar.text)
            return LLMatcher.grammar_from_json_schema(
                grammar.text, defaults=None if says else {"whitespace_pattern": WHITESPACE}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


class Pieces:
    """The vocabulary as llguidance asks for it. It has no end-of-text token of its own, so that one is added behind the
    last: its bit says that the answer may end, whatever tokens this model ends with."""

    bos_token_id: Final = None
    eos_token_id: Final = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Sequence[int], encode: Callable[[str], list[int]] | None
    ) -> None:
        """`encode` is the model's own tokenizer; without it a text is cut into the longest pieces."""
        self.tokens = list(tokens)
        self.special_token_ids = list(special_token_ids)
        self._encode = encode
        self._special = frozenset(special_token_ids)
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """How the model would cut a text that a grammar forces. Called with bytes first, to see whether it may be."""
        if not isinstance(text, str):
            raise TypeError("text only")
        spelled = text.encode()
        if self._encode is not None:
            # NOTE: a SentencePiece model puts a blank before what it takes for a text's beginning.
            for lead in ("", "\x02"):
                ids = self._encode(lead + text)
                while ids and lead and not self._spell(ids, spelled):
                    del ids[0]
                if self._spell(ids, spelled):
                    return ids
        # The text spells a special token, which is not what the grammar means by it.
        return self._longest_pieces(spelled)

    def _spell(self, ids: list[int], text: bytes) -> bool:
        """Whether these are ordinary tokens of exactly this text."""
        if any(i >= len(self.tokens) or i in self._special for i in ids):
            return False
        return b"".join(self.tokens[i] for i in ids) == text

    def _longest_pieces(self, text: bytes) -> list[int]:
        if not self._ids:
            self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in self._special}
        longest = max(map(len, self._ids), default=1)
        ids: list[int] = []
        at = 0
        while at < len(text):
            for length in range(min(longest, len(text) - at), 0, -1):
                found = self._ids.get(text[at : at + length])
                if found is not None:
                    ids.append(found)
                    at += length
                    break
            else:
                raise ValueError(f"no token of this model begins with byte {text[at]:#x}")
        return ids
