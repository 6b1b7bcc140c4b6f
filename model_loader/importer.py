"""Importing a model: from a URI to a manifest with an identity, once, whoever asks and however often.

A URI is resolved to files, their headers are read and checked, every byte is digested, and the result is written to
`models/<identity>/` by rename. A record per URI remembers the files as they were, so that an unchanged model is read
once. Concurrent imports of one URI wait for the first (a file lock, which a killed process releases).
`python -m model_loader.importer` does it in a process of its own with NDJSON progress.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from model_loader.chat import ChatTemplate
from model_loader.chunks import digest_file
from model_loader.content import FileDigests, read_files
from model_loader.description import Description
from model_loader.directory_checkpoint import describe_directory
from model_loader.errors import FormatError, IntegrityError, LoaderError, SourceUnavailable, from_os_error
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.locks import locked
from model_loader.manifest import (
    MANIFEST_NAME,
    MANIFEST_VERSION,
    TOKENIZER_NAME,
    FileContent,
    Manifest,
    SourceFile,
    checkpoint_identity,
    chunks_path,
    remove_abandoned,
    write_atomically,
)
from model_loader.partial_file import landed_chunks_path, landed_names
from model_loader.progress import Progress, Reporter, run_reporting
from model_loader.room import require_memory
from model_loader.sources import ModelUri, ResolvedModel, check_allowed, resolve
from model_loader.vocabulary import VOCABULARY_NAME, Vocabulary

_RECORD_VERSION: Final = 2
"""Records of version 1 lead to manifests without lists of chunks: such a model is imported again."""
_MEMORY_BYTES: Final = 96 * 1024 * 1024
"""Headers and tokenizer while they are parsed, and what is read into."""
ProgressCallback = Callable[[Progress], None]


def import_model(
    uri: str,
    models_dir: Path,
    allow: tuple[str, ...] = ("*",),
    progress: ProgressCallback | None = None,
) -> Manifest:
    """The manifest of `uri`, imported now or, if its files are unchanged, earlier. `Manifest.path` says where it is."""
    check_allowed(uri, allow)
    record_path = models_dir / "imports" / f"{hashlib.sha256(uri.encode()).hexdigest()[:32]}.json"
    try:
        record_path.parent.mkdir(parents=True, exist_ok=True)
        waiting = None if progress is None else partial(progress, Progress("waiting", 0, 0))
        with locked(record_path.with_suffix(".lock"), waiting):
            known = _recorded(record_path, uri, models_dir, progress)
            if known is not None:
                remove_abandoned(known.directory)
                return known
            return _import(uri, models_dir, record_path, allow, progress)
    except OSError as error:
        raise from_os_error(error, str(models_dir)) from error


def load_current(path: Path) -> Manifest:
    """The manifest at `path`; one of an earlier version is made again from where it was imported, and must come out
    with the same identity."""
    manifest = Manifest.load(path)
    if manifest.version == MANIFEST_VERSION:
        return manifest
    again = import_model(manifest.uri, manifest.directory.parent)
    if again.identity != manifest.identity:
        raise IntegrityError(
            f"{manifest.uri} is no longer the model that {path} was made of (identity {again.identity[:16]}…, was "
            f"{manifest.identity[:16]}…): deploy it again to use what is there now"
        )
    return again


def _import(
    uri: str, models_dir: Path, record_path: Path, allow: tuple[str, ...], progress: ProgressCallback | None
) -> Manifest:
    require_memory(_MEMORY_BYTES, f"importing {uri}")
    resolved = resolve(uri, models_dir / "sources", allow, progress)
    try:
        return _import_files(uri, resolved, models_dir, record_path, progress)
    except LoaderError as error:
        if resolved.kept is None or error.retry:
            raise
        if _is_as_fetched(resolved, ()):
            # Fetched, and no model: kept, it would be refused again without being looked for anew.
            shutil.rmtree(resolved.kept, ignore_errors=True)
            raise
    from model_loader.store_source import reopen_folder

    reopen_folder(resolved.kept)
    return _import_files(uri, resolve(uri, models_dir / "sources", allow, progress), models_dir, record_path, progress)


def _import_files(
    uri: str, resolved: ResolvedModel, models_dir: Path, record_path: Path, progress: ProgressCallback | None
) -> Manifest:
    description = _describe(resolved)
    vocabulary = _check_texts(description, uri)
    digests = _digest(description, progress)
    if resolved.kept is not None and not _is_as_fetched(resolved, digests):
        raise IntegrityError(f"the copy in {resolved.root} is not what was fetched from {uri}: import it again")
    tensors = tuple(
        replace(entry, sha256=digests[entry.file].tensors[entry.name].sha256) for entry in description.tensors
    )
    if not all(file.unchanged() for file in description.read_files):
        raise SourceUnavailable(f"the files of {uri} changed while they were imported: try again")
    special = {
        "bos_token": description.bos_token,
        "eos_token": description.eos_token,
        "bos_token_id": description.bos_token_id,
        "eos_token_ids": list(description.eos_token_ids),
        "add_bos_token": description.add_bos_token,
    }
    identity = checkpoint_identity(
        description.config, tensors, description.tokenizer, description.chat_template, special
    )
    directory = models_dir / identity
    remove_abandoned(directory)
    write_atomically(directory / VOCABULARY_NAME, vocabulary.to_bytes())
    write_atomically(directory / TOKENIZER_NAME, description.tokenizer)
    write_atomically(directory / "config.json", json.dumps(asdict(description.config), indent=2).encode())
    chunks = b"".join(each.chunks.to_bytes() for each in digests)
    chunks_sha256 = hashlib.sha256(chunks).hexdigest()
    write_atomically(chunks_path(directory, chunks_sha256), chunks)
    keys = resolved.keys or ("",) * len(digests)
    read = {file.path: file for file in description.read_files}
    manifest = Manifest(
        identity=identity,
        uri=uri,
        pinned_uri=resolved.pinned_uri,
        format=description.format,
        architecture=description.architecture,
        config=description.config,
        tensors=tensors,
        files=tuple(read[str(path)] for path in description.files),
        chat_template=description.chat_template,
        bos_token=description.bos_token,
        eos_token=description.eos_token,
        bos_token_id=description.bos_token_id,
        eos_token_ids=description.eos_token_ids,
        add_bos_token=description.add_bos_token,
        contents=tuple(
            FileContent(each.chunks.nbytes, each.sha256, resolved.origin, key)
            for each, key in zip(digests, keys, strict=True)
        ),
        chunks_sha256=chunks_sha256,
        licence=description.licence or resolved.licence,
    ).save(directory / MANIFEST_NAME)
    record = {
        "version": _RECORD_VERSION,
        "uri": uri,
        "identity": identity,
        "stamp": resolved.stamp,
        "files": [asdict(file) for file in description.read_files],
    }
    write_atomically(record_path, json.dumps(record).encode())
    return manifest


def _describe(resolved: ResolvedModel) -> Description:
    if resolved.format == "gguf":
        return describe_gguf(resolved.files[0])
    return describe_directory(resolved.root)


def _check_texts(description: Description, what: str) -> Vocabulary:
    """What cannot be tokenised or rendered is refused now, not at the first request."""
    try:
        document = json.loads(description.tokenizer)
    except ValueError as error:
        raise FormatError(f"{what}: its tokenizer.json is no JSON: {error}") from error
    vocabulary = Vocabulary.from_tokenizer(document, what)
    if vocabulary.size > description.config.vocab_size:
        raise FormatError(
            f"{what}: its tokenizer has {vocabulary.size} tokens, its embedding {description.config.vocab_size} rows"
        )
    if description.chat_template is not None:
        ChatTemplate(description.chat_template, description.bos_token, description.eos_token)
    return vocabulary


def _digest(description: Description, progress: ProgressCallback | None) -> list[FileDigests]:
    """Reads every file once; threads help because digests are computed outside the interpreter's lock."""
    read = {file.path: file for file in description.read_files}
    sizes = [read[str(path)].nbytes for path in description.files]
    reporter = Reporter("read", sum(sizes), progress)
    digests = read_files(description.files, description.tensors, reporter.add)
    reporter.finish()
    for path, each, nbytes in zip(description.files, digests, sizes, strict=True):
        if each.chunks.nbytes != nbytes:
            raise SourceUnavailable(f"{path} had {nbytes} bytes and then {each.chunks.nbytes}: it is being written")
    return digests


