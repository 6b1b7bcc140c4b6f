"""What a models directory holds: every imported checkpoint, by identity and by the URIs it was imported from.

A checkpoint is removed with its manifest, its records and what this installation fetched for it and nobody else's
manifest names; files that the user put somewhere, and the hub's cache, stay. Limits: who uses a checkpoint is for the
caller to know.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from model_loader.errors import LoaderError, SourceMissing, SourceRefused, from_os_error
from model_loader.locks import locked
from model_loader.manifest import MANIFEST_NAME, Manifest
from model_loader.room import occupied_bytes

_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{4,64}")
RECORDS: Final = "imports"
SOURCES: Final = "sources"


class ModelState(StrEnum):
    READY = "ready"
    CHANGED = "changed"
    """Its files are gone or no longer as they were when they were imported: the next load imports again or says so."""
    DAMAGED = "damaged"
    """Its manifest cannot be read."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    identity: str
    uris: tuple[str, ...]
    state: ModelState
    problem: str
    """Why it is not ready."""
    manifest: Manifest | None
    kept_bytes: int
    """Of disk, in this installation."""


@dataclass(frozen=True, slots=True)
class RemovedModel:
    identity: str
    freed_bytes: int
    left: tuple[str, ...]
    """Files it was made of that are not this installation's to remove."""


def list_models(models_dir: Path) -> list[KnownModel]:
    """By URI."""
    uris = _uris(models_dir)
    try:
        found = [path.name for path in models_dir.iterdir() if _IDENTITY.fullmatch(path.name)]
    except OSError:
        return []
    known = [_known(models_dir, identity, uris.get(identity, ())) for identity in found]
    return sorted(known, key=lambda model: (model.uris, model.identity))


def find_model(models_dir: Path, name: str) -> KnownModel:
    """By a URI it was imported from, or the first digits of its identity."""
    uris = _uris(models_dir)
    if "://" in name:
        found = [identity for identity, known in uris.items() if name in known]
    elif _PREFIX.fullmatch(name):
        found = [path.name for path in models_dir.glob(f"{name}*") if _IDENTITY.fullmatch(path.name)]
    else:
        raise SourceRefused(
            f"{name[:100]!r} names no model: give the URI it was imported from, or at least four digits of its identity"
        )
    if not found:
        raise SourceMissing(f"no model {name[:200]} has been imported: see `stoker models ls`, or import it")
    if len(found) > 1:
        raise SourceRefused(f"{name} names {len(found)} models: {', '.join(each[:16] for each in found[:5])}")
    return _known(models_dir, found[0], uris.get(found[0], ()))


def remove_model(models_dir: Path, identity: str) -> RemovedModel:
    """Imports of its URIs wait meanwhile, and then find nothing."""
    with contextlib.ExitStack() as stack:
        for record in _records(models_dir, identity):
            stack.enter_context(locked(record.with_suffix(".lock")))
        model = find_model(models_dir, identity)
        folders = _own_folders(models_dir, model)
        freed = sum(_folder_bytes(folder) for folder in folders)
        try:
            for record in _records(models_dir, identity):
                record.unlink(missing_ok=True)
            for folder in folders:
                shutil.rmtree(folder)
        except OSError as error:
            raise from_os_error(error, str(models_dir)) from error
    files = [file.path for file in model.manifest.files] if model.manifest is not None else []
    return RemovedModel(identity, freed, tuple(path for path in files if Path(path).exists()))


def _known(models_dir: Path, identity: str, uris: tuple[str, ...]) -> KnownModel:
    manifest, state, problem = None, ModelState.READY, ""
    try:
        manifest = Manifest.load(models_dir / identity / MANIFEST_NAME)
        manifest.chunk_lists()
        changed = [file.path for file in manifest.files if not file.unchanged()]
        if changed:
            state, problem = ModelState.CHANGED, f"{changed[0]} is gone or was changed since: import it again"
    except LoaderError as error:
        state, problem = ModelState.DAMAGED, str(error)
    uris = uris or ((manifest.uri,) if manifest is not None else ())
    model = KnownModel(identity, uris, state, problem, manifest, 0)
    kept = sum(_folder_bytes(folder) for folder in _own_folders(models_dir, model, shared=True))
    return KnownModel(identity, uris, state, problem, manifest, kept)


def _own_folders(models_dir: Path, model: KnownModel, *, shared: bool = False) -> list[Path]:
    """Folders that hold the model and nothing else; with `shared`, those that others' manifests name too."""
    folders = [models_dir / model.identity]
    if model.manifest is None:
        return folders
    sources = models_dir / SOURCES
    own = {_source_folder(sources, Path(file.path)) for file in model.manifest.files} - {None}
    if own and not shared:
        others = {
            _source_folder(sources, Path(path))
            for identity, path in _all_files(models_dir)
            if identity != model.identity
        }
        own -= others
    return [*folders, *(folder for folder in own if folder is not None)]


def _source_folder(sources: Path, path: Path) -> Path | None:
    """Three levels below `sources`: scheme, package or URI, version or stamp."""
    if not path.is_relative_to(sources):
        return None
    parts = path.relative_to(sources).parts
    return sources.joinpath(*parts[:3]) if len(parts) > 3 else None


def _all_files(models_dir: Path) -> Iterable[tuple[str, str]]:
    for path in models_dir.iterdir():
        if _IDENTITY.fullmatch(path.name):
            try:
                files = Manifest.load(path / MANIFEST_NAME).files
            except LoaderError:
                continue
            yield from ((path.name, file.path) for file in files)


def _records(models_dir: Path, identity: str) -> list[Path]:
    return [path for path, _, known in _all_records(models_dir) if known == identity]


def _uris(models_dir: Path) -> dict[str, tuple[str, ...]]:
    """By identity."""
    found: dict[str, list[str]] = {}
    for _, uri, identity in _all_records(models_dir):
        found.setdefault(identity, []).append(uri)
    return {identity: tuple(sorted(uris)) for identity, uris in found.items()}


def _all_records(models_dir: Path) -> Iterable[tuple[Path, str, str]]:
    for path in sorted((models_dir / RECORDS).glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
            uri, identity = record["uri"], record["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(uri, str) and isinstance(identity, str):
            yield path, uri, identity


def _folder_bytes(folder: Path) -> int:
    return sum(occupied_bytes(path) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
