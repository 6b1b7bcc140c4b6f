"""Importing a model: from a URI to a manifest with an identity, once, whoever asks and however often.

A URI is resolved to files, their headers are read and checked, every tensor's content is digested, and the result is
written to `models/<identity>/` by rename. A record per URI remembers the files as they were, so that an unchanged model
is not read again. Concurrent imports of one URI wait for the first (a file lock, which a killed process releases).
`python -m model_loader.importer` does it in a process of its own with NDJSON progress.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from model_loader.chat import ChatTemplate
from model_loader.content import last_tensors, read_content, refuse_zeros
from model_loader.description import Description
from model_loader.directory_checkpoint import describe_directory
from model_loader.errors import FormatError, LoaderError, SourceUnavailable, from_os_error
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.locks import locked
from model_loader.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    SourceFile,
    TensorEntry,
    checkpoint_identity,
    write_atomically,
)
from model_loader.progress import Progress, Reporter, run_reporting
from model_loader.sources import ResolvedModel, check_allowed, resolve
from model_loader.vocabulary import VOCABULARY_NAME, Vocabulary

_RECORD_VERSION: Final = 1
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
        with locked(record_path.with_suffix(".lock")):
            known = _recorded(record_path, uri, models_dir)
            if known is not None:
                return known
            return _import(uri, models_dir, record_path, allow, progress)
    except OSError as error:
        raise from_os_error(error, str(models_dir)) from error


def _import(
    uri: str, models_dir: Path, record_path: Path, allow: tuple[str, ...], progress: ProgressCallback | None
) -> Manifest:
    resolved = resolve(uri, models_dir / "sources", allow, progress)
    description = _describe(resolved)
    vocabulary = _check_texts(description, uri)
    tensors = _digest(description, progress)
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
    write_atomically(directory / VOCABULARY_NAME, vocabulary.to_bytes())
    write_atomically(directory / TOKENIZER_NAME, description.tokenizer)
    write_atomically(directory / "config.json", json.dumps(asdict(description.config), indent=2).encode())
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
    ).save(directory / MANIFEST_NAME)
    record = {
        "version": _RECORD_VERSION,
        "uri": uri,
        "identity": identity,
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


def _digest(description: Description, progress: ProgressCallback | None) -> tuple[TensorEntry, ...]:
    """Reads every tensor once; threads help because digests are computed outside the interpreter's lock."""
    reporter = Reporter("read", sum(t.nbytes for t in description.tensors), progress)
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(open(path, "rb", buffering=0)) for path in description.files]

        last = last_tensors(description.tensors)

        def digest(entry: TensorEntry) -> TensorEntry:
            content = read_content(handles[entry.file].fileno(), entry, description.files[entry.file], reporter.add)
            refuse_zeros(content, entry, description.files[entry.file], is_last=entry.name in last)
            return replace(entry, sha256=content.sha256)

        largest_first = sorted(description.tensors, key=lambda t: -t.nbytes)
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="digest")
        try:
            digested = {entry.name: entry for entry in pool.map(digest, largest_first)}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    reporter.finish()
    return tuple(digested[entry.name] for entry in description.tensors)


def _recorded(record_path: Path, uri: str, models_dir: Path) -> Manifest | None:
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
        texts = (manifest.directory / TOKENIZER_NAME, manifest.directory / VOCABULARY_NAME)
        return manifest if all(path.exists() for path in texts) else None
    except (OSError, ValueError, KeyError, TypeError, FormatError, LoaderError):
        return None


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
