"""tokenizer.json out of a GGUF file's vocabulary, for the two kinds llama models use.

`gpt2` is byte-level BPE; its pre-tokenizer is named by `tokenizer.ggml.pre` and decides how text is cut before merging.
`llama` is SentencePiece BPE with byte fallback; its merges follow from the scores. An unknown pre-tokenizer is refused:
a wrong one would tokenise almost right, which nobody would notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from model_loader.byte_alphabet import byte_alphabet
from model_loader.errors import FormatError, UnsupportedArchitecture, shown

_MAX_TOKEN_CHARS: Final = 1024
_MAX_VOCABULARY_CHARS: Final = 8_000_000
"""Every cut of every token is looked at: these two bound the time to seconds. A vocabulary of 262,000 tokens has under
two million."""
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_LLAMA3: Final = _sequence(
    {"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False},
    {**_BYTE_LEVEL, "use_regex": False},
)
_PRE_TOKENIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm": _sequence(_DIGITS, _BYTE_LEVEL),
    "gpt-2": _BYTE_LEVEL,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_IGNORES_MERGES: Final = ("llama-bpe", "llama3", "llama-v3")
"""A word that is a token as it stands is taken whole, whatever the merges say (as in Llama 3's own tokenizer)."""


def build_tokenizer(metadata: Mapping[str, Any], what: str) -> bytes:
    """The bytes of tokenizer.json."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise FormatError(f"{what} holds no vocabulary")
    for number, token in enumerate(tokens):
        if not isinstance(token, str) or len(token) > _MAX_TOKEN_CHARS:
            raise FormatError(f"{what}: tokenizer.ggml.tokens: token {number} is {shown(token)}")
    chars = sum(map(len, tokens))
    if chars > _MAX_VOCABULARY_CHARS:
        raise FormatError(f"{what}: tokenizer.ggml.tokens has {chars} characters; at most {_MAX_VOCABULARY_CHARS}")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        document = _byte_level(metadata, tokens, what)
    elif kind == "llama":
        document = _sentencepiece(metadata, tokens, what)
    else:
        raise UnsupportedArchitecture(f"{what}: tokenizer model {shown(kind)} is not supported; gpt2 and llama are")
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], what: str) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedArchitecture(
            f"{what}: pre-tokenizer {shown(name)} is not supported; {', '.join(_PRE_TOKENIZERS)} are"
        )
    alphabet = byte_alphabet()
    spelled = set(alphabet.values())
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        known = token if set(token) <= spelled else "".join(alphabet[b] for b in token.encode())
        vocabulary[known] = number
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise FormatError(f"{what} holds no merges")
    return _document(
        added=[a for a in _added_tokens(metadata, tokens) if set(a["content"]) <= spelled],
        normalizer=None,
        pre_tokenizer=_PRE_TOKENIZERS[name],
        post_processor=_post_processor(metadata, tokens),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _IGNORES_MERGES,
            "vocab": vocabulary,
            "merges": [_pair(merge, what) for merge in merges],
        },
    )


def _pair(merge: Any, what: str) -> list[str]:
    parts = merge.split(" ") if isinstance(merge, str) else []
    if len(parts) != 2:
        raise FormatError(f"{what}: merge {shown(merge)} is no pair")
    return parts


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], what: str) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise FormatError(f"{what}: a SentencePiece vocabulary needs one score per token")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return _document(
        added=_added_tokens(metadata, tokens),
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first" if prefix else "never",
            "split": False,
        },
        post_processor=_post_processor(metadata, tokens),
        decoder={"type": "Sequence", "decoders": steps},
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown] if 0 <= unknown < len(tokens) else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _scored_merges(metadata, tokens, scores, vocabulary),
        },
    )


def _scored_merges(
    metadata: Mapping[str, Any], tokens: list[str], scores: list[float], vocabulary: dict[str, int]
) -> list[list[str]]:
    """Every split of a token into two tokens, best score first: SentencePiece merges whatever scores highest."""
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    found: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == _CONTROL:
            continue
        local = [
            (vocabulary[token[:cut]], vocabulary[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        found += [(-score, -cut, cut - len(token), token[:cut], token[cut:]) for _, _, cut in sorted(local)]
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for *_, left, right in found]


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """llama.cpp begins a SentencePiece prompt with BOS unless the file says no, a byte-level one only if it says so."""
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(stated, bool):
        return stated
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _IGNORES_MERGES


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    sequence: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [*sequence, {"Sequence": {"id": "B", "type_id": 1}}]
    special: dict[str, Any] = {}
    number = metadata.get("tokenizer.ggml.bos_token_id")
    if adds_bos(metadata) and isinstance(number, int) and 0 <= number < len(tokens):
        bos = tokens[number]
        sequence = [{"SpecialToken": {"id": bos, "type_id": 0}}, *sequence]
        pair = [*sequence, {"SpecialToken": {"id": bos, "type_id": 1}}, pair[-1]]
        special[bos] = {"id": bos, "ids": [number], "tokens": [bos]}
    return {"type": "TemplateProcessing", "single": sequence, "pair": pair, "special_tokens": special}


def _document(
    *,
    added: list[dict[str, Any]],
    normalizer: Any,
    pre_tokenizer: Any,
    post_processor: Any,
    decoder: Any,
    model: Any,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }
