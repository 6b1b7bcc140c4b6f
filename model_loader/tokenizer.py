"""Text to tokens and back, without torch or transformers.

Encoding uses tokenizer.json through `tokenizers`, which is imported and read at the first use; decoding needs the
vocabulary file only, so that a replica starts without it. Limits: special tokens written in a text are recognised as
such, as every serving engine does; whoever must not write them has to be filtered before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from model_loader.detokenizer import Detokenizer
from model_loader.errors import FormatError, SourceMissing, TextError
from model_loader.manifest import TOKENIZER_NAME
from model_loader.vocabulary import VOCABULARY_NAME, Vocabulary

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Detokenizer", "Tokenizer"]


class Tokenizer:
    """A model's tokenizer; safe to use from several threads."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._backend: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """`directory` holds tokenizer.json and, where it was imported, the vocabulary file."""
        path = directory / TOKENIZER_NAME
        if (directory / VOCABULARY_NAME).exists():
            return cls(path, Vocabulary.load(directory / VOCABULARY_NAME))
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise SourceMissing(f"no tokenizer at {path}: {error.strerror}") from error
        except ValueError as error:
            raise FormatError(f"{path} is no tokenizer: {error}") from error
        return cls(path, Vocabulary.from_tokenizer(document, str(path)))

    def warm(self) -> None:
        """Does now what the first `encode` would do."""
        self._loaded()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens` begins the sequence as the model expects it; a rendered chat template has done so."""
        backend = self._loaded()
        try:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise TextError("the text is no valid Unicode: it holds half of a surrogate pair") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._loaded().decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """The token by itself; bytes that are no whole character become U+FFFD."""
        return self._vocabulary.piece(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return self._vocabulary.is_special(token_id)

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    def _loaded(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._backend is None:
                import tokenizers

                try:
                    self._backend = tokenizers.Tokenizer.from_file(str(self._path))
                except Exception as error:  # the library raises bare Exception
                    raise FormatError(f"{self._path} is no tokenizer that can be read: {error}") from error
                self._backend.no_truncation()
                self._backend.no_padding()
            return self._backend
