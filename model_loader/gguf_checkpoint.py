"""A GGUF file as a checkpoint: configuration, tokenizer, template and special tokens out of its metadata."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_loader.description import Description, reading
from model_loader.errors import FormatError, shown
from model_loader.gguf_format import ROPE_FACTORS, read_gguf
from model_loader.gguf_tokenizer import adds_bos, build_tokenizer
from model_loader.licence import licence_of_gguf
from model_loader.llama_config import config_from_gguf
from model_loader.llama_layout import check_tensors
from model_loader.manifest import SourceFile, TensorEntry
from model_loader.safetensors_format import Ensure

_MAX_FACTOR_BYTES = 1 << 18
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def describe_gguf(path: Path, ensure: Ensure | None = None) -> Description:
    """`ensure` is asked for more of the file's beginning as it is needed."""
    with reading(str(path)):
        return _describe(path, ensure)


def _describe(path: Path, ensure: Ensure | None) -> Description:
    before = SourceFile.of(path)
    header = read_gguf(path, ensure=ensure)
    metadata, what = header.metadata, str(path)
    entries = {t.name: t for t in header.tensors}
    factors = entries.pop(ROPE_FACTORS, None)
    config = config_from_gguf(
        metadata,
        {name: entry.shape for name, entry in entries.items()},
        (t.dtype for t in entries.values() if len(t.shape) > 1),
        None if factors is None else _read_floats(path, factors, ensure),
        what,
    )
    tokenizer = build_tokenizer(metadata, what)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ends = [number for key in _END_KEYS if (number := _token_id(metadata, key, len(tokens), what)) is not None]
    bos = _token_id(metadata, "bos_token_id", len(tokens), what)
    template = metadata.get("tokenizer.chat_template")
    return Description(
        format="gguf",
        architecture="llama",
        config=config,
        tensors=check_tensors(config, entries.values(), what),
        files=(path,),
        read_files=(before,),
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        bos_token=None if bos is None else tokens[bos],
        eos_token=tokens[ends[0]] if ends else None,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        add_bos_token=adds_bos(metadata) and bos is not None,
        licence=licence_of_gguf(metadata),
    )


def _token_id(metadata: Mapping[str, Any], key: str, count: int, what: str) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < count:
        raise FormatError(f"{what}: {key} is {shown(number)}; the vocabulary has {count} tokens")
    return number


def _read_floats(path: Path, entry: TensorEntry, ensure: Ensure | None) -> tuple[float, ...]:
    if entry.dtype != "F32":
        raise FormatError(f"{path}: {ROPE_FACTORS} is {entry.dtype}, not F32")
    if entry.nbytes > _MAX_FACTOR_BYTES:
        raise FormatError(f"{path}: {ROPE_FACTORS} has {entry.nbytes} bytes; at most {_MAX_FACTOR_BYTES} are read")
    if ensure is not None:
        ensure(path, entry.offset, entry.offset + entry.nbytes)
    with open(path, "rb") as file:
        raw = os.pread(file.fileno(), entry.nbytes, entry.offset)
    if len(raw) != entry.nbytes:
        raise FormatError(f"{path} is truncated: {ROPE_FACTORS} needs {entry.nbytes} bytes, {len(raw)} found")
    return struct.unpack(f"<{len(raw) // 4}f", raw)
