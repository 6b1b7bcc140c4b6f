"""Model URIs and how they become files on this machine. Bytes only: no code of a package or repository is ever run."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model_loader.errors import SourceMissing, SourceRefused
from model_loader.progress import Progress


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    uri: str
    pinned_uri: str
    format: str
    root: Path
    files: tuple[Path, ...]


def check_allowed(uri: str, allow: tuple[str, ...]) -> None:
    if not any(fnmatch.fnmatchcase(uri, pattern) for pattern in allow):
        raise SourceRefused(f"the model URI {uri} matches none of the allowed patterns ({', '.join(allow)})")


def resolve(
    uri: str,
    sources_dir: Path,
    allow: tuple[str, ...] = ("*",),
    progress: Callable[[Progress], None] | None = None,
) -> ResolvedModel:
    check_allowed(uri, allow)
    path = Path(uri.removeprefix("file://"))
    if path.is_dir():
        return ResolvedModel(uri, uri, "safetensors", path, ())
    if not path.exists():
        raise SourceMissing(f"no model at {path}")
    return ResolvedModel(uri, uri, "gguf", path.parent, (path,))
