"""Models of the Hugging Face hub, through the user's own cache and credentials.

What the cache holds completely is used without asking the hub; otherwise the missing files are fetched by the hub's own
client, which goes on where it was interrupted. Weights are stored by the hub under the SHA-256 of their content, and
that is checked here: a cut or altered copy is fetched again, once. Limits: safetensors or one GGUF file; pickles are
never fetched.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from model_loader.directory_checkpoint import SETTINGS_NAMES
from model_loader.errors import (
    FormatError,
    IntegrityError,
    LoaderError,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
)
from model_loader.licence import CARD_NAME
from model_loader.pickles import directory_conversion, is_pickle
from model_loader.progress import Progress, Reporter
from model_loader.room import require_disk
from model_loader.safetensors_format import INDEX_NAME, find_files
from model_loader.sources import ModelUri, ResolvedModel, resolve_path

ProgressCallback = Callable[[Progress], None]
_PATTERNS: Final = (*SETTINGS_NAMES, "*.safetensors", INDEX_NAME, CARD_NAME)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PIECE_BYTES: Final = 1024 * 1024


def resolve_repository(uri: ModelUri, progress: ProgressCallback | None) -> ResolvedModel:
    folder = _local(uri)
    if folder is not None:
        try:
            return _checked(uri, folder, progress)
        except (IntegrityError, FormatError, SourceMissing):
            folder = None
    folder = _fetch(uri, progress)
    return _checked(uri, folder, progress)


def _snapshot(uri: ModelUri, **options: Any) -> Path:
    import huggingface_hub

    patterns = [uri.file] if uri.file else list(_PATTERNS)
    found = huggingface_hub.snapshot_download(
        uri.name, revision=uri.version, allow_patterns=patterns, max_workers=4, **options
    )
    return Path(str(found))


def _local(uri: ModelUri) -> Path | None:
    """The snapshot in the cache, if it is there and complete."""
    try:
        folder = _snapshot(uri, local_files_only=True)
        _complete(uri, folder)
    except (LoaderError, OSError, ValueError, RuntimeError):
        return None
    return folder


def _complete(uri: ModelUri, folder: Path) -> tuple[Path, ...]:
    if uri.file is not None:
        path = folder / uri.file
        if not path.exists():
            raise SourceMissing(f"{uri.text}: the repository has no file {uri.file}")
        return (path,)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if missing:
        raise SourceMissing(f"{uri.text}: the repository has no {' and no '.join(missing)}")
    return find_files(folder)


def _fetch(uri: ModelUri, progress: ProgressCallback | None) -> Path:
    from huggingface_hub import errors

    if progress is not None:
        progress(Progress("download", 0, 0))
    try:
        _check_needs(uri)
        return _snapshot(uri)
    except errors.GatedRepoError as error:
        raise SourceRefused(f"{uri.text}: access is gated; accept its terms and log in to the hub") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise SourceMissing(f"{uri.text}: the hub has no such repository or revision (or it is private)") from error
    except errors.HFValidationError as error:
        raise SourceRefused(f"{uri.text}: the hub does not accept that name") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, RuntimeError) as error:
        raise SourceUnavailable(f"{uri.text}: the hub could not be reached: {error}") from error


def _check_needs(uri: ModelUri) -> None:
    """What the repository holds, before any of it is fetched: weights that are no pickles, and room for them."""
    import huggingface_hub
    from huggingface_hub import constants

    found = huggingface_hub.HfApi().model_info(uri.name, revision=uri.version, files_metadata=True)
    sizes = {str(each.rfilename): int(each.size or 0) for each in found.siblings or ()}
    patterns = (uri.file,) if uri.file else _PATTERNS
    wanted = {name: size for name, size in sizes.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    if not any(name.endswith((".safetensors", ".gguf")) for name in wanted):
        pickles = sorted(name for name in sizes if is_pickle(name))
        if pickles:
            raise SourceRefused(
                f"{uri.text}: {pickles[0]} is a pickle, which can run code when it is read, and there are no "
                f"safetensors: convert the model where you trust it, and import the result: "
                f"{directory_conversion(uri.name)}"
            )
    require_disk(Path(constants.HF_HUB_CACHE), sum(wanted.values()), uri.text)


def _checked(uri: ModelUri, folder: Path, progress: ProgressCallback | None) -> ResolvedModel:
    files = _complete(uri, folder)
    _verify_blobs(uri, files, progress)
    commit = folder.name if folder.parent.name == "snapshots" else uri.version
    pinned = f"hf://{uri.name}" + (f"@{commit}" if commit else "") + (f"/{uri.file}" if uri.file else "")
    return resolve_path(uri.text, pinned, files[0] if uri.file else folder)


def _verify_blobs(uri: ModelUri, files: tuple[Path, ...], progress: ProgressCallback | None) -> None:
    """The cache links each file to a blob whose name is the content's SHA-256; a bad blob is removed."""
    blobs = {blob for path in files if _SHA256.fullmatch((blob := Path(os.path.realpath(path))).name)}
    reporter = Reporter("verify", sum(blob.stat().st_size for blob in blobs), progress)

    def check(blob: Path) -> None:
        digest = hashlib.sha256()
        with open(blob, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                reporter.add(len(piece))
        if digest.hexdigest() != blob.name:
            blob.unlink(missing_ok=True)
            raise IntegrityError(f"{uri.text}: {blob} does not have the SHA-256 it is named by; it was removed")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(check, sorted(blobs)))
