"""A Hugging Face directory as a checkpoint: config.json, safetensors, tokenizer.json and what stands beside them.

A tokenizer.json is needed (SentencePiece models alone are not converted). The chat template is taken from
chat_template.jinja or tokenizer_config.json; ends of generation from generation_config.json, else config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from model_loader.confined import is_there, read_confined
from model_loader.description import Description, reading
from model_loader.errors import FormatError, SourceMissing, shown
from model_loader.json_text import parse_json
from model_loader.licence import licence_of_directory
from model_loader.llama_config import config_from_hugging_face
from model_loader.llama_layout import check_tensors
from model_loader.manifest import TOKENIZER_NAME, SourceFile
from model_loader.safetensors_format import INDEX_NAME, Ensure, find_files, read_safetensors

TEMPLATE_NAME: Final = "chat_template.jinja"
SETTINGS_NAMES: Final = (
    "config.json",
    "generation_config.json",
    TOKENIZER_NAME,
    "tokenizer_config.json",
    TEMPLATE_NAME,
)
"""What is read of a directory beside its weights and their index."""
_MAX_SETTINGS_BYTES: Final = 16 * 1024 * 1024
_MAX_SETTINGS_VALUES: Final = 1_000_000
_MAX_TOKENIZER_BYTES: Final = 128 * 1024 * 1024
_MAX_TOKENIZER_VALUES: Final = 8_000_000
_MAX_TEMPLATE_BYTES: Final = 4 * 1024 * 1024


def describe_directory(root: Path, ensure: Ensure | None = None) -> Description:
    """`ensure` is asked for the beginnings of the safetensors files as they are needed."""
    with reading(str(root)):
        return _describe(root, ensure)


def _describe(root: Path, ensure: Ensure | None) -> Description:
    read: list[SourceFile] = []

    def optional(name: str) -> dict[str, Any]:
        if not is_there(root, name):
            return {}
        read.append(SourceFile.of(root / name))
        raw = read_confined(root, name, _MAX_SETTINGS_BYTES)
        return parse_json(raw, str(root / name), max_values=_MAX_SETTINGS_VALUES)

    if not is_there(root, "config.json"):
        raise SourceMissing(f"{root} is no model directory: it has no config.json")
    document = optional("config.json")
    config = config_from_hugging_face(document, str(root / "config.json"))
    if is_there(root, INDEX_NAME):
        read.append(SourceFile.of(root / INDEX_NAME))
    files = find_files(root)
    read += [SourceFile.of(path) for path in files]
    entries = read_safetensors(root, files, ensure)
    if not is_there(root, TOKENIZER_NAME):
        raise SourceMissing(f"{root} has no tokenizer.json; save the tokenizer with transformers to make one")
    read.append(SourceFile.of(root / TOKENIZER_NAME))
    tokenizer = read_confined(root, TOKENIZER_NAME, _MAX_TOKENIZER_BYTES)
    tokenizer_document = parse_json(tokenizer, str(root / TOKENIZER_NAME), max_values=_MAX_TOKENIZER_VALUES)
    settings, generation = optional("tokenizer_config.json"), optional("generation_config.json")
    template = _chat_template(root, settings, read)
    vocabulary = _vocabulary(tokenizer_document)
    bos_token, eos_token = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    ends = _token_ids(generation.get("eos_token_id"), root) or _token_ids(document.get("eos_token_id"), root)
    if eos_token in vocabulary and vocabulary[eos_token] not in ends:
        ends = (*ends, vocabulary[eos_token])
    bos_ids = _token_ids(document.get("bos_token_id"), root)
    bos = vocabulary.get(bos_token or "", bos_ids[0] if bos_ids else None)
    texts = {number: text for text, number in vocabulary.items()}
    return Description(
        format="safetensors",
        architecture="llama",
        config=config,
        tensors=check_tensors(config, entries, str(root)),
        files=files,
        read_files=tuple(read),
        tokenizer=tokenizer,
        chat_template=template,
        bos_token=bos_token or (texts.get(bos) if bos is not None else None),
        eos_token=eos_token or (texts.get(ends[0]) if ends else None),
        bos_token_id=bos,
        eos_token_ids=ends,
        add_bos_token=_adds_bos(tokenizer_document, settings, bos_token),
        licence=licence_of_directory(root),
    )


def _chat_template(root: Path, settings: Mapping[str, Any], read: list[SourceFile]) -> str | None:
    path = root / TEMPLATE_NAME
    if is_there(root, TEMPLATE_NAME):
        read.append(SourceFile.of(path))
        try:
            return read_confined(root, TEMPLATE_NAME, _MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not UTF-8") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token_ids(value: Any, root: Path) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise FormatError(f"{root}: token ids {shown(values)} are malformed")
    return tuple(values)


def _vocabulary(document: Mapping[str, Any]) -> dict[str, int]:
    """Text to id of the model's own and the added tokens."""
    result: dict[str, int] = {}
    vocabulary = (document.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        result.update(vocabulary)
    elif isinstance(vocabulary, list):
        result.update({entry[0]: number for number, entry in enumerate(vocabulary)})
    for token in document.get("added_tokens") or []:
        result[token["content"]] = token["id"]
    return result


def _adds_bos(document: Mapping[str, Any], settings: Mapping[str, Any], bos_token: str | None) -> bool:
    if bos_token is None:
        return False
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return json.dumps(bos_token) in json.dumps(document.get("post_processor"))
