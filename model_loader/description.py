"""What the headers of a checkpoint say, before any tensor has been read. The importer turns it into a manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model_loader.errors import FormatError, shown
from model_loader.manifest import ModelConfig, SourceFile, TensorEntry


@dataclass(frozen=True, slots=True)
class Description:
    format: str
    """gguf | safetensors"""
    architecture: str
    config: ModelConfig
    tensors: tuple[TensorEntry, ...]
    """Without digests."""
    files: tuple[Path, ...]
    """Where the tensors' bytes lie; `TensorEntry.file` counts into it."""
    read_files: tuple[SourceFile, ...]
    """Every file that was read, as it was before it was read, these included: a change of any makes an import stale."""
    tokenizer: bytes
    """tokenizer.json"""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool
    licence: str | None = None
    """As the checkpoint states it."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """A checkpoint is somebody else's document: a value of a kind nobody expected is malformed, and no crash."""
    try:
        yield
    except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FormatError(f"{what} is malformed: {type(error).__name__}: {shown(str(error))}") from error