def _is_as_fetched(resolved: ResolvedModel, digests: Sequence[FileDigests]) -> bool:
    """Whether every file that was fetched and kept is still what came over the wire. `digests` are of `files`; what has
    none is read."""
    known = {path.name: each.chunks for path, each in zip(resolved.files, digests, strict=False)}
    try:
        for name in landed_names(resolved.root):
            chunks = known.get(name) or digest_file(resolved.root / name)
            if landed_chunks_path(resolved.root / name).read_bytes() != chunks.to_bytes():
                return False
    except OSError:
        return False
    return all(landed_chunks_path(path).exists() for path in resolved.files)


def _recorded(record_path: Path, uri: str, models_dir: Path, progress: ProgressCallback | None) -> Manifest | None:
    """The earlier import of the same URI, if nothing it read has changed and what it wrote is still good."""
    try:
        record: dict[str, Any] = json.loads(record_path.read_bytes())
        if record["version"] != _RECORD_VERSION or record["uri"] != uri:
            return None
        if not all(SourceFile(**file).unchanged() for file in record["files"]):
            return None
        manifest = Manifest.load(models_dir / record["identity"] / MANIFEST_NAME)
        if manifest.identity != record["identity"] or not all(file.unchanged() for file in manifest.files):
            return None
        manifest.chunk_lists()
        texts = (manifest.directory / TOKENIZER_NAME, manifest.directory / VOCABULARY_NAME)
        if not manifest.contents or not all(path.exists() for path in texts):
            return None
        return manifest if _is_current(uri, record["stamp"], progress) else None
    except (OSError, ValueError, KeyError, TypeError, FormatError, LoaderError):
        return None


def _is_current(uri: str, stamp: str, progress: ProgressCallback | None) -> bool:
    """Whether the store still holds what was fetched. A store that cannot be asked changes nothing."""
    if not stamp:
        return True
    from model_loader.store_source import current_stamp

    if progress is not None:
        progress(Progress("check", 0, 0))
    try:
        return current_stamp(ModelUri.parse(uri)) == stamp
    except LoaderError as error:
        return error.retry


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="model_loader.importer", description="Import a model.")
    parser.add_argument("uri")
    parser.add_argument("--models-dir", type=Path, required=True)
    parser.add_argument("--allow", action="append", default=[], help="fnmatch pattern of URIs (repeatable)")
    given = parser.parse_args(arguments)

    def work(report: ProgressCallback) -> dict[str, object]:
        manifest = import_model(given.uri, given.models_dir, tuple(given.allow) or ("*",), report)
        return {"identity": manifest.identity, "manifest_path": str(manifest.path)}

    return run_reporting(work)


if __name__ == "__main__":
    raise SystemExit(main())
