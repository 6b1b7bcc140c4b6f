"""Tokens to text that may be shown, one token at a time.

Held back is what the next token may still change: the beginning of a character, and text that may turn out to be the
beginning of a stop string. What is shown depends on the tokens only, not on how they were grouped, so that a replay
gives the same pieces. A stop string counts at the character that completes it; of several completed at once the
longest. Limits: a leading space of SentencePiece text is kept, because the text continues a prompt.
"""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenPieces(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    __slots__ = ("_decoder", "_held", "_skip_special", "_stop", "_tokenizer", "stopped")

    def __init__(self, tokenizer: TokenPieces, stop: tuple[str, ...], skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was hit; the text shown ends before it."""

    def push(self, token_id: int) -> str:
        """The text that may be shown now that this token is known."""
        if self.stopped is not None:
            return ""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._show(self._decoder.decode(self._tokenizer.token_bytes(token_id)), is_last=False)

    def flush(self) -> str:
        """Everything still held back; the choice has ended."""
        if self.stopped is not None:
            return ""
        return self._show(self._decoder.decode(b"", True), is_last=True)

    def _show(self, fresh: str, *, is_last: bool) -> str:
        if not self._stop:
            return fresh
        text = self._held + fresh
        hit = self._first_stop(text, len(self._held))
        if hit is not None:
            start, self.stopped = hit
            self._held = ""
            return text[:start]
        kept = 0 if is_last else self._possible_stop(text)
        shown = text[: len(text) - kept]
        self._held = text[len(text) - kept :]
        return shown

    def _first_stop(self, text: str, seen: int) -> tuple[int, str] | None:
        """Start and text of the stop string completed first; one that ends within the `seen` characters was none."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
