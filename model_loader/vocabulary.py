"""What each token id says, as bytes: enough to turn tokens into text without the tokenizer's own machinery.

A replica only ever decodes; loading tokenizer.json would cost it a tenth of a second of its cold start, this file one
millisecond. It is derived from tokenizer.json when a model is imported. Limits: byte-level decoders (Llama 3, SmolLM2)
and SentencePiece ones with byte fallback (Llama 2).
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from model_loader.byte_alphabet import byte_alphabet
from model_loader.errors import FormatError, SourceMissing, UnsupportedArchitecture

VOCABULARY_NAME: Final = "vocabulary.bin"
_HEAD: Final = struct.Struct("<8sII")
"""magic, number of tokens, bytes of all pieces"""
_MAGIC: Final = b"STOKVOC1"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_TOKENS: Final = 1 << 22


class Vocabulary:
    """Pieces by token id. Special tokens have their text and are marked."""

    __slots__ = ("_ends", "_pieces", "_special", "size")

    def __init__(self, pieces: bytes, ends: array[int], special: bytes) -> None:
        self._pieces = pieces
        self._ends = ends
        self._special = special
        self.size = len(ends)

    def piece(self, token_id: int) -> bytes:
        """The token's bytes; none for an id beyond the vocabulary (models pad their output)."""
        if not 0 <= token_id < self.size:
            return b""
        start = self._ends[token_id - 1] if token_id else 0
        return self._pieces[start : self._ends[token_id]]

    def is_special(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and self._special[token_id] == 1

    @staticmethod
    def of(pieces: Sequence[bytes], special: bytes) -> Vocabulary:
        ends, total = array("I"), 0
        for piece in pieces:
            total += len(piece)
            ends.append(total)
        return Vocabulary(b"".join(pieces), ends, special)

    @staticmethod
    def from_tokenizer(document: Mapping[str, Any], what: str) -> Vocabulary:
        """Out of a parsed tokenizer.json."""
        try:
            return _from_document(document, what)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise FormatError(f"{what}: its tokenizer.json is malformed ({error!r})") from error

    def to_bytes(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.size, len(self._pieces)) + _little(self._ends).tobytes() + (
            self._special + self._pieces
        )  # fmt: skip

    @staticmethod
    def load(path: Path) -> Vocabulary:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise SourceMissing(f"no vocabulary at {path}: import the model again ({error.strerror})") from error
        if len(raw) < _HEAD.size:
            raise FormatError(f"{path} is truncated: {_HEAD.size} bytes needed, {len(raw)} found")
        magic, count, nbytes = _HEAD.unpack_from(raw)
        needed = _HEAD.size + 5 * count + nbytes
        if magic != _MAGIC or len(raw) != needed:
            raise FormatError(f"{path} is no vocabulary of {count} tokens: {needed} bytes needed, {len(raw)} found")
        ends = array("I")
        ends.frombytes(raw[_HEAD.size : _HEAD.size + 4 * count])
        start = _HEAD.size + 4 * count
        return Vocabulary(raw[start + count :], _little(ends), raw[start : start + count])


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array("I", numbers)
    swapped.byteswap()
    return swapped


def _from_document(document: Mapping[str, Any], what: str) -> Vocabulary:
    texts: dict[int, str] = {}
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, dict):
        texts.update({number: text for text, number in vocabulary.items()})
    else:
        texts.update({number: entry[0] for number, entry in enumerate(vocabulary)})
    added = {token["id"]: token for token in document.get("added_tokens") or []}
    texts.update({number: token["content"] for number, token in added.items()})
    count = max(texts, default=-1) + 1
    if not 0 < count <= _MAX_TOKENS or min(texts) < 0:
        raise FormatError(f"{what}: its tokenizer.json has token ids from {min(texts, default=0)} to {count - 1}")
    spell = _speller(document.get("decoder"), what)
    pieces = [spell(texts[number]) if number in texts else b"" for number in range(count)]
    special = bytes(number in added and bool(added[number]["special"]) for number in range(count))
    return Vocabulary.of(pieces, special)


def _speller(decoder: Any, what: str) -> Any:
    """How a token's text becomes bytes, by the tokenizer's decoder."""
    kinds = _kinds(decoder)
    if kinds == ["ByteLevel"]:
        return _byte_level_piece
    if kinds == ["Metaspace"] or (kinds and kinds[0] == "Replace" and set(kinds) <= _SENTENCEPIECE_STEPS):
        return _sentencepiece_piece
    raise UnsupportedArchitecture(f"{what}: a tokenizer with decoder {kinds or None} is not supported")


_SENTENCEPIECE_STEPS: Final = {"Replace", "ByteFallback", "Fuse", "Strip"}


def _kinds(decoder: Any) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step.get("type") for step in decoder["decoders"]]
    return [decoder["type"]]


_BYTES: Final = {text: byte for byte, text in byte_alphabet().items()}


def _byte_level_piece(text: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return text.encode()


def _sentencepiece_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()
